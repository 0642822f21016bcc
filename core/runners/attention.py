"""Attention of few rows over a long static cache.

Under a mask PyTorch's kernels give every key head to one block of the GPU, which then reads all of its keys alone:
eight blocks where there is room for a hundred. Split, each block reads a part of the keys, and the parts' answers are
weighed by the sums of their softmax (Dao et al. 2023, "Flash-Decoding for long-context inference"). In how many parts
is measured when a model is loaded, for a few reaches; what is not measured is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.capture import time_replays

PARTS = (1, 4, 8, 16)
REACHES = (2048, 8192, 32768)
ROWS, CALLS = 5, 20
"""Rows of the round that is timed, so many calls at a time."""
CLEARLY = 1.1
"""How many times as fast a split must be to be taken."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, parts: int = 1) -> Tensor:
    """Queries [B, heads, n, size] over keys and values [B, heads, reach, size] under an additive mask [B, 1, n, reach]
    of their type: [B, heads, n, size]; where B is 1, in so many parts of the reach."""
    if parts == 1:
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
    n = queries.shape[2]
    keys, values = (held[0].unflatten(1, (parts, -1)).transpose(0, 1) for held in (keys, values))
    each = mask[0].unflatten(2, (parts, -1)).permute(2, 0, 1, 3)  # [parts, 1, n, reach / parts]
    whole = parts, queries.shape[1]
    given = queries.expand(parts, -1, -1, -1), keys, values, each.expand(*whole, -1, -1)
    answers, sums = _with_sums(*given, scale)  # [parts, heads, n, size] and, logarithms, [parts, heads, n]
    weights = sums[..., :n].softmax(0).to(answers.dtype)
    return (answers * weights[..., None]).sum(0, keepdim=True)


def _with_sums(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` computes, and the logarithms of its softmax's sums, which it keeps."""
    aten = torch.ops.aten
    if queries.is_cuda:
        found = aten._scaled_dot_product_efficient_attention(queries, keys, values, mask, True, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, attn_mask=mask, scale=scale)
    return found[0], found[1]


def choose_parts(
    time_parts: Callable[[int, int], float], limit: int, parts: tuple[int, ...] = PARTS
) -> dict[int, tuple[int, float]]:
    """For the reaches that a model's context meets, in how many parts attention is fastest there, and how many times as
    fast it is as in one; 1 where no split is clearly faster, or none can be had."""
    chosen = {}
    for reach in REACHES:
        if reach > limit:
            break
        seconds = {1: time_parts(reach, 1)}
        for count in parts[1:]:
            try:
                seconds[count] = time_parts(reach, count)
            except RuntimeError:  # no such kernel for this type, size or device
                break
        best = min(seconds, key=lambda count: seconds[count])
        gain = seconds[1] / seconds[best]
        chosen[reach] = (best, gain) if gain >= CLEARLY else (1, 1.0)
    return chosen


def parts_for(chosen: Mapping[int, tuple[int, float]], reach: int) -> int:
    """In how many parts attention over a reach goes: as measured at the longest reach below it."""
    known = [measured for measured in chosen if measured <= reach]
    parts = chosen[max(known)][0] if known else 1
    return parts if reach % (16 * parts) == 0 else 1


def describe_parts(chosen: Mapping[int, tuple[int, float]]) -> str | None:
    """What was chosen, in a sentence; None where nothing is split."""
    told = [
        f"over {reach:,} positions in {count} ({gain:.1f}x)" for reach, (count, gain) in chosen.items() if count > 1
    ]
    return f"Attention is split over its keys, as measured here: {', '.join(told)}." if told else None


@torch.inference_mode()
def time_attention(
    heads: int, group: int, size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int, int], float]:
    """Seconds of one layer's attention of ROWS rows by reach and parts, replayed as captured passes run it; a split
    that gives other numbers than the whole raises RuntimeError."""

    def timed(reach: int, parts: int) -> float:
        keys, values = torch.randn(2, 1, heads, reach, size, dtype=dtype, device=device)
        queries = torch.randn(1, heads, group * ROWS, size, dtype=dtype, device=device)
        mask = torch.zeros(1, 1, group * ROWS, reach, dtype=dtype, device=device)
        mask[..., -reach // 3 :] = torch.finfo(dtype).min
        given = queries, keys, values, mask, size**-0.5
        whole, split = attend(*given), attend(*given, parts)
        if not (split.float() - whole.float()).norm() < 0.02 * whole.float().norm():
            raise RuntimeError("a split gives other numbers")
        return time_replays(lambda: [attend(*given, parts) for _ in range(CALLS)], device) / CALLS

    return timed
