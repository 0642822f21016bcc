"""The sampler chain and the draw."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from core.sampling import HIGHEST, MOST_DRAFTED, Sampling, Uniforms, draw

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.6, 0.3, 0.1]).log()


def probs(**settings):
    return Sampling(**settings).probabilities(LOGITS)


def test_temperature_one_is_the_models_own_law():
    torch.testing.assert_close(probs(temperature=1.0), torch.tensor([0.6, 0.3, 0.1]))


def test_temperature_raises_probabilities_to_its_inverse():
    """T = 1/2 squares them, up to normalisation."""
    squares = torch.tensor([0.36, 0.09, 0.01])
    torch.testing.assert_close(probs(temperature=0.5), squares / squares.sum())


@pytest.mark.parametrize("temperature", [1e-6, 1e-38])
def test_tiny_temperature_is_greedy_without_overflow(temperature):
    """The limit T -> 0, where logits / T leaves the range of float32."""
    torch.testing.assert_close(probs(temperature=temperature), probs(temperature=0.0))


def test_greedy_is_one_hot_and_takes_the_first_of_equals():
    assert Sampling(0.0).probabilities(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_k_likeliest():
    torch.testing.assert_close(probs(temperature=1.0, top_k=2), torch.tensor([2 / 3, 1 / 3, 0.0]))
    torch.testing.assert_close(probs(temperature=1.0, top_k=99), probs(temperature=1.0))


@pytest.mark.parametrize("top_p, kept", [(0.5, 1), (0.61, 2), (0.89, 2), (0.95, 3), (1.0, 3), (1e-6, 1), (1e-50, 1)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    """The token that crosses the line stays; at least one token always does."""
    assert (probs(temperature=1.0, top_p=top_p) > 0).sum() == kept


def test_top_p_does_not_need_sorted_logits():
    shuffled = torch.tensor([0.1, 0.6, 0.3]).log()
    torch.testing.assert_close(
        Sampling(1.0, top_p=0.8).probabilities(shuffled), torch.tensor([0.0, 2 / 3, 1 / 3]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("min_p, kept", [(0.1, 3), (0.2, 2), (0.6, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_likeliest(min_p, kept):
    assert (probs(temperature=1.0, min_p=min_p) > 0).sum() == kept


def test_order_is_temperature_then_k_then_p_then_min_p():
    """top-p sees the law after top-k: of (.6, .3, .1), k=2 leaves (.67, .33), of which p=.65 keeps one."""
    assert (probs(temperature=1.0, top_k=2, top_p=0.65) > 0).sum() == 1
    assert (probs(temperature=1.0, top_p=0.65) > 0).sum() == 2
    assert (probs(temperature=4.0, min_p=0.2) > 0).sum() == 3


def test_same_chain_for_one_row_and_for_many():
    """Target rows come several at once, draft rows one by one."""
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.7, top_k=20, top_p=0.9, min_p=0.02)
    torch.testing.assert_close(sampling.probabilities(rows)[2], sampling.probabilities(rows[2]))


def test_low_precision_logits_give_float32():
    law = Sampling(1.0, top_p=0.9).probabilities(torch.randn(3, 40).bfloat16())
    assert law.dtype == torch.float32
    torch.testing.assert_close(law.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2.0},
    ],
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(UserError, match=r"^(Temperature|Top-k|Top-p|Min-p) must be .*\.$"):
        Sampling(**settings)


def test_draw_inverts_the_cumulative_distribution():
    law = torch.tensor([0.25, 0.5, 0.25])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.99999])
    assert draw(law.expand(6, 3), uniforms).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.5, HIGHEST])
def test_draw_never_gives_the_impossible(uniform):
    """Zeros at both ends and in between, whatever the uniform number and its rounding."""
    law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draw(law, torch.tensor(uniform)).item() in (1, 3)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6), st.floats(2**-60, 1, width=32))
def test_draw_stops_before_what_follows_the_last_possible_token(weights, last):
    """Whatever a law sums to, the highest uniform number times that sum stays below it."""
    law = torch.tensor([*weights, last, 0.0, 0.0])
    assert law[draw(law, torch.tensor(HIGHEST))] > 0


def test_a_number_rounded_up_to_1_is_taken_as_the_highest_below(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.ones(shape))
    assert {x for part in Uniforms(0, CPU).of_next_round() for x in part.tolist()} == {HIGHEST}


def test_no_number_is_given_twice(monkeypatch):
    """Neither to drafter and judge nor to two rounds, also where more are made."""
    monkeypatch.setattr(Uniforms, "ROUNDS", 3)
    numbers = Uniforms(0, CPU)
    taken = [part for _ in range(7) for part in numbers.of_next_round()]
    assert [len(part) for part in taken] == [MOST_DRAFTED, MOST_DRAFTED + 1] * 7
    assert len(torch.cat(taken).unique()) > 0.999 * 7 * (2 * MOST_DRAFTED + 1)  # of 2**24, two may be equal by chance


def test_the_numbers_of_a_round_follow_from_seed_and_place():
    one, other = Uniforms(5, CPU), Uniforms(5, CPU)
    for _ in range(20):
        assert all(map(torch.equal, one.of_next_round(), other.of_next_round()))
    assert not torch.equal(Uniforms(6, CPU).of_next_round()[0], Uniforms(5, CPU).of_next_round()[0])


def test_draw_does_not_need_a_normalised_law():
    """A residual sums to less than one."""
    assert draw(torch.tensor([0.01, 0.03]), torch.tensor([0.2])).item() == 0
    assert draw(torch.tensor([0.01, 0.03]), torch.tensor([0.3])).item() == 1
