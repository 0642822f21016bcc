"""The native pass of the Llama family and its kin for CPUs: one call of our own code a pass (`native.cpp`).

What a row comes to, to the last bit, does not depend on the rows beside it, so text written speculatively with greedy
choices is the text of plain decoding. Results agree with transformers' to rounding; in 4 bits activations are rounded
to 8 bits by groups of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.runners import Favourites
from core.runners.architecture import HIDDEN, Attending, NativeNetwork
from core.runners.clock import timed_pass
from core.runners.features import Features
from core.runners.program import Program, Workspace
from core.runners.together import Cache, Rows, run_pass, run_rows


class NativeRunner:
    """One key/value cache over a NativeNetwork; implements `core.runners.Runner`."""

    kind = "native"

    def __init__(self, network: NativeNetwork, vocab_size: int, capacity: int = 512) -> None:
        self._net = network
        self._vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._length = self._fed = 0
        program = network.program()
        self._work = Workspace(program.widths, program.widest)
        shape = network.depth, network.kv_heads, program.padded
        self._cache = Cache(shape, network.wide_cache, lambda size: turned(network.kinds, size), capacity)
        self.exit: NativeView | None = None
        self.features: Features | None = None
        self.favourites: Favourites | None = None
        """Of the rows of the newest pass, its own or a view's."""
        self.shares = False
        """Whether a pass is to tell how sure its favourites are: for who drafts with it."""

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._length

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        n, start = len(ids), self._length
        wanted = rows or n
        program = self._net.program(self.features.layers if self.features else ())
        end = len(program.steps)
        resumable = self.exit and parents is None and not self.features
        held = self.exit.take(ids, start) if self.exit and resumable else None
        if held is None:
            columns = len(self.features.layers) * self._net.width if self.features else 0
            done = self._pass(program, 0, end, ids, start, parents, wanted, columns=columns, of=self._net)
        else:
            at, resumed = self.exit.layers, len(held)  # type: ignore[union-attr]
            middle = program.starts[at]
            if resumed < n:
                rest = self._pass(program, 0, middle, ids[resumed:], start + resumed)
                held = torch.cat([held, rest.hidden])  # type: ignore[list-item]
            given = ((HIDDEN, held),)
            done = self._pass(program, middle, end, ids, start, None, wanted, given=given, of=self._net)
        if self.features and done.features is not None:
            self.features.add(start, done.features.to(torch.promote_types(self._net.dtype, torch.float32)))
        self._fed = n
        self._length += n
        return self._logits(done)

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self.features = Features(layers, self._length)
        return self.features

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        if self.features:
            self.features.truncate(self._length)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        if list(path) != list(range(len(path))):
            self._cache.keep(base, path)
        if self.features:
            self.features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> NativeView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        self.exit = NativeView(self, layers)
        return self.exit

    def reset(self) -> None:
        self._length = self._fed = 0
        self.exit = self.features = None
        self.shares = False

    def through(
        self, layers: int, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int
    ) -> tuple[Tensor, Tensor]:
        """What leaves the first `layers` layers [n, width] for tokens at position `start`, and the logits that the head
        gives the last `rows` of it."""
        program = self._net.program()
        hidden = self._pass(program, 0, program.starts[layers], ids, start, parents).hidden
        assert hidden is not None
        head, last = program.starts[-1], hidden[len(hidden) - rows :]
        given = ((HIDDEN, last),)
        return hidden, self._logits(self._pass(program, head, len(program.steps), None, 0, None, rows, given=given))

    def _pass(
        self,
        program: Program,
        first: int,
        last: int,
        ids: Tensor | None,
        start: int,
        parents: Sequence[int] | None = None,
        wanted: int = 0,
        of: Any = None,
        **more: Any,
    ) -> Rows:
        """Run steps of a program for ids [n] behind `start` tokens; or, without ids, of its head. Of a whole pass `of`
        is the network."""
        n, cache = (wanted, None) if ids is None else (len(ids), self._cache)
        rows = Rows(program, self._work, n, first, last, ids, cache, start, parents, wanted=wanted, of=of, **more)
        rows.count, rows.shares = self._vocab_size, self.shares or of is None
        return run_pass(rows)

    def _logits(self, done: Rows) -> Tensor:
        assert done.logits is not None
        self.favourites = done.favourites
        return done.logits[:, : self._vocab_size]


@torch.inference_mode()
def feed_each(runners: Sequence[NativeRunner], tokens: Sequence[Tensor]) -> Tensor:
    """Feed every one of some runners of the same network a token [1], in one pass; logits [runners, vocab]."""
    program, work = runners[0]._net.program(), runners[0]._work
    end = len(program.steps)
    group = [Rows(program, work, 1, 0, end, ids, r._cache, r._length, wanted=1) for r, ids in zip(runners, tokens)]
    run_rows(group)
    for runner in runners:
        runner._length += 1
    return torch.cat([runner._logits(rows) for runner, rows in zip(runners, group)])


def turned(kinds: Sequence[Attending], capacity: int) -> list[tuple[Tensor, Tensor, int | None]]:
    """How the positions below `capacity` are turned for each kind of attention: cosines and sines [capacity, half a
    head] in float32, and its window."""
    found = []
    for kind in kinds:
        angles = torch.outer(torch.arange(capacity).float(), kind.frequencies)
        found.append(
            ((angles.cos() * kind.scaling).contiguous(), (angles.sin() * kind.scaling).contiguous(), kind.window)
        )
    return found


class NativeView:
    """Early exit over a NativeRunner: drafts with the first layers, and the full pass resumes from where they end."""

    kind = "early exit"

    def __init__(self, full: NativeRunner, layers: int) -> None:
        self._full = full
        self.layers = layers
        self.device = full.device
        self._length = full.length
        self._ahead: list[tuple[Tensor, Tensor]] = []
        """Ids and hidden states fed since the full pass: what it need not compute again."""

    @property
    def length(self) -> int:
        # Where the full pass has been, the first layers have been too.
        return max(self._length, self._full.length)

    @property
    def favourites(self) -> Favourites | None:
        return self._full.favourites

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        start = self.length
        hidden, logits = self._full.through(self.layers, ids, start, parents, rows or len(ids))
        self._ahead.append((ids, hidden))
        self._length = start + len(ids)
        return logits

    def take(self, ids: Tensor, start: int) -> Tensor | None:
        """Hidden states of a prefix of ids [n] at position `start`, if the view has just fed exactly those."""
        if not self._ahead or self._length <= start:
            return None
        fed = torch.cat([part for part, _ in self._ahead])
        hidden = torch.cat([part for _, part in self._ahead])
        self._ahead.clear()
        begins = self._length - len(fed)
        if begins != start or len(fed) > len(ids) or not torch.equal(ids[: len(fed)], fed):
            return None
        return hidden if len(fed) < len(ids) else hidden[:-1]

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        self._ahead.clear()

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("an early-exit view drafts chains; the target's runner keeps the verified path")
