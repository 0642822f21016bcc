"""Finished races over the scripted engine, for tests of what is kept and opened; and what a page reads of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fakes import CODE, FakeEngine, pieces

from app.playground.race import queued_race
from app.serving.device import Device
from app.serving.turns import guarded
from core.records import Run, Settings


def finished_race(
    prompt: str = "def f():", settings: Settings | None = None, texts: Sequence[str] = tuple(pieces(CODE))
) -> list[Run]:
    """Speculative and plain, run to the end."""
    runs: list[Run] = []
    chosen = settings or Settings(max_new_tokens=40, draft_length=5)
    for _ in guarded(queued_race(Device(), FakeEngine(texts, pace=0), prompt, chosen, lambda: False, runs)):
        pass
    return runs


class Reader:
    """The other end of `stream`: takes values as they come and gives each event once, in order."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._read = 0

    def read(self, value: str) -> list[dict[str, Any]]:
        head, *events = map(json.loads, value.splitlines())
        if head["id"] != self._id:
            self._id, self._read = head["id"], 0
        if head["from"] > self._read:
            raise ValueError("values were missed")
        fresh = events[self._read - head["from"] :]
        self._read += len(fresh)
        return fresh
