"""Is a difference real, or noise? Intervals of medians, and what of a sweep may be recommended.

Settings are compared run by run: the same prompt, the same repeat, one after the other on the same machine. What is
left is judged by the interval of the median of those quotients, which asks nothing of how they are spread.

And how a sweep goes until that is decided: what it runs in which order, and how long that takes, promised before it and
told anew after every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean, median, stdev
from typing import Any, Literal

from core.costs import CostTable
from core.progress import duration
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


BLOCKS = 6
"""Stretches of a run, at most, whose paces are held against each other."""
UNTOLD = 0.25
"""Share of a speed-up that runs of a few passes leave open."""
FELT = 0.03
"""Share of a speed-up that nobody feels, and that no single race tells."""


def speedup_range(speculative: Run, plain: Run) -> tuple[float, float]:
    """Between what the speed-up of one race lies, by how unevenly its own passes went: twice the standard error of the
    two lanes' times. Lanes of one target that drafted nothing did the same: 1 lies in between."""
    fast, slow = summarise(speculative), summarise(plain)
    if not fast.tokens_per_second or not slow.tokens_per_second:
        return 1.0, 1.0
    speedup = fast.tokens_per_second / slow.tokens_per_second
    open_ = max(FELT, 2 * (_unevenness(speculative) ** 2 + _unevenness(plain) ** 2) ** 0.5)
    low, high = speedup * (1 - min(open_, 1)), speedup * (1 + open_)
    idle = not any(round_.drafted for run in (speculative, plain) for round_ in run.rounds)
    if idle and speculative.environment.get("target") == plain.environment.get("target"):
        low, high = min(low, 1.0), max(high, 1.0)
    return low, high


def faster(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> bool | None:
    """Whether one lane is faster than another beyond the noise, by their runs of the same prompts: on each of them by
    more than its own passes leave open, or in the median of them. None where that cannot be told."""
    shared = [at for at in ours if at in theirs]
    ranges = [speedup_range(ours[at], theirs[at]) for at in shared]
    found = compare(*({(0, at): summarise(runs[at]).tokens_per_second for at in shared} for runs in (ours, theirs)))
    if shared and (found == "better" or all(low > 1 for low, _ in ranges)):
        return True
    return False if shared and (found == "worse" or all(high < 1 for _, high in ranges)) else None


EVEN = 1.1


def about_even(ratio: float) -> bool:
    """Whether speeds of this ratio that noise may have set apart are about the same; else it is too noisy to tell."""
    return 1 / EVEN <= ratio <= EVEN


def baseline_of(run: Run, runs: Iterable[Run]) -> Run | None:
    """Of `runs`, plain decoding of the same prompt by the same target, if it is among them."""
    alike = (
        other
        for other in runs
        if other is not run
        and other.settings.method == "plain"
        and other.rounds
        and other.prompt_ids == run.prompt_ids
        and other.environment["target"] == run.environment["target"]
    )
    return next(alike, None)


@dataclass(frozen=True)
class Gain:
    """The speed-up of `races`: the median, and between what it lies in the slowest and the fastest of them, each with
    what that race leaves open; `same`: none of them tells it from 1."""

    speedup: float
    low: float
    high: float
    races: int
    same: bool


def gain_of(races: Sequence[tuple[Run, Run]]) -> Gain | None:
    """Over races of the same method, each the run that drafts and plain decoding beside it; None without any."""
    ratios = [summarise(run).tokens_per_second / summarise(plain).tokens_per_second for run, plain in races]
    ranges = [speedup_range(run, plain) for run, plain in races]
    if not ratios:
        return None
    lows, highs = zip(*ranges)
    same = all(low <= 1 <= high for low, high in ranges)
    return Gain(median(ratios), min(lows), max(highs), len(races), same)


def _unevenness(run: Run) -> float:
    """Relative standard error of a run's time: of the mean pace of stretches of it, each pass held against the usual
    one with as many tokens."""
    count = min(BLOCKS, len(run.rounds) // 2)
    if count < 2:
        return UNTOLD / 2
    alike: dict[int, list[float]] = {}
    for round_ in run.rounds:
        alike.setdefault(len(round_.drafted), []).append(round_.seconds)
    usual = {drafted: median(seconds) for drafted, seconds in alike.items()}
    paces = [
        round_.seconds / usual[len(round_.drafted)] if usual[len(round_.drafted)] else 1.0 for round_ in run.rounds
    ]
    stretches = [fmean(paces[n * len(paces) // count : (n + 1) * len(paces) // count]) for n in range(count)]
    return stdev(stretches) / count**0.5 / fmean(stretches)


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


WARM_UP_TOKENS = 16
CURVE_SECONDS = 3.0
"""Of timing passes before the first run."""
CHARACTERS = 4
"""Of a token of a prompt, about."""


def schedule_of(variants: int, prompts: int, repeats: int) -> list[tuple[int, int, int]]:
    """(repeat, prompt, variant) in order; repeat -1 is one short warm-up of each variant."""
    order = [(-1, 0, index) for index in range(variants)]
    for repeat in range(repeats):
        for at in range(prompts):
            order += [(repeat, at, (index + repeat + at) % variants) for index in range(variants)]
    return order


def promised(costs: Mapping[str, float], prompts: Sequence[str], variants: int, tokens: int) -> float:
    """Seconds of a sweep that ends with its first repeat, from what passes of the target cost by their tokens: each run
    reads its prompt, as fast as the longest pass that was timed, and is taken to be no faster than plain decoding, as
    some settings are and some are not."""
    table = CostTable.from_dict(costs)
    longest = max(table.seconds)
    reading = sum(len(prompt) for prompt in prompts) / CHARACTERS * table(longest) / longest
    writing = (len(prompts) * tokens + min(WARM_UP_TOKENS, tokens)) * table(1)
    return CURVE_SECONDS + variants * (reading + writing)


class Pace:
    """What runs take, by variant: until a whole one was timed, what its warm-up took, token for token."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._warm: dict[int, float] = {}
        self._whole: dict[int, list[float]] = {}

    def add(self, variant: int, seconds: float, tokens: int, warm_up: bool) -> None:
        """`tokens`: that were asked for."""
        if warm_up:
            self._warm[variant] = seconds * self._tokens / tokens
        else:
            self._whole.setdefault(variant, []).append(seconds)

    def left(self, variants: Iterable[int]) -> float | None:
        """Seconds of these runs; None while the pace of one is not known."""
        seconds = [fmean(found) if (found := self._whole.get(n)) else self._warm.get(n) for n in variants]
        return None if None in seconds else sum(each for each in seconds if each is not None)


@dataclass(frozen=True)
class Step:
    """How far a sweep has come: runs done and in all up to the end of this repeat, what was run last, and the seconds
    that are left of it (None: not known yet). `repeat` counts from 1, of `repeats` at most."""

    done: int
    total: int
    label: str
    left: float | None = None
    repeat: int = 1
    repeats: int = 1

    def __str__(self) -> str:
        said = [self.label]
        if self.left:
            said.append(f"about {duration(self.left)} left")
        if self.repeats > 1:
            said.append(f"repeat {self.repeat} of at most {self.repeats}")
        return "; ".join(said)
