"""Is a difference real, or noise? Intervals of medians, and what of a sweep may be recommended.

Settings are compared run by run: the same prompt, the same repeat, one after the other on the same machine. What is
left is judged by the interval of the median of those quotients, which asks nothing of how they are spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any, Literal

from core.records import Run, percentile, summarise

CONFIDENCE = 0.9
SAME = 0.05
"""Settings whose quotient lies within this share of 1 are as good as each other."""
Speeds = Mapping[tuple[int, int], float]
"""Tokens per second by repeat and prompt."""
Verdict = Literal["better", "worse", "same", "open"]


@dataclass(frozen=True)
class Interval:
    """In which the median of `count` measurements lies with at least `confidence`."""

    low: float
    high: float
    count: int
    confidence: float


def interval(values: Sequence[float]) -> Interval:
    """Of the median: from the k-th smallest to the k-th largest value. The median of what is measured is missed only if
    fewer than k of n values fall on one side of it, with a chance of 2 · P(Binomial(n, ½) < k); k is the largest for
    which CONFIDENCE holds. It cannot hold for fewer than five values: then k is 1, and `confidence` says what is left.
    """
    ordered, n = sorted(values), len(values)
    sides = [2 * sum(comb(n, j) for j in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = max((at for at, missed in enumerate(sides, 1) if missed <= 1 - CONFIDENCE), default=1)
    missed = sides[k - 1] if sides else 1.0
    return Interval(ordered[k - 1], ordered[-k], n, 1 - missed)


def compare(ours: Speeds, theirs: Speeds) -> Verdict:
    """Whether one setting is faster than another, beyond the noise; "open" where that is not decided."""
    quotients = [ours[key] / theirs[key] for key in ours if key in theirs]
    if not quotients:
        return "open"
    found = interval(quotients)
    if found.confidence < CONFIDENCE:
        return "open"
    if found.low >= 1 - SAME and found.high <= 1 + SAME:
        return "same"
    return "better" if found.low > 1 else "worse" if found.high < 1 else "open"


@dataclass(frozen=True)
class Decision:
    """What to set: a draft length, `auto`, or `plain`; None where the measurements do not decide, and then `pays` says
    whether at least speculation as such is faster (None: not even that). `fixed` is the best fixed length."""

    recommended: int | Literal["auto", "plain"] | None
    pays: bool | None
    fixed: int | None


def decide(plain: Speeds, drafting: Mapping[Any, Speeds]) -> Decision:
    """Among plain decoding, auto and the best fixed length. A fixed length is recommended only where it is faster than
    auto beyond the noise, since auto follows the text; either only where it is faster than plain decoding."""
    lengths = [length for length in drafting if length != "auto"]
    fixed = max(lengths, key=lambda length: _gain(drafting[length], plain), default=None)
    versus = {each: compare(drafting[each], plain) for each in ("auto", fixed) if each in drafting}
    if versus and all(verdict in ("worse", "same") for verdict in versus.values()):
        return Decision("plain", False, fixed)
    pays = True if "better" in versus.values() else None
    if len(versus) == 1:
        ((only, verdict),) = versus.items()
        chosen: Any = only
        return Decision(chosen if verdict == "better" else None, pays, fixed)
    between = compare(drafting[fixed], drafting["auto"])
    chosen = {"better": fixed, "worse": "auto", "same": "auto"}.get(between)
    return Decision(chosen if versus.get(chosen) == "better" else None, pays, fixed)


def _gain(ours: Speeds, plain: Speeds) -> float:
    quotients = [ours[key] / plain[key] for key in ours if key in plain]
    return median(quotients) if quotients else 0.0


def speeds(runs: Mapping[tuple[int, int], Run]) -> dict[tuple[int, int], float]:
    return {key: summarise(run).tokens_per_second for key, run in runs.items()}


@dataclass(frozen=True)
class Latency:
    """Seconds that a reader waits: `median` and `p95` of a token, which shares its round's time with the others of the
    round; `longest` pause between two arrivals of text."""

    median: float
    p95: float
    longest: float


def latency(runs: Iterable[Run]) -> Latency:
    rounds = [round_ for run in runs for round_ in run.rounds if round_.kept]
    waits = [(round_.seconds / len(round_.kept), len(round_.kept)) for round_ in rounds]
    middle, late = percentile(waits, 0.5), percentile(waits, 0.95)
    assert middle is not None and late is not None
    return Latency(middle, late, max(round_.seconds for round_ in rounds))
