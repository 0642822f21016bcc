"""The list of runs: its figures are those of the run documents."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from opened import Reader, finished_race

from app.compare.events import Comparison
from app.history import History, columns, row, table
from app.playground.take_away import as_json, export
from app.serving.visit import Visit
from core.records import Settings, summarise
from core.text import Prompt

HISTORY = History(SimpleNamespace(places=[]))  # type: ignore[arg-type]


def event(**data: Any) -> gr.EventData:
    return SimpleNamespace(_data=data)  # type: ignore[return-value]


def test_a_race_in_the_list() -> None:
    runs = finished_race("def f():\n    pass", Settings(max_new_tokens=40, draft_length=5, temperature=0.5))
    found = row(Visit().add("race", runs))
    fast, slow = (summarise(run) for run in runs)
    assert (found["speculative"], found["plain"]) == (fast.tokens_per_second, slow.tokens_per_second)
    assert found["speedup"] == pytest.approx(fast.tokens_per_second / slow.tokens_per_second)
    assert found["acceptance"] == fast.acceptance_rate
    assert (found["method"], found["draft_length"], found["temperature"]) == ("Draft model", 5, 0.5)
    assert found["prompt"] == "def f():\n    pass"


def test_plain_alone_has_no_speed_up() -> None:
    found = row(Visit().add("race", finished_race(settings=Settings(method="plain", max_new_tokens=9))))
    assert (found["speculative"], found["speedup"], found["acceptance"], found["draft_length"]) == (None,) * 4
    assert found["plain"] > 0


def test_lanes_of_a_comparison_are_columns_with_the_figures_of_its_table() -> None:
    """Two drafting lanes and plain on three prompts, whose speeds differ: the median of the prompts is told, and of
    what was drafted the whole."""
    settings = [Settings(method=name, max_new_tokens=30) for name in ("draft", "ngram", "plain")]
    comparison = Comparison.of(settings, [Prompt(name, name) for name in "abc"])
    for contender in comparison.contenders:
        for at, prompt in enumerate(comparison.prompts):
            seeded = replace(contender.settings, seed=at, max_new_tokens=10 * (at + 1))
            run = contender.runs[at] = finished_race(prompt.text, seeded)[0]
            run.settings = contender.settings
            for round_ in run.rounds:
                round_.verify_seconds *= (at + 1) ** (1 + len(contender.settings.method))
    first, second, _ = comparison.rows()
    entry = Visit().add("compare", comparison.runs())
    for column, then in zip(columns(entry), (first, second)):
        told = column["measured"]
        assert told["Tokens/s"] == f"{then['tokens_per_second']['median']:.0f}"
        assert told["Speed-up"] == f"{then['ratio_to_plain']['median']:.2f}×"
        assert told["Accepted"] == f"{then['acceptance_rate']:.0%}"
        assert told["Tokens per pass"] == f"{then['tokens_per_round']:.2f}"
        assert (column["settings"]["Prompt"], told["Tokens written"]) == ("3 prompts", "60")
    assert row(entry)["speedup"] == first["ratio_to_plain"]["median"]
    assert row(entry)["acceptance"] == first["acceptance_rate"]
    assert row(entry)["method"] == "Draft model + 1 more"


def test_a_lane_is_held_against_plain_decoding_of_its_own_target() -> None:
    runs = [run for precision in ("int4", "bf16") for run in finished_race(settings=Settings(precision=precision))]
    for run in runs[2:]:
        for round_ in run.rounds:
            round_.verify_seconds *= 4
    told = [column["measured"] for column in columns(Visit().add("compare", runs))]
    rates = [f"{summarise(run).tokens_per_second:.0f}" for run in runs]
    assert [(each["Tokens/s"], each["Plain tokens/s"]) for each in told] == [tuple(rates[:2]), tuple(rates[2:])]


def test_a_file_is_opened_into_the_list_and_can_be_shown() -> None:
    visit = Visit()
    document = Visit().add("race", finished_race()).document()
    said = json.loads(HISTORY.open(visit, event(name="mine.json", text=as_json(document))))
    assert said["say"] == "mine.json is open as number 1."
    assert (said["rows"][0]["kind"], said["rows"][0]["label"]) == ("opened", "mine.json")
    value, tabs, _ = HISTORY.show(visit, event(number=1))
    events = Reader().read(value)
    ends = {each["lane"]: each["run"]["token_ids"] for each in events if each["e"] == "end"}
    assert ends == dict(zip(("speculative", "plain"), (run["token_ids"] for run in document["runs"])))
    assert events[-1] == {"e": "done"}
    assert tabs.selected == "playground"
    assert visit.shown == 1


@pytest.mark.parametrize("text", ["", "{}", None, 3, '{"schema":1,"methods":[]}'])
def test_a_file_that_is_no_run_changes_nothing(text: Any) -> None:
    visit = Visit()
    said = json.loads(HISTORY.open(visit, event(name="x", text=text)))
    assert said["error"]
    assert said["say"].endswith(".")
    assert visit.entries == []


@pytest.mark.parametrize("number", [None, 9, "1", {}, True])
def test_showing_what_is_not_there_is_a_sentence(number: Any) -> None:
    _, _, value = HISTORY.show(Visit(), event(number=number))
    assert json.loads(value)["say"].startswith("That run is no longer kept")


TIMES = ("draft_seconds", "verify_seconds", "other_seconds")


@pytest.mark.parametrize("instant", [0.0, 5e-324, 1e-310, 1e-200, 1e-30])
@pytest.mark.parametrize("which", [TIMES, *((name,) for name in TIMES)], ids=len)
@pytest.mark.parametrize("lanes", [(0,), (1,), (0, 1)], ids=str)
def test_times_of_next_to_nothing_are_figures_or_a_sentence(
    instant: float, which: tuple[str, ...], lanes: tuple[int, ...]
) -> None:
    """Speeds and quotients stay numbers, which JSON has; what took no time at all is refused."""
    document = Visit().add("race", finished_race()).document()
    for lane in lanes:
        for round_ in document["runs"][lane]["rounds"]:
            round_.update(dict.fromkeys(TIMES, 0.0) | dict.fromkeys(which, instant))
    visit = Visit()
    told = json.loads(HISTORY.open(visit, event(text=json.dumps(document))))
    if told["error"]:
        assert "took no time" in told["say"] and instant < 1e-100
        return
    json.dumps(json.loads(HISTORY.table(visit), parse_constant=float), allow_nan=False)
    race, *_ = HISTORY.show(visit, event(number=1))
    assert Reader().read(race)
    for form in ("json", "html"):
        assert "Infinity" not in export(visit.entries[0], form).text


def test_removing_takes_numbers_only() -> None:
    visit = Visit()
    visit.add("race", finished_race())
    for numbers in (None, "1", ["1", None, {}], [7]):
        assert len(json.loads(HISTORY.remove(visit, event(numbers=numbers)))["rows"]) == 1
    assert json.loads(HISTORY.remove(visit, event(numbers=[1])))["rows"] == []


def test_hostile_text_stays_data() -> None:
    visit = Visit()
    visit.add("opened", finished_race("</script><script>alert(1)</script>${1}{{x}}"), "<b>x</b>")
    assert "<" not in table(visit)
    assert json.loads(table(visit))["rows"][0]["label"] == "<b>x</b>"
