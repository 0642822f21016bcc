"""How many threads a model is run with."""

import pytest
import torch

from core.loading import model as threads


@pytest.fixture
def machine(monkeypatch):
    """Eight threads to choose from, and seconds by thread count instead of a clock."""

    def set_up(seconds):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(threads, "_time", lambda work, count, repeats: seconds[count])

    return set_up


@pytest.mark.parametrize("seconds, chosen", [({1: 1.0, 8: 0.3}, 8), ({1: 1.0, 8: 0.9}, 1), ({1: 1.0, 8: 30.0}, 1)])
def test_more_threads_must_earn_their_place(machine, seconds, chosen):
    """A small gain is not worth what a single busy core then costs."""
    machine(seconds)
    assert threads.fastest_threads(lambda: None) == chosen


def test_the_environment_decides_where_it_is_set(machine, monkeypatch):
    """OMP_NUM_THREADS is the owner's word."""
    machine({})
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.fastest_threads(lambda: None) == 8
