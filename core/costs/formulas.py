"""The papers' formulas, which know acceptance and one ratio of costs. What measured costs say: `core.costs.rounds`.

α is the chance that a drafted token is accepted, γ the draft length, c the time of a draft step over that of a plain
target step. Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per round with independent acceptance: (1 - α^(γ+1)) / (1 - α), equation 1 of the paper."""
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_tokens_by_position(reached: Sequence[float], gamma: int) -> float:
    """1 + Σ aᵢ over the first γ positions, aᵢ = P(at least i tokens accepted). Holds without independence."""
    return 1 + sum(reached[:gamma])


def leviathan(alpha: float, gamma: int, c: float) -> float:
    """Theorem 3.8: E / (γc + 1). Assumes that verifying γ+1 tokens costs what one token costs."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def rule_of_thumb(alpha: float, gamma: int) -> float:
    """1 / (1 - α + α/γ): an Amdahl-style interpolation, exact only at α = 0 and 1. For comparison, not prediction."""
    return 1 / (1 - alpha + alpha / gamma) if gamma else 1.0


def best_length(alpha: float, c: float, longest: int = 64) -> int:
    """The draft length that maximises `leviathan`; 0 where speculation cannot gain."""
    return max(range(longest + 1), key=lambda gamma: (leviathan(alpha, gamma, c), -gamma))
