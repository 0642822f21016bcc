"""Running servers as lanes of Compare, and under load, without a browser; each server is a stand-in."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeEngine
from opened import Reader
from stand_in_servers import STEPS, WORDS, stand_in_server

from app.compare import ONE_PROMPT, Compare
from app.compare.again import again
from app.compare.lanes import LANE, SERVER, SIDEBAR
from app.compare.servers import ServerContender, server_row
from app.explain.costs import costs_html
from app.history import History, columns, row
from app.history.run_file import open_file
from app.playground.take_away import export, taken
from app.serving.device import Device
from app.serving.visit import Entry, Visit
from app.settings import CONTROLS
from app.sidebar.picker import choices
from core.errors import UserError
from core.records import SCHEMA, Settings, run_from_dict
from core.servers import Server, ServerChunk, ServerRun, load_document
from core.servers.records import Timings, speculation

DRAFTED, ACCEPTED = sum(drafted for drafted, _ in STEPS), sum(accepted for _, accepted in STEPS)


def tab(engine: FakeEngine | None = None) -> Compare:
    engine = engine or FakeEngine(pace=0)
    return Compare(engine, Device(), choices(engine.settings, engine.offers(), public=False))


def last_of(lanes: list[dict[str, Any]], prompt: str = "def f():", **more: Any) -> dict[str, Any]:
    *_, last = tab().compare(lanes, prompt, max_new_tokens=16, **more)
    return last


def shown_again(entry: Entry) -> list[dict[str, Any]]:
    """The events that History's Show sends to Compare."""
    asked: Any = SimpleNamespace(_data={"number": entry.number})
    visit = Visit(entries=[entry])
    _, tabs, _, value, *_ = History(tab()).show(visit, asked)
    assert tabs.selected == "compare" and visit.shown == 0
    return Reader().read(value)


def test_plain_decoding_without_a_pane_is_the_baseline_of_the_others() -> None:
    runs = [run_from_dict(each) for each in last_of([{"method": "draft"}, {"method": "ngram"}])["document"]["runs"]]
    server = Server("http://127.0.0.1:1", "vLLM", None, "tiny", ("tiny",))
    answers = [
        ServerRun(replace(server, model=name), runs[0].settings, runs[0].prompt, [ServerChunk("it", 0.1)], "eos")
        for name in ("tiny", "other", "third")
    ]
    comparison = again(Visit().add("comparison", runs, servers=answers[:2]).document())
    assert [each.number for each in comparison.contenders if not each.added] == [1, 2]
    assert [each["ratio_to_plain"] is not None for each in comparison.rows()] == [True, True, False, False, True]
    crowded = again(Visit().add("comparison", runs, servers=answers).document())
    assert [each.number for each in crowded.servers] == [3, 4]


def test_of_a_servers_answers_history_tells_what_compare_tells() -> None:
    """Medians, and of the drafts that it counted the whole; an answer that was stopped counts where none came whole."""
    server = Server("http://127.0.0.1:1", "llama.cpp", None, "tiny", ("tiny",))
    counts = [speculation("answer", drafted=drafted, accepted=4, per_pass=1.0 + drafted) for drafted in (4, 8, 40, 1)]
    answers = [
        ServerRun(server, Settings(), prompt, [ServerChunk("it", 0.1)], ended, timings=Timings(None, 10, seconds))
        for prompt, ended, seconds in (
            ("a", "eos", 1.0),
            ("b", "eos", 0.5),
            ("c", "length", 0.1),
            ("d", "cancelled", 9),
        )
    ]
    answers = [replace(answer, speculation=each) for answer, each in zip(answers, counts)]
    lane = ServerContender(1, server.address, None, Settings(), server, dict(enumerate(answers)))
    row_of_compare = server_row(lane, [], {})
    entry = Visit().add("comparison", [], servers=answers)
    assert row_of_compare["tokens_per_second"]["median"] == row(entry)["speculative"] == 20
    assert row_of_compare["acceptance_rate"] == row(entry)["acceptance"] == 12 / 52
    told = columns(entry)[0]["measured"]
    assert (told["Tokens/s"], told["Drafts used"], told["Tokens per pass"]) == ("20", "23%", "9.00")
    assert row_of_compare["tokens_per_round"] == 9


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
    assert "no rounds to replay" in taken(entry, "html")["say"]

    events = shown_again(entry)
    texts = {each["lane"]: "" for each in events if each["e"] == "open"}
    for each in events:
        if each["e"] == "chunk":
            texts[each["lane"]] += each["chunk"]["text"]
    assert list(texts) == ["1", "2", "3", "4"] and texts["3"] == texts["4"] == "".join(WORDS)
    ends = {each["lane"]: each["run"] for each in events if each["e"] == "end"}
    assert ends["1"]["token_ids"] == opened.runs[0].token_ids and ends["4"]["kinds"].count("accepted") == ACCEPTED
    now = {each["lane"]: each for each in again(entry.document()).rows()}
    differing = {"lane", "server", "added"}
    for lane, then in ((1, ours), (3, last["rows"][0]), (4, third)):
        assert {key: now[lane][key] for key in then if key not in differing} == {
            key: then[key] for key in then if key not in differing
        }
    assert now[4]["server"]["drafted"] == DRAFTED and now[4]["server"]["same"]["lane"] == 3
    assert events[-2]["kind"] == "finished" and "shown again" in events[0]["notes"][0].lower()


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
        *_, last = compare.many_readers.run([1, 2], kind, visit, None, 2, *controls, "default", *values)  # type: ignore[arg-type]
        assert (plain.most_reading, drafting.most_reading) == (2, 2)
    status, *charts = last
    assert "peculation" in status and all(chart["visible"] for chart in charts)
    assert visit.load is not None and [gain["readers"] for gain in visit.load["gains"]] == [1, 2]
    kept = visit.entries[-1]
    assert f'data-save="{kept.number}"' in status and row(kept)["kind"] == "load"
    saved = export(kept, "json").text
    found = open_file(saved).load
    assert found is not None and {"schema": SCHEMA, "servers": load_document(found)} == json.loads(saved)
    other, history = Visit(), History(compare)
    history.open(other, SimpleNamespace(_data={"name": "load.json", "text": saved}))  # type: ignore[arg-type]
    assert other.load == visit.load and other.entries[0].document() == kept.document()
    *_, part, again_status, first, _, _ = history.show(other, SimpleNamespace(_data={"number": 1}))  # type: ignore[arg-type]
    assert part["open"] and again_status == status.replace(f'"{kept.number}"', '"1"')
    assert first["value"].to_json() == charts[0]["value"].to_json()
    for spoilt in ({"server": 9}, {"readers": 0}, {"tokens_per_second": -1.0}):
        document = json.loads(saved)
        document["servers"]["levels"][0] |= spoilt
        with pytest.raises(UserError, match=r"server that is not named|levels\[0\]"):
            open_file(json.dumps(document))
    rates = next(trace for trace in charts[2]["value"].data if len(trace.x))
    assert list(rates.x) == [1, 2] and rates.y[0] == pytest.approx(ACCEPTED / DRAFTED)
    ours = [
        dict.fromkeys(LANE, "") | {"pair": SIDEBAR, "precision": SIDEBAR, "method": "plain", "draft_length": SIDEBAR}
    ]
    values = [lane[name] for lane in ours * 2 for name in LANE]
    *_, (said, *_) = compare.many_readers.run([1], ONE_PROMPT, visit, None, 2, *controls, "default", *values)  # type: ignore[arg-type]
    assert "Choose" in said and "role='alert'" in said
    run = run_from_dict(last_of([{"method": "draft"}, {"method": "plain"}])["document"]["runs"][0])
    told = costs_html(run, None, visit.load, servers=True)
    assert "Measured on your servers" in told and 'data-open="many-readers"' in told
