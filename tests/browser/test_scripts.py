"""The pure parts of the page's scripts, called in Chromium: what they compute is held to Python, or to the hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from races import corrected_round, scripted_race, tree_round

from app.assets import modules
from app.tokens import stream
from app.tokens.markup import HIDDEN
from app.tokens.replay import lanes_of, replay_events, verdict_event

HOME = "http://modules.test/"

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(chromium: Any) -> Iterator[Call]:
    """`call(module, expression, given)`: the value of a JavaScript expression over `m`, the module, and `given`."""
    page = chromium.new_context().new_page()

    def answer(route: Any) -> None:
        text = modules().get(route.request.url.removeprefix(HOME))
        kind = "text/html" if text is None else "text/javascript"
        route.fulfill(body=text or "<!doctype html>", content_type=f"{kind}; charset=utf-8")

    page.route(f"{HOME}**", answer)
    page.goto(HOME)

    def call(module: str, expression: str, given: Any = None) -> Any:
        assert module in modules()
        return page.evaluate(f"async given => {{ const m = await import('/{module}'); return {expression}; }}", given)

    yield call
    page.context.close()


# Text


def test_python_and_the_page_hide_the_same_characters(call: Call) -> None:
    hidden = call(
        "tokens/text.js",
        "Array.from({ length: 0x110000 }, (_, code) => code)"
        ".filter(code => m.visible(String.fromCodePoint(code)) !== String.fromCodePoint(code))",
    )
    assert hidden == [code for code in range(0x110000) if HIDDEN.match(chr(code))]


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a", "·a"), ("a\n", "a⏎"), ("\t", "⇥"), ("\u202eb", "⟨U+202E⟩b"), ("\x07", "␇"), ("", "part of a character")],
)
def test_a_token_is_quoted_so_that_every_character_shows(call: Call, text: str, shown: str) -> None:
    assert call("tokens/text.js", "m.quoted(given)", text) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0, "0.00"), (0.00004, "<0.0001"), (0.0042, "0.0042"), (0.125, "0.13"), (1, "1.00")],
)
def test_a_probability_never_looks_like_zero_where_it_is_not(call: Call, value: float | None, shown: str) -> None:
    assert call("tokens/text.js", "m.probability(given)", value) == shown


# A round as data


def test_a_tree_is_judged_down_its_path_siblings_in_turn(call: Call) -> None:
    """a is refused, its sibling b accepted; under b d is refused and c accepted; what hangs below a is not judged."""
    tree = tree_round().to_dict()
    assert call("tokens/story.js", "m.isTree(given)", tree)
    beats = call("tokens/story.js", "m.beatsOf(given)", tree)
    assert [beat["kind"] for beat in beats] == ["draft"] * 6 + ["judge"] * 4 + ["emit"]
    assert [beat["index"] for beat in beats if beat["kind"] == "judge"] == [0, 1, 4, 5]
    assert beats[5]["at"] == pytest.approx(0.002)
    told = [round(beat["at"], 9) for beat in beats[6:]]
    assert told == [0.004, 0.006, 0.008, 0.01, 0.012], "told one by one over the time of the pass that judges all"


def test_a_moment_knows_what_waits_for_its_judgement(call: Call) -> None:
    """Of b (refused) and c (never judged): both wait until b is judged, which decides both."""
    waiting = """[0, 1, 2, 3, 4].map(count => {
        const moment = new m.Moment(given, count);
        return [0, 1].map(i => moment.pending(i));
    })"""
    shown = call("tokens/story.js", waiting, corrected_round().to_dict())
    assert shown == [[True, True], [True, True], [True, True], [False, False], [False, False]]


def test_slow_motion_leaves_time_to_read_each_judgement(call: Call) -> None:
    """The tree is judged four times and one token follows, in 10 ms: at 0.6 s for each, 300 times slower."""
    assert call("tokens/replay.js", "m.readingFactor([given, given])", tree_round().to_dict()) == 300


def test_the_residual_is_what_p_has_over_q(call: Call) -> None:
    """p = (a 0.5, b 0.3, c 0.1) and q = (b 0.6, a 0.3): max(0, p - q) = (a 0.2, c 0.1), and c's q is not recorded."""
    given = corrected_round().to_dict()
    rows = call("tokens/story.js", "m.residualOf(m.lawsAt(given.emitted, given, -1, false))", given)
    shares = {row["text"]: row["share"] for row in rows if row["share"]}
    assert shares == pytest.approx({"a": 2 / 3, "c": 1 / 3})


def test_a_test_is_told_with_its_own_numbers(call: Call) -> None:
    words = call("tokens/story.js", "m.testWords(given, 0, false)", corrected_round().to_dict())
    assert words == "Accepted with probability min(1, p/q) = 0.50; drew 0.80: refused."
    greedy = call("tokens/story.js", "m.testWords(given, 0, true)", corrected_round().to_dict())
    assert greedy == "It is not the target’s likeliest token: refused."


# Totals and events


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_running_totals_are_the_engines(call: Call, temperature: float) -> None:
    totals = """(() => {
        const tally = new m.Tally(given);
        for (const round of given.rounds) tally.add(round);
        return { new_tokens: tally.tokens, seconds: tally.seconds, tokens_per_second: tally.rate, rounds: tally.rounds,
                 acceptance_rate: tally.acceptance, tokens_per_round: tally.tokensPerRound };
    })()"""
    for run in scripted_race(temperature=temperature)["runs"]:
        found = call("tokens/tally.js", totals, run)
        assert found == pytest.approx({name: run["metrics"][name] for name in found})


def test_a_saved_race_tells_the_same_events_in_python_and_in_its_page(call: Call) -> None:
    document = scripted_race(temperature=0.8)
    verdict = verdict_event(list(lanes_of(document).values()))
    value = call("tokens/replay_page.js", "m.eventsOf(...given)", [document, verdict])
    _, *events = map(json.loads, value.splitlines())
    assert events == list(replay_events(document))


READ = """(() => {
    const got = [];
    const take = event => got.push(event.n);
    const sink = { begin: () => got.push("begin"), take, flush() {}, lost: () => got.push("lost") };
    const reader = new m.EventReader(sink);
    for (const value of given) reader.update(value);
    return got;
})()"""


@pytest.mark.parametrize("seen_of", [1, 3])
def test_a_growing_value_gives_each_event_once(call: Call, seen_of: int) -> None:
    values = list(stream({"e": "status", "n": n, "text": "x" * (n % 700)} for n in range(600)))
    shown = [value for n, value in enumerate(values) if n % seen_of == 0 or n == len(values) - 1]
    assert call("tokens/reader.js", READ, shown) == ["begin", *range(600)]


def test_a_value_that_comes_late_or_with_a_gap_is_noticed(call: Call) -> None:
    one, other = (list(stream({"e": "status", "n": n, "text": "x" * 600} for n in range(200))) for _ in range(2))
    assert call("tokens/reader.js", READ, [one[0], one[-1]])[:3] == ["begin", 0, "lost"]
    assert call("tokens/reader.js", READ, [one[0], other[0], one[1]]) == ["begin", 0, "begin", 0]


# Charts and tables


@pytest.mark.parametrize(
    ("span", "shown"),
    [
        ((0, 1, 5), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0, 9, 4), ["0", "5"]),
        ((3, 41, 4), ["10", "20", "30", "40"]),
    ],
)
def test_ticks_are_round_numbers_in_as_few_digits_as_tell_them_apart(call: Call, span: Any, shown: list[str]) -> None:
    assert call("page/chart.js", "m.ticks(...given).map(tick => tick.text)", span) == shown


def test_ticks_can_be_written_in_another_unit(call: Call) -> None:
    assert call("page/chart.js", "m.ticks(0, 0.02, 4, 1000).map(tick => tick.text)") == ["0", "5", "10", "15", "20"]


def test_a_scale_maps_ends_to_ends(call: Call) -> None:
    assert call("page/chart.js", "[2, 4, 6].map(m.linear(2, 6, 100, 0))") == [100, 50, 0]


def test_a_line_that_grew_too_long_keeps_its_ends(call: Call) -> None:
    assert call("page/chart.js", "m.thinned([1, 2, 3, 4, 5, 6])") == [1, 3, 5, 6]


def test_names_at_the_ends_of_lines_do_not_touch(call: Call) -> None:
    ends = [{"name": "b", "x": 0, "at": 12}, {"name": "a", "x": 300, "at": 10}, {"name": "low", "x": 0, "at": 90}]
    moved = call("page/chart.js", "m.pushedApart(given)", ends)
    assert [(end["name"], end["at"]) for end in moved] == [("a", 10), ("b", 23), ("low", 90)]
    within = call("page/chart.js", "m.pushedApart(given, 95)", [*ends, {"name": "lower", "x": 0, "at": 92}])
    assert [(end["name"], end["at"]) for end in within] == [("a", 10), ("b", 23), ("low", 82), ("lower", 95)]


@pytest.mark.parametrize(("down", "order"), [(True, [3, 1, 2, 4]), (False, [1, 3, 2, 4])])
def test_lanes_without_a_figure_stay_last_in_the_table(call: Call, down: bool, order: list[int]) -> None:
    rows = [{"lane": lane, "n": n} for lane, n in ((1, 5), (2, None), (3, 9), (4, None))]
    assert (
        call("compare/table.js", "m.inOrder(given[0], row => row.n, given[1]).map(row => row.lane)", [rows, down])
        == order
    )


@pytest.mark.parametrize(
    ("count", "shown"), [(None, "–"), (970, "1.0\u2009kB"), (31_400_000, "31\u2009MB"), (2.5e9, "2.5\u2009GB")]
)
def test_bytes_in_two_digits(call: Call, count: float | None, shown: str) -> None:
    assert call("compare/table.js", "m.bytes(given)", count) == shown


def test_runs_of_equal_figures_come_newest_first(call: Call) -> None:
    rows = [
        {"number": n, "speedup": x, "method": w}
        for n, x, w in ((1, 2.0, "tree"), (2, None, "draft"), (3, 2.0, "draft"))
    ]
    order = "m.inOrder(given[0], given[1]).map(row => row.number)"
    assert call("history/history.js", order, [rows, {"key": "speedup", "down": True}]) == [3, 1, 2]
    assert call("history/history.js", order, [rows, {"key": "speedup", "down": False}]) == [2, 3, 1]
    assert call("history/history.js", order, [rows, {"key": "method", "down": False}]) == [3, 2, 1]


# Addresses


def test_an_address_says_what_differs_from_the_start(call: Call) -> None:
    names, start = ["prompt", "seed", "tree"], ["def f():", 0, "auto"]
    at = "https://a.example/play/?seed=3&other=1"
    for values, query in (
        (["def f():", 0, "auto"], "?other=1"),
        (["x & y", 7, "auto"], "?seed=7&other=1&prompt=x+%26+y"),
        (["x" * 2001, 0, "3x2"], "?other=1&tree=3x2"),
    ):
        found = call("playground/take_away.js", "m.addressOf(...given).search", [at, names, start, values])
        assert found == query
