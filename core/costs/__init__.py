"""What a pass over n tokens costs on this machine: measured after loading; the adaptive draft length rests on it.

What it costs to check n tokens in one pass, in words.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any, TypeVar

import torch
from torch import Tensor

from core.runners import Runner
from core.runners.clock import timed
from core.runners.widths import width_for

MEASURED_LENGTHS = (1, 2, 4, 6, 9, 17)
"""The last is a pass over the longest automatic draft and the newest token."""
BETWEEN = (3, 5, 7, 8, 12, 16)
"""Measured too where the cost climbs around them, for it may do so in a step: kernels work on 4, 8 or 16 rows at once.
"""
CLIMB = 1.1
"""From how much of a climb between two measured lengths on."""
BETWEEN_SECONDS = 0.5
REPEATS = 5
CONTEXT = 128
"""Tokens in the cache while passes are timed."""
CHAIN = 3
"""How many passes of a draft are timed behind its first."""


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a pass over n tokens, interpolated between the measured n. Past the last of them it climbs as
    steeply as its last part does, measured lengths from half of the last on; it never falls, nor below what was
    measured of fewer tokens: a line through the last two may, where they are neighbours and one was disturbed.

    `following`, of a draft: seconds of a pass over one token right behind another of its own.
    """

    seconds: dict[int, float]
    following: float | None = None

    def __call__(self, n: int) -> float:
        if n in self.seconds:
            return self.seconds[n]
        known = self._known
        if n > known[-1]:
            return max(self.seconds.values()) + self._climb * (n - known[-1])
        if len(known) == 1:
            return self.seconds[known[0]]
        right = max(bisect_left(known, n), 1)
        low, high = known[right - 1], known[right]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (n - low)

    @cached_property
    def _known(self) -> list[int]:
        return sorted(self.seconds)

    @cached_property
    def _climb(self) -> float:
        """Seconds of each token more, past the last measured."""
        known = self._known
        part = known[max(0, bisect_right(known, known[-1] // 2) - 1) :]
        if len(part) == 1:
            return 0.0
        return max(0.0, linear_regression(part, [self.seconds[n] for n in part]).slope)

    def __or__(self, other: CostTable) -> CostTable:
        """With the lengths of another table; `following` stays."""
        return CostTable({**self.seconds, **other.seconds}, self.following)

    @classmethod
    def from_dict(cls, costs: Mapping[str, float], following: float | None = None) -> CostTable:
        return cls({int(n): seconds for n, seconds in costs.items()}, following)

    def to_dict(self) -> dict[str, float]:
        return {str(n): s for n, s in sorted(self.seconds.items())}


def between_jumps(table: CostTable) -> tuple[tuple[int, ...], int]:
    """The lengths of BETWEEN that lie where a table climbs, and how often each can be timed in BETWEEN_SECONDS."""
    known = sorted(table.seconds)
    found = [
        n
        for low, high in pairwise(known)
        for n in BETWEEN
        if low < n < high and table.seconds[high] > CLIMB * table.seconds[low]
    ]
    return tuple(found), max(1, min(REPEATS, round(BETWEEN_SECONDS / max(1e-9, sum(map(table, found))))))


TREES = (24, 32)
"""Measured too where passes are padded to few widths: what checking a tree costs is then a step, not a line."""


def by_width(table: CostTable) -> CostTable:
    """Of a runner that pads its passes (`core.runners.widths`): a pass takes what the one of its width takes, wherever
    that was measured."""
    of_width = {width_for(n): seconds for n, seconds in table.seconds.items()}
    lengths = range(1, max(table.seconds) + 1)
    return table | CostTable({n: of_width[width_for(n)] for n in lengths if width_for(n) in of_width})


def wider(table: CostTable, rows: int) -> tuple[tuple[int, ...], int]:
    """The lengths still to be measured for passes over as many as `rows` tokens, each about twice the one before, and
    how often each can be timed in BETWEEN_SECONDS."""
    found, last = [], max(table.seconds)
    while last < rows:
        last = min(rows, max(last + 1, 2 * last - 1))
        found.append(last)
    return tuple(found), max(1, min(REPEATS, round(BETWEEN_SECONDS / max(1e-9, sum(map(table, found))))))


GROWN = (1, 9)
"""Passes that say how much dearer they are behind a longer text."""


def time_here(runner: Runner, repeats: int = 2, lengths: Sequence[int] = GROWN) -> CostTable:
    """Passes of a runner behind the text it holds, which stays as it is."""
    held = runner.length
    samples: dict[int, list[float]] = {n: [] for n in lengths}
    for n in _in_turn(repeats, lengths):
        samples[n].append(_time_from(runner, n, held))
    return table_of(samples)


def time_passes(runner: Runner, context: int, repeats: int, lengths: Sequence[int] = MEASURED_LENGTHS) -> CostTable:
    """Passes of one model, each behind another of its own."""
    samples: dict[int, list[float]] = {n: [] for n in lengths}
    _read(runner, context)
    for n in _in_turn(repeats, lengths):
        samples[n].append(_time_from(runner, n, context))
    return table_of(samples)


R = TypeVar("R", bound=Runner)
AT_ONCE = (1, 3, 5)
"""Rows of each text in the passes of several that are timed."""


def time_at_once(
    runners: Sequence[R], pass_behind: Callable[[Sequence[R], Tensor], None], context: int, repeats: int = REPEATS
) -> CostTable:
    """Passes over the rows of several texts, by the rows of all; `pass_behind` runs one over ids [n] behind each."""
    samples: dict[int, list[float]] = {n: [] for n in AT_ONCE}
    for runner in runners:
        _read(runner, context)
    for n in _in_turn(repeats, AT_ONCE):
        ids = _ids(runners[0], n)
        samples[n].append(timed(ids.device, lambda ids=ids: pass_behind(runners, ids))[1])
    return table_of({len(runners) * n: found for n, found in samples.items()})


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
    return table_of(verify), table_of(first, undisturbed(following[len(lengths) :]))


def time_exit(
    target: Any, layers: int, context: int, repeats: int, lengths: Sequence[int] = MEASURED_LENGTHS
) -> tuple[CostTable, CostTable]:
    """The same of early exit after `layers` layers of a target's runner: its view drafts, its own head included, and
    the full pass behind it goes on from where the view ends, where the runner can. The view is never behind: its table
    has one entry."""
    verify: dict[int, list[float]] = {n: [] for n in lengths}
    first: list[float] = []
    following: list[float] = []
    _read(target, context)
    view = target.view(layers)
    for n in _in_turn(repeats, lengths):
        if n > 1:
            first.append(_time(view, 1, rows=1))
            following.append(_time(view, 1, CHAIN, rows=1) / CHAIN)
            view.truncate(context)
            view.feed(_ids(view, n - 1), rows=1)
        verify[n].append(_time_from(target, n, context))
        view.truncate(context)
    started = len(lengths) - 1  # of the first time
    drafting = CostTable({1: undisturbed(first[started:])}, undisturbed(following[started:]))
    return table_of(verify), drafting


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

    def feed() -> None:
        for _ in range(passes):
            runner.feed(ids, rows=rows)

    return timed(runner.device, feed)[1]


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


def table_of(samples: Mapping[int, Sequence[float]], following: float | None = None) -> CostTable:
    """The table of the seconds that were timed, by number of tokens; the first of each were its warm-up."""
    return CostTable({n: undisturbed(found[1:]) for n, found in samples.items()}, following)


def undisturbed(seconds: Sequence[float]) -> float:
    """Of a few times of the same work their lower quartile, one of them. Whatever else the machine does only adds: by
    the median, a slow moment made a pass over 3 tokens dearer than one over 4, and a plain step dearer than either, so
    that drafting seemed to pay where it lost."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


UNDISTURBED = 0.85
"""A pass over more tokens may seem to take so much of the time of one over a single token, and not less."""
CURVE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64)
"""Each row up to 9 and around 12 and 16, where kernels that work on 4, 8 or 16 rows at a time take a step; then as
far as the rows of a batch."""
BATCH, DRAFT = 16, 3
"""The batch the reading speaks of: 16 texts at once, 3 drafted tokens each, make the curve's 64 rows."""


def describe_costs(seconds: Mapping[int, float]) -> str:
    """The verification cost curve in two to four sentences; `seconds` of a pass by its number of tokens, with 1."""
    ratio = {n: s / seconds[1] for n, s in sorted(seconds.items())}
    if n := disturbed(seconds):
        return (
            f"A pass over {n} tokens took {ratio[n]:.1f}× one over a single token: something else kept the machine "
            "busy meanwhile. Measure again when it is idle."
        )
    sentences = [_small(ratio), _step(ratio), _batch(ratio)]
    return " ".join(sentence for sentence in sentences if sentence)


def disturbed(seconds: Mapping[int, float]) -> int | None:
    """The tokens of the pass that took least, where it was so much less than one over a single token that the curve
    cannot be the models'; else None."""
    least = min(seconds, key=lambda n: seconds[n])
    return least if seconds[least] < UNDISTURBED * seconds[1] else None


def _small(ratio: Mapping[int, float]) -> str:
    """What a draft of ordinary length costs to check."""
    n = max(n for n in ratio if n <= 8)
    if n == 1:
        return "Only a pass over one token was measured."
    each = (ratio[n] - 1) / (n - 1)
    if ratio[n] < 1.25:
        verdict = "nearly free"
    elif ratio[n] < 2:
        verdict = "cheap"
    elif each < 0.5:
        verdict = f"each further token costs {each:.2f} of a pass, so acceptance has to pay for it"
    elif ratio[n] < 0.9 * n:
        verdict = f"dear: each further token costs {each:.2f} of a pass"
    else:
        verdict = "no cheaper than one after the other, so speculation cannot win"
    return f"Checking {n} tokens costs {ratio[n]:.1f}× one: {verdict}."


def _step(ratio: Mapping[int, float]) -> str | None:
    """The steepest step at the lengths people draft, where it stands out from the rest of the curve."""
    steps = {n: ratio[n] - ratio[n - 1] for n in ratio if 2 < n <= 9 and n - 1 in ratio}
    if not steps:
        return None
    at = max(steps, key=lambda n: steps[n])
    longest = max(ratio)
    typical = (ratio[longest] - 1) / (longest - 1)
    if steps[at] < 0.15 or steps[at] < 2.5 * typical:
        return None
    return f"It climbs in steps, the highest from {at - 1} to {at}: {ratio[at - 1]:.1f}× to {ratio[at]:.1f}×."


def _batch(ratio: Mapping[int, float]) -> str | None:
    """Why a server with many texts at once gains less: its passes are wide before anything is drafted."""
    rows = BATCH * (DRAFT + 1)
    if rows not in ratio or BATCH not in ratio:
        return None
    wider = ratio[rows] / ratio[BATCH]
    most = (DRAFT + 1) / wider
    left = "nothing is left to gain" if most < 1.1 else f"at most {most:.1f}× is left to gain, predicted"
    return (
        f"A pass over {rows} costs {ratio[rows]:.1f}× one: with {BATCH} texts at once and {DRAFT} drafted tokens each, "
        f"{wider:.1f}× the time of plain decoding for at most {DRAFT + 1}× the tokens, so {left}."
    )
