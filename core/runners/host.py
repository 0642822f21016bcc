"""What passes between the host and a device: ids one way, a round's results the other, each in one transfer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
    """Numbers [n] and ids [n] as lists. With `on_host`, the round's one synchronisation: all the host needs at once."""
    if all(vector.device.type == "cpu" for vector in vectors):
        return [vector.tolist() for vector in vectors]
    return in_one_transfer(*vectors)


def in_one_transfer(*vectors: Tensor) -> list[list[Any]]:
    """The same by way of one tensor."""
    packed = iter(_pack(vectors).tolist())
    lists = [list(islice(packed, len(vector))) for vector in vectors]
    return [x if vector.is_floating_point() else list(map(int, x)) for x, vector in zip(lists, vectors)]


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the CPU: as they are if there already, else in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    pieces = _pack(tensors).cpu().split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape).to(tensor.dtype) for piece, tensor in zip(pieces, tensors)]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All values in a row, as float32: exact for ids up to 2**24."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])
