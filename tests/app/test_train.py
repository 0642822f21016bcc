"""The tab Train over a scripted training: what is told while it runs, how it ends, what is offered afterwards."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fakes import FakeEngine, FakeSession

from app.serving.device import Device
from app.serving.turns import OUR_FAULT, guarded, with_device
from app.settings import CONTROLS, start_of
from app.train import BUNDLED, KINDS, NEW, TOKENS, Train, plan_from, prompts_of_file
from app.train.events import training_events
from app.train.example import LOOKS, example_html
from core.errors import UserError
from core.progress import never


def told(events: Iterator[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["e"] == kind]


@pytest.fixture
def session(tmp_path: Path) -> FakeSession:
    return FakeSession(tmp_path / "head", {"seconds": 1.0, "prompts": None})


def test_a_training_is_told_look_by_look(session: FakeSession) -> None:
    events = list(training_events(session, never, Device()))
    looks = [event for event in events if event["e"] == "look"]
    assert [look["agreement"] for look in looks] == [
        each.standing.agreement for each in session.looks if not each.sample
    ]
    outlooks = [event for event in events if event["e"] == "outlook"]
    assert [look["accepted"] for look in outlooks] == [
        look.standing.acceptance for look in session.looks if look.sample
    ]
    assert [look["before"] for look in outlooks] == [True, False]
    assert [event["lane"] for event in events if event["e"] == "sample"] == ["before", "now"]
    assert events[-2]["doing"] == "done" and events[-2]["left"] == 0 and events[-2]["share"] == 1
    assert events[-1]["kind"] == "finished" and str(session.folder) in events[-1]["text"]


def test_the_standing_is_told_while_looks_come_fast(session: FakeSession) -> None:
    """A counter that waits for a pause of the looks would stand still."""
    session.pace, session.looks = 1.0, session.looks * 2
    events = training_events(session, never, Device())
    times = [time.monotonic() for event in events if event["e"] == "standing"]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 1


def test_stop_ends_it_and_says_that_nothing_is_lost(session: FakeSession) -> None:
    session.endless = True
    asked = threading.Event()
    events = []
    for event in training_events(session, asked.is_set, Device()):
        events.append(event)
        if event["e"] == "sample":
            asked.set()
    assert events[-1] == {"e": "over", "kind": "stopped", "text": events[-1]["text"]}
    assert "nothing is lost" in events[-1]["text"]


def test_a_reader_who_goes_away_ends_it_too(session: FakeSession) -> None:
    session.endless = True
    device, ended = Device(), threading.Event()
    with device.turn() as turn:
        assert turn.wait(0)
        events = training_events(session, never, device, ended.set)
        next(event for event in events if event["e"] == "look")
        assert not session.ended.is_set()
        events.close()
    assert ended.wait(5) and session.ended.is_set()
    assert device.drain(5)


def test_what_goes_wrong_in_its_thread_is_a_sentence(session: FakeSession) -> None:
    session.fault = UserError("The disk is full; free some space and resume.")
    assert told(guarded(training_events(session, never, Device())), "error") == [
        {"e": "error", "text": str(session.fault)}
    ]


def test_what_goes_wrong_at_its_end_ends_it_too(session: FakeSession) -> None:
    def ended() -> None:
        raise RuntimeError("the device is lost")

    events = guarded(training_events(session, never, Device(), ended))
    assert {"e": "error", "text": OUR_FAULT} in itertools.islice(events, 4 * len(session.looks))


def test_others_are_told_what_they_wait_for_and_how_long() -> None:
    """The place in line, what goes on, and for how long: as long as it tells itself, then as runs before took."""
    now = [0.0]
    device = Device(clock=lambda: now[0])
    ours = with_device(device, never, lambda: iter([{"e": "x"}, {"e": "x", "left": 100.0}]), "a head is being trained")
    next(ours)
    theirs, last = (with_device(device, never, lambda: iter([{"e": "y"}])) for _ in range(2))
    now[0] = 30.0
    waiting = next(theirs)
    assert waiting["kind"] == "queued" and waiting["text"] == (
        "Queued: one run is ahead of yours on this device; now a head is being trained, for 30 seconds so far. "
        "Yours starts by itself."
    )
    next(ours)
    now[0] = 70.0
    assert next(theirs)["text"] == (
        "Queued: one run is ahead of yours on this device; now a head is being trained. Yours starts by itself in "
        "about 60 seconds."
    )
    assert "2 runs are ahead" in (unknown := next(last)["text"]) and unknown.endswith("Yours starts by itself.")
    list(ours)
    assert next(theirs) == {"e": "y"}
    now[0] += 4.0
    list(theirs)
    assert next(last) == {"e": "y"}
    after = with_device(device, never, lambda: iter([]))
    now[0] += 1.0
    told = next(after)["text"]
    assert told == "Queued: one run is ahead of yours on this device. Yours starts by itself in about 3 seconds."
    last.close()
    assert list(after) == []


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine(pace=0)
    engine.heads = tmp_path
    return engine


START: tuple[Any, ...] = (3, "minutes", "", "eagle3", NEW)


def test_before_and_after_the_first_training(engine: FakeEngine) -> None:
    train = Train(engine, Device())
    words, begin, resume, below, *_ = train.glance(*START)
    assert not begin["visible"]
    assert "for 3 minutes" in words and "pocket target writes texts of its own" in words
    assert (resume["interactive"], below["visible"]) == (False, False)
    with pytest.raises(gr.Error, match="no trained head"):
        train.race()
    values = list(train.start(0.01, "minutes", "", "eagle3", NEW, gr.Request()))
    assert '"e":"look"' in values[-1] and '"kind":"finished"' in values[-1]
    assert "of its guesses accepted (32% to 58% from prompt to prompt)" in values[-1]
    words, _, resume, below, kept, kinds, vllm, sglang = train.glance(*START)
    folder = str(engine.heads / "pocket")
    assert "Resume: goes on" in words and resume["interactive"] and below["visible"] and not kinds["visible"]
    config = engine.heads / "pocket" / "config.json"
    assert "The newest head of this target is kept" in kept
    config.write_text(json.dumps({**json.loads(config.read_text()), "target": {"name": "owner/its"}}))
    assert "The newest head of owner/its is kept" in train.glance(*START)[4]
    assert folder in kept and folder in vllm and "eagle3" in vllm and "EAGLE3" in sglang
    run, _, target, draft, _, length, _, place, said = train.race()
    wanted = {"method": "head", "draft_length": 2, "target": "pocket", "draft": folder, "revision": ""}
    assert json.loads(run)["controls"] == wanted
    assert length == 2  # what the last look found best
    assert place["visible"] and "the new head as draft, method Trained head, draft length 2" in said
    method, _ = train.race_method(None)
    assert (target["value"], draft["value"], method["value"]) == ("pocket", folder, "head")
    assert "head" in [value for _, value in method["choices"]]
    list(train.resume(0.01, "minutes", "", "eagle3", NEW, gr.Request()))
    assert engine.trained == [(engine.heads / "pocket", False), (engine.heads / "pocket", True)]
    assert engine.forgotten == [engine.heads / "pocket"] * 2


def test_a_race_of_the_head_gives_back_what_stood_there(engine: FakeEngine) -> None:
    """The way back leads past a second race to the visitor's own settings, but not past what they chose since."""
    train = Train(engine, Device())
    list(train.start(0.01, "minutes", "", "eagle3", NEW, gr.Request()))
    stood = {**{name: start_of(name) for name in CONTROLS}, "method": "ngram", "draft_length": 7}
    _, own = train.race_method(None, *stood.values(), "small-pair")
    raced = {**stood, "method": "head", "draft_length": 2, "target": "pocket", "draft": str(engine.heads / "pocket")}
    _, own = train.race_method(own, *raced.values(), "other…")
    *back, kept, place = train.give_back(own)
    assert back[:4] == ["small-pair", "", "", ""] and (back[4]["value"], back[5]) == ("ngram", 7)
    assert kept is None and not place["visible"]
    _, own = train.race_method(own, *{**raced, "draft": "owner/tiny"}.values(), "other…")
    assert own[:3] == ["other…", "pocket", "owner/tiny"]


def test_the_bundled_head_is_gone_on_from_where_there_is_one(engine: FakeEngine, tmp_path: Path) -> None:
    train = Train(engine, Device())
    engine.bundled = tmp_path / "bundled"
    words, begin, *_ = train.glance(3, "minutes", "", "eagle3", BUNDLED)
    assert begin["visible"] and "the bundled head goes on learning" in words
    assert "an EAGLE-3 head of one layer learns" in train.glance(*START)[0]
    list(train.start(0.01, "minutes", "", "eagle3", BUNDLED, gr.Request()))
    list(train.start(0.01, "minutes", "", "eagle3", NEW, gr.Request()))
    list(train.start(0.01, "minutes", "", "dspark", BUNDLED, gr.Request()))
    assert [plan["head"] for plan in engine.plans] == [engine.bundled, None, None], "the bundled one is no DSpark"
    assert [plan["kind"] for plan in engine.plans] == ["eagle3", "eagle3", "dspark"]
    list(train.resume(0.01, "minutes", "", "dspark", BUNDLED, gr.Request()))
    assert engine.plans[-1]["kind"] is None, "of the kind it was begun with, whatever is chosen"


@pytest.mark.parametrize("kind, drafted", [("dspark", 5), ("dflash", 4)])
def test_a_block_drafter_is_raced_and_served_as_one(engine: FakeEngine, kind: str, drafted: int) -> None:
    """Both have blocks of 5 rows; the first row of a DFlash drafts nothing."""
    train = Train(engine, Device())
    words, begin, *_ = train.glance(3, "minutes", "", kind, BUNDLED)
    assert f"a {KINDS[kind]} head of one layer learns" in words and not begin["visible"]
    list(train.start(0.01, "minutes", "", kind, NEW, gr.Request()))
    method, _ = train.race_method(None)
    assert method["value"] == "block" and "block" in [value for _, value in method["choices"]]
    run, *_ = train.race()
    assert json.loads(run)["controls"]["method"] == "block"
    *_, vllm, sglang = map(unescape, train.glance(3, "minutes", "", kind, NEW)[-2:])
    folder = engine.heads / "pocket"
    assert f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": {drafted}' in vllm, vllm
    assert f"--speculative-algorithm {kind.upper()}" in sglang
    assert f"--speculative-num-draft-tokens {drafted + 1}" in sglang


def test_two_kinds_are_seen_learning_beside_each_other(engine: FakeEngine) -> None:
    train = Train(engine, Device())
    list(train.start(0.01, "minutes", "", "dspark", NEW, gr.Request()))
    look = {"visits": 2000, "agreement": [0.5, 0.25]}
    engine.looks = {"dspark": [{"visits": 0, "agreement": []}, look], "eagle3": [look, {**look, "visits": 4000}]}
    kinds = train.glance(*START)[5]
    eagle, dspark = kinds["value"].data
    assert kinds["visible"] and (eagle.name, dspark.name) == ("EAGLE-3", "DSpark")
    assert (list(eagle.x), list(eagle.y), list(dspark.x)) == ([2.0, 4.0], [1.75, 1.75], [2.0])


def test_there_is_nothing_to_resume_at_first(engine: FakeEngine) -> None:
    (*_, last) = Train(engine, Device()).resume(3, "minutes", "", "eagle3", NEW, gr.Request())
    assert "There is no training" in last


def test_strangers_cannot_train(engine: FakeEngine) -> None:
    (*_, last) = Train(engine, Device(), public=True).start(3, "minutes", "", "eagle3", NEW, gr.Request())
    assert "off on this public page" in last and not engine.trained


@pytest.mark.parametrize("amount", [0, -1, None, float("nan"), float("inf"), 1e308, 10**400, "3"])
def test_a_training_of_no_length_is_refused(amount: Any, engine: FakeEngine) -> None:
    words, _, resume, below, *_ = Train(engine, Device()).glance(amount, "minutes", "", "eagle3", NEW)
    assert "Train for more than 0" in words and "alert" in words
    assert not resume["interactive"] and not below["visible"]


def test_prompts_are_lines_with_marked_breaks(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[[prompt]]\nname = "f"\ntext = """def f():\n    pass\n"""\n[[prompt]]\nname = "g"\ntext = "g"\n')
    plan = plan_from(2, TOKENS, prompts_of_file(str(file)))
    assert plan == {"tokens": 2000, "prompts": ["def f():\n    pass", "g"]}


@pytest.mark.parametrize(
    "content, said",
    [(b"\xff\xfe\x00", "not a file of prompts"), (b"\n \n", "holds no prompts")],
    ids=["binary", "empty"],
)
def test_a_bad_file_of_prompts_gets_one_sentence(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(gr.Error, match=said):
        prompts_of_file(str(file))


def test_before_the_first_training_an_example_shows_how_one_went():
    """The looks that are shipped, labelled with where they were recorded: from few right guesses to more."""
    looks = json.loads(LOOKS.read_text())["looks"]
    html = example_html()
    assert html.count("<svg") == 2 and html.count("<polyline") == len(looks[0]["agreement"]) + 1
    assert re.search(r"An example: \d+ .* of a head for the bundled target, recorded on .*; yours comes here", html)
    assert f"{looks[0]['agreement'][0]:.0%} at the start" in html
    assert looks[-1]["agreement"][0] > looks[0]["agreement"][0]
