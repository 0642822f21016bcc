"""A forward of the Llama family and its kin for CPUs, where a pass costs by its operations: few, fused, into
preallocated memory.

transformers' eager forward spends more time between the matrix products than in them at batch 1. Here q/k/v and
gate/up are one product each, what lies between two products is computed in float32 in memory made once per number of
rows, and keys and values are written in place. Results agree with transformers' to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.runners.architecture import Attending, FusedNetwork
from core.runners.clock import timed_pass
from core.runners.features import Features
from core.runners.host import tree_depths, tree_visible

KEPT_ROWS = 32
"""Passes over more rows are prefill: what they need is made anew."""


class FusedRunner:
    """One key/value cache over a FusedNetwork; implements `core.runners.Runner`."""

    kind = "fused"

    def __init__(self, network: FusedNetwork, vocab_size: int, capacity: int = 512) -> None:
        self._net = network
        self._vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._length = self._fed = 0
        self._masks: dict[int, Tensor] = {}
        self._capacity = 0
        self._grow(capacity)
        self.exit: FusedView | None = None
        self.features: Features | None = None

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def length(self) -> int:
        return self._length

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        net, n = self._net, len(ids)
        resumable = self.exit and parents is None and not self.features
        resumed, at = (self.exit.take(ids, self._length) if self.exit and resumable else None), 0
        if resumed is None:
            noted: dict[int, Any] | None = dict.fromkeys(self.features.layers) if self.features else None
            hidden = self.through(0, net.depth, net.embed(ids), self._length, parents, noted)
            if self.features and noted:
                self.features.add(self._length, torch.cat([noted[i] for i in self.features.layers], 1))
        else:
            at, held = self.exit.layers, resumed  # type: ignore[union-attr]
            rest = self.through(0, at, net.embed(ids[len(held) :]), self._length + len(held), None)
            hidden = self.through(at, net.depth, torch.cat([held, rest]), self._length, None)
        self._fed = n
        self._length += n
        return net.layers.logits(hidden[n - (rows or n) :])[:, : self._vocab_size]

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
            index = base + torch.tensor(list(path))
            self._cache[..., base : base + len(path), :] = self._cache.index_select(3, index)
        if self.features:
            self.features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> FusedView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        self.exit = FusedView(self, layers)
        return self.exit

    def reset(self) -> None:
        self._length = self._fed = 0
        self.exit = self.features = None

    def through(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        start: int,
        parents: Sequence[int] | None,
        noted: dict[int, Any] | None = None,
    ) -> Tensor:
        """Run the residual stream [n, width] through layers first … last-1, in place, as the tokens from position
        `start` on; a copy of what enters the layers that `noted` names is put there."""
        net, n = self._net, len(hidden)
        end = start + n
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        boundaries = sorted(boundary for boundary in noted or () if first <= boundary <= last)
        kinds = self._seen(n, start, parents)
        found = net.layers(hidden, first, self._cache[first:last], start, *kinds, boundaries)
        if noted is not None:
            noted.update(zip(boundaries, found))
        return hidden

    def _seen(
        self, n: int, start: int, parents: Sequence[int] | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], list[int]]:
        """For each kind of attention, what turns n rows at position `start` (cosines and signed sines [n, 1, size]),
        the additive mask, and the first position they see."""
        end = start + n
        at = slice(start, end) if parents is None else start + torch.tensor(tree_depths(parents, n))
        masks: list[Tensor | None] = []
        begins: list[int] = []
        for kind in self._net.kinds:
            window = kind.window if kind.window and end > kind.window else None
            begin = 0 if window is None else max(0, start + 1 - window)
            if parents is not None:
                mask = self._additive(tree_visible(parents, start, window)[:, begin:])
            elif n == 1:
                mask = None
            else:
                mask = self._causal(n, start) if window is None else self._windowed(n, start, window, begin)
            masks.append(mask)
            begins.append(begin)
        return [cos[at] for cos, _ in self._rotations], [sin[at] for _, sin in self._rotations], masks, begins

    def _causal(self, n: int, start: int) -> Tensor:
        """Additive mask [group·n, start+n]; a slice of one table per n, so that a pass builds nothing."""
        if n > KEPT_ROWS:
            return self._additive(torch.ones(n, start + n, dtype=torch.bool).tril(start))
        if n not in self._masks:
            column = torch.arange(2 * self._capacity + n)
            self._masks[n] = self._additive(column[None] <= self._capacity + torch.arange(n)[:, None])
        return self._masks[n][:, self._capacity - start : self._capacity + n]

    def _windowed(self, n: int, start: int, window: int, begin: int) -> Tensor:
        """Additive mask [group·n, start+n-begin] of rows that see fewer than `window` positions back."""
        back = torch.arange(start, start + n)[:, None] - torch.arange(begin, start + n)
        return self._additive((back >= 0) & (back < window))

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self._net.dtype).masked_fill_(~visible, -torch.inf)
        return mask.repeat(self._net.heads // self._net.kv_heads, 1)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        net = self._net
        cache = torch.zeros(net.depth, 2, net.kv_heads, capacity, net.head_size, dtype=net.dtype)
        if self._capacity:
            cache[..., : self._capacity, :] = self._cache
        self._cache = cache
        self._rotations = [rotation(kind, capacity, net.work) for kind in net.kinds]
        self._capacity = capacity
        self._masks.clear()


def rotation(kind: Attending, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [capacity, 1, head size] such that rotating x is x·cos + (x·sin with its halves swapped)."""
    angles = torch.outer(torch.arange(capacity).float(), kind.frequencies)
    cos, sin = angles.cos() * kind.scaling, angles.sin() * kind.scaling
    return torch.cat([cos, cos], 1)[:, None].to(dtype), torch.cat([sin, -sin], 1)[:, None].to(dtype)


class FusedView:
    """Early exit over a FusedRunner: drafts with the first layers and lets the full pass resume from where they end."""

    kind = "early exit"

    def __init__(self, full: FusedRunner, layers: int) -> None:
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

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        full, start = self._full, self.length
        hidden = full.through(0, self.layers, full._net.embed(ids), start, parents)
        self._ahead.append((ids, hidden))
        self._length = start + len(ids)
        return full._net.layers.logits(hidden[len(ids) - (rows or len(ids)) :])[:, : full._vocab_size]

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
