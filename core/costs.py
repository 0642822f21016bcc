"""What a pass over n tokens costs on this machine: measured after loading; the adaptive draft length rests on it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from core.clock import synchronise
from core.runner import Runner

MEASURED_LENGTHS = (1, 2, 4, 6, 9, 16)
REPEATS = 5
CONTEXT = 128
"""Tokens in the cache while passes are timed."""
CHAIN = 3
"""How many passes of a draft are timed behind its first."""


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a pass over n tokens, interpolated between the measured n and continued linearly.

    `following`, of a draft: seconds of a pass over one token right behind another of its own.
    """

    seconds: dict[int, float]
    following: float | None = None

    def __call__(self, n: int) -> float:
        known = sorted(self.seconds)
        if n in self.seconds:
            return self.seconds[n]
        right = min(max(bisect_left(known, n), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (n - low)

    @classmethod
    def from_dict(cls, costs: Mapping[str, float], following: float | None = None) -> CostTable:
        return cls({int(n): seconds for n, seconds in costs.items()}, following)

    def to_dict(self) -> dict[str, float]:
        return {str(n): s for n, s in sorted(self.seconds.items())}


def time_passes(runner: Runner, context: int, repeats: int, lengths: Sequence[int] = MEASURED_LENGTHS) -> CostTable:
    """Passes of one model, each behind another of its own."""
    samples: dict[int, list[float]] = {n: [] for n in lengths}
    _read(runner, context)
    for n in _in_turn(repeats, lengths):
        samples[n].append(_time_from(runner, n, context))
    return CostTable(_medians(samples))


def time_rounds(
    target: Runner, draft: Runner, context: int, repeats: int, lengths: Sequence[int] = MEASURED_LENGTHS
) -> tuple[CostTable, CostTable]:
    """Passes of a target and its draft where they stand in decoding. The target's over one token is a plain step and
    comes behind another of its own; over more it verifies, behind a chain of the draft's, whose first comes behind it.

    Each pushes the other out of the processor's caches: timed alone, a small draft looks a third cheaper than it is.
    """
    verify: dict[int, list[float]] = {n: [] for n in lengths}
    first: dict[int, list[float]] = {n: [] for n in lengths}
    following: list[float] = []
    _read(target, context)
    _read(draft, context)
    for n in _in_turn(repeats, lengths):
        first[n].append(_time(draft, n, rows=1))
        following.append(_time(draft, 1, CHAIN) / CHAIN)
        verify[n].append(_time_from(target, n, context))
        draft.truncate(context)
    return CostTable(_medians(verify)), CostTable(_medians(first), median(following[len(lengths) :]))


def median_table(tables: Sequence[CostTable]) -> CostTable:
    """Length by length the median of tables of the same lengths."""
    following = [table.following for table in tables if table.following is not None]
    seconds = {n: median(table.seconds[n] for table in tables) for n in tables[0].seconds}
    return CostTable(seconds, median(following) if following else None)


def _read(runner: Runner, context: int) -> None:
    runner.feed(_ids(runner, context), rows=1)


def _ids(runner: Runner, n: int) -> Tensor:
    return torch.ones(n, dtype=torch.long, device=runner.device)


def _time(runner: Runner, n: int, passes: int = 1, rows: int | None = None) -> float:
    ids = _ids(runner, n)
    synchronise(runner.device)
    start = time.perf_counter()
    for _ in range(passes):
        runner.feed(ids, rows=rows)
    synchronise(runner.device)
    return time.perf_counter() - start


def _time_from(runner: Runner, n: int, context: int) -> float:
    """A pass over n tokens behind `context`; that over one behind its like, as a plain step is."""
    if n == 1:
        runner.feed(_ids(runner, 1))
        runner.truncate(context)
    seconds = _time(runner, n)
    runner.truncate(context)
    return seconds


def _in_turn(repeats: int, lengths: Sequence[int]) -> list[int]:
    """One after the other and all over again, so that a slow moment hits all alike; the first time is warm-up."""
    return [*lengths] * (repeats + 1)


def _medians(samples: dict[int, list[float]]) -> dict[int, float]:
    return {n: median(found[1:]) for n, found in samples.items()}
