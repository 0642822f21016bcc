import itertools
import json
from typing import Any

import pytest
from opened import Reader

from app.assets import asset, modules
from app.tokens import UPDATES_PER_SECOND, Window, encode, stream


def lines(value: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in value.splitlines()]


def test_a_line_is_ascii_and_holds_no_markup() -> None:
    event = {"e": "round", "text": "</script>\u2028\u202e\ud800é😀\n${1}{{2}}"}
    line = encode(event)
    assert line.isascii()
    assert "<" not in line
    assert line.count("\n") == 1
    assert json.loads(line) == event


def test_figures_keep_six_digits_and_are_always_json() -> None:
    line = encode({"e": "x", "p": 0.123456789, "q": [float("nan")]})
    assert json.loads(line) == {"e": "x", "p": 0.123457, "q": [None]}


def test_values_grow_by_appending_while_they_are_short() -> None:
    events = [{"e": "open"}, *({"e": "round", "n": n} for n in range(50)), {"e": "done"}]
    values = list(stream(events, clock=lambda: 0.0))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(values))
    assert lines(values[-1])[1:] == events


@pytest.mark.parametrize("seen_of", [1, 3])
def test_a_reader_gets_every_event_once_also_from_long_streams(seen_of: int) -> None:
    events = [{"e": "status", "n": n, "text": "x" * (n % 700)} for n in range(2000)]
    values = list(stream(events))
    assert max(map(len, values)) < Window.LONGEST + 1000
    reader = Reader()
    shown = [value for n, value in enumerate(values) if n % seen_of == 0 or n == len(values) - 1]
    assert [event for value in shown for event in reader.read(value)] == events


def test_a_reader_that_missed_too_much_knows_it() -> None:
    values = list(stream({"e": "status", "text": "x" * 500} for _ in range(500)))
    reader = Reader()
    reader.read(values[0])
    with pytest.raises(ValueError, match="missed"):
        reader.read(values[-1])


def test_a_single_huge_event_gets_through() -> None:
    events = [{"e": "open", "text": "x" * 200_000}, {"e": "done"}]
    reader = Reader()
    assert [event for value in stream(events) for event in reader.read(value)] == events


def test_rounds_are_gathered_to_a_few_updates_a_second() -> None:
    now = 0.0

    def rounds() -> Any:
        nonlocal now
        for n in range(1000):
            now += 0.002
            yield {"e": "round", "n": n}

    values = list(stream(rounds(), clock=lambda: now))
    assert len(values) <= 2.0 * UPDATES_PER_SECOND + 1
    assert len(lines(values[-1])) == 1001


def test_two_streams_begin_differently() -> None:
    first, second = (next(iter(stream([{"e": "done"}]))) for _ in range(2))
    assert first.splitlines()[0] != second.splitlines()[0]


def test_the_template_has_nothing_to_fill_in() -> None:
    template = asset("tokens/race.html")
    assert not any(mark in template for mark in ("${", "{{", "`", "\\"))


def test_no_script_writes_markup() -> None:
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    assert not any(way in text for text in modules().values() for way in ways)
