"""The tab Compare without a browser: lanes from what people set, and the events of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeEngine

from app.compare import Compare
from app.compare.events import WARM_UP_TOKENS, Comparison, compare, conclusion, fetch_all, notes, plan_event
from app.compare.figures import acceptance_by_position, speed_by_lane
from app.compare.lanes import LANE, SAME, SIDEBAR, chosen_lanes, lane_names, lanes_from
from app.serving.device import Device
from app.serving.turns import guarded
from app.settings import CONTROLS
from app.sidebar.picker import choices
from core.errors import UserError
from core.records import Round, Run, Settings, run_from_dict
from core.text import Prompt

BASE = Settings(target="owner/big", draft="owner/small", max_new_tokens=24, draft_length=5)
CHOSEN = {name: getattr(BASE, name) for name in CONTROLS}
PROMPTS = [Prompt("one", "def f():"), Prompt("two", "class A:")]


class PickyEngine(FakeEngine):
    """Cannot load the target "owner/missing", has no memory for lanes with seed 13; notes who was opened, and who raced
    with whom."""

    def __init__(self) -> None:
        super().__init__(pace=0)
        self.raced: list[list[str]] = []
        self.opened: list[tuple[str, int]] = []

    def load(self, settings: Settings, *_: Any) -> Any:
        if settings.target == "owner/missing":
            raise UserError("The Hub has no model 'owner/missing'; check the spelling.")
        return super().load(settings)

    def is_loaded(self, settings: Settings) -> bool:
        return settings.target != "owner/missing"

    def fetch(self, settings: Settings, *_: Any) -> None:
        self.load(settings)

    def open_lane(self, pair: Any, prompt: str, settings: Settings, stop: Any, tops: int = 3) -> Any:
        lane = super().open_lane(pair, prompt, settings, stop, tops)
        self.opened.append((str(settings.method), settings.max_new_tokens))
        if settings.seed == 13 and settings.max_new_tokens > 8:
            lane.rounds = self._exhausted(lane.rounds)
        return lane

    @staticmethod
    def _exhausted(rounds: Any) -> Any:
        yield next(rounds)
        raise UserError("The memory of this device ran out.")

    def race(self, lanes: Any) -> Any:
        self.raced.append([str(lane.run.settings.method) for lane in lanes])
        return super().race(lanes)


class IdleEngine(PickyEngine):
    """Whose drafter proposes nothing, on a machine that has sped up meanwhile."""

    def _speculative(self, run: Run, chance: Any) -> Round:
        round_ = self._plain(run)
        round_.verify_seconds *= 0.9
        return round_


def run(
    lanes: list[Settings],
    prompts: list[Prompt] = PROMPTS,
    engine: FakeEngine | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[dict[str, Any]], Comparison]:
    engine = engine or PickyEngine()
    comparison = Comparison.of(lanes, prompts)

    def events() -> Any:
        yield plan_event(comparison)
        yield from fetch_all(engine, comparison, stop)
        yield from compare(Device(), engine, comparison, stop)

    return list(guarded(events())), comparison


def lane(method: str = "draft", **changes: Any) -> Settings:
    return lanes_from(BASE, CHOSEN, [{"method": method, **changes}] * 2, 4096)[0]


def of(events: list[dict[str, Any]], kind: str, **found: Any) -> list[dict[str, Any]]:
    return [event for event in events if event["e"] == kind and found.items() <= event.items()]


# Lanes


def test_a_lane_is_as_the_sidebar_but_for_what_it_says() -> None:
    first, second = lanes_from(BASE, CHOSEN, [{}, {"method": "ngram", "draft_length": 7, "precision": "bf16"}], 4096)
    assert first == BASE
    assert (second.method, second.draft_length, second.precision, second.target) == ("ngram", 7, "bf16", "owner/big")


def test_what_a_lane_has_the_same_as_lane_1_is_taken_from_there() -> None:
    nowhere = ("", "")
    first = ("other…", "owner/big", "owner/small", "nf4", "draft", 3, *nowhere)
    same = (SAME, "forgotten", "", SAME, "ngram", SAME, *nowhere)
    own = (SIDEBAR, "", "", "bf16", "plain", SAME, *nowhere)
    lanes = chosen_lanes((*first, *same, *own))
    assert [tuple(lane[name] for name in LANE) for lane in lanes] == [
        first,
        ("other…", "owner/big", "owner/small", "nf4", "ngram", 3, *nowhere),
        (SIDEBAR, "", "", "bf16", "plain", 3, *nowhere),
    ]


def test_a_lane_that_names_its_target_takes_no_other_model_of_the_sidebar() -> None:
    named, bundled, drafted = lanes_from(
        BASE, CHOSEN, [{"target": "owner/other"}, {"target": "pocket"}, {"draft": "owner/tiny"}], 4096
    )
    assert (named.target, named.draft) == ("owner/other", None)
    assert (bundled.target, bundled.draft) == ("pocket", None)
    assert (drafted.target, drafted.draft) == ("owner/big", "owner/tiny")


@pytest.mark.parametrize(
    ("lanes", "sentence"),
    [
        ([{}], "2 to 4 lanes"),
        ([{}] * 5, "2 to 4 lanes"),
        ("lanes", "2 to 4 lanes"),
        ([{}, "plain"], "Lane 2: a lane is an object"),
        ([{}, {"temperature": 1}], "Lane 2: there is no 'temperature' to set"),
        ([{"draft_length": 99}, {}], "Lane 1: Draft length must be auto or a whole number between 1 and 16"),
        ([{}, {"method": "magic"}], "Lane 2: There is no method 'magic'"),
        ([{}, {"target": 7}], "Lane 2: Target must be text"),
    ],
)
def test_what_a_lane_cannot_be_is_said_with_its_number(lanes: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        lanes_from(BASE, CHOSEN, lanes, 4096)


def test_names_say_what_sets_lanes_apart() -> None:
    assert lane_names([lane("draft"), lane("ngram"), lane("plain")]) == [
        ("Draft model", ""),
        ("N-gram", ""),
        ("Plain only", ""),
    ]
    assert lane_names([lane(draft_length=2), lane(draft_length=8), lane("plain", precision="nf4")]) == [
        ("Draft model, length 2", "auto"),
        ("Draft model, length 8", "auto"),
        ("Plain only", "NF4"),
    ]
    assert lane_names([lane(), lane(target="owner/other", draft="owner/tiny")])[1] == ("Draft model", "other + tiny")


def test_the_page_says_what_runs_in_turn_and_what_comes_on_top() -> None:
    lanes = [lane(), lane("plain"), lane(precision="bf16"), lane(target="owner/other", method="ngram")]
    said = " ".join(notes(Comparison.of(lanes, PROMPTS)))
    assert "Lane 3 needs the target in another precision: it is loaded and runs after the others." in said
    assert "Lane 4 needs another target" in said
    assert said.count("Plain decoding of each target runs as well") == 1
    assert notes(Comparison.of(lanes[:2], PROMPTS)) == []


# Events


def test_lanes_of_a_target_race_at_once_after_an_equal_warm_up() -> None:
    engine = PickyEngine()
    run([lane("draft"), lane("ngram"), lane("plain")], engine=engine)
    assert engine.raced == [["draft", "ngram", "plain"]] * 2
    assert engine.opened[:3] == [(method, WARM_UP_TOKENS) for method in ("draft", "ngram", "plain")]


def test_the_events_of_a_lane_are_its_run_documents() -> None:
    events, comparison = run([lane("draft"), lane("plain")])
    documents = []
    for event in events:
        if event.get("lane") != "1":
            continue
        if event["e"] == "open":
            documents.append({**event["run"], "rounds": []})
        elif event["e"] == "round":
            documents[-1]["rounds"].append(event["round"])
        elif event["e"] == "end":
            documents[-1] |= event["run"]
    runs = comparison.contenders[0].runs
    assert documents == [runs[0].to_dict(), runs[1].to_dict()]
    assert [run_from_dict(each).token_ids for each in documents] == [runs[0].token_ids, runs[1].token_ids]


def test_plain_decoding_is_added_where_no_lane_is_plain() -> None:
    events, comparison = run([lane("draft"), lane("ngram")])
    rows = of(events, "result")[0]["rows"]
    assert [(row["lane"], row["method"], row["added"]) for row in rows][-1] == (3, "plain", True)
    assert not of(events, "open", lane="3")  # its figures are shown, not its text
    assert rows[0]["ratio_to_plain"]["median"] > 1
    assert rows[0]["identical"] == {"same": 2, "compared": 2, "first": None, "logit_gap": None}
    assert len(comparison.runs()) == 6


def test_a_target_that_cannot_be_loaded_fails_its_lane_alone() -> None:
    events, _ = run([lane("draft"), lane(target="owner/missing"), lane("plain")])
    assert of(events, "fail")[0] == {
        "e": "fail",
        "lane": "2",
        "text": "The Hub has no model 'owner/missing'; check the spelling.",
    }
    rows = of(events, "result")[0]["rows"]
    assert [row["prompts"] for row in rows] == [2, 0, 2]  # and no baseline ran for a lane that could not
    assert rows[1]["error"].startswith("The Hub has no model")


def test_a_lane_that_fails_half_way_leaves_the_race_to_the_others() -> None:
    failing = lane("draft")
    failing.seed = 13
    events, _ = run([failing, lane("ngram"), lane("plain")])
    assert [event["lane"] for event in of(events, "fail")] == ["1"]
    assert "ran out" in of(events, "fail")[0]["text"]
    assert len(of(events, "end", lane="2")) == 2
    assert events[-1] == {"e": "done"}


def test_where_all_lanes_fail_alike_it_is_one_error() -> None:
    events, _ = run([lane("draft"), lane("plain")], prompts=[Prompt("", "  ")])
    assert of(events, "error")[0]["text"].startswith("The prompt is empty")
    assert not of(events, "result")


def test_stop_keeps_what_is_finished() -> None:
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 60

    events, comparison = run([lane("draft"), lane("plain")], prompts=PROMPTS * 4, stop=stop)
    result = of(events, "result")[0]
    assert result["kind"] == "stopped"
    assert result["text"].startswith("Stopped.")
    reasons = [each.stop_reason for each in comparison.runs()]
    assert "length" in reasons
    assert result["rows"][0]["prompts"] == reasons[: len(reasons) // 2].count("length")


def test_progress_counts_runs() -> None:
    events, _ = run([lane("draft"), lane("ngram"), lane("plain")])
    running = [event for event in of(events, "status") if "Prompt" in event["text"]]
    assert [(event["done"], event["of"]) for event in running] == [(0, 6), (3, 6)]
    assert running[1]["text"] == "Prompt 2 of 2, two: lanes 1, 2 and 3 are running."


def test_nothing_is_called_fastest_that_the_noise_may_have_made_so() -> None:
    """Lanes that one prompt does not separate are about as fast; a lane that drafted nothing does what plain does."""
    events, alone = run([lane("draft"), lane("plain")], PROMPTS[:1])
    told = of(events, "result")[0]
    assert "Lane 1, Draft model, is the fastest" in told["text"] and "× plain decoding" in told["text"]
    behind = [{**alone.rows()[0], "faster": False}]
    assert "and slower than plain decoding of its own target" in conclusion(alone, behind)
    assert [(row["faster"], row["drafted"] > 0) for row in told["rows"]] == [(True, True), (None, False)]
    events, comparison = run([lane("draft"), lane("draft", draft_length=4), lane("plain")], PROMPTS[:1])
    level = of(events, "result")[0]
    assert "and lane 2 are about as fast" in level["text"] and "one prompt does not separate them" in level["text"]
    rows = comparison.rows()
    rows[1]["tokens_per_second"]["median"] /= 2
    assert "is ahead of lane 2: " in conclusion(comparison, rows)
    idle = of(run([lane("draft"), lane("plain")], PROMPTS[:1], IdleEngine())[0], "result")[0]
    assert "and lane 2 are about as fast" in idle["text"] and "×" not in idle["text"]
    assert (idle["rows"][0]["faster"], idle["rows"][0]["drafted"]) == (None, 0)


# Charts


def rows_of(*lanes: Settings, prompts: list[Prompt] = PROMPTS) -> list[dict[str, Any]]:
    return of(run(list(lanes), prompts)[0], "result")[0]["rows"]


def test_a_chart_is_drawn_only_where_it_says_more_than_a_number() -> None:
    one = rows_of(lane("draft"), lane("plain"), prompts=PROMPTS[:1])
    assert speed_by_lane(one) is None  # a single speed is in the table
    assert speed_by_lane(rows_of(lane("draft"), lane("plain"))) is not None
    assert acceptance_by_position(rows_of(lane("plain"), lane("plain"))) is None


def test_charts_draw_the_figures_of_the_table() -> None:
    rows = rows_of(lane("draft"), lane("plain"))
    speed, positions = speed_by_lane(rows), acceptance_by_position(rows)
    assert speed and positions
    assert [trace.x[0] for trace in speed.data] == [row["tokens_per_second"]["median"] for row in rows]
    assert list(positions.data[0].y) == rows[0]["accepted_by_position"][: len(positions.data[0].y)]


# The tab


def tab(engine: FakeEngine) -> Compare:
    return Compare(engine, Device(), choices(engine.settings, engine.offers(), public=False))


def test_the_api_gives_rows_and_documents() -> None:
    lanes = [{"method": "draft"}, {"method": "plain"}]
    *_, last = tab(FakeEngine(pace=0)).compare(lanes, "def f():", max_new_tokens=16)
    assert [row["method"] for row in last["rows"]] == ["draft", "plain"]
    runs: list[Run] = [run_from_dict(each) for each in last["document"]["runs"]]
    assert [len(each.token_ids) for each in runs] == [16, 16]


def test_the_api_runs_a_kind_of_prompts_and_knows_no_others() -> None:
    compare_tab = tab(FakeEngine(pace=0))
    lanes = [{"method": "draft"}, {"method": "plain"}]
    *_, last = compare_tab.compare(lanes, prompts="repetitive", max_new_tokens=8)
    assert {row["prompts"] for row in last["rows"]} == {sum(p.kind == "repetitive" for p in compare_tab.prompts)}
    with pytest.raises(Exception, match="no prompts of the kind 'poems'"):
        list(compare_tab.compare(lanes, prompts="poems"))


def test_strangers_may_not_hold_the_device_for_long() -> None:
    engine = FakeEngine(pace=0)
    engine.public = True
    with pytest.raises(Exception, match="fewer or shorter prompts, fewer lanes or new tokens"):
        list(tab(engine).compare([{}, {}], prompts="all", max_new_tokens=512))
