from dataclasses import replace
from typing import Any

import gradio as gr
import pytest
from fakes import FakeEngine
from opened import Reader

from app.playground import Playground
from app.playground.race import queued_race
from app.serving.device import Device
from app.serving.turns import OUR_FAULT, guarded
from app.serving.visit import Visit
from app.settings import CONTROLS, NAMED, start_of
from app.sidebar.picker import Picker
from core.records import Run, Settings, run_from_dict

SETTINGS = Settings(max_new_tokens=40, draft_length=5)


def race(
    prompt: str = "def f():", settings: Settings = SETTINGS, **more: Any
) -> tuple[list[dict[str, Any]], list[Run]]:
    runs: list[Run] = []
    stop = more.pop("stop", lambda: False)
    events = list(guarded(queued_race(Device(), FakeEngine(pace=0, **more), prompt, settings, stop, runs)))
    return events, runs


def document(events: list[dict[str, Any]], lane: str) -> dict[str, Any]:
    """The run document that a lane's events make."""
    mine = [event for event in events if event.get("lane") == lane]
    rounds = [event["round"] for event in mine if event["e"] == "round"]
    return {**mine[0]["run"], "rounds": rounds, **mine[-1]["run"]}


def test_the_events_of_a_lane_are_its_run_document() -> None:
    events, runs = race()
    for lane, run in zip(("speculative", "plain"), runs):
        assert document(events, lane) == run.to_dict()
        assert run_from_dict(document(events, lane)).token_ids == run.token_ids


def test_a_race_ends_with_its_verdict() -> None:
    events, runs = race()
    assert [event["e"] for event in events[-2:]] == ["verdict", "done"]
    assert events[-2]["text"] == "Identical to plain decoding, all 40 tokens."
    assert [run.settings.method for run in runs] == ["draft", "plain"]


def test_plain_alone_says_that_speculation_is_off() -> None:
    events, runs = race(settings=replace(SETTINGS, method="plain"))
    assert len(runs) == 1
    assert "Speculation is off" in events[-2]["text"]


def test_stopped_lanes_say_so() -> None:
    events, runs = race(stop=lambda: True)
    assert {run.stop_reason for run in runs} == {"cancelled"}
    assert events[-2]["kind"] == "stopped"


@pytest.mark.parametrize(("prompt", "text"), [("  ", "The prompt is empty"), ("explode", OUR_FAULT)])
def test_what_goes_wrong_is_one_sentence(prompt: str, text: str) -> None:
    events, _ = race(prompt)
    assert events[-2]["e"] == "error"
    assert events[-2]["text"].startswith(text)
    assert events[-1] == {"e": "done"}


def test_a_queued_run_says_how_many_are_ahead_and_can_be_stopped() -> None:
    device = Device()
    with device.turn():
        stopped = False
        events = queued_race(device, FakeEngine(pace=0), "x", SETTINGS, lambda: stopped, [])
        assert "one run is ahead" in next(events)["text"]
        stopped = True
        assert next(events)["kind"] == "idle"
        assert list(events) == []
    with device.turn() as turn:
        assert turn.ahead == 0


def test_a_reader_that_goes_away_frees_the_device() -> None:
    device = Device()
    runs: list[Run] = []
    events = guarded(queued_race(device, FakeEngine(pace=0), "x", SETTINGS, lambda: False, runs))
    while next(events)["e"] != "round":
        pass
    events.close()
    assert {run.stop_reason for run in runs} == {"cancelled"}
    with device.turn() as turn:
        assert turn.ahead == 0


@pytest.mark.parametrize(
    ("pair", "named", "raced"),
    [
        ("small-pair", ("", "", ""), ("owner/small", "owner/tiny", None)),
        ("default", ("owner/small", "owner/tiny", ""), ("pocket", None, None)),
        ("default", ("", "", "v2"), ("pocket", None, "v2")),
        ("other…", ("owner/large", "", "v2"), ("owner/large", None, "v2")),
    ],
    ids=["chosen", "the first again", "of a link", "typed"],
)
def test_the_pair_that_is_chosen_is_raced_though_its_fields_follow(
    pair: str, named: tuple[str, ...], raced: tuple[str | None, ...]
) -> None:
    """And by a method it can use, where that follows too."""
    engine, visit = FakeEngine(pace=0), Visit()
    playground = Playground(engine, Device(), choices=Picker(engine, Device()).choices)
    controls = {**{name: start_of(name) for name in CONTROLS}, "method": "early-exit", **dict(zip(NAMED, named))}
    reader, values = Reader(), playground.run("x", visit, gr.Request(), *controls.values(), pair)
    events = [event for value in values for event in reader.read(value)]
    settings = visit.entries[0].runs[0].settings
    assert (settings.target, settings.draft, settings.revision) == raced
    assert settings.method == "draft"
    asked = next(event for event in events if event["e"] == "asked")["controls"]
    assert asked["method"] == "draft" and (asked["target"] or "pocket") == raced[0]
