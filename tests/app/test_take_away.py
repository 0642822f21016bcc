"""The bar answers every press with a file, a text to copy or a sentence."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from opened import finished_race

from app.playground.take_away import TakeAway
from app.serving.visit import Visit
from app.settings import CONTROLS
from core.loading.pair import choose_target
from core.records import Settings


def taken(visit: Visit, public: bool = False, **asked: Any) -> dict[str, Any]:
    event: gr.EventData = SimpleNamespace(_data=asked)  # type: ignore[assignment]
    values = ["plain" if name == "method" else None for name in CONTROLS]
    return json.loads(
        TakeAway(lambda **given: Settings(method=given["method"]), public).take(visit, event, "now", *values)
    )


def visit_of_two() -> Visit:
    visit = Visit()
    for prompt in ("first", "second"):
        visit.shown = visit.add("race", finished_race(prompt)).number
    return visit


def test_without_a_number_it_is_what_the_playground_shows() -> None:
    visit = visit_of_two()
    assert json.loads(taken(visit, form="json")["text"])["runs"][0]["prompt"] == "second"
    assert json.loads(taken(visit, form="json", number=1)["text"])["runs"][0]["prompt"] == "first"


def test_a_command_is_for_the_clipboard_and_a_file_has_a_name() -> None:
    visit = visit_of_two()
    assert "--prompt first" in taken(visit, form="command", number=1)["copy"]
    assert taken(Visit(), True, form="command")["copy"].startswith(
        f"python -m core generate --target {choose_target(None)} --method plain --prompt now"
    )
    names = [taken(visit, form=form)["name"] for form in ("json", "csv", "html")]
    assert names == ["speculative-race-2.json", "speculative-race-2.csv", "speculative-race-2.html"]


def test_a_command_works_where_it_is_pasted(tmp_path: Path) -> None:
    """In any folder, with no environment active: it names the folder and the interpreter that this page runs by."""
    line = taken(Visit(), form="command")["copy"].replace(" --method plain --prompt now", " --help")
    found = subprocess.run(["sh", "-c", line], cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, text=True)
    assert (found.returncode, "--draft-length" in found.stdout) == (0, True), found.stderr


def test_every_answer_is_told_apart_from_the_one_before() -> None:
    visit = visit_of_two()
    assert taken(visit, form="csv")["id"] != taken(visit, form="csv")["id"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"form": "json"}, "nothing to take away yet"),
        ({"form": "json", "number": 7}, "no longer kept"),
        ({"form": "json", "number": {"a": []}}, "no longer kept"),
        ({}, "nothing to take away yet"),
    ],
)
def test_what_is_not_there_is_a_sentence(asked: dict[str, Any], words: str) -> None:
    found = taken(Visit(), **asked)
    assert found["error"]
    assert words in found["say"]
    assert "text" not in found


def test_a_prompt_no_command_line_carries_is_a_sentence() -> None:
    visit = Visit()
    visit.shown = visit.add("race", finished_race("a\0b")).number
    assert "--prompt-file" in taken(visit, form="command", number=visit.shown)["say"]


def test_nothing_in_an_answer_looks_like_a_tag() -> None:
    visit = Visit()
    visit.shown = visit.add("race", finished_race("<script>alert(1)</script>")).number
    event: gr.EventData = SimpleNamespace(_data={"form": "html"})  # type: ignore[assignment]
    assert "<" not in TakeAway(lambda **_: Settings()).take(visit, event)
