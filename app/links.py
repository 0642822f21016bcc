"""Settings in the address of the page: what a link says, checked as if a person had typed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from app.settings import CONTROLS
from core.errors import UserError
from core.records import Settings

LONGEST_QUERY = 20_000
LONGEST_PROMPT = 4_000
"""Characters of a prompt as a link may carry it. The page itself writes shorter ones (assets/take_away.js)."""

Check = Callable[..., Settings]
"""Every control's value by name -> settings, or UserError: `app.settings.settings_from` over a base."""


def read_link(query: str, controls: dict[str, Any], check: Check) -> tuple[dict[str, Any], list[str]]:
    """Values by name ("prompt" and the controls) that a query string asks for, and a sentence for each it cannot have.

    Whatever is not ours is left alone; each value is checked by itself, with every other control at its start.
    """
    try:
        if len(query) > LONGEST_QUERY:
            raise ValueError
        found = parse_qs(query.removeprefix("?"), keep_blank_values=True, max_num_fields=64)
    except ValueError:
        return {}, ["The link is too long to be one of this page's; its settings were left out."]
    values: dict[str, Any] = {}
    refused: list[str] = []
    start = {name: controls[name].value for name in CONTROLS}
    for name in ("prompt", *CONTROLS):
        if name not in found:
            continue
        try:
            text = found[name][-1]
            values[name] = _prompt(text) if name == "prompt" else _value(name, text, controls[name], start, check)
        except UserError as error:
            refused.append(f"The link's {name.replace('_', ' ')} was left out: {error}")
    return values, refused


def _prompt(text: str) -> str:
    if len(text) > LONGEST_PROMPT:
        raise UserError(f"it has more than {LONGEST_PROMPT:,} characters.")
    return text


def _value(name: str, text: str, control: Any, start: dict[str, Any], check: Check) -> Any:
    """What the control itself could hold, and then what the settings allow."""
    value: Any = text
    if (choices := getattr(control, "choices", None)) is not None:
        value = next((value for _, value in choices if str(value) == text), None)
        if value is None and not getattr(control, "allow_custom_value", False):
            raise UserError(f"{text[:40]!r} is not one of the choices here.")
        value = text if value is None else value
    elif isinstance(start[name], (int, float)):
        value = _number(text, control)
    check(**{**start, name: value})
    return value


def _number(text: str, control: Any) -> float | int:
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{text[:40]!r} is not a number.") from None
    low, high = getattr(control, "minimum", None), getattr(control, "maximum", None)
    if (low is not None and number < low) or (high is not None and number > high):
        raise UserError(
            f"it must lie between {low:,} and {high:,}." if None not in (low, high) else "it is out of range."
        )
    return int(number) if number.is_integer() else number
