"""The formulas against the papers' numbers and against their own definitions."""

import pytest

from core.costs.rounds import (
    RoundCosts,
    best_length,
    expected_tokens,
    expected_tokens_by_position,
    leviathan,
    rule_of_thumb,
)


@pytest.mark.parametrize("alpha, c, gamma, speedup", [(0.8, 0.1, 6, 2.47), (0.8, 0.3, 3, 1.55), (0.6, 0.2, 2, 1.40)])
def test_best_length_of_known_cases(alpha, c, gamma, speedup):
    assert best_length(alpha, c) == gamma
    assert leviathan(alpha, gamma, c) == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize("alpha, c", [(0.3, 0.3), (0.1, 0.5), (0.0, 0.01)])
def test_nothing_to_gain_where_acceptance_is_no_more_than_the_cost(alpha, c):
    assert best_length(alpha, c) == 0


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.4])
def test_best_length_obeys_the_marginal_rule(alpha, c):
    """Extend while α^(γ+1)/c > E(γ)/(1+cγ)."""
    gamma = 0
    while gamma < 64 and alpha ** (gamma + 1) / c > expected_tokens(alpha, gamma) / (1 + c * gamma):
        gamma += 1
    assert best_length(alpha, c) == gamma


def test_expected_tokens_is_the_geometric_sum():
    assert expected_tokens(0.7, 3) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


def test_independent_positions_agree_with_the_general_sum():
    assert expected_tokens_by_position([0.7, 0.49, 0.343, 0.2], 3) == pytest.approx(expected_tokens(0.7, 3))


def test_honest_is_leviathan_where_verifying_costs_one_pass():
    """Theorem 3.8 assumes t(γ+1) = t(1)."""
    flat = RoundCosts(lambda n: 1.0, lambda n: 0.1).speed_up(expected_tokens(0.8, 6), 6)
    assert flat == pytest.approx(leviathan(0.8, 6, 0.1))


def test_honest_says_no_where_verification_is_dear():
    """With a cost that climbs with the rows, high acceptance does not help."""
    assert RoundCosts(float, lambda n: 0.1).speed_up(expected_tokens(0.8, 6), 6) < 1


@pytest.mark.parametrize(
    "alpha, gamma, speedup", [(0.7, 4, 2.1), (0.8, 4, 2.5), (0.7, 8, 2.58), (0.8, 8, 3.3), (0.0, 8, 1.0), (1.0, 8, 8.0)]
)
def test_rule_of_thumb(alpha, gamma, speedup):
    assert rule_of_thumb(alpha, gamma) == pytest.approx(speedup, abs=0.05)
