"""The arguments of app.py, each checked before anything is loaded."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from core.records import PRECISIONS


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
