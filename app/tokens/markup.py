"""Tokens, figures and documents as text that a page can show. Nothing here is HTML, or escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from core.progress import in_bytes

HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that cannot be seen or that reorder their surroundings, as in assets/tokens/text.js."""
LONGEST = 24
"""Characters of a token that are shown."""


def quoted(text: str) -> str:
    """A token's text with blanks marked and nothing invisible, so that " a" and "a" look different. Not escaped."""
    if not text:
        return "◌"
    shown = HIDDEN.sub(named, str(text)).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def named(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def shape(dimensions: Iterable[int]) -> str:
    """A tensor's shape as PyTorch prints it."""
    found = list(dimensions)
    return f"({found[0]:,},)" if len(found) == 1 else "(" + ", ".join(f"{n:,}" for n in found) + ")"


def probability(p: float) -> str:
    """Three digits where they matter, never a false 0 or 1."""
    if p in (0, 1):
        return f"{p:g}"
    if p < 0.001:
        return "< 0.001"
    return "> 0.999" if p > 0.999 else f"{p:.3f}"


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def size(count: float) -> str:
    """Bytes, to the digits that tell a sum from its parts."""
    return in_bytes(count, digits=3)


def json_text(value: Any) -> str:
    """JSON in ASCII that no HTML parser sees markup in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def plural(count: int, word: str, words: str = "") -> str:
    return f"{count:,} {word if count == 1 else words or word + 's'}"
