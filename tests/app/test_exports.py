"""What is taken home says what the run said, and does nothing by itself."""

import csv
import json
import shlex
from dataclasses import replace
from io import StringIO

import pytest
from opened import finished_race

from app.history.run_file import read_run_file
from app.playground.take_away import COLUMNS, FORMULA, command_of, export, harmless
from app.serving.visit import Visit
from core.__main__ import parser
from core.cli import settings_of
from core.errors import UserError
from core.loading.pair import choose_target
from core.records import Settings

KEPT = {"accepted", "corrected", "bonus", "plain"}
HOSTILE = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    ' "=1',
    "'=1",
    "＝1",
    "a,b",
    'say "hi"',
    "\n",
    "",
]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text, newline="")))


def test_json_is_the_document_and_opens_again() -> None:
    entry = Visit().add("race", finished_race("def café():"))
    file = export(entry, "json")
    assert json.loads(file.text) == entry.document()
    assert [run.to_dict() for run in read_run_file(file.text)] == entry.document()["runs"]
    assert (file.name, file.type) == ("speculative-race-1.json", "application/json")


def test_csv_has_a_row_for_every_token() -> None:
    """Kept rows in order are the output, and its positions count it."""
    runs = finished_race()
    found = rows(export(Visit().add("race", runs), "csv").text)
    assert tuple(found[0]) == COLUMNS
    for number, run in enumerate(runs, 1):
        mine = [row for row in found if row["run"] == str(number)]
        assert len(mine) == sum(len(r.drafted) + bool(r.emitted) for r in run.rounds)
        kept = [row for row in mine if row["outcome"] in KEPT]
        assert [int(row["id"]) for row in kept] == run.token_ids
        assert [int(row["position"]) for row in kept] == list(range(len(run.token_ids)))
        assert {row["method"] for row in mine} == {run.settings.method}
        assert {row["model_p"] for row in mine if row["outcome"] in ("accepted", "plain")} == {"0.71"}, "not the test's"
    token = next(t for r in runs[0].rounds for t in r.drafted)
    assert (float(found[0]["p"]), float(found[0]["q"]), float(found[0]["draw"])) == (token.p, token.q, token.draw)


def test_csv_starts_no_formula() -> None:
    """Model text is hostile: no cell of it begins like a formula, also behind spaces or quotes."""
    entry = Visit().add("race", finished_race(texts=HOSTILE))
    texts = {row["text"] for row in rows(export(entry, "csv").text)}
    assert texts == {harmless(text) for text in HOSTILE}
    assert not any(text.lstrip(' "').startswith(FORMULA) for text in texts)


def test_harmless_text_is_left_as_it_is() -> None:
    for text in ("def", " x", "a=b", "(", "", "é"):
        assert harmless(text) == text


def test_the_command_repeats_the_speculative_run() -> None:
    settings = Settings(method="ngram", temperature=0.7, seed=3, max_new_tokens=20)
    entry = Visit().add("race", finished_race("it's $HOME", settings))
    words = shlex.split(command_of(entry))
    parsed = parser().parse_args(words[3:])
    assert settings_of(parsed) == replace(settings, target=choose_target(None))
    assert parsed.prompt == "it's $HOME"


@pytest.mark.parametrize("form", [None, "pickle", 3, ["json"]])
def test_other_forms_are_refused(form: object) -> None:
    with pytest.raises(UserError, match="no such form"):
        export(Visit().add("race", finished_race()), form)
