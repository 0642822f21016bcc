"""One visitor's runs of this visit, newest last: what Explain, History and the exports look at.

A finished run is kept as packed JSON, a twentieth of what its objects take, and unpacked when somebody looks at it.
Whatever is kept counts: an opened file may pack to nothing and still have long texts in its head.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakSet

from core.errors import UserError
from core.measuring.comparison import summed_up
from core.records import SCHEMA, Run, run_from_dict
from core.servers import ServerRun

MOST_ENTRIES = 50
MOST_BYTES = 8 << 20
"""Bytes one visit may hold, its newest entry apart."""
MOST_BYTES_OF_ALL = 256 << 20
"""Bytes all visits together may hold: however many strangers come, memory stays bounded."""
MOST_UNPACKED = 4 << 20
"""Characters of the documents whose runs stay unpacked for whoever steps through them; of all visitors together."""
LONGEST_IN_HEAD = 500
"""Characters of a text."""
MODEL_IN_HEAD = ("name", "parameters", "precision", "origin")
"""What the list says of a model."""


Look = TypeVar("Look", bound=Callable[..., Any])
_looking = RLock()


def alone(look: Look) -> Look:
    """A function that unpacks what is kept: one of all such runs at a time, whoever asks. A document takes ten times as
    many bytes as characters while it is looked at."""

    @wraps(look)
    def looks(*arguments: Any, **named: Any) -> Any:
        with _looking:
            return look(*arguments, **named)

    return looks  # type: ignore[return-value]


@dataclass(frozen=True)
class Entry:
    """A race, a comparison or an opened document: one or more runs that belong together, answers of servers included;
    or, of the kind "load", a measurement of servers with many readers (`core.servers.load_document`).

    `heads` are the run documents without what grows with a run: texts cut short, no ids or rounds, of the models their
    names; `server_heads` those of servers' answers. `lanes`: what became of each lane, as `core.measuring.comparison`
    sums it up. `size`: bytes that all this takes.
    """

    number: int
    kind: str
    packed: bytes = field(repr=False)
    heads: list[dict[str, Any]] = field(repr=False)
    label: str = ""
    server_heads: list[dict[str, Any]] = field(default_factory=list, repr=False)
    lanes: list[dict[str, Any]] = field(default_factory=list, repr=False)
    when: datetime = field(default_factory=lambda: datetime.now(UTC))
    size: int = 0

    @property
    def runs(self) -> list[Run]:
        """Unpacked, and kept so for a while where they are few."""
        with _lock:
            if self.packed in _unpacked:
                _unpacked.move_to_end(self.packed)
                return list(_unpacked[self.packed][1])
        text = zlib.decompress(self.packed)
        runs = [run_from_dict(document) for document in json.loads(text).get("runs", [])]
        with _lock:
            _unpacked[self.packed] = len(text), tuple(runs)
            while sum(size for size, _ in _unpacked.values()) > MOST_UNPACKED:
                _unpacked.popitem(last=False)
        return runs

    def document(self) -> dict[str, Any]:
        return json.loads(zlib.decompress(self.packed))


@dataclass(eq=False)
class Visit:
    """Lives in a `gr.State`: one per browser tab, forgotten with it. The oldest entries make room for new ones."""

    entries: list[Entry] = field(default_factory=list)
    count: int = 0
    shown: int = 0
    """The number of the entry that the Playground shows."""
    many: dict[str, Any] | None = None
    """The newest measurement of many texts at once (`core.measuring.batches`): a row a number of texts and method."""

    @property
    def load(self) -> dict[str, Any] | None:
        """The newest measurement of servers with many readers (`core.servers.load_document`), without its answers."""
        newest = next((entry for entry in reversed(self.entries) if entry.kind == "load"), None)
        found = newest.document() if newest else {}
        return {key: value for key, value in found.items() if key != "server_runs"} or None

    def add(self, kind: str, runs: Sequence[Run], label: str = "", servers: Sequence[ServerRun] = ()) -> Entry:
        """Keep runs that belong together; `label` is where opened ones came from."""
        documents, answers = [run.to_dict() for run in runs], [run.to_dict() for run in servers]
        document = {"schema": SCHEMA, "runs": documents} | ({"server_runs": answers} if answers else {})
        return self._keep(kind, label, document, [asdict(lane) for lane in summed_up(runs)])

    def add_load(self, document: dict[str, Any], label: str = "") -> Entry:
        """Keep a measurement of servers with many readers, and let it be the newest."""
        return self._keep("load", label, document, [])

    def _keep(self, kind: str, label: str, document: dict[str, Any], lanes: list[Any]) -> Entry:
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), 3)
        environments: dict[str, Any] = {}
        heads, server_heads = (
            [_head(run, environments) for run in document.get(name, ())] for name in ("runs", "server_runs")
        )
        size = memory_of([packed, heads, server_heads, lanes, label])
        with _lock:
            self.count += 1
            entry = Entry(self.count, kind, packed, heads, label, server_heads, lanes, size=size)
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
_unpacked: OrderedDict[bytes, tuple[int, tuple[Run, ...]]] = OrderedDict()
"""By the packed document: its characters and its runs, those looked at last at the end."""
_visits: WeakSet[Visit] = WeakSet()


def _newest(entries: list[Entry]) -> list[Entry]:
    """As many of the newest entries as a visit may hold; the last one always."""
    entries = entries[-MOST_ENTRIES:]
    while len(entries) > 1 and sum(entry.size for entry in entries) > MOST_BYTES:
        entries = entries[1:]
    return entries


def _make_room(newest: Entry) -> None:
    """Let the oldest entries of all visits go until they fit together."""
    held = [(entry.when, visit, entry) for visit in _visits for entry in visit.entries]
    size = sum(entry.size for _, _, entry in held)
    for _, visit, entry in sorted(held, key=lambda each: each[0]):
        if size <= MOST_BYTES_OF_ALL:
            return
        if entry is not newest:
            visit.entries = [each for each in visit.entries if each is not entry]
            size -= entry.size


def _head(document: dict[str, Any], environments: dict[str, Any]) -> dict[str, Any]:
    """A run document's head; runs of one place share their environment, by its JSON in `environments`."""
    grown = ("prompt_ids", "token_ids", "text", "rounds", "chunks", "environment", "metrics")
    kept = {key: value for key, value in document.items() if key not in grown}
    kept["settings"] = {name: _cut(value) for name, value in document["settings"].items()}
    kept["prompt"] = _cut(document["prompt"])
    kept["metrics"] = {name: value for name, value in document["metrics"].items() if not isinstance(value, list)}
    if environment := document.get("environment"):
        models = {role: environment.get(role) for role in ("target", "draft", "head")}
        known = {role: {name: each.get(name) for name in MODEL_IN_HEAD} for role, each in models.items() if each}
        short = {"device": environment["device"], "device_name": environment["device_name"], **known}
        kept["environment"] = environments.setdefault(json.dumps(short, sort_keys=True), short)
    return kept


def _cut(value: Any) -> Any:
    return value[:LONGEST_IN_HEAD] if isinstance(value, str) else value


def memory_of(value: Any, seen: set[int] | None = None) -> int:
    """Bytes that plain data takes, what it shares with itself once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(memory_of(part, seen) for part in parts)
