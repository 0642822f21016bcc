"""Pieces of HTML made in Python, for `gr.HTML` values. Whatever a model or a file wrote goes through `escape`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from core.progress import in_bytes
from core.records import Token

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


def chip(text: str, outcome: str = "") -> str:
    """A token as it looks in the stream: tinted and marked by what became of it."""
    mark = f' data-outcome="{escape(outcome)}"' if outcome else ""
    return f'<code class="tok"{mark}>{escape(quoted(text))}</code>'


def token_chip(token: Token) -> str:
    return chip(token.text, token.outcome)


def paragraph(text: str, kind: str = "") -> str:
    """`text` is HTML already."""
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str, caption: str = "") -> str:
    """Cells are HTML already; the first of a row heads it. Scrolls by itself where it is too wide, by keyboard too."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    title = f"<caption>{caption}</caption>" if caption else ""
    name = escape(re.sub(r"<[^>]*>", "", caption) or "table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table class="{kind}">{title}'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def shape(dimensions: Iterable[int]) -> str:
    """A tensor's shape as PyTorch prints it."""
    found = list(dimensions)
    return f"({found[0]:,},)" if len(found) == 1 else "(" + ", ".join(f"{n:,}" for n in found) + ")"


def probability(p: float) -> str:
    """Three digits where they matter, never a false 0 or 1."""
    if p in (0, 1):
        return f"{p:g}"
    if p < 0.001:
        return "&lt; 0.001"
    return "&gt; 0.999" if p > 0.999 else f"{p:.3f}"


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


def question(name: str, title: str, answer: str, body: str, level: int = 2) -> str:
    """A card that is shut: a question (`title`), its answer in one line, and what is behind it. All is HTML already."""
    return (
        f'<details class="question" data-question="{name}"><summary><h{level}>{title}</h{level}>'
        f'<p class="answer">{answer}</p></summary><div class="{name}">{body}</div></details>'
    )
