"""Where a draft ends: by how sure the drafter is, decided before the token is drawn, by what it costs."""

import json
import random
from collections import Counter

import pytest
from drafters import DRAFTS, TARGET
from lookup import BLOCK, LookupRunner, block_law, count_blocks, decode, p_value, table
from test_head_lossless import TableHead
from test_law import DRAWS, THRESHOLD

from core.costs import CostTable
from core.costs.rounds import RoundCosts
from core.costs.sampling import SamplingCosts
from core.drafting import model
from core.drafting.build import whole_costs
from core.drafting.chain import Chain
from core.drafting.head import HeadDrafter
from core.drafting.length import Adaptive, Confident, Fixed, Worth
from core.drafting.model import ModelDrafter
from core.lanes import open_lane
from core.records import Round, Token, run_from_dict
from core.sampling import Sampling
from core.settings import Settings

CUT = {"unsure", "odds"}


def dear_rows(row):
    """Costs by which a draft of the tables' unsure laws ends in all places."""
    return RoundCosts(lambda n: 1 + row * (n - 1), lambda n: 0.001, 0.001)


def law_with_cuts(sampling):
    """The p-value of the joint law where a model's chains end by its confidence, and how often why."""
    confident = Confident(dear_rows(0.65), longest=4)
    drafter = ModelDrafter(LookupRunner(DRAFTS["similar"]), sampling, ending=confident)
    run = decode(LookupRunner(TARGET), drafter, sampling, confident, DRAWS * BLOCK, seed=1)
    return p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)), Counter(r.ended for r in run.rounds)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=4)], ids=["1", "0.7, top 4"])
def test_ending_before_the_draw_keeps_the_law(sampling):
    p, ended = law_with_cuts(sampling)
    assert p > THRESHOLD
    assert min(ended["unsure"], ended["odds"]) > DRAWS // 10


def test_a_head_s_chains_keep_the_law_too():
    """Also where its vocabulary is reduced."""
    logits, sampling = table(1), Sampling(1.0)
    target, confident = LookupRunner(logits), Confident(dear_rows(0.1), longest=4)
    drafter = HeadDrafter(TableHead("cold", [0, 2, 3]), target.watch([0]), sampling, confident)
    run = decode(target, drafter, sampling, confident, DRAWS * BLOCK, seed=5)
    assert {round_.ended for round_ in run.rounds} >= CUT
    assert p_value(count_blocks(run.token_ids), block_law(logits, sampling)) > THRESHOLD


class LooksAtTheToken(Chain):
    """Draws, and drops the token where its own probability is too low: what engines do that cut a draft by it."""

    def add(self, row, q, favourite=None):
        ending, self._ending = self._ending, None
        index = super().add(row, q, favourite)
        self._ending = ending
        sure = q[0, index].item()
        if ending.takes(sure):
            self._confidences.append(sure)
            return index
        for each in (self._indices, self._laws, self._rows):
            each.pop()
        self._ended, self._refused = "unsure", sure
        return None


def test_a_cut_that_looks_at_the_token_breaks_the_law(monkeypatch):
    monkeypatch.setattr(model, "Chain", LooksAtTheToken)
    assert law_with_cuts(Sampling(1.0))[0] < THRESHOLD


class World:
    """A drafter whose confidence is what it says: a guess with confidence c stands with chance c ** honest. How sure it
    is changes from token to token, and clings to what it was."""

    def __init__(self, costs, seed, honest=1.0, easy=0.5):
        self.costs, self.random, self.honest, self.easy = costs, random.Random(seed), honest, easy
        self.behind = 0

    def confidence(self):
        return self.random.random() ** (0.15 if self.random.random() < self.easy else 1.5)

    def play(self, controller, tokens):
        """Seconds that so many tokens take."""
        spent = written = 0
        while written < tokens:
            length, drafted, refused, ended = controller.next([]), [], None, "length"
            confident = isinstance(controller, Confident)
            stands = True
            if confident and length:
                controller.begin()
            while len(drafted) < length:
                sure = self.confidence()
                if confident and not controller.takes(sure):
                    refused, ended = sure, "unsure"
                    break
                ok = self.random.random() < sure**self.honest
                outcome = "ignored" if not stands else "accepted" if ok else "rejected"
                drafted.append(Token(1, "", outcome, parent=len(drafted) - 1 if drafted else None, confidence=sure))
                stands = stands and ok
                if len(drafted) < length and confident and not controller.goes_on():
                    ended = "odds"
                    break
            looked = refused is not None
            spent += self.costs.chain(len(drafted), self.behind, looked)
            self.behind = self.behind + 1 if not drafted and not looked else int(stands and not looked)
            round_ = Round(0, drafted, Token(1, "", "bonus" if stands else "corrected"), ended=ended, refused=refused)
            controller.observe(round_)
            written += len(round_.kept)
        return spent / written


@pytest.mark.parametrize("draft, row", [(0.06, 0.05), (0.12, 0.12), (0.12, 0.03), (0.25, 0.03)])
def test_knowing_how_sure_one_is_beats_the_best_fixed_length(draft, row):
    """At the costs of trained heads and of small models, by more than it costs to be told."""
    costs = RoundCosts(lambda n: 1 + row * (n - 1), lambda n: draft, draft, drawing=0.01)

    def time_of(make):
        return sum(World(costs, seed).play(make(), 400) for seed in range(16))

    fixed = min(time_of(lambda length=length: Fixed(length)) for length in (1, 2, 3, 4, 6, 8))
    assert min(fixed, 16 * costs.plain) / time_of(lambda: Confident(costs)) > 1.03
    assert time_of(lambda: Adaptive(costs)) / time_of(lambda: Confident(costs)) > 1.03


@pytest.mark.parametrize("draft", [0.05, 0.2, 0.6])
def test_a_drafter_that_is_sure_and_wrong_costs_little(draft):
    """Nothing stands however sure it is: what that confidence is worth is soon learnt, and plain steps follow."""
    costs = RoundCosts(lambda n: 1 + 0.03 * (n - 1), lambda n: draft, draft)
    for seed in range(4):
        world, controller = World(costs, seed, honest=1e9), Confident(costs)
        first = world.play(controller, 40)
        assert costs.plain / first > 0.85
        assert costs.plain / world.play(controller, 260) > 0.98


def test_what_one_degree_of_being_sure_is_worth_tells_of_the_others():
    """A drafter whose unsure tokens fall is trusted less where it is sure, and more where its sure ones stand."""
    worse, better = Worth(), Worth()
    for _ in range(12):
        worse.add(0.5, False)
        better.add(0.7, True)
    assert worse.rate(0.9) < 0.75 * Worth().rate(0.9)
    assert better.rate(0.3) > 1.1 * Worth().rate(0.3)


def test_confidence_is_worth_what_it_was():
    worth = Worth()
    before = worth.rate(0.5), worth.rate(0.99)
    for _ in range(60):
        worth.add(0.5, True)
        worth.add(0.99, False)
    assert worth.rate(0.5) > 0.85 > before[0] and worth.rate(0.99) < 0.2 < before[1]
    assert sum(share for share, _ in worth.outlook()) == pytest.approx(1)


def test_what_costs_more_ends_a_draft_sooner():
    """Dearer passes and dearer rows; and a chance is that of all tokens so far."""

    def least(costs, taken=()):
        controller = Confident(costs)
        controller.begin()
        for sure in taken:
            assert controller.takes(sure)
        trial = [sure / 100 for sure in range(100) if controller._chance * controller._worth.rate(sure / 100)
                 > controller._rate * controller._rows[controller._taken]]  # fmt: skip
        return min(trial)

    cheap, dear = (RoundCosts(lambda n, row=row: 1 + row * n, lambda n: 0.1, 0.1) for row in (0.05, 0.3))
    assert least(cheap) < least(dear)
    assert least(dear) <= least(dear, [0.7])
    sure, unsure = Confident(cheap), Confident(RoundCosts(lambda n: 1 + 0.05 * n, lambda n: 0.5, 0.5))
    assert sure.takes(0.5) and unsure.takes(0.5)
    assert sure.goes_on() and not unsure.goes_on()


def test_a_token_costs_its_drawing_and_its_judging():
    costs = RoundCosts(lambda n: 1.0, lambda n: 0.1, 0.1, overhead=0.5, drawing=0.02, judging=0.03)
    assert costs.plain == 1.5
    assert costs.chain(3) == pytest.approx(1.5 + 3 * (0.1 + 0.02 + 0.03))
    assert costs.chain(3, refused=True) == pytest.approx(costs.chain(3) + 0.1 + 0.02)
    assert costs.tree((2, 1)) == pytest.approx(1.5 + 2 * 0.1 + 4 * 0.05)
    assert costs.chain(0, refused=True) == pytest.approx(1.5 + 0.1 + 0.02)


@pytest.mark.parametrize(("method", "drawing"), [("draft", 0.02), ("ngram", 0.0), ("ngram+draft", 0.02)])
def test_only_a_network_s_tokens_are_drawn(pair, monkeypatch, method, drawing):
    monkeypatch.setattr("core.drafting.build.time_sampling", lambda *asked: SamplingCosts(0.5, 0.02, 0.03, 0.0))
    monkeypatch.setattr(pair, "sampling", {})
    costs = whole_costs(pair, Settings(method=method, temperature=1.0))
    assert (costs.overhead, costs.drawing, costs.judging) == (0.5, drawing, 0.03)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_tells_how_sure_its_drafter_was(pair, temperature, monkeypatch):
    """And why each draft ended; what a document tells can be read again."""
    monkeypatch.setattr(pair.target, "costs", CostTable({1: 1.0, 17: 1.6}))
    monkeypatch.setattr(pair.draft, "costs", CostTable({1: 0.05, 17: 0.1}, 0.05))
    settings = Settings(temperature=temperature, max_new_tokens=40, ignore_eos=True)
    with open_lane(pair, "the quick brown fox jumps over", settings) as lane:
        rounds = list(lane)
    tokens = [token for round_ in rounds for token in round_.drafted]
    assert tokens and all(0 < token.confidence <= 1 for token in tokens)
    if temperature:
        assert all(token.q <= token.confidence + 1e-6 for token in tokens)
    assert {round_.ended for round_ in rounds} & CUT
    assert all((round_.refused is None) == (round_.ended != "unsure") for round_ in rounds)
    again = run_from_dict(json.loads(json.dumps(lane.run.to_dict())))
    assert [(r.ended, r.refused, [t.confidence for t in r.drafted]) for r in again.rounds] == [
        (r.ended, r.refused, [t.confidence for t in r.drafted]) for r in rounds
    ]


def test_a_fixed_length_is_drafted_whole_and_tells_too(pair):
    with open_lane(pair, "the quick brown fox", Settings(draft_length=3, max_new_tokens=21, ignore_eos=True)) as lane:
        rounds = list(lane)
    assert {len(round_.drafted) for round_ in rounds if round_.draft_length == 3} == {3}
    assert {round_.ended for round_ in rounds if round_.drafted} == {"length"}
    assert all(token.confidence is not None for round_ in rounds for token in round_.drafted)
