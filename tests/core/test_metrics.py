"""What is counted, and what is not."""

import pytest
import torch

from core.decoding import Step, record
from core.drafting import Draft
from core.records import (
    CacheLengths,
    Candidate,
    Round,
    Run,
    Settings,
    Token,
    accepted_by_position,
    depths,
    first_divergence,
    repeats_itself,
    summarise,
)
from core.sampling import Sampling
from core.verification import judge

LETTER = {"a": "accepted", "r": "rejected", "i": "ignored", "c": "corrected", "b": "bonus", "p": "plain"}


def make_round(drafted, emitted, parents=None, seconds=0.1):
    """A round from letters: `make_round("ar i", "c")`."""
    names = drafted.replace(" ", "")
    parents = parents or [i - 1 if i else None for i in range(len(names))]
    tokens = [Token(n, "x", LETTER[name], 0.5, 0.5, parent) for n, (name, parent) in enumerate(zip(names, parents))]
    return Round(0, tokens, Token(9, "y", LETTER[emitted], 0.5) if emitted else None, verify_seconds=seconds)


def make_run(*rounds):
    run = Run(Settings(), {}, "", [1], rounds=list(rounds))
    run.token_ids = [token.id for r in rounds for token in r.kept]
    return run


def test_acceptance_rate_counts_what_was_judged():
    """accepted ÷ (accepted + rejected): the two ignored tokens are neither. Utilisation counts all five drafted."""
    m = summarise(make_run(make_round("arii", "c"), make_round("a", "b")))
    assert m.acceptance_rate == pytest.approx(2 / 3)
    assert m.draft_utilisation == pytest.approx(2 / 5)


def test_rate_and_utilisation_of_nothing_are_none():
    m = summarise(make_run(make_round("", "p")))
    assert (m.acceptance_rate, m.draft_utilisation) == (None, None)
    assert m.accepted_by_position == []


def test_totals():
    """Decoding seconds are the rounds'; prefill is apart."""
    run = make_run(make_round("aa", "b", seconds=0.2), make_round("r", "c", seconds=0.3))
    run.prefill_seconds = 9.0
    m = summarise(run)
    assert (m.new_tokens, m.rounds, m.tokens_per_round) == (4, 2, 2.0)
    assert m.seconds == pytest.approx(0.5)
    assert m.tokens_per_second == pytest.approx(8.0)
    assert m.prefill_seconds == 9.0


def test_accepted_by_position():
    """Of three rounds, 2/3 accepted one token or more; of the two that drafted that deep, 1/2 two or more."""
    rounds = [make_round("aa", "b"), make_round("ar", "c"), make_round("r", "c")]
    assert accepted_by_position(rounds) == pytest.approx([2 / 3, 1 / 2])


def test_a_round_cut_by_the_end_says_nothing_past_the_cut():
    """What was cut off was not rejected."""
    assert accepted_by_position([make_round("aii", None), make_round("ar", "c")]) == [1.0, 0.0]


def test_a_sibling_refused_before_the_end_was_judged():
    """The tree's second first token is the stop id: the one before it counts, what it would have gone on with not."""
    logits = torch.eye(9)[[7, 0, 3, 0]]
    draft = Draft(torch.tensor([5, 7, 3]), parents=[-1, -1, 1])
    step = Step(
        2, draft, logits, judge(logits, draft, Sampling(), torch.empty(0)), CacheLengths(1, 5, 3), None, 0, 0, 0
    )
    round_ = record(step, 0, Sampling(), frozenset({7}))
    assert [token.outcome for token in round_.drafted] == ["rejected", "accepted", "ignored"]
    assert round_.emitted is None
    assert accepted_by_position([round_]) == [1.0]


def test_expected_tokens_are_one_plus_the_sum_over_positions():
    """E = 1 + Σ aᵢ where every round drafts equally deep."""
    rounds = [make_round("aaa", "b"), make_round("ari", "c"), make_round("rii", "c"), make_round("aar", "c")]
    mean = summarise(make_run(*rounds)).tokens_per_round
    assert 1 + sum(accepted_by_position(rounds)) == pytest.approx(mean)


def test_positions_in_a_tree_are_depths():
    round_ = make_round("r a i r a", "b", parents=[None, None, 0, 1, 1])
    assert depths(round_) == [0, 0, 1, 1, 1]
    assert accepted_by_position([round_]) == [1.0, 1.0]


def test_a_path_may_end_above_the_deepest_token():
    """Where the accepted first token has no children, the round drafted two deep all the same."""
    assert accepted_by_position([make_round("a i i", "b", parents=[None, None, 1])]) == [1.0, 0.0]


def test_first_divergence_reports_the_logit_gap():
    """ln(p1/p2) of the two likeliest tokens there: the difference of their logits."""
    one, other = make_run(make_round("aa", "b")), make_run(make_round("aa", "b"))
    assert first_divergence(one, other) is None
    other.token_ids[1] = 7
    one.rounds[0].drafted[1].top_target = [Candidate(1, "x", 0.6), Candidate(7, "z", 0.3)]
    found = first_divergence(one, other)
    assert found.position == 1
    assert found.logit_gap == pytest.approx(0.6931, abs=1e-3)


def test_texts_of_different_length_do_not_diverge_where_both_go():
    one, other = make_run(make_round("aa", "b")), make_run(make_round("a", None))
    assert first_divergence(one, other) is None


def test_a_text_that_repeats_itself():
    """Stretches of eight tokens are counted: a loop is one, a list whose items differ is none, a short text neither."""
    assert repeats_itself([1, 2, 3] * 40)
    assert not repeats_itself(list(range(128)))
    assert not repeats_itself([1] * 31) and repeats_itself([1] * 32)
    items = [token for n in range(20) for token in (1, 2, 3, 100 + n)]
    assert not repeats_itself(items)
    once = list(range(100))
    assert not repeats_itself(once + once[:30])
    assert repeats_itself(once + once[:60])
