"""Cost tables: what is timed, and behind what."""

import copy
import time
from dataclasses import replace
from itertools import count

import pytest
import torch
from tiny import VOCABULARY, target_of

from core import Settings, generate
from core.costs import (
    CONTEXT,
    GROWN,
    MEASURED_LENGTHS,
    REPEATS,
    CostTable,
    between_jumps,
    by_width,
    median_table,
    time_exit,
    time_here,
    time_passes,
    time_rounds,
    wider,
)
from core.costs.rounds import RoundCosts, count_nodes
from core.drafting.length import Adaptive, Growing
from core.drafting.tree import MOST_NODES, AdaptiveShape
from core.loading.model import Model
from core.runners.graph import GraphRunner
from core.runners.widths import width_for

COLD = 100.0
"""What a pass costs more where the other model's pass came before it."""


class Machine:
    """A clock that only passes move, and whose caches hold one model at a time."""

    now = 0.0
    warm = None


class FakeRunner:
    device = torch.device("cpu")

    def __init__(self, machine, base):
        self.machine, self.base = machine, base
        self.length = 0
        self.begun = []

    def feed(self, ids, parents=None, *, rows=None):
        self.begun.append(self.length)
        self.length += len(ids)
        self.machine.now += self.base + len(ids) + (0 if self.machine.warm is self else COLD)
        self.machine.warm = self

    def truncate(self, length):
        self.length = min(self.length, length)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    return machine


def test_alone_every_pass_is_behind_its_own_kind(machine):
    runner = FakeRunner(machine, 10.0)
    table = time_passes(runner, 32, 3, (1, 2, 4))
    assert table.seconds == {1: 11.0, 2: 12.0, 4: 14.0}
    assert set(runner.begun[1:]) == {32}


def test_in_a_round_each_model_comes_behind_the_other(machine):
    """A plain step and what follows in a chain are warm; a verification and the first of a chain are not."""
    target, draft = FakeRunner(machine, 10.0), FakeRunner(machine, 1.0)
    verify, drafting = time_rounds(target, draft, 32, 3, (1, 2, 4))
    assert verify.seconds == {1: 11.0, 2: 12.0 + COLD, 4: 14.0 + COLD}
    assert drafting.seconds == {1: 2.0 + COLD, 2: 3.0 + COLD, 4: 5.0 + COLD}
    assert drafting.following == 2.0
    assert set(target.begun[1:]) == {32}
    assert target.length == draft.length == 32


def test_a_slow_moment_makes_no_pass_dearer(machine, monkeypatch):
    """Something else has the processor for most of the first rounds of measuring, and now and then later on: the table
    is that of the passes it did not meet, and with it what drafting seems to bring."""
    quiet = FakeRunner(machine, 10.0)
    expected = time_passes(quiet, 32, REPEATS, (1, 2, 4))
    disturbed, passes = FakeRunner(machine, 10.0), count()
    feed = disturbed.feed

    def late(ids, parents=None, *, rows=None):
        machine.now += 30.0 * (next(passes) % 5 < 2)
        feed(ids, parents, rows=rows)

    monkeypatch.setattr(disturbed, "feed", late)
    assert time_passes(disturbed, 32, REPEATS, (1, 2, 4)) == expected
    plain, drafting = RoundCosts(expected).plain, RoundCosts(expected, lambda n: 1.0).chain(1)
    assert plain < drafting < 1.2 * plain


HEAD = 50.0


class FakeTarget(FakeRunner):
    """Of ten layers and a dear head; a pass behind its view has the view's layers less to do for what that has fed."""

    def feed(self, ids, parents=None, *, rows=None):
        self.machine.now += HEAD + 10 * len(ids) - (self.seen.layers * self.seen.fed if self.seen else 0)
        self.length += len(ids)
        self.seen = None

    seen = None

    def view(self, layers):
        return FakeView(self, layers)


class FakeView:
    device = torch.device("cpu")

    def __init__(self, full, layers):
        self.full, self.layers, self.fed = full, layers, 0

    def feed(self, ids, parents=None, *, rows=None):
        self.full.machine.now += HEAD + self.layers * len(ids)
        self.fed += len(ids)
        self.full.seen = self

    def truncate(self, length):
        self.fed, self.full.seen = 0, None


def test_an_early_exit_is_timed_with_its_head_and_what_it_saves(machine):
    """Not as its share of the layers: of three drafted tokens the full pass repeats only what lies behind the exit."""
    verify, drafting = time_exit(FakeTarget(machine, 0.0), 3, 32, 3, (1, 2, 4))
    assert verify.seconds == {1: HEAD + 10, 2: HEAD + 20 - 3, 4: HEAD + 40 - 9}
    assert (drafting(1), drafting.following) == (HEAD + 3, HEAD + 3)


def stepped(n):
    """A kernel that works on eight rows at once."""
    return 1.0 + 0.01 * n + (n + 7) // 8


@pytest.mark.parametrize("alone", [True, False])
def test_steps_are_measured_where_the_cost_climbs(pair, alone, monkeypatch):
    """Interpolation would put the step from 8 to 9 on the way from 6: the lengths around it are measured, and those
    where the curve is flat are not."""
    asked = []

    def timed(repeats=5, lengths=MEASURED_LENGTHS):
        asked.append(tuple(lengths))
        table = CostTable({n: stepped(n) for n in lengths}, 0.5)
        return table if alone else (table, CostTable({n: 0.1 for n in lengths}, 0.1))

    mine = replace(pair, target=replace(pair.target, costs=None), draft=replace(pair.draft, costs=None))
    monkeypatch.setattr(mine.target if alone else mine, "time_passes" if alone else "time_rounds", timed)
    table = mine.target.measure_costs() if alone else mine.measure_costs()[0]
    assert asked == [MEASURED_LENGTHS, (7, 8, 12, 16)]
    assert [table(n) for n in (7, 8, 9, 16, 17)] == [stepped(n) for n in (7, 8, 9, 16, 17)]
    assert table.following == 0.5


def test_nothing_more_is_measured_of_a_flat_curve():
    assert between_jumps(CostTable({n: 1 + 0.001 * n for n in MEASURED_LENGTHS}))[0] == ()


@pytest.mark.parametrize("last", [0.98, 1.0, 1.05, 1.3])
def test_past_the_last_length_no_pass_costs_less_than_one_over_fewer_tokens(last):
    """Neighbours of which one was disturbed say nothing of a hundred tokens: neither less than nothing nor minutes."""
    table = CostTable({1: 1.0, 16: 1.0, 17: last})
    tail = [table(n) for n in range(16, 200)]
    assert tail[2:] == sorted(tail[2:]) and min(tail[2:]) >= max(table.seconds.values())
    assert table(113) < 3


def test_a_pass_over_many_tokens_costs_what_the_last_part_of_the_table_says():
    """Up to 17 rows a pass is nearly free, as memory allows, and then each costs as much: the late slope goes on."""
    table = CostTable({n: max(1.0, 0.1 * n) for n in (1, 2, 4, 6, 9, 17, 33, 65)})
    assert table(129) == pytest.approx(12.9)


@pytest.mark.parametrize(
    ("last", "missing"), [(1, (2, 3, 5, 9, 17)), (2, (3, 5, 9, 17)), (9, (17,)), (16, (17,)), (17, ()), (33, ())]
)
def test_what_is_measured_beyond_a_table_goes_as_far_as_asked(last, missing):
    assert wider(CostTable({1: 1.0, last: 1.0}), 17)[0] == missing


def test_no_tree_that_is_chosen_is_larger_than_a_pass_takes():
    shapes = AdaptiveShape(RoundCosts(lambda n: 1.0, lambda n: 0.0))._shapes
    assert max(map(count_nodes, shapes)) <= MOST_NODES


def test_between_measured_lengths_a_straight_line():
    """And past the last one the line goes on."""
    table = CostTable({1: 1.0, 4: 4.0, 8: 6.0})
    assert [table(n) for n in (1, 2, 6, 8, 12)] == [1.0, 2.0, 5.0, 6.0, 8.0]


def test_a_table_survives_the_run_document():
    table = CostTable({1: 0.01, 16: 0.02}, following=0.005)
    assert CostTable.from_dict(table.to_dict(), table.following) == table


def test_several_measurements_become_their_medians():
    tables = [CostTable({1: x, 4: 2 * x}, following=x / 10) for x in (1.0, 50.0, 2.0)]
    assert median_table(tables) == CostTable({1: 2.0, 4: 4.0}, following=0.2)
    assert median_table([CostTable({1: 1.0})]).following is None


def test_a_padded_pass_takes_what_its_width_takes():
    """Thirteen rows are padded to seventeen; between widths that were not measured a line is all there is."""
    table = by_width(CostTable({1: 1.0, 2: 1.0, 4: 2.0, 9: 3.0, 17: 7.0, 24: 8.0}, following=0.5))
    assert [table(n) for n in (9, 10, 12, 13, 17, 18, 24)] == [3.0, 3.0, 3.0, 7.0, 7.0, 8.0, 8.0]
    assert table(3) == 1.5 and table.following == 0.5


def test_a_model_that_pads_is_measured_up_to_trees(monkeypatch):
    model = Model("m", copy.deepcopy(target_of("llama")), None, "fp32", frozenset(), 512, VOCABULARY)
    assert not model.pads and model.measured_lengths == MEASURED_LENGTHS
    model.runner_kind, model._fused = GraphRunner.kind, None
    asked = []

    def timed(repeats=5, lengths=MEASURED_LENGTHS):
        asked.extend(lengths)
        return CostTable({n: float(width_for(n)) for n in lengths})

    monkeypatch.setattr(model, "time_passes", timed)
    costs = model.measure_costs()
    assert {24, 32} <= set(asked)
    assert all(costs(n) == width_for(n) for n in range(1, 33))


class GrowingRunner(FakeRunner):
    """Each row reads all that is kept."""

    def feed(self, ids, parents=None, *, rows=None):
        self.machine.now += self.base + len(ids) * self.length / 100
        self.length += len(ids)


def test_passes_behind_a_longer_text_are_measured_where_they_stand(machine):
    """And the line through their difference is added to what every pass costs, a share of it to the drafter's."""
    runner = GrowingRunner(machine, 100.0)
    table = time_passes(runner, CONTEXT, 2, MEASURED_LENGTHS)
    short = time_passes(GrowingRunner(machine, 100.0), CONTEXT, 2, GROWN)
    runner.length = 5000
    here = time_here(runner)
    assert runner.length == 5000
    costs = RoundCosts(table, lambda n: 10.0, 10.0).grown(short, here, share=0.5)
    for n in (1, 4, 9, 17):
        assert costs.target(n) == pytest.approx(100 + n * 50)
    assert costs.step == pytest.approx(10 + 0.5 * (50 - 1.28))
    assert RoundCosts(table).grown(here, short, 1.0).target(9) == table(9), "nothing gets cheaper by a longer text"


def test_the_choice_moves_with_the_text(machine):
    """Checking is nearly free behind a short text and as dear as writing behind a long one: drafts get shorter."""
    runner = GrowingRunner(machine, 100.0)
    costs = RoundCosts(time_passes(runner, CONTEXT, 2), lambda n: 5.0)
    short = time_passes(GrowingRunner(machine, 100.0), CONTEXT, 2, GROWN)
    asked = []

    def measured():
        asked.append(runner.length)
        return costs.grown(short, time_here(runner), 0.0)

    for controller in (Adaptive(costs), AdaptiveShape(costs)):
        asked.clear()
        growing = Growing(controller, [controller.refit], measured, limit=50_000)
        lengths = []
        for runner.length in (100, 600, 700, 1100, 2300, 20_000, 60_000):
            growing.settle(runner.length)
            for _ in range(AdaptiveShape.STANDS + 1):
                length = growing.next([])
            lengths.append(length)
        assert asked == [600, 2300, 20_000]
        assert lengths[0] >= 3 and lengths[0] == max(lengths) and lengths[-1] <= 1


def test_a_long_text_is_measured_once_for_all_its_runs(pair, monkeypatch):
    """A few passes on the run's own cache, which the text does not show."""
    monkeypatch.setattr(Growing, "START", 40)
    target = replace(pair.target, grown={})
    mine = replace(pair, target=target)
    settings = Settings(method="draft", max_new_tokens=40, ignore_eos=True, chat="off")
    prompt = "the quick brown fox " * 8
    first, again, plain = (
        generate(mine, prompt, replace(settings, method=method)) for method in ("draft", "draft", "plain")
    )
    assert first.token_ids == again.token_ids == plain.token_ids
    assert list(target.grown) and all(len(tables) == 2 for tables in target.grown.values())


@pytest.mark.parametrize("alone", [True, False])
def test_trees_are_measured_at_their_size(pair, alone, monkeypatch):
    """Once one is asked for, and not before."""
    asked = []

    def timed(repeats=5, lengths=MEASURED_LENGTHS):
        asked.append(tuple(lengths))
        table = CostTable({n: 1.0 for n in lengths}, 0.5)
        return table if alone else (table, table)

    target = replace(pair.target, costs=None)
    mine = replace(pair, target=target, draft=None if alone else replace(pair.draft, costs=None))
    monkeypatch.setattr(mine.target if alone else mine, "time_passes" if alone else "time_rounds", timed)
    mine.measure_costs()
    assert asked == [MEASURED_LENGTHS]
    mine.measure_costs(65)
    mine.measure_costs(25)
    assert asked[1:] == [(33, 65)]
    assert {33, 65} <= set(mine.target.costs.seconds)
