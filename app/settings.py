"""What the controls hold, as settings; the arguments of app.py, each checked before anything is loaded."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from core.cli import flag
from core.errors import UserError
from core.settings import POCKET_NAME, SPECS, Settings

ON_PAGE = {name: spec for name, spec in SPECS.items() if spec.on_page}
CONTROLS = tuple(sorted(ON_PAGE, key=lambda name: ON_PAGE[name].of_models))
"""The settings that a visitor decides, in the order in which functions of the page take them: what decides a run, then
the models."""
PAIR_CONTROLS = tuple(name for name in CONTROLS if ON_PAGE[name].of_models)
"""Those of them that decide which models are loaded."""
NAMED = ("target", "draft", "revision")
MOST_NEW_TOKENS = SPECS["max_new_tokens"].most_on_page or 0


def start_of(name: str, settings: Settings | None = None) -> Any:
    """What the control of a setting shows at first: `auto`, or nothing, where the setting is None."""
    value = getattr(settings, name) if settings else SPECS[name].default
    return value if value is not None else "auto" if SPECS[name].auto else ""


def settings_from(base: Settings, *, most_new_tokens: int = MOST_NEW_TOKENS, **controls: Any) -> Settings:
    """`base` (the pair, the device) with the values of the controls; raises UserError for what cannot be.

    Where no target is named the pair is that of `base`.
    """
    most = {"max_new_tokens": most_new_tokens}
    given = {name: _read(name, controls, most.get(name)) for name in CONTROLS if name not in PAIR_CONTROLS}
    found = replace(pair_from(base, **controls), **given)
    if found.tree:
        from core.drafting.tree import parse_shape  # here, so that arguments are read before PyTorch is imported

        parse_shape(found.tree)
    return found


def pair_from(base: Settings, **controls: Any) -> Settings:
    """`base` with the models that the controls name, in their precisions."""
    given = {name: _read(name, controls) for name in PAIR_CONTROLS}
    return replace(base, **{**given, **_models(base, *(given[name] for name in NAMED))})


def _read(name: str, controls: dict[str, Any], most: int | None = None) -> Any:
    """A setting of the controls, or its default where there is no such control. An empty text is none."""
    spec = SPECS[name]
    value = controls.get(name, spec.default)
    value = value.strip() if isinstance(value, str) else value
    return spec.read(None if value == "" and spec.default is None else value, most or spec.most_on_page)


def _models(base: Settings, target: str | None, draft: str | None, revision: str | None) -> dict[str, str | None]:
    """Target, draft and revision: those of `base`, unless a target, or another draft for it, is named. The name of the
    bundled pair means its own draft too."""
    if target == POCKET_NAME:
        return {"target": target, "draft": None if draft == POCKET_NAME else draft, "revision": None}
    if not target or target == base.target:
        draft = draft or (None if target else base.draft)
        return {"target": base.target, "draft": draft, "revision": revision or base.revision}
    return {"target": target, "draft": draft, "revision": revision}


def prompt_text(value: Any) -> str:
    """A prompt as it came from a control or a caller: text, or nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    raise UserError(f"The prompt must be text, not {type(value).__name__}.")


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The chosen arguments; what cannot be ends the program with one line and status 2."""
    parser = argparse.ArgumentParser(prog="app.py", description="See, measure and trust speculative decoding.")
    for name in ("target", "draft", "precision"):
        spec = SPECS[name]
        parser.add_argument(flag(name), default=spec.default, choices=spec.choices, help=spec.help)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (this machine only by default)")
    parser.add_argument("--port", help="also GRADIO_SERVER_PORT; by default the first free one from 7860")
    parser.add_argument("--share", action="store_true", help="open a temporary public address; --public without --auth")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask visitors for a name and a password")
    parser.add_argument(
        "--public", action="store_true", help="limits for strangers: the catalogue's pairs, shorter runs"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a running server of yours, which is sent the key in PLAYGROUND_SERVER_KEY; again for more",
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
    if chosen.server:
        from core.servers import name_servers

        try:
            name_servers(chosen.server)
        except UserError as error:
            parser.exit(2, f"{error}\n")
    if chosen.draft and not chosen.target:
        parser.exit(2, "--draft needs --target: name the model that it is to draft for.\n")
    if chosen.mcp and find_spec("mcp") is None:
        parser.exit(2, "--mcp needs one more package: pip install 'gradio[mcp]'\n")
    return chosen


def unguarded(chosen: argparse.Namespace) -> str | None:
    """What it means that others reach the page with everything its owner may do."""
    if chosen.public or chosen.auth or chosen.host in ("127.0.0.1", "localhost", "::1"):
        return None
    return (
        f"Whoever reaches {chosen.host} may load any model, train, and connect this machine to servers: add --auth "
        "USER:PASSWORD, or --public for strangers."
    )


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
