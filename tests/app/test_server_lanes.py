"""Running servers as lanes of Compare, and under load, without a browser; each server is a stand-in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes import FakeEngine
from stand_in_servers import STEPS, WORDS, stand_in_server

from app.compare import ONE_PROMPT, Compare
from app.compare.lanes import LANE, SERVER, SIDEBAR
from app.explain.costs import costs_html
from app.history import columns, row
from app.history.run_file import open_file
from app.serving.device import Device
from app.serving.visit import Visit
from app.settings import CONTROLS
from app.sidebar.picker import choices
from core.records import run_from_dict

DRAFTED, ACCEPTED = sum(drafted for drafted, _ in STEPS), sum(accepted for _, accepted in STEPS)


def tab(engine: FakeEngine | None = None) -> Compare:
    engine = engine or FakeEngine(pace=0)
    return Compare(engine, Device(), choices(engine.settings, engine.offers(), public=False))


def last_of(lanes: list[dict[str, Any]], prompt: str = "def f():", **more: Any) -> dict[str, Any]:
    *_, last = tab().compare(lanes, prompt, max_new_tokens=16, **more)
    return last


def test_servers_answer_beside_our_lanes_and_the_document_opens_again() -> None:
    with stand_in_server("llama.cpp", steps=()) as plain, stand_in_server("llama.cpp") as drafting:
        last = last_of([{"server": plain.address}, {"method": "draft"}, {"server": f"{drafting.address}/v1"}])
    assert [(each["lane"], each["method"]) for each in last["rows"]] == [
        (1, "server"),
        (2, "draft"),
        (3, "server"),
        (4, "plain"),  # the baseline that lane 2 is held against
    ]
    first, ours, third, _ = last["rows"]
    assert first["server"]["clock"] == "server" and first["server"]["same"]["lane"] == 2
    assert first["server"]["same"]["parting"] is not None  # the scripted engine says something else
    assert third["server"]["same"] == {"lane": 1, "same": 1, "compared": 1, "parting": None}
    assert third["acceptance_rate"] == ACCEPTED / DRAFTED and third["server"]["drafted"] == DRAFTED
    assert ours["server"] is None and ours["first_token_seconds"] > 0 and ours["ratio_to_plain"]
    opened = open_file(json.dumps(last["document"]))
    assert [len(opened.runs), len(opened.server_runs)] == [2, 2]
    assert {run.text for run in opened.server_runs} == {"".join(WORDS)}
    entry = Visit().add("opened", opened.runs, "a file", opened.server_runs)
    assert [column["settings"]["Pair"] for column in columns(entry)][1:] == ["llama.cpp b11549-abc: tiny"] * 2
    assert json.dumps(entry.document()["server_runs"]) == json.dumps(last["document"]["server_runs"])
    alone = Visit().add("opened", [], "a file", opened.server_runs)
    assert row(alone)["method"] == "running server + 1 more" and len(columns(alone)) == 2


@pytest.mark.parametrize("fault", ["html", "not JSON", "hang up mid-token", "500", "redirect"])
def test_a_server_that_fails_says_so_in_one_sentence_and_the_others_go_on(fault: str) -> None:
    with stand_in_server("llama.cpp", fault=fault) as broken, stand_in_server("SGLang") as whole:
        last = last_of([{"server": broken.address}, {"server": whole.address}, {"method": "plain"}])
    first, second, third = last["rows"]
    assert first["error"].endswith((".", "?")) and "\n" not in first["error"] and "Traceback" not in first["error"]
    assert second["tokens_per_second"] and third["tokens_per_second"] and not second["error"]


def test_what_a_servers_lane_may_say() -> None:
    for lane, reason in (
        ({"server": "http://127.0.0.1:1", "method": "draft"}, "Lane 1: a running server decides on 'method' itself"),
        ({"server": " "}, "Lane 1: give the address"),
        ({"server": 3}, "are texts"),
        ({"model": "tiny"}, "name the server too"),
        ({"server": "http://user:key@127.0.0.1:1"}, "holds no user, key or question"),
    ):
        with pytest.raises(Exception, match=reason):
            last_of([lane, lane])


def test_strangers_are_connected_to_no_server() -> None:
    engine = FakeEngine(pace=0)
    engine.public = True
    with stand_in_server("vLLM") as it, pytest.raises(Exception, match="public: it connects to no servers"):
        list(tab(engine).compare([{"server": it.address}, {}], "def f():"))
    assert not it.requests


def test_many_readers_are_measured_charted_and_told_to_explain() -> None:
    compare, visit = tab(), Visit()
    controls = [getattr(compare.engine.settings, name) for name in CONTROLS]
    slow = {"seconds_per_word": 0.005}
    with stand_in_server("llama.cpp", steps=(), **slow) as plain, stand_in_server("llama.cpp", **slow) as drafting:
        lanes = [dict.fromkeys(LANE, "") | {"pair": SERVER, "server": it.address} for it in (plain, drafting)]
        values = [lane[name] for lane in lanes for name in LANE]
        kind = compare._sets()[1][1]
        *_, last = compare.many_readers.run([1, 2], kind, visit, None, 2, *controls, *values)  # type: ignore[arg-type]
        assert (plain.most_reading, drafting.most_reading) == (2, 2)
    status, *charts = last
    assert "peculation" in status and all(chart["visible"] for chart in charts)
    assert visit.load is not None and [gain["readers"] for gain in visit.load["gains"]] == [1, 2]
    rates = next(trace for trace in charts[2]["value"].data if len(trace.x))
    assert list(rates.x) == [1, 2] and rates.y[0] == pytest.approx(ACCEPTED / DRAFTED)
    ours = [
        dict.fromkeys(LANE, "") | {"pair": SIDEBAR, "precision": SIDEBAR, "method": "plain", "draft_length": SIDEBAR}
    ]
    values = [lane[name] for lane in ours * 2 for name in LANE]
    *_, (said, *_) = compare.many_readers.run([1], ONE_PROMPT, visit, None, 2, *controls, *values)  # type: ignore[arg-type]
    assert "Choose" in said and 'role="alert"' in said
    run = run_from_dict(last_of([{"method": "draft"}, {"method": "plain"}])["document"]["runs"][0])
    told = costs_html(run, None, visit.load, servers=True)
    assert "Measured on your servers" in told and 'data-open="many-readers"' in told
