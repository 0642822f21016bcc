"""Whatever comes in through a control or an endpoint: an answer in words, never an unhandled exception.

About two thousand cases in process, drawn by hypothesis with a fixed seed; over HTTP a few hundred, for what only
a real request meets. `FUZZ_CASES=20000` draws more.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from fakes import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opened import Reader

from app.api import STARTING
from app.history.run_file import read_run_file
from app.page import build
from app.playground import Playground
from app.playground.take_away import read_link
from app.serving import Engine
from app.serving.device import Device
from app.serving.turns import OUR_FAULT
from app.settings import CONTROLS, settings_from
from core.drafting.methods import METHODS
from core.errors import UserError
from core.settings import Settings

CASES = int(os.environ.get("FUZZ_CASES", "500"))
fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 16, 17, 2**31, 2**32, 2**63, 2**64, 1e308, -0.0, 5e-324]),
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(st.characters(), max_size=20),  # surrogates and control characters too
    st.sampled_from(
        ["", " ", "\x00", "\u202e", "auto", "draft", "3x2x1", "1e999", "NaN", "../../etc/passwd", "${40+2}"]
    ),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
SENSIBLE = st.one_of(
    st.sampled_from([*METHODS, "auto", "nf4", "fp32", "", None]),
    st.integers(0, 64),
    st.floats(0, 2),
    st.sampled_from(["2", "2x2", "0.5", "pocket"]),
)
DEFAULTS = STARTING
CHANGES = st.dictionaries(st.sampled_from(CONTROLS), st.one_of(ANYTHING, SENSIBLE), max_size=len(CONTROLS))


def is_sentence(text: str) -> bool:
    return bool(text.strip()) and "Traceback" not in text and len(text) < 2000


@fuzzed
@given(CHANGES)
def test_controls(changes: dict[str, Any]) -> None:
    """Any value of any control is a setting or a sentence."""
    sentence = None
    try:
        json.dumps(settings_from(Settings(), **{**DEFAULTS, **changes}).to_dict(), allow_nan=False)
    except UserError as error:
        sentence = str(error)
    assert sentence is None or is_sentence(sentence)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Faults are what is looked for; the log would have them once more."""
    log = logging.getLogger("app.serving.turns")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.fixture
def playground(unlogged: None) -> Playground:
    return Playground(FakeEngine(pace=0), Device(), most_new_tokens=24)


def test_runs(playground: Playground) -> None:
    """Any prompt with any controls: a stream that ends with `done`, and no fault of ours."""

    @fuzzed
    @given(st.one_of(TEXTS, ANYTHING), CHANGES)
    def run(prompt: Any, changes: dict[str, Any]) -> None:
        reader = Reader()
        events: list[dict[str, Any]] = []
        for value, document in playground.race(prompt, {**DEFAULTS, "max_new_tokens": 6, **changes}):
            events += reader.read(value)
            json.dumps(document, allow_nan=False)
        assert events[-1] == {"e": "done"}
        found = [event["text"] for event in events if event["e"] == "error"]
        assert all(map(is_sentence, found))
        assert OUR_FAULT not in found
        assert found or events[-2]["e"] == "verdict"

    run()
    with playground.device.turn() as turn:
        assert turn.wait(0)


def test_a_prompt_of_a_megabyte(playground: Playground) -> None:
    *_, (_, document) = playground.race("x" * 1_000_000, {**DEFAULTS, "max_new_tokens": 4})
    assert document is not None
    assert len(document["runs"][0]["prompt"]) == 1_000_000


def test_prompts_through_a_real_tokenizer_and_pair(saved_pair: tuple[Path, Path]) -> None:
    """Control characters, lone surrogates, text of every script: a run, or a sentence."""
    base = Settings(target=str(saved_pair[0]), draft=str(saved_pair[1]), precision="fp32", device="cpu")
    playground = Playground(Engine(base), Device())
    options = {**DEFAULTS, "max_new_tokens": 2, "precision": "fp32"}

    @settings(parent=fuzzed, max_examples=CASES // 8)
    @given(st.one_of(st.text(min_size=1, max_size=40), st.text(st.characters(), min_size=1, max_size=20)))
    def run(prompt: str) -> None:
        reader = Reader()
        events = [event for value, _ in playground.race(prompt, options) for event in reader.read(value)]
        found = [event["text"] for event in events if event["e"] == "error"]
        assert OUR_FAULT not in found
        assert found or events[-2]["e"] == "verdict"

    run()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, as keys from its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


def test_opened_files(playground: Playground) -> None:
    """A run document with anything in any place of it: opened, or refused in a sentence."""
    *_, (_, document) = playground.race("def f():", {**DEFAULTS, "max_new_tokens": 6})
    whole = json.dumps(document)
    everywhere = places(document)[1:]

    @fuzzed
    @given(st.sampled_from(everywhere), ANYTHING, st.sampled_from(["replace", "remove", "double"]))
    def change(path: tuple[Any, ...], value: Any, how: str) -> None:
        changed = json.loads(whole)
        at = changed
        for key in path[:-1]:
            at = at[key]
        if how == "remove":
            del at[path[-1]]
        elif how == "double" and isinstance(at, list):
            at.append(at[path[-1]])
        else:
            at[path[-1]] = value
        try:
            runs = read_run_file(json.dumps(changed))
            sentence = None
        except UserError as error:
            sentence = str(error)
        assert sentence is None or is_sentence(sentence)
        if sentence is None:
            json.dumps([run.to_dict() for run in runs], allow_nan=False)

    change()


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{}", "\x00", "\ud800", "[" * 100_000, "x" * 17_000_000, "cos\nsystem\n(S'ls'\ntR."),
        *('{"schema":1}', '{"schema":1,"runs":[]}', '{"schema":1e999}', '{"schema":1,"runs":[{"a":NaN}]}'),
        '{"schema":1,"runs":' * 5_000,
    ],
    ids=lambda text: ascii(text[:16]),
)
def test_files_that_are_no_runs(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_run_file(text)
    assert is_sentence(str(caught.value))


@settings(parent=fuzzed, max_examples=CASES // 4)
@given(st.text(st.characters(), max_size=200))
def test_links(query: str) -> None:
    """Any query string: values that the controls may hold, and a sentence for each that they may not."""
    start = {name: SimpleNamespace(value=value) for name, value in DEFAULTS.items()}
    for text in (query, f"prompt={query}", f"temperature={query}&seed={query}&method={query}"):
        values, refused = read_link(text, start, lambda **controls: settings_from(Settings(), **controls))
        assert all(map(is_sentence, refused))
        json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("name", ["generate", "compare", "sweep", "trace", "lossless"])
def test_endpoints(name: str, unlogged: None) -> None:
    """What programs may call, with anything for any argument: an answer, or an error in a sentence."""
    page = build(FakeEngine(pace=0), public=True)
    call = next(found.fn for found in page.fns.values() if found.api_name == name)
    required = {"prompt": "def f():", "document": {}, "settings": {}, "lanes": [{}, {"method": "plain"}]}
    names = [each for each in inspect.signature(call).parameters if each not in ("visit", "request")]

    @settings(parent=fuzzed, max_examples=CASES // 10)
    @given(st.dictionaries(st.sampled_from(names), st.one_of(ANYTHING, SENSIBLE), max_size=3))
    def attempt(changes: dict[str, Any]) -> None:
        arguments = {key: value for key, value in required.items() if key in names} | changes
        sentence = None
        try:
            answer = call(**arguments)
            answer = list(answer) if isinstance(answer, Iterator) else answer
        except (gr.Error, UserError) as error:
            sentence = str(getattr(error, "message", error))
        assert sentence is None or (is_sentence(sentence) and sentence != OUR_FAULT)

    attempt()


def test_opened_files_are_shown_within_memory_and_time() -> None:
    """In a process whose memory is bounded; `python tests/robustness/fuzz_documents.py` tries ten thousand."""
    program = Path(__file__).with_name("fuzz_documents.py")
    words = [sys.executable, str(program), "--cases", "200"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
