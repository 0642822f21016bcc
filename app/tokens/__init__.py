"""The streaming race component, Python half: a string of JSON lines, one line per event.

The component's JavaScript parses only what is new. Nothing that a model wrote ever reaches a template: the template is
fixed, and texts enter the page through `textContent`.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

import gradio as gr

from app.assets import asset
from app.insides import scripted

STYLES = (
    "tokens/stream.css",
    "tokens/race.css",
    "tokens/charts.css",
    "tokens/card.css",
    "tokens/inspector.css",
    "tokens/round.css",
    "tokens/scrubber.css",
)
"""The component's style; it goes with that of the page, whose colours it uses by their names."""
UPDATES_PER_SECOND = 12.0


def token_stream(**options: Any) -> gr.HTML:
    """The race component; its value is what `stream` makes of events."""
    return scripted(asset("tokens/race.html"), "playground/live.js", **options)


def encode(event: dict[str, Any]) -> str:
    """One event as one line of ASCII. Figures keep six digits: what a person can see, at half the bytes."""
    line = json.dumps(_rounded(event), separators=(",", ":"), allow_nan=False)
    return line.replace("<", "\\u003c") + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


class Window:
    """The component's value: a head that names the stream and its first line's number, then the newest lines.

    It grows by appending, of which Gradio sends the new end alone; but whatever Gradio's page does with a value takes
    time in its whole length. So past LONGEST it begins anew with its last OVERLAP, which leaves a reader that missed
    a few values without a gap.
    """

    LONGEST, OVERLAP = 48_000, 16_000

    def __init__(self) -> None:
        self._id = uuid4().hex
        self._lines: deque[str] = deque()
        self._size = self._first = 0
        self.value = self._head()

    def _head(self) -> str:
        return encode({"e": "begin", "id": self._id, "from": self._first})

    def add(self, lines: Iterable[str]) -> str:
        fresh = list(lines)
        self._lines.extend(fresh)
        self._size += sum(map(len, fresh))
        if self._size <= self.LONGEST:
            self.value += "".join(fresh)
            return self.value
        while self._size > self.OVERLAP and len(self._lines) > len(fresh):
            self._size -= len(self._lines.popleft())
            self._first += 1
        self.value = self._head() + "".join(self._lines)
        return self.value


def stream(events: Iterable[dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Values for the component, at most UPDATES_PER_SECOND of them a second while text comes in.

    Only rounds and chunks are held back: whatever else happens is worth showing at once.
    """
    window = Window()
    waiting: list[str] = []
    shown = clock()
    for event in events:
        waiting.append(encode(event))
        if event["e"] not in ("round", "chunk") or clock() - shown >= 1 / UPDATES_PER_SECOND:
            yield window.add(waiting)
            waiting.clear()
            shown = clock()
    if waiting:
        yield window.add(waiting)
