"""One visitor's runs of this visit, newest last: what Explain, History and the exports look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from core.records import SCHEMA, Run

MOST_ENTRIES = 20


@dataclass
class Entry:
    """A race, a comparison or an opened document: one or more runs that belong together."""

    number: int
    kind: str
    runs: list[Run]
    when: datetime = field(default_factory=lambda: datetime.now(UTC))

    def document(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "runs": [run.to_dict() for run in self.runs]}


@dataclass
class Visit:
    """Lives in a `gr.State`: one per browser tab, forgotten with it. The oldest entries make room for new ones."""

    entries: list[Entry] = field(default_factory=list)
    count: int = 0

    def add(self, kind: str, runs: Sequence[Run]) -> Entry:
        self.count += 1
        entry = Entry(self.count, kind, list(runs))
        self.entries = [*self.entries, entry][-MOST_ENTRIES:]
        return entry

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None
