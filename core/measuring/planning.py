"""What a sweep runs, in which order, and how long that takes: promised before it, told anew after every run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from core.costs import CostTable
from core.progress import duration

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
