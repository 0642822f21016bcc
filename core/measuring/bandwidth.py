"""How near a pass comes to what the memory can deliver: at batch 1 a pass is little but reading the weights once."""

from __future__ import annotations

import time
from statistics import median

import torch

from core.clock import synchronise
from core.geometry import describe_geometry
from core.model import Model

COPIED = 1 << 30


def describe_bandwidth(target: Model, seconds: float, context: int) -> dict[str, float] | None:
    """Bytes per second a pass over one token achieves (weights, and keys and values of `context` tokens, over its
    measured seconds), those of a large copy on the same device, and their ratio. None off CUDA, where caches of the
    processor blur what is read from memory."""
    if target.device.type != "cuda":
        return None
    achieved = bytes_read(target, context) / seconds
    copied = copy_bandwidth(target.device)
    return {"achieved": achieved, "copy": copied, "share": achieved / copied}


def bytes_read(model: Model, context: int) -> int:
    """What a pass over one token has to read: every weight but the rows of embeddings it does not look up, and the
    cached keys and values."""
    geometry = describe_geometry(model)
    return geometry.read_bytes + geometry.cached_bytes * context if geometry else model.weight_bytes()


def copy_bandwidth(device: torch.device, size: int = COPIED, repeats: int = 10) -> float:
    """Bytes read plus bytes written per second while copying `size` random bytes on the device; median of repeats."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / median(seconds[2:])
