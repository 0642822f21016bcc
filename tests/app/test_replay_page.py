"""A saved race as events, as a value and as one HTML file."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeEngine
from opened import Reader

from app.assets import asset, theme
from app.playground.race import queued_race
from app.serving.device import Device
from app.tokens.replay import lanes_of, replay_events, replay_page, replay_value
from core.records import SCHEMA, Run, Settings

SETTINGS = Settings(max_new_tokens=40, draft_length=5)


def race(settings: Settings = SETTINGS, prompt: str = "def f():", **engine: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events of a race as they were streamed, and its document."""
    runs: list[Run] = []
    events = list(queued_race(Device(), FakeEngine(pace=0, **engine), prompt, settings, lambda: False, runs))
    return events, {"schema": SCHEMA, "runs": [run.to_dict() for run in runs]}


def by_lane(events: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    lanes: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["e"] not in ("status", "done"):
            lanes.setdefault(event.get("lane"), []).append(event)
    return lanes


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, temperature=0.8), replace(SETTINGS, method="plain")])
def test_a_saved_race_gives_the_events_it_was_streamed_with(settings: Settings) -> None:
    streamed, document = race(settings)
    replayed = list(replay_events(json.loads(json.dumps(document))))
    assert by_lane(replayed) == by_lane(streamed)
    assert replayed[-1] == {"e": "done"}


def test_its_value_is_read_like_any_other() -> None:
    _, document = race()
    events = Reader().read(replay_value(document))
    assert [event["e"] for event in events] == [event["e"] for event in replay_events(document)]
    assert replay_value(document) != replay_value(document), "each showing is another stream"


def test_a_lone_run_is_shown_without_a_baseline() -> None:
    _, document = race()
    events = list(replay_events(document["runs"][0]))
    assert {event.get("lane") for event in events} == {"speculative", None}
    assert "without plain decoding" in events[-2]["text"]


def test_of_many_runs_the_first_that_belong_together_are_shown() -> None:
    (_, one), (_, other) = race(), race(prompt="another", settings=replace(SETTINGS, temperature=0.5))
    for run in other["runs"]:
        run["prompt_ids"] = [9]
    lanes = lanes_of({"schema": SCHEMA, "runs": [*reversed(other["runs"]), *one["runs"]]})
    assert {run.prompt for run in lanes.values()} == {"another"}
    assert set(lanes_of({"schema": SCHEMA, "runs": [one["runs"][0], other["runs"][1]]})) == {"speculative"}


@pytest.mark.parametrize("document", [{}, {"schema": 2}, {"runs": []}, {"schema": 1, "runs": [{"schema": 1}]}, [], 3])
def test_anything_else_is_refused(document: Any) -> None:
    for show in (replay_value, replay_page):
        with pytest.raises(ValueError, match="run"):
            show(document)


def test_the_page_holds_the_document_and_is_closed_to_the_outside() -> None:
    texts = ["</script><script>alert(1)</script>", "<!--", "${1}", "\u2028", "\ud800", "&lt;"]
    _, document = race(texts=texts)
    page = replay_page(document)
    parts = dict(re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    assert json.loads(parts["document"]) == document
    assert "<" not in parts["document"] + parts["verdict"]
    assert not re.findall(r"\b(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    (word,) = re.findall(r"script-src 'nonce-([\w-]{22})';", page)
    bearing = re.findall(rf'<(style|script(?: type="\w+")?) nonce="{word}">', page)
    assert bearing == ["style", 'script type="importmap"', 'script type="module"']
    assert word not in replay_page(document), "drawn for each page"
    assert "default-src 'none'" in page
    assert "unsafe" not in page


def test_the_environment_of_another_version_does_no_harm() -> None:
    _, document = race()
    for run in document["runs"]:
        run["environment"] = {"device": "<mark>"}
    assert "<mark>" not in replay_page(document)


def test_the_page_has_the_colours_of_the_playground() -> None:
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+|white);", part)) for part in asset("tokens/replay_page.css").split(".dark")
    )
    ours = vars(theme())

    def resolved(name: str) -> str:
        value = ours[name]
        return resolved(value[1:]) if value.startswith("*") else value

    for name, value in light.items():
        assert resolved(name.replace("-", "_")) == value, name
    for name, value in dark.items():
        assert resolved(name.replace("-", "_") + "_dark") == value, name
