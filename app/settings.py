"""What the controls hold, as settings; what they may hold, as sentences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from core.drafting.tree import parse_shape
from core.errors import UserError
from core.records import METHODS, POCKET_NAME, PRECISIONS, Settings

LONGEST_DRAFT = 16
MOST_NEW_TOKENS = 4096
MOST_LAYERS = 1024
MAX_SEED = 2**32 - 1
LONGEST_NAME, LONGEST_SYSTEM = 300, 20_000
"""Characters of a model's name or revision, and of a system prompt."""
CONTROLS = (
    "method",
    "draft_length",
    "tree",
    "exit_layer",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
    "seed",
    "precision",
    "target",
    "draft",
    "revision",
    "draft_precision",
    "chat",
    "system",
)
"""The controls of the sidebar that decide a run, in the order in which functions of the page take them."""
PAIR_CONTROLS = ("precision", "target", "draft", "revision", "draft_precision")
"""Those of them that decide which models are loaded."""


def settings_from(base: Settings, *, most_new_tokens: int = MOST_NEW_TOKENS, **controls: Any) -> Settings:
    """`base` (the pair, the device) with the values of the controls; raises UserError for what cannot be.

    Where no target is named the pair is that of `base`.
    """
    return replace(
        pair_from(base, **controls),
        method=_method(controls["method"]),
        draft_length=_draft_length(controls["draft_length"]),
        tree=_tree(controls["tree"]),
        exit_layer=_exit_layer(controls["exit_layer"]),
        temperature=_number("Temperature", controls["temperature"], 0, 5),
        top_k=int(_number("Top-k", controls["top_k"], 0, 1_000_000)),
        top_p=_number("Top-p", controls["top_p"], 0, 1, above=True),
        min_p=_number("Min-p", controls["min_p"], 0, 1),
        max_new_tokens=int(_number("New tokens", controls["max_new_tokens"], 1, most_new_tokens)),
        seed=int(_number("Seed", controls["seed"], 0, MAX_SEED)),
        chat=_chat(controls.get("chat") or "auto"),
        system=_text("The system prompt", controls.get("system"), LONGEST_SYSTEM) or None,
    )


def pair_from(base: Settings, **controls: Any) -> Settings:
    """`base` with the models that the controls name, in their precisions."""
    return replace(
        base,
        **_models(base, controls),
        precision=_precision(controls["precision"]),
        draft_precision=_precision(controls.get("draft_precision") or "auto"),
    )


def _models(base: Settings, controls: dict[str, Any]) -> dict[str, str | None]:
    """Target, draft and revision: those of `base`, unless a target, or another draft for it, is named. The name of the
    bundled pair means its own draft too."""
    target = _text("The target", controls.get("target"), LONGEST_NAME)
    draft = _text("The draft", controls.get("draft"), LONGEST_NAME)
    revision = _text("The revision", controls.get("revision"), LONGEST_NAME)
    if not target or target == base.target:
        own_revision = revision or base.revision
        return {"target": base.target, "draft": draft or (None if target else base.draft), "revision": own_revision}
    if target == POCKET_NAME:
        return {"target": None, "draft": None if draft in ("", POCKET_NAME) else draft, "revision": None}
    return {"target": target, "draft": draft or None, "revision": revision or None}


def _text(name: str, value: Any, longest: int) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value:
        raise UserError(f"{name} must be text.")
    if len(value) > longest:
        raise UserError(f"{name} is longer than {longest:,} characters; shorten it.")
    return value.strip()


def _chat(value: Any) -> Any:
    if value not in ("auto", "off"):
        raise UserError(f"There is no chat mode {value!r}; choose auto or off.")
    return value


def prompt_text(value: Any) -> str:
    """A prompt as it came from a control or a caller: text, or nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    raise UserError(f"The prompt must be text, not {type(value).__name__}.")


def _precision(value: Any) -> str:
    if value not in PRECISIONS:
        raise UserError(f"There is no precision {value!r}; choose one of {', '.join(PRECISIONS)}.")
    return value


def _method(value: Any) -> Any:
    if value not in METHODS:
        raise UserError(f"There is no method {value!r}; choose one of {', '.join(METHODS)}.")
    return value


def _draft_length(value: Any) -> Any:
    if value == "auto":
        return "auto"
    return int(_number("Draft length", value, 1, LONGEST_DRAFT))


def _tree(value: Any) -> str | None:
    if value in (None, "", "auto"):
        return None
    parse_shape(str(value))
    return str(value)


def _exit_layer(value: Any) -> int | None:
    return None if value in (None, "auto") else int(_number("Exit layer", value, 1, MOST_LAYERS))


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] where it must lie above."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (low <= number <= high) or (above and number == low):
        bounds = f"above {low:,} and at most {high:,}" if above else f"between {low:,} and {high:,}"
        raise UserError(f"{name} must be a number {bounds}.")
    return number
