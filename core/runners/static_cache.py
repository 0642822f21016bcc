"""Keys and values at fixed addresses: what a captured CUDA graph needs, and how passes see and roll back such a cache.

All layers write at one position that is stated with each pass, so rolling back is stating a smaller one. A store has a
slot for each of the texts whose rows are in one pass (`core.runners.slots`); one for a text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from core.runners.host import ids_on, mask_by_kind, moved, tree_depths, tree_visible
from core.runners.widths import capacity_for, reach_for


@dataclass
class Inputs:
    """What a pass over n rows of each of B texts reads besides the cache, on the device. ids [B, n]; `start` [B] int64:
    the position of each text's first row, and `cells` [B] where in the store that is kept. The pass reads the first
    `reach` positions of the B slots from `first` on, so that its cost follows the texts and not the capacity. Of trees,
    `depth` [B, n] tells the position of each row after `start`, and `within` [B, n, n] bool which rows each sees; of
    chains, `depth` is [n]."""

    ids: Tensor
    start: Tensor
    cells: Tensor
    reach: int
    depth: Tensor
    within: Tensor | None = None
    first: int = 0


class StaticStore:
    """Keys and values over all layers, `capacity` rows in each of its slots."""

    def __init__(self, network: nn.Module, capacity: int, limit: int | None = None, slots: int = 1) -> None:
        self._shapes = _cached_shapes(network)
        self._limit = limit
        self.slots = slots
        self.device: torch.device = next(network.parameters()).device
        self.dtype: torch.dtype = network.get_input_embeddings().weight.dtype  # type: ignore[operator]
        self.inputs: Inputs | None = None
        """Those of the pass in progress, for transformers' modules, which are not given them."""
        self.capacity = 0
        self._blocks: list[Tensor] = []
        self._move(capacity)

    def reserve(self, length: int) -> bool:
        """Make room for `length` rows in each slot; whether keys and values have moved (captured passes are void)."""
        if length <= self.capacity:
            return False
        self._move(max(length, capacity_for(length, self._limit)))
        return True

    def reach_for(self, length: int) -> int:
        """How far a pass reads that ends at `length` tokens."""
        return min(reach_for(length), self.capacity)

    def order(self, n: int) -> Tensor:
        """0 … n - 1, at an address that stays."""
        return self._columns[:n]

    @torch.inference_mode()
    def compact(self, base: int, path: Sequence[int], slot: int = 0) -> None:
        """Move the tokens of a slot at base + path, in this order, to the positions from `base` on."""
        base += slot * self.capacity
        index = base + ids_on(self.device, list(path))
        for block in self._blocks:
            block[:, :, base : base + len(path)] = block.index_select(2, index)

    @torch.inference_mode()
    def clear(self, slot: int = 0) -> None:
        """Masked positions weigh nothing, but nothing times not-a-number is not a number."""
        for block in self._blocks:
            block.unflatten(2, (self.slots, -1))[:, :, slot].zero_()

    @torch.inference_mode()
    def _move(self, capacity: int) -> None:
        blocks: dict[tuple[int, int], Tensor] = {}
        for heads, size in dict.fromkeys(shape for pair in self._shapes for shape in pair):
            count = sum(shape == (heads, size) for pair in self._shapes for shape in pair)
            shape = count, heads, self.slots * capacity, size
            blocks[heads, size] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for old, new in zip(self._blocks, blocks.values()):
            held, room = (block.unflatten(2, (self.slots, -1)) for block in (old, new))
            room[..., : self.capacity, :] = held
        self._blocks = list(blocks.values())
        self.capacity = capacity
        self._columns = torch.arange(capacity, device=self.device)
        slices = {shape: iter(block) for shape, block in blocks.items()}
        layers = [StoredLayer(self, next(slices[keys]), next(slices[values])) for keys, values in self._shapes]
        self.cache = Cache(layers=layers)  # type: ignore[arg-type]

    def layered(self) -> Tensor:
        """All keys and values [layers, 2, heads, slots · capacity, size], where all layers have the same shapes."""
        (block,) = self._blocks
        return block.view(-1, 2, *block.shape[1:])

    def additive(self, inputs: Inputs) -> Callable[[int | None], Tensor]:
        """What makes the additive masks of a pass [B, 1, n, reach] for layers of a window; None: of full attention. No
        host value is asked for, so a captured pass computes them anew at every replay."""
        (texts, n), reach, within = inputs.ids.shape, inputs.reach, inputs.within
        start, columns = inputs.start[:, None], self._columns[:reach]
        position, held = start + inputs.depth, columns  # [B, n], and [reach] or, of trees, [B, reach]
        if within is None:
            visible = columns <= position[..., None]
        else:
            below = columns - start  # which of the fed tokens a column holds
            node = below.clamp(0, n - 1)
            fed = (below >= 0) & (below < n)
            seen = within.gather(2, node[:, None].expand(-1, n, -1))
            visible = (below < 0)[:, None] | (fed[:, None] & seen)
            held = torch.where(fed, position.gather(1, node), columns)[:, None]

        def additive(window: int | None) -> Tensor:
            hidden = ~visible if window is None else ~visible | (position[..., None] - held >= window)
            blank = torch.zeros(texts, n, reach, dtype=self.dtype, device=self.device)
            return blank.masked_fill_(hidden, torch.finfo(self.dtype).min)[:, None]

        return additive


class StoredLayer(StaticLayer):
    """One layer of a StaticStore of one slot; keys and values [heads, capacity, size] are slices of its blocks."""

    keys: Tensor
    values: Tensor

    def __init__(self, store: StaticStore, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[1])
        self._store = store
        self.keys, self.values = keys[None], values[None]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [1, heads, n, size] where the pass stands; return what it may look at."""
        inputs = self._pass()
        cells, reach = inputs.start + self._store.order(inputs.ids.shape[1]), inputs.reach
        self.keys.index_copy_(2, cells, key_states)
        self.values.index_copy_(2, cells, value_states)
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def get_seq_length(self) -> Any:
        return self._pass().start[0]

    def _pass(self) -> Inputs:
        assert self._store.inputs is not None
        return self._store.inputs


def run_pass(network: Any, store: StaticStore, inputs: Inputs, rows: int) -> Tensor:
    """Feed the inputs of one text where they stand, through transformers' modules; logits [rows, padded vocab]."""
    store.inputs = inputs
    return network(
        input_ids=inputs.ids,
        position_ids=inputs.start[:, None] + inputs.depth,
        attention_mask=mask_by_kind(network, store.additive(inputs)),
        past_key_values=store.cache,
        use_cache=True,
        logits_to_keep=rows,
    ).logits[0]


@lru_cache(maxsize=64)
def tree_inputs(parents: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths [width] and who sees whom [width, width] of a tree; surplus rows are roots of their own."""
    padded = [*parents, *[-1] * (width - len(parents))]
    return ids_on(device, tree_depths(padded, width)), moved(tree_visible(padded, 0), device)


@torch.inference_mode()
def _cached_shapes(network: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(heads, size) of the keys and of the values of every layer, read off a pass over one token.

    Raises ValueError for layers that keep no keys and values of their own.
    """
    cache = DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=next(network.parameters()).device)
    network(input_ids=one, past_key_values=cache, use_cache=True)
    held: list[Any] = list(cache.layers)
    if not all(layer.is_initialized for layer in held):
        raise ValueError("some of its layers keep no keys and values of their own")
    return [((h.keys.shape[1], h.keys.shape[3]), (h.values.shape[1], h.values.shape[3])) for h in held]
