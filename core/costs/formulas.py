"""Predicted speed-ups, and the draft length that maximises them.

α is the chance that a drafted token is accepted, γ the draft length, c the time of a draft step over that of a plain
target step. Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.records import Round, accepted_by_position


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per round with independent acceptance: (1 - α^(γ+1)) / (1 - α), equation 1 of the paper."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_tokens_by_position(reached: Sequence[float], gamma: int) -> float:
    """1 + Σ aᵢ over the first γ positions, aᵢ = P(at least i tokens accepted). Holds without independence."""
    return 1 + sum(reached[:gamma])


def leviathan(alpha: float, gamma: int, c: float) -> float:
    """Theorem 3.8: E / (γc + 1). Assumes that verifying γ+1 tokens costs what one token costs."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def honest(
    expected: float, gamma: int, target_seconds: Callable[[int], float], draft_seconds: float, overhead: float = 0.0
) -> float:
    """E · t(1) / (γ·t_draft + t(γ+1) + overhead) with measured times; target_seconds(n) is a pass over n tokens."""
    round_seconds = gamma * draft_seconds + target_seconds(gamma + 1) + overhead
    return expected * (target_seconds(1) + overhead) / round_seconds


def rule_of_thumb(alpha: float, gamma: int) -> float:
    """1 / (1 - α + α/γ): an Amdahl-style interpolation, exact only at α = 0 and 1. For comparison, not prediction."""
    return 1 / (1 - alpha + alpha / gamma) if gamma else 1.0


def best_length(alpha: float, c: float, longest: int = 64) -> int:
    """The draft length that maximises `leviathan`; 0 where speculation cannot gain."""
    return max(range(longest + 1), key=lambda gamma: (leviathan(alpha, gamma, c), -gamma))


@dataclass(frozen=True)
class Promise:
    """What measured costs and acceptance allow a run: its rounds would yield `tokens` and their passes take `seconds`;
    `step` is the seconds of a pass over one token."""

    tokens: float
    seconds: float
    rounds: int
    step: float

    def ratio(self, overhead: float = 0.0) -> float:
        """Speed-up over plain decoding by `honest`; `overhead` is what a round costs beside its passes."""
        return self.tokens * (self.step + overhead) / (self.seconds + self.rounds * overhead)


def promise(
    rounds: Sequence[Round],
    target_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
    step: float | None = None,
) -> Promise:
    """`honest` for the draft lengths a run used, which may differ from round to round: every round is charged by the
    cost of its passes, the draft's catching-up included, and credited 1 + Σ aᵢ over the positions it drafted. `step`:
    seconds of a pass over one token that follows another of the draft's; without it, draft_seconds(1)."""
    step = draft_seconds(1) if step is None else step
    reached = accepted_by_position(list(rounds))
    tokens = seconds = 0.0
    behind = 0
    for round_ in rounds:
        drafted = len(round_.drafted)
        tokens += expected_tokens_by_position(reached, drafted)
        seconds += target_seconds(drafted + 1)
        if drafted:
            seconds += draft_seconds(1 + behind) + (drafted - 1) * step
        whole = all(token.outcome == "accepted" for token in round_.drafted)
        # After full acceptance the draft has not fed its own last token; a plain step leaves it one more behind.
        behind = (0 if drafted else behind) + int(whole)
    return Promise(tokens, seconds, len(rounds), target_seconds(1))
