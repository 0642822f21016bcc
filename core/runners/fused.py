"""A forward of the Llama family and its kin for CPUs, where a pass costs by its operations: few, fused, into
preallocated memory.

transformers' eager forward spends more time between the matrix products than in them at batch 1. Here q/k/v and
gate/up are one product each, what lies between two products is computed in float32 in memory made once per number of
rows, and keys and values are written in place. Results agree with transformers' to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.clock import timed_pass
from core.runners.architecture import Attending, FusedNetwork, Norm
from core.runners.features import Features
from core.runners.host import tree_depths, tree_visible

KEPT_ROWS = 32
"""Passes over more rows are prefill: what they need is made anew."""


class Space:
    """Memory of a pass over n rows, and its views: what projections read, and queries, keys and values as they come
    out of the first product [n, heads], as the cache holds them [2, key heads, n] and as attention wants them."""

    def __init__(self, net: FusedNetwork, n: int) -> None:
        heads, kv_heads, size = net.heads, net.kv_heads, net.head_size
        self.x = torch.empty(n, net.width, dtype=net.dtype)
        self.rows = torch.empty(n, (heads + 2 * kv_heads) * size, dtype=net.work)
        qkv = self.rows.view(n, heads + 2 * kv_heads, size)
        self.turned = qkv[:, : heads + kv_heads]
        self.swapping = torch.empty_like(self.turned)
        self.halves = self.turned.split(size // 2, -1)
        self.other_halves = self.swapping.split(size // 2, -1)[::-1]
        self.queries, self.keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        self.keys_values = qkv[:, heads:].view(n, 2, kv_heads, size).permute(1, 2, 0, 3)
        # Queries that share a key head become rows of one product: no repeated keys.
        group = heads // kv_heads
        self.grouped = self.queries.view(n, kv_heads, group, size).permute(1, 2, 0, 3)
        self.asking = torch.empty(1, kv_heads, group * n, size, dtype=net.dtype)
        self.asking_by_head = self.asking.view(kv_heads, group, n, size)


class Seen(NamedTuple):
    """What a pass's layers of one kind of attention share: cosines and sines [n, 1, size], the latter with the sign
    that an entry takes into the other half, the additive mask, and per layer the keys and values that may be seen."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class FusedRunner:
    """One key/value cache over a FusedNetwork; implements `core.runners.Runner`."""

    kind = "fused"

    def __init__(self, network: FusedNetwork, vocab_size: int, capacity: int = 512) -> None:
        self._net = network
        self._vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._length = self._fed = 0
        self._masks: dict[int, Tensor] = {}
        self._spaces: dict[int, Space] = {}
        self._capacity = 0
        self._grow(capacity)
        self.exit: FusedView | None = None
        self.features: Features | None = None

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
            hidden = self.through(0, len(net.layers), net.embed(ids), self._length, parents, noted)
            if self.features and noted:
                self.features.add(self._length, torch.cat([noted[i] for i in self.features.layers], 1))
        else:
            at, held = self.exit.layers, resumed  # type: ignore[union-attr]
            rest = self.through(0, at, net.embed(ids[len(held) :]), self._length + len(held), None)
            hidden = self.through(at, len(net.layers), torch.cat([held, rest]), self._length, None)
        self._fed = n
        self._length += n
        return net.logits(hidden[n - (rows or n) :])[:, : self._vocab_size]

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
        space = self._space(n)
        cache = self._cache[first:last]
        written = cache[:, :, :, start:end].unbind()
        kinds = self._seen(cache, n, start, parents)
        scale, attend = net.scale, F.scaled_dot_product_attention
        x, turned, swapping = space.x, space.turned, space.swapping
        (low, high), (from_high, from_low) = space.halves, space.other_halves
        for i, layer in enumerate(net.layers[first:last]):
            if noted is not None and first + i in noted:
                noted[first + i] = hidden.to(net.dtype, copy=True)
            cos, sin, mask, keys, values = kinds[layer.kind]
            if layer.before_attention:
                layer.before_attention(hidden, x)
            else:
                x.copy_(hidden)
            space.rows.copy_(layer.qkv(x))
            if layer.query_key_norms:
                self._normalise(space, *layer.query_key_norms)
            torch.mul(turned, sin, out=swapping)
            turned.mul_(cos)
            low += from_high
            high += from_low
            written[i].copy_(space.keys_values)
            space.asking_by_head.copy_(space.grouped)
            seen = attend(space.asking, keys[i], values[i], mask, scale=scale)
            if n > 1:
                seen = seen.view(net.heads, n, net.head_size).transpose(0, 1)
            y = layer.out(seen.reshape(n, -1))
            hidden += layer.after_attention(y.to(net.work), y) if layer.after_attention else y
            if layer.before_mlp:
                layer.before_mlp(hidden, x)
            else:
                x.copy_(hidden)
            gate, up = layer.gate_up(x).chunk(2, -1)
            y = layer.down(net.activation(gate) * up)
            hidden += layer.after_mlp(y.to(net.work), y) if layer.after_mlp else y
        if noted is not None and last in noted:
            noted[last] = hidden.to(net.dtype, copy=True)
        return hidden

    @staticmethod
    def _normalise(space: Space, query: Norm, key: Norm) -> None:
        """Normalise queries and keys, each head on its own or, where the norm is as wide as all heads, together."""
        for part, norm in ((space.queries, query), (space.keys, key)):
            part = part if norm.weight.shape[0] == part.shape[-1] else part.flatten(1)
            norm(part, part)

    def _space(self, n: int) -> Space:
        if n > KEPT_ROWS:
            return Space(self._net, n)
        if n not in self._spaces:
            self._spaces[n] = Space(self._net, n)
        return self._spaces[n]

    def _seen(self, cache: Tensor, n: int, start: int, parents: Sequence[int] | None) -> list[Seen]:
        """For each kind of attention, what n rows at position `start` see of a part of the cache."""
        end = start + n
        at = slice(start, end) if parents is None else start + torch.tensor(tree_depths(parents, n))
        found = []
        for kind, (cos, sin) in zip(self._net.kinds, self._rotations):
            window = kind.window if kind.window and end > kind.window else None
            begin = 0 if window is None else start + 1 - window
            begin = max(0, begin)
            if parents is not None:
                mask = self._additive(tree_visible(parents, start, window)[:, begin:])
            elif n == 1:
                mask = None
            else:
                mask = self._causal(n, start) if window is None else self._windowed(n, start, window, begin)
            keys, values = cache[:, :, None, :, begin:end].unbind(1)
            found.append(Seen(cos[at], sin[at], mask, keys.unbind(), values.unbind()))
        return found

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
        cache = torch.zeros(len(net.layers), 2, net.kv_heads, capacity, net.head_size, dtype=net.dtype)
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
        return full._net.logits(hidden[len(ids) - (rows or len(ids)) :])[:, : full._vocab_size]

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
