"""A pass over the rows of several texts at once.

A round is the same for a text alone and for one of many: wherever it runs a pass, it hands in its rows. Alone they are
run at once. Of texts that are decoded `Together`, each waits at that place for the others, and one pass takes the rows
of all: the weights are read once for everybody, and each row comes to what it comes to alone.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, Generic, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from core.errors import Cancelled
from core.runners import Favourites
from core.runners.architecture import HIDDEN
from core.runners.program import MOST_COLUMNS, MOST_TOLD, Pass, Program, Turning, Workspace, run, team


class Cache:
    """Keys and values of one text, [layers, 2, key heads, capacity, size of a head], and how its positions are turned:
    `turned` gives for each kind of layer its cosines and sines [capacity, half a head] and its window."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        wide: bool,
        turned: Callable[[int], Sequence[tuple[Tensor, Tensor, int | None]]],
        capacity: int,
    ) -> None:
        """`shape`: layers, key heads and size of a head; `wide`: in float32."""
        self._shape, self._turned = shape, turned
        self._dtype = torch.float32 if wide else torch.bfloat16
        self.capacity = 0
        self._grow(capacity)

    def reserve(self, end: int) -> None:
        """Have room for `end` cells."""
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Of the cells from `base` on keep those at these indices, in this order."""
        index = base + torch.tensor(list(path))
        self.held[..., base : base + len(path), :] = self.held.index_select(3, index)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        layers, heads, size = self._shape
        held = torch.zeros(layers, 2, heads, capacity, size, dtype=self._dtype)
        if self.capacity:
            held[..., : self.capacity, :] = self.held
        self.held, self.capacity = held, capacity
        self.tables = self._turned(capacity)
        turnings = [Turning(cos.data_ptr(), sin.data_ptr(), window or 0) for cos, sin, window in self.tables]
        self.turnings = (Turning * len(turnings))(*turnings)


@dataclass(slots=True, eq=False)
class Rows:
    """The n rows of one text in a pass over steps first … last of a program, and what comes of them.

    Behind `start` cells of the `cache`, one after the other, or as a tree of `parents`, or of what each row has `seen`
    [n, m] of the last m cells, its own included, or as a `block` whose rows may see each other. `ids` [n], where tokens
    are fed. `given`: row buffers to be filled before, by number. Wanted are the `logits` of the last so many rows,
    added to those `onto` which a program adds, or else what leaves the steps, `hidden`, of all; with `both`, that too.
    Of so many columns of logits as `count` their `favourites` are told, with `shares` if asked. Where the program notes
    hidden states, so many columns of `features`. `of`: the network whose whole pass it is, None for one of a few of its
    layers or of a head.
    """

    program: Program
    work: Workspace
    n: int
    first: int
    last: int
    ids: Tensor | None = None
    cache: Cache | None = None
    start: int = 0
    parents: Sequence[int] | None = None
    seen: Tensor | None = None
    block: bool = False
    given: Sequence[tuple[int, Tensor]] = ()
    wanted: int = 0
    onto: Tensor | None = None
    both: bool = False
    count: int = 0
    shares: bool = False
    columns: int = 0
    of: Any = None
    logits: Tensor | None = None
    favourites: Favourites | None = None
    hidden: Tensor | None = None
    features: Tensor | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Whose rows can be in one pass: those of the same steps."""
        return id(self.program), self.first, self.last

    def run(self, group: Sequence[Rows]) -> None:
        run_rows(group)

    def place(self, rows: array[int], cells: array[int], slot: int) -> None:
        """Add what the pass is told of each row: its slot, position and cell, how many cells from the first on it sees,
        and from where in `cells` how many further."""
        start = self.start
        if self.seen is not None:
            text = start + self.n - self.seen.shape[1]
            for i, flags in enumerate(self.seen.tolist()):
                path = [text + j for j, seen in enumerate(flags) if seen]
                rows.extend((slot, text + len(path) - 1, start + i, text, len(cells), len(path)))
                cells.extend(path)
        elif self.parents is not None:
            paths: list[list[int]] = []
            for i, parent in enumerate(self.parents):
                path = [*(paths[parent] if parent >= 0 else ()), start + i]
                paths.append(path)
                rows.extend((slot, start + len(path) - 1, start + i, start, len(cells), len(path)))
                cells.extend(path)
        elif self.block:
            for cell in range(start, start + self.n):
                rows.extend((slot, cell, cell, start, len(cells), self.n))
            cells.extend(range(start, start + self.n))
        else:
            for position in range(start, start + self.n):
                rows.extend((slot, position, position, position + 1, 0, 0))


def run_rows(group: Sequence[Rows]) -> None:
    """One pass over the rows of several texts, of the same steps of the same program."""
    program, work, first, last = group[0].program, group[0].work, group[0].first, group[0].last
    head = len(program.steps) - 1
    counts = [rows.n for rows in group]
    n, wanted = sum(counts), sum(rows.wanted for rows in group)
    each = work.fit(n, team.threads())
    table, cells, at = array("i"), array("i"), 0
    for slot, rows in enumerate(group):
        for number, values in rows.given:
            work.buffers[number][at : at + rows.n] = values
        if rows.cache is not None:
            rows.cache.reserve(rows.start + rows.n)
            rows.place(table, cells, slot)
        at += rows.n
    held = [rows.cache for rows in group if rows.cache is not None]
    if ids := [rows.ids for rows in group if rows.ids is not None]:
        ids = ids[0] if len(ids) == 1 else torch.cat(ids)
        each.ids = ids.data_ptr()
    if held:
        caches, capacities = array("Q", [c.held.data_ptr() for c in held]), array("q", [c.capacity for c in held])
        each.rows = table.buffer_info()[0]
        each.cells = cells.buffer_info()[0] if cells else None
        each.caches, each.capacities = caches.buffer_info()[0], capacities.buffer_info()[0]
        each.turnings = ctypes.addressof(max(held, key=lambda cache: cache.capacity).turnings)
    if columns := group[0].columns:
        noted = torch.empty(n, columns, dtype=torch.float32)
        each.output, each.stride = noted.data_ptr(), columns
        for rows, part in zip(group, _parts(noted, counts)):
            rows.features = part
    each.first, each.last, each.wanted, each.likeliest = first, last, 0, None
    if not wanted:
        run(program, each)
        _note_hidden(group, work, counts)
        return
    both = group[0].both
    if len(group) > 1 and wanted < n and first < head:  # those whose logits are wanted do not lie side by side
        each.last = head
        run(program, each)
        if both:
            _note_hidden(group, work, counts)
            both = False
        hidden = work.buffers[HIDDEN][:n].split(counts)
        tails = torch.cat([part[len(part) - rows.wanted :] for rows, part in zip(group, hidden)])
        each = work.fit(wanted, team.threads())
        work.buffers[HIDDEN][:wanted] = tails
        each.first, each.last = head, last
    logits = torch.empty(wanted, program.outs, dtype=torch.float32)
    each.wanted, each.logits = wanted, logits.data_ptr()
    found = _to_tell(each, group[0]) if wanted <= MOST_TOLD and 0 < group[0].count <= MOST_COLUMNS else None
    each_wanted = [rows.wanted for rows in group]
    for rows, part in zip(group, _parts(logits, each_wanted)):
        rows.logits = part
        if rows.onto is not None:
            part[:, : rows.onto.shape[1]] = rows.onto
    run(program, each)
    if found:
        parts = [_parts(values, each_wanted) for values in found if values is not None]
        for rows, *told in zip(group, *parts):
            rows.favourites = Favourites(*told)
    if both:
        _note_hidden(group, work, counts)


def _to_tell(each: Pass, rows: Rows) -> Favourites:
    """What a pass is to fill in."""
    ids, told = torch.empty(each.wanted, dtype=torch.long), torch.empty(2, each.wanted, dtype=torch.float32)
    each.columns, each.shares, each.likeliest, each.told = rows.count, rows.shares, ids.data_ptr(), told.data_ptr()
    return Favourites(ids, told[0], told[1] if rows.shares else None)


def _note_hidden(group: Sequence[Rows], work: Workspace, counts: Sequence[int]) -> None:
    for rows, part in zip(group, _parts(work.buffers[HIDDEN][: sum(counts)].clone(), counts)):
        rows.hidden = part


def _parts(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Those of each text. Of one alone it is all of them: what runs behind a pass finds nothing in the caches."""
    return (rows,) if len(counts) == 1 else rows.split(counts)


class Part(Protocol):
    """What a text hands in for a pass, and then finds filled in. `of`: the network whose whole pass it is, None for a
    part of one. Parts of the same `key` can be run as one pass."""

    of: Any

    @property
    def key(self) -> Hashable: ...

    def run(self, group: Sequence[Any]) -> None:
        """One pass over the parts of several texts, this one among them."""
        ...


T = TypeVar("T")
S = TypeVar("S")
P = TypeVar("P", bound=Part)
_thread = local()


def beside() -> Together[Any] | None:
    """What decodes other texts beside the one that asks, if there are any."""
    together: Together[Any] | None = getattr(_thread, "together", None)
    return together


@contextmanager
def apart() -> Iterator[None]:
    """Passes that wait for no text beside: those that are timed."""
    before, _thread.together = beside(), None
    try:
        yield
    finally:
        _thread.together = before


def run_pass(part: P) -> P:
    """Have a text's part of a pass run, alone or with those of the texts beside; it comes back filled in."""
    if together := beside():
        together.wait(part)
    else:
        part.run([part])
    return part


class Together(Generic[T]):
    """Texts decoded side by side on one thread: each a generator that goes its own way until it needs a pass.

    A pass begins when every text waits for one. Whole passes of the network `last` come after all others, so that the
    drafts of all texts are over before they are judged, and are judged in one pass.
    """

    def __init__(self, last: Any = None) -> None:
        self._last = last
        self._hub = getcurrent()
        self._most = 1
        self.turns = 0
        """How often all texts waited to be judged, and were."""
        self._waiting: dict[greenlet, Part] = {}
        self._common: dict[int, Any] = {}
        self._resources = ExitStack()

    def run(self, texts: Iterable[Generator[T]], most: int) -> Generator[T]:
        """What the texts yield, as it comes; `most` of them at a time, and where one ends the next begins. To be asked
        on one thread alone. What one raises ends all of them, as does going away."""
        coming, ready = iter(texts), deque[greenlet]()
        going = 0
        self._hub, self._most = getcurrent(), most
        try:
            while True:
                if not ready:  # a place is taken again between passes, when every text has told what the last gave it
                    while going < most and (text := next(coming, None)) is not None:
                        ready.append(greenlet(partial(self._follow, text)))
                        going += 1
                if not ready:
                    if not going:
                        return
                    ready.extend(self._pass())
                text = ready.popleft()
                told = self._switch(text)
                if text.dead:
                    going -= 1
                elif text not in self._waiting:
                    ready.append(text)
                    yield told
        finally:
            for text in (*ready, *self._waiting):
                with suppress(Cancelled):
                    self._switch(text, Cancelled())
            self._common.clear()
            self._resources.close()

    def wait(self, part: Part) -> None:
        """Give way to the other texts until this has been run; at once where there never is another."""
        if self._most > 1:
            self._waiting[getcurrent()] = part
            self._hub.switch()
            return
        part.run([part])
        self.turns += part.of is not None and part.of is self._last

    def common(self, owner: Any, open_for: Callable[[int], AbstractContextManager[S]]) -> S | None:
        """What all texts have in common of an owner, opened for as many as there may be at a time when the first asks,
        and closed when all have ended; None where there never is another."""
        if self._most > 1 and id(owner) not in self._common:
            self._common[id(owner)] = self._resources.enter_context(open_for(self._most))
        return self._common.get(id(owner))

    def _follow(self, text: Generator[T]) -> None:
        with closing(text), suppress(Cancelled):
            for told in text:
                self._hub.switch(told)

    def _pass(self) -> list[greenlet]:
        """Run what all texts wait for; or those that still draft, where some do. Those texts."""
        drafting = {text: part for text, part in self._waiting.items() if part.of is None or part.of is not self._last}
        served = drafting or dict(self._waiting)
        self.turns += not drafting
        groups: dict[Hashable, list[greenlet]] = {}
        for text, part in served.items():
            groups.setdefault(part.key, []).append(text)
        for texts in groups.values():
            try:
                served[texts[0]].run([served[text] for text in texts])
            except Exception as error:  # for the first of them to say in its words
                del self._waiting[texts[0]]
                self._switch(texts[0], error)
                raise
        for text in served:
            del self._waiting[text]
        return list(served)

    def _switch(self, text: greenlet, error: Exception | None = None) -> Any:
        before = getattr(_thread, "together", None)
        _thread.together = self
        try:
            with torch.inference_mode():  # for all alike: each text enters and leaves it by itself
                return text.throw(error) if error else text.switch()
        finally:
            _thread.together = before
