"""Cost tables: what is timed, and behind what."""

import pytest
import torch

from core import costs
from core.costs import CostTable, median_table, time_passes, time_rounds

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
    monkeypatch.setattr(costs.time, "perf_counter", lambda: machine.now)
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
