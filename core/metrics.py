"""What is computed from a run; every definition in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from core.records import Round, Run, Token


@dataclass(frozen=True, slots=True)
class Metrics:
    """Totals of a run.

    `seconds` and `tokens_per_second` are decoding, prefill apart. `acceptance_rate` is accepted ÷ judged (accepted +
    rejected): the estimate of α. `draft_utilisation` is accepted ÷ drafted. Both are None when nothing was judged.
    `accepted_by_position[i]` is the share of the rounds that drafted at least i+1 deep in which at least i+1 drafted
    tokens were accepted.
    """

    new_tokens: int
    seconds: float
    prefill_seconds: float
    draft_prefill_seconds: float
    tokens_per_second: float
    rounds: int
    tokens_per_round: float
    acceptance_rate: float | None
    draft_utilisation: float | None
    accepted_by_position: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def depths(round_: Round) -> list[int]:
    """Depth of each drafted token, first tokens at 0 (in a chain: its position)."""
    found: list[int] = []
    for token in round_.drafted:
        found.append(0 if token.parent is None else found[token.parent] + 1)
    return found


def accepted_by_position(rounds: list[Round]) -> list[float]:
    """Share of rounds with at least 1, 2, … accepted tokens, of those that drafted (and were not cut) that deep."""
    tried, accepted = count_by_position(rounds)
    return [a / t for a, t in zip(accepted, tried)]


def count_by_position(rounds: list[Round]) -> tuple[list[int], list[int]]:
    """How many rounds drafted (and were not cut) 1, 2, … deep, and in how many of them so many were accepted."""
    tried: list[int] = []
    accepted: list[int] = []
    for round_ in rounds:
        depth_of = depths(round_)
        # A round cut by the end of the sequence says nothing of the positions past the cut.
        judged = max((d for d, t in zip(depth_of, round_.drafted) if t.outcome != "ignored"), default=-1)
        rejected = any(t.outcome == "rejected" for t in round_.drafted)
        deepest = max(depth_of, default=-1) if rejected else judged
        count = sum(t.outcome == "accepted" for t in round_.drafted)
        while len(tried) <= deepest:
            tried.append(0)
            accepted.append(0)
        for depth in range(deepest + 1):
            tried[depth] += 1
            accepted[depth] += depth < count
    return tried, accepted


def summarise(run: Run) -> Metrics:
    """Totals of a run as far as it has come."""
    outcomes = [t.outcome for r in run.rounds for t in r.drafted]
    accepted, rejected = outcomes.count("accepted"), outcomes.count("rejected")
    seconds = sum(r.seconds for r in run.rounds)
    tokens = len(run.token_ids)
    return Metrics(
        new_tokens=tokens,
        seconds=seconds,
        prefill_seconds=run.prefill_seconds,
        draft_prefill_seconds=run.draft_prefill_seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        rounds=len(run.rounds),
        tokens_per_round=tokens / len(run.rounds) if run.rounds else 0.0,
        acceptance_rate=accepted / (accepted + rejected) if accepted + rejected else None,
        draft_utilisation=accepted / len(outcomes) if outcomes else None,
        accepted_by_position=accepted_by_position(run.rounds),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same thing."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two outputs part: `logit_gap` is between the two likeliest tokens of the first run there (None unless the
    run recorded them): near zero, the two passes rounded a tie differently."""

    position: int
    first_text: str
    second_text: str
    logit_gap: float | None


def first_divergence(first: Run, second: Run) -> Divergence | None:
    """The first position at which the tokens of two runs differ, or None as far as both go."""
    for position, (a, b) in enumerate(zip(first.token_ids, second.token_ids)):
        if a != b:
            one, other = _kept_at(first, position), _kept_at(second, position)
            top = one.top_target or []
            # Both probabilities come from one softmax, so their log ratio is the difference of the logits.
            gap = math.log(top[0].p / top[1].p) if len(top) > 1 and top[1].p > 0 else None
            return Divergence(position, one.text, other.text, gap)
    return None


def _kept_at(run: Run, position: int) -> Token:
    for round_ in run.rounds:
        if position < len(round_.kept):
            return round_.kept[position]
        position -= len(round_.kept)
    raise IndexError(position)
