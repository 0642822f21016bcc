"""What the host makes for a pass, and what comes back from it.

Ids one way, a round's results the other, each in one transfer; who may see whom in a pass: a tree's depths and
ancestors, and the masks transformers takes for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor


def ids_on(device: torch.device, ids: Sequence[int]) -> Tensor:
    """Token ids from the host as int64 [n] on a device."""
    if not ids:
        return torch.empty(0, dtype=torch.long, device=device)
    tensor = torch.frombuffer(array("q", ids), dtype=torch.long)  # half the time of torch.tensor
    return tensor if device.type == "cpu" else moved(tensor, device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device still has to do: CUDA copies from pinned
    memory alone in the order of its queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def lists_on_host(*vectors: Tensor) -> list[list[Any]]:
    """Numbers [n] and ids [n] as lists. The round's one synchronisation: all the host needs at once."""
    if all(vector.device.type == "cpu" for vector in vectors):
        return [vector.tolist() for vector in vectors]
    return in_one_transfer(*vectors)


def in_one_transfer(*vectors: Tensor) -> list[list[Any]]:
    """The same by way of one tensor."""
    packed = iter(_pack(vectors).tolist())
    lists = [list(islice(packed, len(vector))) for vector in vectors]
    return [x if vector.is_floating_point() else list(map(int, x)) for x, vector in zip(lists, vectors)]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All values in a row, as float32: exact for ids up to 2**24."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def tree_depths(parents: Sequence[int] | None, n: int) -> list[int]:
    """Depth of each fed token below the cache; a chain without parents."""
    if parents is None:
        return list(range(n))
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def tree_visible(parents: Sequence[int], length: int, window: int | None = None) -> Tensor:
    """Which positions each tree token may attend to: bool [n, length + n], its ancestors, itself and the cache.

    With a sliding `window`, only those fewer than `window` positions back, positions counted by depth.
    """
    n = len(parents)
    within = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            within[i] |= within[parent]
    visible = torch.cat([torch.ones(n, length, dtype=torch.bool), within], dim=1)
    if window is not None:
        depth = torch.tensor(tree_depths(parents, n))
        at = torch.cat([torch.arange(length), length + depth])
        visible &= (length + depth)[:, None] - at[None] < window
    return visible


def tree_mask(network: Any, parents: Sequence[int], length: int, device: torch.device) -> Tensor | dict[str, Tensor]:
    """The additive 4-D mask transformers takes as it is; one per kind of layer where a model mixes kinds."""
    dtype = network.get_input_embeddings().weight.dtype

    def additive(window: int | None) -> Tensor:
        visible = moved(tree_visible(parents, length, window), device)
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)[
            None, None
        ]

    return mask_by_kind(network, additive)


def mask_by_kind(network: Any, additive: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
    """The mask of each kind of layer of a model, made by `additive(window)`; a window of None is full attention."""
    config = network.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        return {kind: additive(window if kind == "sliding_attention" else None) for kind in sorted(kinds)}
    return additive(window if not kinds else None)
