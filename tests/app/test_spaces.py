"""A race as a job in a process of its own: all that goes in and out is pickled, and it is the race of this process."""

import multiprocessing
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from tiny import make_tokenizer, random_model

import app.insides  # noqa: F401  (first: the process of a job imports Gradio in half the time)
from app.playground.race import queued_race
from app.serving import Engine, spaces
from app.serving.device import Device
from app.serving.spaces import ZeroGpu, race_job, seconds_of_gpu, settle_in
from core.errors import UserError
from core.progress import never
from core.records import Settings

PROMPT = "the quick brown fox"
MEASURED = ("draft_seconds", "verify_seconds", "other_seconds", "prefill", "seconds", "environment")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Of a small pair in a folder, with a fixed draft length: what is drafted then depends on no clock."""
    folders = []
    for seed in (1, 2):
        folders.append(str(tmp_path_factory.mktemp("model")))
        words = make_tokenizer()
        random_model("llama", seed, vocab=len(words)).float().save_pretrained(folders[-1])
        words.save_pretrained(folders[-1])
    target, draft = folders
    return Settings(target, draft, draft_length=3, max_new_tokens=12, precision="fp32", device="cpu", ignore_eos=True)


def elsewhere(job):
    """The same job in another process, every event pickled on its way. A fresh one: nothing but the arguments can have
    reached it."""

    def events(*arguments):
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=tell, args=(job, pickle.dumps(arguments), there), daemon=True)
        process.start()
        there.close()
        try:
            while here.poll(60) and (event := here.recv()) is not None:
                yield event
        finally:
            process.terminate()
            process.join(10)

    return events


def tell(job, arguments, pipe):
    for event in job(*pickle.loads(arguments)):
        pipe.send(event)
    pipe.send(None)


def bare(value):
    """Without what a clock decides."""
    if isinstance(value, dict):
        kept = {k: bare(v) for k, v in value.items() if k not in MEASURED}
        if "metrics" in kept:
            counted = ("new_tokens", "rounds", "acceptance_rate")
            kept["metrics"] = {k: v for k, v in kept["metrics"].items() if k in counted}
        return kept
    return [bare(item) for item in value] if isinstance(value, list) else value


def telling(events):
    """Those of a race by lane (which lane steps next is decided by a clock), not those of the way to it."""
    told = [bare(event) for event in events if event["e"] in ("open", "round", "end")]
    return {lane: [event for event in told if event["lane"] == lane] for lane in ("speculative", "plain")}


def race_here(settings):
    runs = []
    events = list(queued_race(Device(), Engine(settings), PROMPT, settings, never, runs))
    return events, runs


def race_away(settings, job, stop=never):
    engine, runs = Engine(settings), []
    engine.remote = ZeroGpu(job).race
    return list(queued_race(Device(), engine, PROMPT, settings, stop, runs)), runs


def test_a_job_elsewhere_tells_the_race_of_this_process(settings):
    """Event by event what the job tells here, and the text that a race without a job writes."""
    away, runs = race_away(settings, elsewhere(race_job))
    same, _ = race_away(settings, race_job)
    _, own = race_here(settings)
    assert telling(away) == telling(same)
    assert [run.token_ids for run in runs] == [run.token_ids for run in own]
    assert [run.settings.method for run in runs] == ["draft", "plain"]
    assert {event["e"] for event in away} == {"status", "open", "round", "end", "verdict"}


def test_costs_come_back_and_go_into_the_next_job(settings):
    """The second job measures nothing, and its environment has the table that the first one measured."""
    given = []

    def job(*arguments):
        given.append(arguments[2])
        return race_job(*arguments)

    engine = Engine(settings)
    engine.remote = ZeroGpu(job).race
    heads = []
    for _ in range(2):
        events = list(queued_race(Device(), engine, PROMPT, settings, never, []))
        heads.append(next(event for event in events if event["e"] == "open")["run"]["environment"])
    assert given[0] == {}
    assert set(given[1]) == {"target", "draft"}
    for role in ("target", "draft"):  # to the last digit: a second measurement would have found others
        tables = [{key: head[role][key] for key in ("costs", "following")} for head in heads]
        assert tables[0] == tables[1] == given[1][role]


def test_a_job_uses_the_plain_forward(settings):
    events, _ = race_away(settings, race_job)
    head = next(event for event in events if event["e"] == "open")
    assert head["run"]["environment"]["target"]["runner"].startswith("dynamic (a process of ZeroGPU")


def test_a_mistake_is_told_by_its_sentence(settings):
    events, runs = race_away(replace(settings, max_new_tokens=100_000), race_job)
    assert "past the context" in next(event["text"] for event in events if event["e"] == "error")
    assert not runs


def test_stopping_ends_the_job(settings):
    """Its process is ended with it; nothing is shown after."""
    ended, shown = [], []

    def job(*arguments):
        try:
            yield from race_job(*arguments)
        finally:
            ended.append(True)

    def stop():
        return len(shown) > 3

    engine = Engine(settings)
    engine.remote = ZeroGpu(job).race
    for event in queued_race(Device(), engine, PROMPT, settings, stop, []):
        shown.append(event)
    assert ended
    assert shown[-1]["text"] == "Stopped."


def test_what_zero_gpu_refuses_is_a_sentence(settings):
    class RefusalError(Exception):
        __module__ = "gradio.exceptions"

    def job(*_):
        raise RefusalError("You have exceeded your GPU quota")
        yield

    with pytest.raises(UserError, match="exceeded your GPU quota"):
        race_away(settings, job)


def test_time_is_asked_for_by_what_a_run_takes():
    def ask(tokens, costs):
        return seconds_of_gpu({"max_new_tokens": tokens}, PROMPT, costs)

    measured = {"target": {"costs": {"1": 0.02, "4": 0.03}}}
    assert ask(512, measured) < ask(512, {})
    assert ask(1, measured) <= ask(512, measured) <= ask(4096, {}) == spaces.LONGEST
    assert isinstance(ask(100, measured), int)


def test_only_zero_gpu_moves_races_away(settings, monkeypatch):
    """With the decorator of a `spaces` package that keeps what it was given."""
    engine = Engine(Settings())
    settle_in(engine)
    assert engine.remote is None
    asked = []

    def gpu(duration):
        asked.append(duration)
        return lambda job: job

    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=gpu))
    settle_in(engine)
    assert asked == [seconds_of_gpu]
    assert engine.remote is not None
    assert engine.settings.device == "cpu"
