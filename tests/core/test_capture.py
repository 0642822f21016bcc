"""What is captured, kept and believed, with stand-ins for streams and graphs: `captured_here` records operations."""

import pytest
import torch

from core.runners import capture
from core.runners.capture import GAVE_OTHER_NUMBERS, Captures

CPU = torch.device("cpu")


def rows_of(n, start):
    return torch.arange(float(n)) + start


@pytest.fixture
def captures(captured_here):
    return Captures(CPU)


def test_work_is_done_as_it_is_where_nothing_can_be_captured():
    captures = Captures(CPU)
    assert captures("rows", lambda x, start: (x + start,), (torch.ones(2), 3))[0].tolist() == [4, 4]
    assert len(captures) == 0


def test_a_graph_takes_what_it_is_given(captures):
    """Numbers of the host, too; what it gives is good until the next call, for all share their memory."""
    held = torch.zeros(4)

    def work(x, start):
        held.copy_(held + 0 * x.sum())  # memory that stays where it is
        return (x * 2 + start,)

    first = captures("a", work, (torch.ones(3), 1))[0]
    assert first.tolist() == [3, 3, 3]
    for n in range(4):
        assert captures("a", work, (rows_of(3, n), n))[0].tolist() == [n * 3 + 2 * i for i in range(3)]
    assert captures("b", work, (torch.zeros(2), 7))[0].tolist() == [7, 7] == first[:2].tolist()
    assert captures.failure is None and len(captures) == 2


class Counted:
    """Work that counts how often it is done and not replayed."""

    def __init__(self, then=lambda x, start, done: x + start):
        self.done, self._then = 0, then

    def __call__(self, x, start):
        self.done += 1
        return (self._then(x, start, self.done),)


def test_each_graph_is_checked_twice(captures):
    """Against the work itself, with what it is captured with and elsewhere; then it is believed."""
    work = Counted()
    captures("a", work, (torch.ones(2), 1), (torch.ones(2), 5))
    done = work.done
    captures("b", work, (torch.ones(2), 1))
    assert work.done - done == done - 1
    done = work.done
    for start in range(5):
        assert captures("a", work, (torch.ones(2), start))[0].tolist() == [1 + start] * 2
    assert work.done == done


class Baked:
    start = 0


@pytest.mark.parametrize(
    "mutant",
    [
        lambda x, start, done: x + done,
        lambda x, start, done: x + start * 0 + Baked.start,
        lambda x, start, done: (x + start) * (float("nan") if done > 1 else 1),
    ],
    ids=["other numbers every time", "a number of the host that was baked in", "not a number"],
)
def test_a_graph_that_gives_other_numbers_is_not_believed(mutant, captures, monkeypatch):
    """The run goes on with the work's own results, and the reason is kept."""

    def on_device(self, given):
        Baked.start = given[1]  # what the host knows when the work is done, and does not when it is replayed
        return [given[0], torch.tensor(given[1])]

    monkeypatch.setattr(Captures, "_on_device", on_device)
    work = Counted(mutant)
    for start in (3, 4):
        found = captures("a", work, (torch.ones(2), start), (torch.ones(2), start + 2))[0]
        Baked.start = start
        expected = mutant(torch.ones(2), torch.tensor(start), work.done)
        assert torch.equal(found, expected) or (found.isnan().all() and expected.isnan().all())
        assert captures.failure == GAVE_OTHER_NUMBERS
    assert len(captures) == 0


def test_tokens_drawn_at_a_near_tie_are_no_failure():
    """Rows after the first token that differs are of another text."""
    logits = torch.tensor([[1.0, 1.0], [0.0, 5.0]])
    other = torch.tensor([[1.00001, 1.0], [9.0, 0.0]])
    assert not capture.alike((logits,), (other,))
    tokens = torch.tensor([1, 1]), torch.tensor([0, 1])
    assert capture.alike((logits, tokens[0]), (other, tokens[1]))
    assert not capture.alike((logits, tokens[0]), (other + 1, tokens[1]))


def test_the_least_recently_used_go(captures, monkeypatch):
    monkeypatch.setattr(capture, "MOST_CAPTURED", 3)
    work = Counted()
    for key in ("a", "b", "c", "a", "d"):
        captures(key, work, (torch.ones(1), 1))
    assert list(captures._held) == ["c", "a", "d"]
    done = work.done
    captures("b", work, (torch.ones(1), 1))
    assert work.done > done and captures.failure is None and len(captures) == 3


def test_captured_passes_go_where_memory_is_wanted(captures, monkeypatch):
    """Graphs share their memory, so all go; the one that found none is then captured. With none to go, that is said."""
    record, left = capture.record, []

    def short(*args):
        if len(left):
            raise torch.OutOfMemoryError(left.pop())
        return record(*args)

    monkeypatch.setattr(capture, "record", short)
    for key in "ab":
        captures(key, Counted(), (torch.ones(1), 1))
    left.append("CUDA out of memory")
    assert captures("c", Counted(), (torch.ones(1), 1))[0].tolist() == [2]
    assert list(captures._held) == ["c"] and captures.failure is None
    left += ["CUDA out of memory"] * 2
    assert captures("d", Counted(), (torch.ones(1), 1))[0].tolist() == [2]
    assert captures.failure == "its passes cannot be captured: CUDA out of memory"
