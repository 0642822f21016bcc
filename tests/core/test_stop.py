"""Stop: before the first token, in a prefill, between rounds, or because the reader went away."""

import pytest
import torch
from tiny import draft_runner, random_prompt, target_runner

from core.decoding import speculative
from core.drafting.length import Fixed
from core.drafting.model import ModelDrafter
from core.errors import UserError
from core.lanes import open_lane, race
from core.records import Run, Settings
from core.sampling import Sampling


class StopAfter:
    """Says stop from the n-th question on."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def decode(stop, prompt_length=5):
    """What a run of the tiny pair came to, and how far its two caches got."""
    target, draft = target_runner("llama"), draft_runner("llama")
    run = Run(Settings(max_new_tokens=20), {}, "", random_prompt(prompt_length))
    drafter = ModelDrafter(draft, Sampling(0.0))
    for _ in speculative(target, drafter, run, length=Fixed(2), stop=stop):
        pass
    return run, target.length, draft.length


def test_before_anything():
    run, fed, drafted = decode(StopAfter(0))
    assert (run.stop_reason, run.token_ids, run.rounds) == ("cancelled", [], [])
    assert (fed, drafted) == (0, 0)


@pytest.mark.parametrize("questions, fed", [(1, (256, 0)), (2, (512, 0)), (3, (599, 0)), (4, (599, 256))])
def test_in_a_prefill(questions, fed):
    """A prompt is read 256 tokens at a time, by the target and then by the draft, and stop is asked in between."""
    run, *lengths = decode(StopAfter(questions), prompt_length=600)
    assert tuple(lengths) == fed
    assert (run.stop_reason, run.rounds) == ("cancelled", [])


def test_between_rounds():
    """What was written so far stays, and is a whole document."""
    run, *_ = decode(StopAfter(2 + 3))  # two prefills, three rounds
    assert run.stop_reason == "cancelled"
    assert len(run.rounds) == 3
    assert run.token_ids == [token.id for r in run.rounds for token in r.kept]
    assert run.to_dict()["metrics"]["rounds"] == 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closing_a_lane_ends_the_run_and_frees_its_runners(pair, steps):
    """Also where nothing was generated yet: the reader of a page may go at any moment."""
    lane = open_lane(pair, "the quick brown fox", Settings(max_new_tokens=50, ignore_eos=True, draft_length=2))
    with lane:
        for _ in range(steps):
            next(lane)
    lane.close()
    assert lane.run.stop_reason == "cancelled"
    assert list(lane) == []
    with pair.target.lease() as runner:
        assert runner.length == 0


def test_leaving_a_race_closes_every_lane(pair):
    settings = Settings(max_new_tokens=50, ignore_eos=True)
    lanes = [open_lane(pair, "the fox", settings) for _ in range(2)]
    going = race(lanes)
    next(going)
    going.close()
    assert [lane.run.stop_reason for lane in lanes] == ["cancelled", "cancelled"]


def test_an_error_in_a_round_frees_the_runners(pair, monkeypatch):
    """A lane that fails is closed like any other; the pool gets its runners back empty."""
    lane = open_lane(pair, "the fox", Settings(temperature=1.0))
    monkeypatch.setattr("core.decoding.record", lambda *_: (_ for _ in ()).throw(UserError("failed")))
    with pytest.raises(UserError, match="failed"):
        for _ in race([lane]):
            pass
    assert lane.run.stop_reason == "cancelled"
    with pair.target.lease() as runner:
        assert runner.length == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers(temperature, value):
    """One sentence instead of a token drawn from nothing."""
    target = target_runner("llama")
    feed = target.feed

    def broken(*args, **options):
        return feed(*args, **options).index_fill(1, torch.tensor([3]), value)

    target.feed = broken
    run = Run(Settings(temperature=temperature), {}, "", [1, 2])
    with pytest.raises(UserError, match="logits that are not numbers"):
        next(speculative(target, None, run, length=Fixed(1)))
