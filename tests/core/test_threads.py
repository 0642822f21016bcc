"""How many threads a model is run with, and what other threads may do meanwhile."""

import pytest
import torch
from tiny import bfloat16_by_default

from core import generate
from core.loading import load_model
from core.loading import model as threads
from core.runners.program import team
from core.settings import Settings


@pytest.fixture
def machine(monkeypatch):
    """Eight threads to choose from, and seconds by thread count instead of a clock."""

    def set_up(seconds):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        used = []
        monkeypatch.setattr(threads, "_time", lambda work, repeats: seconds[used[-1]])
        return used.append

    return set_up


@pytest.mark.parametrize("seconds, chosen", [({1: 1.0, 8: 0.3}, 8), ({1: 1.0, 8: 0.9}, 1), ({1: 1.0, 8: 30.0}, 1)])
def test_more_threads_must_earn_their_place(machine, seconds, chosen):
    """A small gain is not worth what a single busy core then costs."""
    use = machine(seconds)
    assert threads.fastest_threads(lambda: None, use) == chosen


def test_the_environment_decides_where_it_is_set(machine, monkeypatch):
    """OMP_NUM_THREADS is the owner's word."""
    use = machine({})
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads.fastest_threads(lambda: None, use) == 8


def test_the_native_pass_has_a_team_of_its_own(pair_folder):
    """PyTorch's threads would spin on the processors of the team."""
    target = load_model(str(pair_folder / "target"), torch.device("cpu"), "fp32")
    before = torch.get_num_threads(), team.size
    try:
        target.threads = 3
        with target.with_threads():
            assert (torch.get_num_threads(), team.threads()) == (1, 3)
        assert torch.get_num_threads() == before[0]
        target.fall_back("for this test")
        target.use_threads()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before[0])
        team.size = before[1]


@pytest.mark.parametrize("method", ["plain", "draft", "tree", "early-exit"])
def test_a_run_is_the_same_while_another_thread_loads_a_model(pair, method):
    """For as long as it loads one, transformers changes PyTorch's default type, and that for all threads."""
    settings = Settings(method=method, temperature=0.9, seed=3, max_new_tokens=24)
    expected = generate(pair, "the quick", settings).token_ids
    for model in (pair.target, pair.draft):
        model.drop_idle()
    with bfloat16_by_default():
        assert generate(pair, "the quick", settings).token_ids == expected
