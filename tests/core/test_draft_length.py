"""Draft length: fixed, or chosen before each round from costs and past outcomes alone."""

import random

import pytest

from core.costs import CostTable
from core.costs.rounds import RoundCosts, best_length
from core.drafting.length import Adaptive, AdaptiveSource, Fixed, Matches, Repeating
from core.drafting.tree import AdaptiveShape
from core.errors import UserError
from core.records import Round, Token


def flat(seconds):
    return lambda n: seconds


def play(controller, alpha, rounds, seed=0):
    """Let a drafter whose tokens are each accepted with chance alpha run; the lengths chosen."""
    chance = random.Random(seed)
    lengths = []
    for _ in range(rounds):
        length = controller.next([])
        lengths.append(length)
        accepted = next((i for i in range(length) if chance.random() >= alpha), length)
        outcomes = ["accepted"] * accepted + ["rejected"] * (accepted < length)
        outcomes += ["ignored"] * (length - len(outcomes))
        drafted = [Token(1, "", o, parent=i - 1 if i else None) for i, o in enumerate(outcomes)]
        emitted = "plain" if not length else "bonus" if accepted == length else "corrected"
        controller.observe(Round(0, drafted, Token(1, "", emitted)))
    return lengths


def mean(numbers):
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("length", [1, 64])
def test_fixed_is_what_was_asked(length):
    assert play(Fixed(length), 0.5, 5) == [length] * 5


@pytest.mark.parametrize("length", [0, -1, 65, 1000])
def test_absurd_lengths_are_refused(length):
    with pytest.raises(UserError, match=rf"between 1 and 64, not {length}"):
        Fixed(length)


@pytest.mark.parametrize("alpha, c", [(0.8, 0.1), (0.8, 0.3), (0.6, 0.2), (0.9, 0.05)])
def test_settles_near_the_best_length(alpha, c):
    """With independent acceptance and flat costs the optimum is Leviathan's."""
    lengths = play(Adaptive(RoundCosts(flat(1.0), flat(c))), alpha, 400)
    assert mean(lengths[100:]) == pytest.approx(min(best_length(alpha, c), 16), rel=0.5, abs=1.5)


def test_gives_up_on_a_hopeless_drafter_but_probes():
    """Nothing is ever accepted: plain steps, with a short probe now and then, ever more rarely."""
    lengths = play(Adaptive(RoundCosts(flat(1.0), flat(0.2))), 0.0, 300)
    late = lengths[100:]
    assert set(late) == {0, 1}
    assert 1 <= late.count(1) <= 6


def test_recovers_when_acceptance_changes_halfway():
    """The text turns easy: probing finds out, and drafting resumes."""
    controller = Adaptive(RoundCosts(flat(1.0), flat(0.2)))
    assert mean(play(controller, 0.0, 60)[30:]) < 0.5
    assert mean(play(controller, 0.95, 300)[200:]) > 3


@pytest.mark.parametrize("missed, finds_out", [(0.0, True), (0.015, True), (0.1, False)])
def test_recovers_where_catching_up_costs_little(missed, finds_out):
    """A drafter that has a hundred tokens to read first is asked all the same, unless reading takes a tenth of what
    writing does."""
    controller = Adaptive(RoundCosts(lambda n: 1 + 0.06 * (n - 1), lambda n: 0.12 + missed * (n - 1)))
    assert mean(play(controller, 0.0, 100)[50:]) < 0.5
    assert (mean(play(controller, 0.98, 600)[300:]) > 3) == finds_out


def test_backs_off_when_acceptance_falls_halfway():
    controller = Adaptive(RoundCosts(flat(1.0), flat(0.2)))
    assert mean(play(controller, 0.95, 100)[50:]) > 3
    assert mean(play(controller, 0.05, 100)[50:]) < 0.5


def test_steep_verification_shortens_drafts():
    """Where every further row costs, fewer tokens are drafted than where rows are free."""
    cheap = play(Adaptive(RoundCosts(flat(1.0), flat(0.05))), 0.8, 200)
    dear = play(Adaptive(RoundCosts(lambda n: 1.0 + 0.3 * n, flat(0.05))), 0.8, 200)
    assert mean(dear[50:]) < mean(cheap[50:]) / 2


def test_free_drafts_are_long():
    """n-gram drafts cost nothing, and verification is flat: as long as allowed."""
    assert mean(play(Adaptive(RoundCosts(flat(1.0), flat(0.0)), longest=8), 0.95, 200)[50:]) > 7


def test_same_costs_and_outcomes_same_lengths():
    """A pure function: two controllers that saw the same choose the same."""
    one, other = (play(Adaptive(RoundCosts(lambda n: 1 + 0.05 * n, flat(0.1))), 0.7, 200, seed=3) for _ in range(2))
    assert one == other


POCKET_TARGET = CostTable({1: 4.17, 2: 4.24, 3: 4.57, 4: 4.56, 5: 5.21, 6: 5.44, 8: 5.8, 9: 6.28, 16: 7.97, 33: 12.95})
POCKET_DRAFT = CostTable({1: 0.305, 2: 0.303, 4: 0.315, 8: 0.374, 16: 0.548, 33: 0.844, 65: 1.258})
"""Milliseconds of the bundled pair's passes on two cores."""
SAMPLING = 0.12
"""What a drafted token costs beside its pass: choosing it. The controller does not know."""


def milliseconds(controller, alpha, tokens, seed, target=POCKET_TARGET, draft=POCKET_DRAFT):
    """What a run of so many tokens takes when each drafted token is accepted with chance alpha."""
    chance, spent, written, behind = random.Random(seed), 0.0, 0, 0
    while written < tokens:
        length = min(controller.next([]), tokens - written - 1)
        accepted = next((i for i in range(length) if chance.random() >= alpha), length)
        outcomes = ["accepted"] * accepted + ["rejected"] * (accepted < length)
        outcomes += ["ignored"] * (length - len(outcomes))
        drafted = [Token(1, "", o, parent=i - 1 if i else None) for i, o in enumerate(outcomes)]
        spent += target(length + 1)
        if length:
            spent += draft(1 + behind) + (length - 1) * draft(1) + length * SAMPLING
        behind = int(accepted == length) if length else behind + 1
        controller.observe(Round(0, drafted, Token(1, "", "bonus" if length else "plain")))
        written += accepted + 1
    return spent


@pytest.mark.parametrize("alpha", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("dearer", [1, 3, 8])
def test_a_draft_that_does_not_match_costs_little(alpha, dearer):
    """Never below 0.95 of plain decoding: a few rounds to find out, then a probe now and then. Also where the draft
    costs three or eight times as much, and has many tokens to catch up on at a probe."""

    def draft(n):
        return dearer * POCKET_DRAFT(n)

    for tokens in (128, 400):
        plain = tokens * POCKET_TARGET(1)
        spent = [
            milliseconds(Adaptive(RoundCosts(POCKET_TARGET, draft)), alpha, tokens, seed, draft=draft)
            for seed in range(8)
        ]
        assert plain / max(spent) >= 0.95


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.75, 0.9])
def test_auto_is_near_the_best_fixed_length(alpha):
    """Without having swept, at what the bundled pair's passes cost."""

    def time_of(make):
        return mean([milliseconds(make(), alpha, 256, seed) for seed in range(24)])

    fixed = [time_of(lambda length=length: Fixed(length)) for length in (1, 2, 3, 4, 5, 6, 8, 11, 15)]
    best = min(*fixed, 256 * POCKET_TARGET(1))
    assert best / time_of(lambda: Adaptive(RoundCosts(POCKET_TARGET, POCKET_DRAFT))) >= 0.95


def test_what_was_not_judged_teaches_nothing():
    """Ignored tokens neither raise nor lower the estimate."""
    one, other = Adaptive(RoundCosts(flat(1.0), flat(0.1))), Adaptive(RoundCosts(flat(1.0), flat(0.1)))
    rejected, ignored = Token(1, "", "rejected"), Token(1, "", "ignored", parent=0)
    for _ in range(5):
        one.observe(Round(0, [rejected]))
        other.observe(Round(0, [rejected, ignored]))
        assert one.next([]) == other.next([])


def test_two_sources_are_told_apart():
    """A text that repeats itself and a draft that never hits: the n-gram's drafts are long and the model's none,
    though together they are accepted about half the time; and the other way round."""
    context: list[int] = [0]
    found: list[int] = []
    dear = RoundCosts(lambda n: 1 + 0.02 * n, flat(0.2))
    for ngram_hits in (True, False):
        chosen = AdaptiveSource(Repeating(lambda *_: (list(found), 4), RoundCosts(dear.target)), Adaptive(dear))
        lengths = {"ngram": [], "model": []}
        for index in range(200):
            found[:] = [5] * 16 if index % 2 else []
            length = chosen.next(context)
            source = chosen.source()
            lengths[source].append(length)
            hits = ngram_hits == (source == "ngram")
            kept = [Token(5 if source == "ngram" else 6, "", "accepted") for _ in range(length)] if hits else []
            missed = [Token(7, "", "rejected" if not i else "ignored") for i in range(length)] if not hits else []
            emitted = Token(5 if ngram_hits and found else 6, "", "bonus")
            chosen.observe(Round(index, kept + missed, emitted))
        if ngram_hits:
            assert mean(lengths["ngram"][20:]) > 10
            assert mean(lengths["model"][40:]) < 0.2
        else:
            assert mean(lengths["model"][40:]) > 8
            assert len(lengths["ngram"]) < 10


def test_an_n_gram_drafts_by_how_many_words_were_the_same():
    """Where long matches go on as they did and short ones do not, only what follows long ones is drafted, and more of
    it; a short match that has grown is a long one."""
    same, text = 2, [Token(5, "", "bonus")] * 6
    ngram = Repeating(lambda context, most: ([5] * 6, same), RoundCosts(lambda n: 1 + 0.2 * n))
    for same in (2, 9) * 40:
        ngram.next([])
        ngram.observe(Round(0, [], Token(6, "", "bonus")) if same == 2 else Round(0, text, None))
    lengths = {}
    for same in (2, 9):
        lengths[same] = ngram.next([])
    assert lengths == {2: 0, 9: 6}
    matches = Matches()
    assert matches.rates(3, 4) == [matches.rates(n, 1)[0] for n in (3, 4, 5, 6)]


def test_a_model_is_charged_for_what_ngrams_wrote_without_it():
    """It reads what it missed before it drafts again: where that costs more than a plain step saves, it does not."""
    read = []
    costs = RoundCosts(flat(1.0), lambda n: read.append(n) or 0.1)
    model = Adaptive(costs)
    tokens = [Token(1, "", "accepted") for _ in range(6)]
    model.pass_over(Round(0, tokens, Token(1, "", "bonus")))
    read.clear()
    model.next([])
    assert 1 + 7 in read


@pytest.mark.parametrize("alpha, drafts", [(0.9, True), (0.05, False)])
def test_a_tree_falls_back_to_a_chain_and_to_plain(alpha, drafts):
    """Where a second sibling is never the one, and each row of a pass costs: a chain, or nothing but probes."""
    shape = AdaptiveShape(RoundCosts(lambda n: 1 + 0.1 * n, flat(0.1)))
    chance, lengths = random.Random(1), []
    for index in range(300):
        lengths.append(shape.next([]))
        accepted = next((i for i in range(lengths[-1]) if chance.random() >= alpha), lengths[-1])
        drafted, parent = [], None
        for depth, width in enumerate(shape()[: lengths[-1]]):
            outcome = "accepted" if depth < accepted else "rejected" if depth == accepted else "ignored"
            siblings = [outcome, *["ignored" if outcome == "accepted" else outcome] * (width - 1)]
            drafted += [Token(i, "", each, parent=parent) for i, each in enumerate(siblings)]
            parent = len(drafted) - width
        shape.observe(Round(index, drafted, Token(1, "", "bonus")))
    if drafts:
        assert set(shape()) == {1} and mean(lengths[100:]) > 2
    else:
        assert set(lengths[100:]) <= {0, 1} and 0 < mean(lengths[100:]) < 0.1


def test_tree_grows_wide_where_second_guesses_are_right():
    """The shape follows the acceptance by rank: wide where the second sibling is often the one, else a chain."""

    def shape_after(outcomes: list[str]) -> tuple[int, ...]:
        shape = AdaptiveShape(RoundCosts(lambda n: 1 + 0.02 * n, lambda n: 0.1))
        for index in range(60):
            siblings = [Token(i, "", outcome) for i, outcome in enumerate(outcomes)]
            shape.observe(Round(index, siblings))
        shape.next([])
        return shape()

    second_is_right = shape_after(["rejected", "accepted", "ignored"])
    first_is_right = shape_after(["accepted", "ignored", "ignored"])
    assert second_is_right[0] >= 2
    assert set(first_is_right) == {1}
    assert len(first_is_right) > 3
