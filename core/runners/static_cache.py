"""Keys and values at fixed addresses: what a captured CUDA graph needs, and how passes see and roll back such a cache.

All layers write at one position that the runner states before each pass, so rolling back is stating a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from core.runners.host import ids_on, mask_by_kind, moved, tree_depths, tree_visible

SHORTEST_REACH = 256


class Window:
    """Where the next pass stands. `start` [] int64 on the device is the position of its first token, written before
    every pass; `slots` [n] where it writes; it reads the first `reach` positions, a power of two, so that its cost
    follows the text and not the capacity."""

    def __init__(self, device: torch.device) -> None:
        self.start = torch.zeros((), dtype=torch.long, device=device)
        self.slots = self.start[None]
        self.reach = 0


class StaticStore:
    """The keys and values of one runner over all layers."""

    def __init__(self, network: nn.Module, capacity: int, limit: int | None = None) -> None:
        self._shapes = _cached_shapes(network)
        self._limit = limit
        self.device: torch.device = next(network.parameters()).device
        self.dtype: torch.dtype = network.get_input_embeddings().weight.dtype  # type: ignore[operator]
        self.window = Window(self.device)
        self.capacity = 0
        self._blocks: list[Tensor] = []
        self._grow(capacity)

    def reserve(self, length: int) -> bool:
        """Make room for `length` tokens by doubling; whether keys and values have moved (captured passes are void)."""
        if length <= self.capacity:
            return False
        doubled = max(2 * self.capacity, 1 << (length - 1).bit_length())
        self._grow(doubled if self._limit is None else max(length, min(doubled, self._limit)))
        return True

    def reach_for(self, length: int) -> int:
        """How far a pass must read to see `length` tokens: few values, so that few passes are captured."""
        return min(max(SHORTEST_REACH, 1 << (length - 1).bit_length()), self.capacity)

    @torch.inference_mode()
    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move the tokens at base + path, in this order, to the positions from `base` on."""
        index = base + ids_on(self.device, list(path))
        for block in self._blocks:
            block[:, :, base : base + len(path)] = block.index_select(2, index)

    @torch.inference_mode()
    def clear(self) -> None:
        """Masked positions weigh nothing, but nothing times not-a-number is not a number."""
        for block in self._blocks:
            block.zero_()

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        blocks: dict[tuple[int, int], Tensor] = {}
        for heads, size in dict.fromkeys(shape for pair in self._shapes for shape in pair):
            count = sum(shape == (heads, size) for pair in self._shapes for shape in pair)
            blocks[heads, size] = torch.zeros(count, heads, capacity, size, dtype=self.dtype, device=self.device)
        for old, new in zip(self._blocks, blocks.values()):
            new[:, :, : self.capacity] = old
        self._blocks = list(blocks.values())
        self.capacity = capacity
        self._columns = torch.arange(capacity, device=self.device)
        slices = {shape: iter(block) for shape, block in blocks.items()}
        layers = [StoredLayer(self.window, next(slices[keys]), next(slices[values])) for keys, values in self._shapes]
        self.cache = Cache(layers=layers)  # type: ignore[arg-type]

    def layered(self) -> Tensor:
        """All keys and values [layers, 2, heads, capacity, size], where all layers have the same shapes."""
        (block,) = self._blocks
        return block.view(-1, 2, *block.shape[1:])

    def masks(self, network: nn.Module, depth: Tensor, within: Tensor | None) -> Tensor | dict[str, Tensor]:
        """The mask of the next pass as transformers takes it, one per kind of layer."""
        return mask_by_kind(network, self.additive(depth, within))

    def additive(self, depth: Tensor, within: Tensor | None) -> Callable[[int | None], Tensor]:
        """What makes the additive mask of the next pass [1, 1, n, reach] for layers of a window; None: of full
        attention. No host value is asked for, so a captured pass computes it anew at every replay.

        depth [n]: position of each token after `start`; within [n, n] bool: which fed tokens each sees; None: a chain.
        """
        start, reach, n = self.window.start, self.window.reach, len(depth)
        columns = self._columns[:reach]
        position, held = start + depth, columns
        if within is None:
            visible = columns[None] <= position[:, None]
        else:
            below = columns - start  # which of the fed tokens a column holds
            node = below.clamp(0, n - 1)
            fed = (below >= 0) & (below < n)
            visible = (below < 0) | (fed & within.index_select(1, node))
            held = torch.where(fed, position.index_select(0, node), columns)

        def additive(window: int | None) -> Tensor:
            hidden = ~visible if window is None else ~visible | (position[:, None] - held[None] >= window)
            blank = torch.zeros(n, reach, dtype=self.dtype, device=self.device)
            return blank.masked_fill_(hidden, torch.finfo(self.dtype).min)[None, None]

        return additive


class StoredLayer(StaticLayer):
    """One layer of a StaticStore; keys and values [heads, capacity, size] are slices of its blocks."""

    keys: Tensor
    values: Tensor

    def __init__(self, window: Window, keys: Tensor, values: Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[1])
        self._window = window
        self.keys, self.values = keys[None], values[None]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [1, heads, n, size] where the pass stands; return what it may look at."""
        slots, reach = self._window.slots, self._window.reach
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def get_seq_length(self) -> Any:
        return self._window.start


class Inputs:
    """What a pass reads besides the cache, on the device: overwritten in place between replays of a captured pass."""

    def __init__(self, ids: Tensor, parents: Sequence[int] | None) -> None:
        self.ids = ids.clone()
        self.parents = parents if parents is None else tuple(parents)
        self.order = torch.arange(len(ids), device=ids.device)
        self.depth, self.within = self.order, None
        if parents is not None:
            self.depth, self.within = _tree_inputs(parents, ids.device)

    def set(self, ids: Tensor, parents: Sequence[int] | None) -> None:
        """Other ids, and another tree of the same size."""
        self.ids.copy_(ids)
        if parents is not None and self.within is not None and tuple(parents) != self.parents:
            depth, within = _tree_inputs(parents, self.ids.device)
            self.depth.copy_(depth)
            self.within.copy_(within)
            self.parents = tuple(parents)


def run_pass(network: Any, store: StaticStore, inputs: Inputs, rows: int) -> Tensor:
    """Feed the inputs where the window stands; logits [rows, padded vocab]. Captured as it is, or run eagerly."""
    start = store.window.start
    store.window.slots = start + inputs.order
    return network(
        input_ids=inputs.ids[None],
        position_ids=(start + inputs.depth)[None],
        attention_mask=store.masks(network, inputs.depth, inputs.within),
        past_key_values=store.cache,
        use_cache=True,
        logits_to_keep=rows,
    ).logits[0]


def _tree_inputs(parents: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    depth = ids_on(device, tree_depths(parents, len(parents)))
    return depth, moved(tree_visible(parents, 0), device)


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
