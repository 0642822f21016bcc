"""What the controls hold, as settings; what they may hold, as sentences.

The arguments of app.py, each checked before anything is loaded.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
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


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The chosen arguments; what cannot be ends the program with one line and status 2."""
    parser = argparse.ArgumentParser(prog="app.py", description="See, measure and trust speculative decoding.")
    parser.add_argument("--target", help="model id or folder; without it, the bundled pair")
    parser.add_argument("--draft", help="model id or folder of the draft model")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (this machine only by default)")
    parser.add_argument("--port", help="also GRADIO_SERVER_PORT; by default the first free one from 7860")
    parser.add_argument("--share", action="store_true", help="open a temporary public address; --public without --auth")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask visitors for a name and a password")
    parser.add_argument(
        "--public", action="store_true", help="limits for strangers: the catalogue's pairs, shorter runs"
    )
    parser.add_argument("--mcp", action="store_true", help="offer the page's functions as MCP tools")
    chosen = parser.parse_args(words)
    try:
        chosen.port = _port(chosen.host, chosen.port or os.environ.get("GRADIO_SERVER_PORT"))
        chosen.auth = _auth(chosen.auth)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    chosen.public = chosen.public or (chosen.share and chosen.auth is None)  # an address of that kind is anyone's
    chosen.public = chosen.public or bool(os.environ.get("SPACE_ID"))  # so is a Space's
    if chosen.draft and not chosen.target:
        parser.exit(2, "--draft needs --target: the bundled draft belongs to the bundled target.\n")
    if chosen.mcp and find_spec("mcp") is None:
        parser.exit(2, "--mcp needs one more package: pip install 'gradio[mcp]'\n")
    return chosen


def unmet(chosen: argparse.Namespace, shared: str | None, mcp_error: str | None) -> Iterator[str]:
    """What was asked for and could not be had, although the page itself serves."""
    if chosen.share and not shared:
        yield "No public address: Gradio's share service cannot be reached. The page serves this machine as usual."
    if chosen.mcp and mcp_error:
        yield f"No MCP tools: {mcp_error.splitlines()[0]}. Reinstall what they need: pip install 'gradio[mcp]'"


def _port(host: str, text: str | None) -> int | None:
    """A free port by its number; None leaves the choice to Gradio."""
    if text is None:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"A port is a number from 1 to 65535, not {text!r}.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(text)))
        except OSError as error:
            raise ValueError(f"Cannot listen on {host} port {text}: {error.strerror}.") from None
    return int(text)


def _auth(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    user, _, password = text.partition(":")
    if not user or not password:
        raise ValueError("--auth wants USER:PASSWORD.")
    return user, password
