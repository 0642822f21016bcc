"""Finished races over the scripted engine, for tests of what is kept, exported and opened."""

from __future__ import annotations

from collections.abc import Sequence

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
