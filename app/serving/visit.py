"""One visitor's runs of this visit, newest last: what Explain, History and the exports look at.

A finished run is kept as packed JSON, a twentieth of what its objects take, and unpacked when somebody looks at it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any
from weakref import WeakSet

from core.errors import UserError
from core.records import SCHEMA, Run, run_from_dict
from core.servers import ServerRun

MOST_ENTRIES = 50
MOST_BYTES = 8 << 20
"""Packed bytes one visit may hold, its newest entry apart."""
MOST_BYTES_OF_ALL = 256 << 20
"""Packed bytes all visits together may hold: however many strangers come, memory stays bounded."""


@dataclass(frozen=True)
class Entry:
    """A race, a comparison or an opened document: one or more runs that belong together, answers of servers included;
    or, of the kind "load", a measurement of servers with many readers (`core.servers.load_document`).

    `heads` are the run documents without what grows with a run: prompt cut short, no ids, texts or rounds;
    `server_heads` those of servers' answers.
    """

    number: int
    kind: str
    packed: bytes = field(repr=False)
    heads: list[dict[str, Any]] = field(repr=False)
    label: str = ""
    server_heads: list[dict[str, Any]] = field(default_factory=list, repr=False)
    when: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def runs(self) -> list[Run]:
        return [run_from_dict(document) for document in self.document().get("runs", [])]

    def document(self) -> dict[str, Any]:
        return json.loads(zlib.decompress(self.packed))


@dataclass(eq=False)
class Visit:
    """Lives in a `gr.State`: one per browser tab, forgotten with it. The oldest entries make room for new ones."""

    entries: list[Entry] = field(default_factory=list)
    count: int = 0
    shown: int = 0
    """The number of the entry that the Playground shows."""
    load: dict[str, Any] | None = None
    """The newest measurement of servers with many readers (`core.servers.load_document`), without its answers."""

    def add(self, kind: str, runs: Sequence[Run], label: str = "", servers: Sequence[ServerRun] = ()) -> Entry:
        """Keep runs that belong together; `label` is where opened ones came from."""
        documents, answers = [run.to_dict() for run in runs], [run.to_dict() for run in servers]
        return self._keep(
            kind, label, {"schema": SCHEMA, "runs": documents} | ({"server_runs": answers} if answers else {})
        )

    def add_load(self, document: dict[str, Any], label: str = "") -> Entry:
        """Keep a measurement of servers with many readers, and let it be the newest."""
        self.load = {key: value for key, value in document.items() if key != "server_runs"}
        return self._keep("load", label, document)

    def _keep(self, kind: str, label: str, document: dict[str, Any]) -> Entry:
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), 3)
        heads, server_heads = ([_head(run) for run in document.get(name, ())] for name in ("runs", "server_runs"))
        with _lock:
            self.count += 1
            entry = Entry(self.count, kind, packed, heads, label, server_heads)
            self.entries = _newest([*self.entries, entry])
            _visits.add(self)
            _make_room(entry)
        return entry

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    def find(self, number: Any) -> Entry:
        """The entry of this number; UserError where there is none (any more)."""
        for entry in self.entries:
            if entry.number == number:
                return entry
        raise UserError("That run is no longer kept: a visit keeps its newest runs. Run it again, or open its file.")

    def remove(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        with _lock:
            self.entries = [entry for entry in self.entries if entry.number not in gone]


_lock = Lock()
_visits: WeakSet[Visit] = WeakSet()


def _newest(entries: list[Entry]) -> list[Entry]:
    """As many of the newest entries as a visit may hold; the last one always."""
    entries = entries[-MOST_ENTRIES:]
    while len(entries) > 1 and sum(len(entry.packed) for entry in entries) > MOST_BYTES:
        entries = entries[1:]
    return entries


def _make_room(newest: Entry) -> None:
    """Let the oldest entries of all visits go until they fit together."""
    held = [(entry.when, visit, entry) for visit in _visits for entry in visit.entries]
    size = sum(len(entry.packed) for _, _, entry in held)
    for _, visit, entry in sorted(held, key=lambda each: each[0]):
        if size <= MOST_BYTES_OF_ALL:
            return
        if entry is not newest:
            visit.entries = [each for each in visit.entries if each is not entry]
            size -= len(entry.packed)


def _head(document: dict[str, Any]) -> dict[str, Any]:
    grown = ("prompt_ids", "token_ids", "text", "rounds", "chunks")
    kept = {key: value for key, value in document.items() if key not in grown}
    return {**kept, "prompt": document["prompt"][:500]}
