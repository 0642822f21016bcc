"""What a visit keeps: whole, in order, and never more than it may."""

import gc
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier

import pytest
from fakes import FakeEngine
from opened import finished_race

import app.serving.visit
from app.explain import Explain
from app.history.run_file import open_file
from app.serving.device import Device
from app.serving.visit import MOST_BYTES, MOST_ENTRIES, Visit
from core.errors import UserError
from core.records import Settings


def test_an_entry_gives_back_the_runs_as_they_were() -> None:
    runs = finished_race()
    visit = Visit()
    entry = visit.add("race", runs)
    assert visit.last is entry
    assert [run.to_dict() for run in entry.runs] == [run.to_dict() for run in runs]
    assert entry.document() == {"schema": 1, "runs": [run.to_dict() for run in runs]}


def test_packed_runs_take_a_fraction_of_their_documents() -> None:
    entry = Visit().add("race", finished_race(settings=Settings(max_new_tokens=200, draft_length=5)))
    assert len(entry.packed) * 5 < len(repr(entry.document()))


def test_numbers_go_on_when_entries_go() -> None:
    runs, visit = finished_race(), Visit()
    first, second = visit.add("race", runs), visit.add("race", runs)
    visit.remove([first.number, 77])
    third = visit.add("race", runs)
    assert [entry.number for entry in visit.entries] == [second.number, third.number] == [2, 3]
    assert visit.find(3) is third
    with pytest.raises(UserError, match="no longer kept"):
        visit.find(1)


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count and by size; the newest is kept however large it is."""
    runs, visit = finished_race(), Visit()
    for _ in range(app.serving.visit.MOST_ENTRIES + 3):
        visit.add("race", runs)
    assert len(visit.entries) == app.serving.visit.MOST_ENTRIES
    assert visit.entries[-1].number == app.serving.visit.MOST_ENTRIES + 3
    monkeypatch.setattr(app.serving.visit, "MOST_BYTES", 3 * visit.entries[0].size)
    visit.add("race", runs)
    assert len(visit.entries) == 3
    monkeypatch.setattr(app.serving.visit, "MOST_BYTES", 1)
    visit.add("race", runs)
    assert len(visit.entries) == 1


def test_all_visits_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's many tabs cost others their oldest runs before they cost the machine its memory."""
    gc.collect()
    app.serving.visit._visits.clear()
    runs = finished_race()
    one, other = Visit(), Visit()
    size = one.add("race", runs).size
    monkeypatch.setattr(app.serving.visit, "MOST_BYTES_OF_ALL", 3 * size)
    for _ in range(4):
        other.add("race", runs)
    assert one.entries == []
    assert len(other.entries) == 3


def test_a_closed_visit_is_no_longer_counted() -> None:
    visit = Visit()
    visit.add("race", finished_race())
    before = len(app.serving.visit._visits)
    del visit
    gc.collect()
    assert len(app.serving.visit._visits) == before - 1


def test_visitors_get_a_visit_each() -> None:
    """Gradio copies the first value for every session."""
    first = Visit()
    other = deepcopy(first)
    other.add("race", finished_race())
    assert first.entries == []


def large_file(part: int) -> str:
    """A file that packs to almost nothing: eight runs, each with long texts wherever a text may be."""
    runs = [run.to_dict() for run in finished_race(texts=["a"])]
    for run in runs:
        run["settings"]["system"] = chr(ord("a") + part) * 50_000
        run["environment"]["target"]["notes"] = ["n" * 2000] * 32
        run["environment"]["versions"] = {f"package-{number}": "v" * 500 for number in range(32)}
    return json.dumps({"schema": 1, "runs": runs * 4})


def test_what_a_visit_takes_is_what_it_counts() -> None:
    """Measured over a visit that opens as much as it may and looks at it: nothing is kept that does not count."""
    app.serving.visit._unpacked.clear()
    visit = Visit()
    open_file(large_file(0))  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        for part in range(5):
            visit.add("opened", open_file(large_file(part)).runs, "a file")
            assert visit.entries[-1].runs
        unpacked = app.serving.visit._unpacked
        assert sum(size for size, _ in unpacked.values()) <= app.serving.visit.MOST_UNPACKED
        unpacked.clear()  # of all visitors together, and bounded by itself
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sum(entry.size for entry in visit.entries)
    assert kept < 1.2 * counted + 500_000, (kept, counted)
    assert kept * MOST_ENTRIES / len(visit.entries) < 2 * MOST_BYTES


def test_however_many_look_one_document_is_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a visit of its own, which keeps nothing unpacked."""
    monkeypatch.setattr(app.serving.visit, "MOST_UNPACKED", 0)
    runs, explain = (
        finished_race(settings=Settings(max_new_tokens=400, draft_length=5)),
        Explain(FakeEngine(), Device()),
    )
    visits = [Visit() for _ in range(6)]
    for visit in visits:
        visit.add("opened", runs)
    begin = Barrier(len(visits))

    def look(visit: Visit, together: bool) -> str:
        if together:
            begin.wait()
        return explain.step(visit, "1:0", 3)

    def peak(pool: ThreadPoolExecutor, visits: list[Visit]) -> int:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        assert all(
            "One pass of the target" in shown for shown in pool.map(look, visits, [len(visits) > 1] * len(visits))
        )
        return tracemalloc.get_traced_memory()[1] - before

    with ThreadPoolExecutor(len(visits)) as pool:
        look(visits[0], False)  # what is made once
        tracemalloc.start()
        try:
            alone, together = peak(pool, visits[:1]), peak(pool, visits)
        finally:
            tracemalloc.stop()
    assert together < 2 * alone, (alone, together)


def test_a_measurement_of_servers_goes_with_its_entry() -> None:
    visit = Visit()
    entry = visit.add_load({"schema": 1, "servers": [], "server_runs": [], "gains": [1]})
    assert visit.load == {"schema": 1, "servers": [], "gains": [1]}
    visit.remove([entry.number])
    assert visit.load is None
