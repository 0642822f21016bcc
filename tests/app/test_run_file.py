"""Opening a file: what we wrote comes back the same; whatever else comes is refused in one sentence."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opened import finished_race
from pydantic import BaseModel, ValidationError

from app.history import run_file
from app.history.run_file import DraftedFile, EmittedFile, RoundFile, RunFile, SettingsFile, read_run_file
from app.history.server_file import LoadFile
from app.playground.take_away import as_json
from app.serving.visit import Visit
from core.errors import UserError
from core.records import Round, Settings, Token

RACE = Visit().add("race", finished_race()).document()


def changed(*path: Any, to: Any) -> str:
    """The race with one place of it changed; ... as value takes the place out."""
    document = json.loads(json.dumps(RACE))
    place = document
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(document)


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_run_file(text)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 300
    return sentence


def test_a_race_comes_back_the_same() -> None:
    assert [run.to_dict() for run in read_run_file(as_json(RACE))] == RACE["runs"]


def test_a_single_run_of_the_command_line_comes_back_the_same() -> None:
    assert [run.to_dict() for run in read_run_file(json.dumps(RACE["runs"][0]))] == RACE["runs"][:1]


def test_a_file_with_a_byte_order_mark_is_read() -> None:
    assert len(read_run_file("\ufeff" + json.dumps(RACE))) == 2


def test_figures_are_computed_anew() -> None:
    """Whoever edits the metrics of a file changes nothing but the prefill that only it can tell."""
    text = changed("runs", 0, "metrics", "tokens_per_second", to=1e6)
    assert read_run_file(text)[0].to_dict()["metrics"] == RACE["runs"][0]["metrics"]


def test_the_schema_covers_the_records() -> None:
    """A field that a record gains is added to what can be opened."""
    assert set(SettingsFile.model_fields) == {field.name for field in fields(Settings)}
    assert set(DraftedFile.model_fields) == {field.name for field in fields(Token)}
    assert set(RoundFile.model_fields) == {field.name for field in fields(Round)}
    assert {field.alias or name for name, field in RunFile.model_fields.items()} == set(RACE["runs"][0])
    assert set(EmittedFile.model_fields) <= {field.name for field in fields(Token)}


RUN = ("runs", 0)
FIRST = (*RUN, "rounds", 0)
DRAFTED = (*FIRST, "drafted", 1)
BAD = [
    ("", "cannot be read as JSON"),
    ("no run", "cannot be read as JSON"),
    (json.dumps(RACE)[:-40], "cannot be read as JSON"),
    ("[" * 100_000, "recursion limit"),
    ('{"schema":1,"runs":' + "[" * 150 + "]" * 150 + "}", r"runs\[0\]"),
    ('{"schema":1,"rounds":' + "9" * 100_000 + "}", "cannot be read as JSON"),
    (changed(*DRAFTED, "p", to=float("nan")), "cannot be read as JSON"),
    (changed(*DRAFTED, "p", to=float("inf")), "cannot be read as JSON"),
    ("[]", "must be an object"),
    ("null", "must be an object"),
    ("{}", "names no schema"),
    (changed("schema", to=2), "another schema"),
    (changed("schema", to=True), "another schema"),
    (changed("schema", to="1"), "another schema"),
    ('{"schema":1,"environment":{},"methods":[]}', "benchmark's table"),
    ('{"schema":1,"sweep":[]}', "holds no runs"),
    ('{"schema":1,"runs":[]}', "at least 1"),
    (changed("runs", to=[RACE["runs"][1]] * 257), "at most 256"),
    (changed("extra", to=1), "extra is unknown"),
    (changed(*RUN, "schema", to=3), r"runs\[0\]\.schema"),
    (changed(*RUN, "rounds", to=...), "rounds is missing"),
    (changed(*RUN, "<script>alert(1)</script>", to=1), "is unknown"),
    (changed(*RUN, "settings", "method", to="magic"), "method: input should be"),
    (changed(*RUN, "settings", "seed", to="0"), "seed: input should be a valid integer"),
    (changed(*RUN, "settings", "max_new_tokens", to=10**12), "max_new_tokens"),
    (changed(*RUN, "settings", "target", to="x" * 501), "target"),
    (changed(*RUN, "environment", "target", to=None), "target"),
    (changed(*RUN, "stop_reason", to=None), "stop_reason"),
    (changed(*RUN, "prompt_ids", to=[-1]), "prompt_ids"),
    (changed(*RUN, "prompt_ids", to=[True]), "prompt_ids"),
    (changed(*RUN, "metrics", "prefill_seconds", to=-1), "prefill_seconds"),
    (changed(*FIRST, "verify_seconds", to="0"), "verify_seconds"),
    (changed(*FIRST, "index", to=4), "not numbered"),
    (changed(*DRAFTED, "p", to=1.5), "less than or equal"),
    (changed(*DRAFTED, "q", to="0.5"), "valid number"),
    (changed(*DRAFTED, "outcome", to="bonus"), "'accepted', 'rejected' or 'ignored'"),
    (changed(*DRAFTED, "parent", to=1), "continues one that comes after it"),
    (changed(*DRAFTED, "parent", to=-1), "parent"),
    (changed(*DRAFTED, "text", to="x" * 2001), "at most 2000"),
    (changed(*DRAFTED, "top_target", to=[RACE["runs"][0]["rounds"][0]["drafted"][0]["top_target"][0]] * 65), "64"),
    (changed(*FIRST, "emitted", "id", to=999), "token_ids are not"),
    (changed(*FIRST, "emitted", to=None), "token_ids are not"),
    (changed(*RUN, "token_ids", to=[]), "token_ids are not"),
    (changed(*RUN, "text", to="something else"), "text is not that of its tokens"),
    (changed(*FIRST, "target_cache", to={"before": 0, "fullest": 10**12, "after": 0}), "target's cache in round 0"),
    (changed(*FIRST, "target_cache", to={"before": 0, "fullest": 0, "after": 0}), "target's cache in round 0"),
    (changed(*FIRST, "draft_cache", to={"before": 0, "fullest": 2**53, "after": 0}), "draft's cache in round 0"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[words for _, words in BAD])
def test_what_is_no_run_is_refused_in_one_sentence(text: str, words: str) -> None:
    assert re.search(words, refusal(text))


def test_a_file_that_is_too_large_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "from_json", None)
    assert "too large" in refusal("x" * (run_file.LONGEST_FILE + 1))


def containers(schema: Any) -> Iterator[dict[str, Any]]:
    """Every list and dictionary that a schema of pydantic's core reads, at any depth."""
    if isinstance(schema, dict) and schema.get("type") in ("list", "dict"):
        yield schema
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    for part in inner:
        yield from containers(part)


@pytest.mark.parametrize("kind", [run_file.RaceFile, LoadFile])
def test_of_the_faults_in_a_list_the_first_is_enough(kind: type[BaseModel]) -> None:
    """A file of a hundred kilobytes may have a hundred thousand faults, and each takes a kilobyte while it is told."""
    found = list(containers(kind.__pydantic_core_schema__))
    assert found
    for each in found:
        anything = {part.get("type") for part in (each.get("items_schema"), each.get("values_schema")) if part}
        assert each.get("fail_fast") or anything == {"any"}, each


@pytest.mark.parametrize(
    "place",
    [(*RUN, "rounds"), (*RUN, "prompt_ids"), (*FIRST, "drafted"), ("runs",), ("server_runs",)],
    ids=lambda place: place[-1],
)
def test_a_list_of_faults_is_not_told_one_by_one(place: tuple[Any, ...]) -> None:
    document = json.loads(changed(*place, to=[{}] * 200))
    with pytest.raises(ValidationError) as caught:
        run_file.RaceFile.model_validate(document)
    assert caught.value.error_count() < 50


def test_a_thousand_unknown_keys_are_told_as_one() -> None:
    assert "5,000 things" in refusal(json.dumps(RACE | {str(number): 0 for number in range(5000)}))


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
places = st.sampled_from(
    [
        (*RUN, "settings"), (*RUN, "environment"), (*RUN, "rounds"), (*RUN, "metrics"), (*RUN, "text"), FIRST, DRAFTED,
        (*DRAFTED, "id"), (*DRAFTED, "parent"), (*DRAFTED, "top_target"), (*FIRST, "emitted"), ("runs",), RUN,
        (*RUN, "environment", "target", "costs"), (*RUN, "settings", "draft_length"), (*RUN, "prompt_ids"),
    ]
)  # fmt: skip


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=places, value=nonsense)
def test_nonsense_anywhere_is_a_sentence_or_a_run(place: tuple[Any, ...], value: Any) -> None:
    text = changed(*place, to=value)
    try:
        runs = read_run_file(text)
    except UserError:
        refusal(text)
    else:
        assert all(run.token_ids == [t.id for r in run.rounds for t in r.kept] for run in runs)
