"""The live check: it passes for the right rule, fails for wrong ones, and its statistics are those of the books."""

from collections import Counter

import pytest
import torch
from drafters import DRAFTS, METHODS, TARGET, make_drafter
from lookup import BLOCK, LookupRunner
from scipy.stats import chi2
from test_mutants import accept_by_ratio_of_argmax, match_and_draw_again, no_bonus_row, no_residual

from core import verification
from core.errors import UserError
from core.explaining.lossless import (
    AT_ONCE,
    GreedyCheck,
    LawCheck,
    Progress,
    check_greedy,
    check_law,
    chi_squared_survival,
    choose_context,
    continuation,
    g_test,
    parting,
    two_token_law,
)
from core.lanes import open_lane
from core.records import Run, Settings
from core.runners import together
from core.sampling import Sampling, Uniforms

SAMPLING = Sampling(temperature=0.9, top_k=4)
CONTEXT = [0] * BLOCK
N = 1500


def check(method="draft", draft="similar", n=N, gamma=2, seed=1, broken=False, sampling=SAMPLING):
    """The check as the page runs it, over tables."""
    target = LookupRunner(TARGET)
    drafter = make_drafter(method, target, DRAFTS[draft], sampling)
    target.feed(torch.tensor(CONTEXT[:-1]))
    law = two_token_law(target, CONTEXT, sampling, n)
    numbers, totals = Uniforms(seed, torch.device("cpu")), Counter()
    counts = Counter(
        continuation(target, drafter, CONTEXT, 1 + i % gamma, sampling, numbers, totals, broken) for i in range(n)
    )
    return law.compare(counts, len(CONTEXT), totals["drafted"], totals["rejected"])


@pytest.mark.parametrize("method", [m for m in METHODS if m != "plain"])
def test_the_right_rule_passes(method):
    found = check(method)
    assert found.p_value > 1e-4
    assert (found.n, found.excluded) == (N, 0)
    assert len(found.cells) > 5
    assert sum(c.observed for c in found.cells) == N
    assert sum(c.expected for c in found.cells) == pytest.approx(N)
    assert min(c.expected for c in found.cells) >= 5


@pytest.mark.parametrize("mutant", [no_residual, no_bonus_row, accept_by_ratio_of_argmax], ids=lambda f: f.__name__)
def test_wrong_rules_fail(mutant, monkeypatch):
    """The faults of tests/core/test_mutants.py show in 1,500 continuations of two tokens."""
    monkeypatch.setattr(verification, "verify_chain", mutant)
    assert check(gamma=2).p_value < 1e-4


def test_drawing_again_after_a_mismatch_fails(monkeypatch):
    monkeypatch.setattr(verification, "verify_chain", match_and_draw_again)
    assert check("draft", "similar").p_value < 1e-4


@pytest.mark.parametrize("method", ["draft", "tree 2x2"])
def test_drafts_taken_unjudged_fail(method):
    """What the page shows when asked to break the rule on purpose."""
    found = check(method, broken=True)
    assert found.p_value < 1e-6


def test_p_values_are_spread_evenly_under_the_right_rule():
    """Over many seeds: a p-value below a half in about half of them, and no crowd at either end."""
    values = sorted(check(n=300, seed=seed).p_value for seed in range(30))
    assert 0.25 < values[15] < 0.75
    assert values[0] > 1e-4
    assert sum(value < 0.1 for value in values) < 12


@pytest.mark.parametrize("freedom", [1, 2, 7, 60, 900])
@pytest.mark.parametrize("times", [0.0, 0.3, 1.0, 1.7, 4.0])
def test_survival_function_is_scipys(freedom, times):
    x = times * freedom
    assert chi_squared_survival(x, freedom) == pytest.approx(chi2.sf(x, freedom), rel=1e-9, abs=1e-300)


def test_g_of_equal_counts_is_nothing():
    assert g_test([5, 10], [5.0, 10.0]) == (0.0, 1, 1.0)
    assert g_test([30], [30.0])[2] == 1.0
    assert g_test([0, 30], [15.0, 15.0])[2] < 1e-9


def test_cells_do_not_depend_on_what_was_drawn():
    """The same partition for whatever counts, each cell with at least five expected."""
    target = LookupRunner(TARGET)
    law = two_token_law(target, CONTEXT, SAMPLING, 300)
    one = law.compare(Counter({(0, 0): 300}), 3)
    other = law.compare(Counter({(1, 2): 150, (3, 3): 150}), 3)
    assert [(c.ids, c.expected) for c in one.cells] == [(c.ids, c.expected) for c in other.cells]


def test_what_the_cut_excludes_is_counted():
    target = LookupRunner(TARGET)
    law = two_token_law(target, CONTEXT, Sampling(0.9, top_k=2), 300)
    never = int((law.first == 0).nonzero()[0])
    assert law.compare(Counter({(never, 0): 3, (int(law.first.argmax()), 1): 0}), 3).excluded == 3


def test_the_place_is_where_the_target_is_least_sure():
    """Of the positions a pass gives, the one with most first tokens that can be told apart."""
    sure, unsure = torch.full((5,), -9.0), torch.zeros(5)
    sure[1] = 9.0
    logits = torch.stack([sure] * len(TARGET))
    runner = LookupRunner(logits)
    from lookup import NEXT

    text = [0, 1, 2, 3]
    row = NEXT[NEXT[0][0]][1]  # after 0, 1
    runner.logits[row] = unsure
    assert choose_context(runner, text, 100, Sampling(1.0)) == 2
    assert runner.length == 1


def last(items):
    found = list(items)
    assert [i.done for i in found[:-1]] == sorted(i.done for i in found[:-1])
    assert all(isinstance(i, Progress) for i in found[:-1])
    return found[-1]


@pytest.mark.parametrize("method", ["draft", "ngram", "early-exit", "tree", "ngram+draft"])
def test_a_loaded_pair_is_checked_at_a_place_of_its_run(pair, method):
    """End to end on real runners, from the caches rolled back to the context each time."""
    settings = Settings(method=method, temperature=1.5, top_k=12, max_new_tokens=30, ignore_eos=True, exit_layer=1)
    with open_lane(pair, "the quick brown fox the quick brown", settings) as lane:
        for _ in lane:
            pass
    found = last(check_law(pair, lane.run, "", settings, n=200))
    assert isinstance(found, LawCheck)
    assert found.p_value > 1e-4
    assert found.drafted > 0
    assert len(found.cells) > 1
    assert found.context <= len(lane.run.prompt_ids) + len(lane.run.token_ids)


def test_a_loaded_pair_broken_on_purpose_fails(pair):
    settings = Settings(temperature=1.5, top_k=12, draft_length=2)
    assert last(check_law(pair, None, "the quick brown fox", settings, 300, broken=True)).p_value < 1e-4


def test_continuations_share_their_passes(pair, monkeypatch):
    groups, run_rows = [], together.run_rows
    monkeypatch.setattr(together, "run_rows", lambda group: (groups.append(len(group)), run_rows(group))[1])
    check = last(check_law(pair, None, "the quick", Settings(temperature=1.0, draft_length=2), 40))
    assert check.n == 40 and groups.count(AT_ONCE) >= 2 * 40 / AT_ONCE, "a draft and its check, of each four"


def test_stopping_keeps_what_was_sampled(pair):
    settings = Settings(temperature=1.0)
    seen = []

    def stop():
        return len(seen) > 15

    for item in check_law(pair, None, "the quick", settings, 10_000, stop):
        seen.append(item)
    assert isinstance(seen[-1], LawCheck)
    assert 30 < seen[-1].n < 100


def test_greedy_texts_are_identical(pair):
    found = last(check_greedy(pair, ["the quick", "a lazy dog"], Settings(max_new_tokens=20, ignore_eos=True)))
    assert isinstance(found, GreedyCheck)
    assert (found.texts, found.identical, found.tokens, found.divergences) == (2, 2, 40, [])


def test_a_text_that_ends_sooner_is_not_the_same():
    """Nor one of the same tokens that ended for another reason."""

    def run_of(ids, reason):
        return Run(Settings(), {}, "", [1], token_ids=ids, stop_reason=reason)

    plain = run_of([5, 6, 7], "eos")
    assert parting(plain, run_of([5, 6, 7], "eos")) is None
    sooner, other = parting(plain, run_of([5, 6], "length")), parting(plain, run_of([5, 6, 7], "length"))
    assert (sooner.position, sooner.first_text, sooner.second_text) == (2, "eos after 3", "length after 2")
    assert other.position == 3


def test_a_greedy_difference_is_told_with_its_place_and_gap(pair, monkeypatch):
    """A judge that takes the second choice at the end of every round."""
    from core.verification import verify_greedy

    def second_best(choices, tokens, parents):
        verdict = verify_greedy(choices, tokens, parents)
        return verdict._replace(token=(verdict.token + 1) % 200) if tokens else verdict

    monkeypatch.setattr(verification, "verify_greedy", second_best)
    found = last(check_greedy(pair, ["the quick"], Settings(draft_length=2, max_new_tokens=20, ignore_eos=True)))
    assert found.identical == 0
    number, divergence = found.divergences[0]
    assert number == 0
    assert divergence.logit_gap is not None and divergence.logit_gap > 0
    assert found.tokens == divergence.position


@pytest.mark.parametrize("where", ["prompt_ids", "token_ids"])
def test_ids_that_are_not_the_targets_never_reach_a_model(pair, where, monkeypatch):
    """A document may hold any: past the vocabulary they end a process that computes on a GPU."""
    settings = Settings(temperature=1.5, draft_length=2)
    run = Run(settings, {}, "the quick", [1, 2, 3], [4, 5])
    getattr(run, where)[-1] = pair.target.vocab_size
    monkeypatch.setattr(pair.target, "lease", None)
    with pytest.raises(UserError, match=f"holds the token {pair.target.vocab_size:,}"):
        list(check_law(pair, run, "", settings, 50))


def test_what_cannot_be_checked_is_a_sentence(pair):
    with pytest.raises(UserError, match="above 0"):
        list(check_law(pair, None, "a", Settings(), 10))
    with pytest.raises(UserError, match="does not speculate"):
        list(check_law(pair, None, "a", Settings(method="plain", temperature=1.0), 10))
    with pytest.raises(UserError, match="does not speculate"):
        list(check_greedy(pair, ["a"], Settings(method="plain")))
