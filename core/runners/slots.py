"""Several texts of one model in one static cache, so that one pass takes the rows of all.

Each text has a slot. A pass is over the first B slots and as many rows of each (`core.runners.widths`), and is captured
as those of a text alone are (`core.runners.graph`). A slot with fewer rows in it is filled up with some that nobody
reads: behind a text's own, where its next ones are written over them, or, of a text that has none in this pass, in the
last cells of its slot, which are kept free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UserError, out_of_memory
from core.runners.capture import Captures
from core.runners.graph import GraphRunner
from core.runners.host import ids_on
from core.runners.static_cache import Inputs, StaticStore, tree_inputs
from core.runners.static_layers import FusedPass, StaticNetwork
from core.runners.together import run_pass
from core.runners.widths import LONGEST, MOST_ROWS, ROUND, texts_for, width_for


@dataclass(slots=True, eq=False)
class SlotRows:
    """The rows of one text in a pass (`core.runners.graph.GraphRunner.run`): ids [n] at position `start` of its slot,
    of which the last so many rows are `wanted`; their `logits` [wanted, vocab], and the features [n, …] that are
    `noted`, if any, come with the pass."""

    slots: Slots
    slot: int
    what: int | tuple[int, ...] | None
    ids: Tensor
    start: int
    parents: Sequence[int] | None
    wanted: int
    logits: Tensor | None = None
    noted: tuple[Tensor, ...] = ()

    @property
    def of(self) -> StaticNetwork | None:
        return None if isinstance(self.what, int) else self.slots.fused

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def tree(self) -> tuple[int, ...]:
        """Its parents, also of a chain."""
        return tuple(range(-1, self.n - 1) if self.parents is None else self.parents)

    @property
    def shared(self) -> bool:
        """Whether it is a round's. Part of a prompt goes by itself: over so many rows nothing is to be won."""
        return self.n <= ROUND or self.n == self.wanted <= LONGEST

    @property
    def key(self) -> Hashable:
        return (id(self.slots), self.what) if self.shared else id(self)

    def run(self, group: Sequence[SlotRows]) -> None:
        self.slots.run(group) if self.shared else self.slots.run_alone(self)


class Slots:
    """Keys and values of up to `count` texts of a model, and the passes over them that are captured."""

    def __init__(
        self,
        network: nn.Module,
        fused: StaticNetwork,
        vocab_size: int,
        count: int,
        limit: int | None = None,
    ) -> None:
        self.fused, self.vocab_size, self.count = fused, vocab_size, count
        self.store = StaticStore(network, 1, limit, count)
        self.captures = Captures(self.store.device, most=MOST_ROWS)
        self._free = list(range(count))

    @contextmanager
    def lease(self, room: int = 0) -> Iterator[SlotRunner]:
        """The first free slot, as a runner with an empty cache for `room` tokens. Raises UserError where the device has
        no memory for as many in every slot."""
        slot = heappop(self._free)
        try:
            self._make_room(room)
            yield SlotRunner(self, slot)
        finally:
            self.store.clear(slot)
            heappush(self._free, slot)

    def _make_room(self, room: int) -> None:
        try:
            self.reserve(room)
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"This device has no memory for {self.count} texts of {room:,} tokens at once; ask for fewer."
            ) from None

    @property
    def full(self) -> bool:
        return not self._free

    def reserve(self, length: int) -> None:
        """Make room for texts of `length` tokens: when what is held moves, what was captured is void."""
        if self.store.reserve(length + LONGEST):  # the last cells are of no text
            self.captures.forget()

    @torch.inference_mode()
    def run(self, group: Sequence[SlotRows]) -> None:
        """One pass over the rows of several texts; what is captured is checked once behind itself."""
        what = group[0].what
        texts = min(texts_for(1 + max(rows.slot for rows in group)), self.count)
        width = width_for(max(rows.n for rows in group))
        self.reserve(max(rows.start for rows in group) + 2 * width)
        reach = self.store.reach_for(max(rows.start + rows.n for rows in group))
        ids, where, behind = self._placed(group, texts, width)
        tree: tuple[Tensor, ...] = ()
        if any(rows.parents is not None for rows in group):
            of_slot = {rows.slot: rows.tree for rows in group}
            tree = self._trees([of_slot.get(slot, ()) for slot in range(texts)], width)
        work = partial(self._pass, what, reach, 0, texts * width)
        if texts * width <= MOST_ROWS:
            key = what, texts, width, reach, bool(tree)
            found = self.captures(key, work, (ids, where, *tree), (ids, behind, *tree))
        else:
            found = work(ids, where, *tree)
        logits, *noted = (each.view(texts, width, -1).clone() for each in found)
        for rows in group:
            rows.logits = logits[rows.slot, rows.n - rows.wanted : rows.n, : self.vocab_size]
            rows.noted = tuple(each[rows.slot, : rows.n] for each in noted)

    @torch.inference_mode()
    def run_alone(self, rows: SlotRows) -> None:
        """A pass over the rows of one text, of any number, as they are."""
        start = rows.start
        self.reserve(start + rows.n)
        where = ids_on(self.store.device, [start, rows.slot * self.store.capacity + start]).view(2, 1)
        tree = () if rows.parents is None else self._trees([rows.tree], rows.n)
        reach = self.store.reach_for(start + rows.n)
        logits, *noted = self._pass(rows.what, reach, rows.slot, rows.wanted, rows.ids[None], where, *tree)
        rows.logits, rows.noted = logits[:, : self.vocab_size], tuple(noted)

    def _placed(self, group: Sequence[SlotRows], texts: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ids [B, n] of a pass; for each slot at which position and in which cell its rows begin [2, B], and the
        same once more behind them."""
        device, capacity = self.store.device, self.store.capacity
        starts, step = [0] * texts, [0] * texts
        cells = [(slot + 1) * capacity - width for slot in range(texts)]
        places: list[int] = []
        for rows in group:
            slot = rows.slot
            starts[slot], cells[slot], step[slot] = rows.start, slot * capacity + rows.start, width
            places.extend(range(slot * width, slot * width + rows.n))
        after = [[at + more for at, more in zip(each, step)] for each in (starts, cells)]
        numbers = ids_on(device, [*starts, *cells, *after[0], *after[1], *places])  # in one transfer
        where, behind = numbers[: 4 * texts].view(2, 2, texts)
        ids = torch.zeros(texts * width, dtype=torch.long, device=device)
        ids.index_copy_(0, numbers[4 * texts :], torch.cat([rows.ids for rows in group]))
        return ids.view(texts, width), where, behind

    def _trees(self, trees: Sequence[tuple[int, ...]], width: int) -> tuple[Tensor, Tensor]:
        """Depths [B, n] and who sees whom [B, n, n] in the trees of each slot."""
        depth, within = zip(*(tree_inputs(parents, width, self.store.device) for parents in trees))
        return torch.stack(depth), torch.stack(within)

    def _pass(
        self,
        what: Any,
        reach: int,
        first: int,
        rows: int,
        ids: Tensor,
        where: Tensor,
        depth: Tensor | None = None,
        within: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        depth = self.store.order(ids.shape[1]) if depth is None else depth
        inputs = Inputs(ids, where[0], where[1], reach, depth, within, first)
        return FusedPass(self.fused, what)(self.store, inputs, rows)


class SlotRunner(GraphRunner):
    """A text in a slot; implements `core.runners.Runner`. Its passes wait for those of the texts beside."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots = slots
        self._begin(slots.store, slots.captures, slots.vocab_size, slots.fused, slot)

    def reserve(self, length: int) -> None:
        self._slots.reserve(length)

    def run(
        self, what: Any, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int | None
    ) -> tuple[Tensor, ...]:
        done = run_pass(SlotRows(self._slots, self._slot, what, ids, start, parents, rows or len(ids)))
        assert done.logits is not None
        return done.logits, *done.noted


def pass_behind(runners: Sequence[SlotRunner], ids: Tensor) -> None:
    """One pass over ids [n] behind each of some texts of the same slots, none of which has them afterwards: what it
    takes is to be known."""
    group = [SlotRows(runner._slots, runner._slot, None, ids, runner.length, None, len(ids)) for runner in runners]
    group[0].run(group)
