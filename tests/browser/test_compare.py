"""The tab Compare as a person uses it: lanes are chosen, run, sorted and stopped; figures are held to the documents."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from driving import expect, fill_in, open_tab, says, set_number
from gradio_client import Client
from test_hostile import HOSTILE, PICTURES

from core.text import read_prompts

VIEW = "document.querySelector('.comparison').view"
SHOWN = """lane => [...document.querySelectorAll(`.comparison .pane[data-lane="${lane}"] .t:not(.mark)`)].map(
    t => [t.dataset.outcome, t.textContent])"""
COLUMN = "n => [...document.querySelectorAll('.comparison tbody tr')].map(row => row.children[n].innerText)"
FIGURES = (
    "() => [...document.querySelectorAll('.comparison tbody tr')].map(row => row.children[2].firstChild.textContent)"
)
TOLD = r"Lane \d, .*(is the fastest|about as fast|is ahead of lanes? [\d, and]+): \d+ tokens/s"


def to_compare(page: Any) -> Any:
    open_tab(page, "compare")
    page.wait_for_function("document.querySelector('.comparison')?.view")
    page.wait_for_selector("#compare-run")
    return page


def compare(page: Any) -> None:
    page.click("#compare-run")
    wait_over(page)


def wait_over(page: Any) -> None:
    page.wait_for_function(
        "document.querySelector('.comparison').dataset.state === 'idle'"
        " && !['idle', 'starting'].includes(document.querySelector('.comparison .status').dataset.kind)"
    )


def wait_charts(page: Any, count: int) -> None:
    page.wait_for_function(f"document.querySelectorAll('#compare-plots .js-plotly-plot').length === {count}")


def status(page: Any) -> str:
    return page.inner_text(".comparison .status-text")


def choose(page: Any, lane: int, label: str, option: str) -> None:
    page.locator(".compare-lane").nth(lane - 1).get_by_label(label).click()
    page.locator("li").and_(page.get_by_role("option", name=option, exact=True)).click()  # not those of a select


def as_shown(figure: float, digits: int) -> str:
    """As JavaScript's toFixed rounds: halves away from zero, Python's to even."""
    return str(Decimal(figure).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def choose_prompts(page: Any, kind: str) -> None:
    page.locator("#compare-kind input").click()
    page.get_by_role("option", name=kind).click()
    page.wait_for_selector("#compare-prompts li")


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    return to_compare(visit(scripted[1]))


@pytest.fixture(scope="module")
def shared(scripted: tuple[Any, str], visit_once: Any) -> Any:
    """A page for tests that compare the lanes it begins with, whatever was compared before."""
    return to_compare(visit_once(scripted[1]))


def test_lanes_race_and_the_table_holds_their_figures(app: str, visit: Any) -> None:
    page = to_compare(visit(app))
    fill_in(page.locator("#compare-prompt textarea"), "def make_pair(folder):\n")
    set_number(page, "New tokens", 48)
    choose(page, 1, "Draft length", "4")  # auto may find that drafting does not pay on this pair, and draft nothing
    compare(page)
    documents = page.evaluate(f"{VIEW}.runs")
    assert [documents[lane]["0"]["settings"]["method"] for lane in "1234"] == ["draft", "ngram", "early-exit", "plain"]
    for lane in "1234":
        run = documents[lane]["0"]
        tokens = [t for r in run["rounds"] for t in [*r["drafted"], *([r["emitted"]] if r["emitted"] else [])]]
        assert [row[0] for row in page.evaluate(SHOWN, lane)] == [t["outcome"] for t in tokens]
        assert len(run["token_ids"]) == 48
    metrics = [documents[lane]["0"]["metrics"] for lane in "1234"]
    speeds = [each["tokens_per_second"] for each in metrics]
    assert page.evaluate(COLUMN, 1) == [as_shown(s, 1 if s < 100 else 0) for s in speeds]
    ratios = [speed / speeds[3] for speed in speeds]
    assert [float(cell) for cell in page.evaluate(FIGURES)] == pytest.approx(ratios, abs=6e-3)
    assert page.evaluate(COLUMN, 4) == [as_shown(each["tokens_per_round"], 2) for each in metrics]
    assert page.evaluate(COLUMN, 6) == ["identical"] * 3 + ["the baseline"]
    assert re.search(TOLD, status(page))
    wait_charts(page, 1)  # one speed a lane is no chart
    shown = page.evaluate(FIGURES)[0]
    heads = page.locator(".comparison thead .sort").all_inner_texts()
    open_tab(page, "history")
    page.wait_for_selector(".history-list tbody tr")
    column = page.locator(".history-list thead th").all_inner_texts().index("Speed-up")
    assert page.locator(".history-list tbody td").nth(column).inner_text() == f"{shown}×"
    assert "speed-up" in heads, "by the same name"


def test_other_targets_run_in_turn_and_a_lane_that_fails_says_why(app: str, visit: Any) -> None:
    """Lane 2 is the same target in another precision, lane 3 cannot be loaded; two baselines come on top."""
    page = to_compare(visit(app))
    set_number(page, "New tokens", 16)
    page.locator("#compare-count").get_by_label("3").check()
    choose(page, 1, "Draft length", "4")
    choose(page, 2, "Precision", "bf16")
    choose(page, 3, "Lane 3: pair", "other…")
    fill_in(page.get_by_label("Target of lane 3"), "/nowhere/at/all")
    choose_prompts(page, "repetitive")
    compare(page)
    assert "Lane 2 needs the target in another precision" in page.inner_text(".comparison .status-why")
    assert "There is no folder '/nowhere/at/all'" in page.inner_text('.comparison .pane[data-lane="3"] [role="alert"]')
    rows = page.evaluate(COLUMN, 0)
    assert [row[0] for row in rows] == list("12345")
    assert "added as the baseline" in rows[3] and "added as the baseline" in rows[4]
    assert page.evaluate(COLUMN, 1)[2] == "–"
    assert " to " in page.evaluate(COLUMN, 2)[0]  # the spread over three prompts
    wait_charts(page, 2)

    first = page.evaluate(SHOWN, 1)
    assert "prompt 3 of 3" in page.inner_text(".comparison .prompt-steps")
    page.get_by_role("button", name="Next prompt").click()
    assert "prompt 1 of 3" in page.inner_text(".comparison .prompt-steps")
    assert page.evaluate(SHOWN, 1) != first
    page.get_by_role("button", name="Previous prompt").click()
    assert page.evaluate(SHOWN, 1) == first


def test_hostile_text_stays_text_in_every_lane(shared: Any, engine: Any) -> None:
    page = shared
    engine.texts = HOSTILE
    title = page.title()
    compare(page)
    expected = [PICTURES.get(text, text) for text in HOSTILE]
    assert [row[1] for row in page.evaluate(SHOWN, 3)][: len(HOSTILE)] == expected
    assert page.title() == title


def test_the_table_is_sorted_by_any_column(shared: Any, engine: Any) -> None:
    page = shared
    compare(page)
    assert [row[0] for row in page.evaluate(COLUMN, 0)] == list("123")
    head = page.locator(".comparison thead th").nth(2)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    ratios = [float(cell) for cell in page.evaluate(FIGURES)]
    assert ratios == sorted(ratios, reverse=True)
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(cell) for cell in page.evaluate(FIGURES)] == sorted(ratios)


def test_stop_keeps_what_is_finished(page: Any, engine: Any) -> None:
    engine.pace = 0.3
    choose_prompts(page, "all")
    assert page.is_disabled("#compare-stop")
    page.click("#compare-run")
    page.wait_for_function("document.querySelector('.comparison .status-text').textContent.includes('Prompt 2')")
    engine.pace = 20.0
    page.click("#compare-stop")
    wait_over(page)
    assert page.is_disabled("#compare-stop")
    assert status(page).startswith("Stopped.")
    found = re.search(r"Over (\d+) of (\d+) prompts", page.inner_text(".comparison caption"))
    finished = int(found[1])
    assert 1 <= finished < int(found[2]) == len(read_prompts())
    documents = page.evaluate(f"{VIEW}.runs")
    done = [sum(run["stop_reason"] != "cancelled" for run in documents[lane].values()) for lane in "123"]
    assert max(done) == finished, "of the lane that came furthest"
    assert min(done) >= max(1, finished - 1), "no lane begins a prompt that another has not finished before"
    assert "–" not in page.evaluate(COLUMN, 1)


def test_keys_compare_and_leave_the_playground_alone(page: Any, engine: Any) -> None:
    engine.pace = 20.0
    page.focus("#compare-prompt textarea")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".comparison .t")
    page.keyboard.press("Escape")
    wait_over(page)
    assert status(page).startswith("Stopped.")
    assert page.locator("#speculative-stream .t").count() == 0
    page.focus(".comparison .t[tabindex='0']")
    assert page.locator("#comparison-card").is_visible()


def test_as_many_columns_as_lanes(page: Any) -> None:
    page.locator("#compare-count").get_by_label("2").check()
    page.wait_for_function("document.querySelectorAll('.comparison .pane:not([hidden])').length === 2")
    page.wait_for_function(
        "[...document.querySelectorAll('.compare-lane')].filter(e => e.checkVisibility()).length === 2"
    )
    page.set_viewport_size({"width": 1280, "height": 720})
    places = page.evaluate(
        "[...document.querySelectorAll('.compare-lane .lane-length')].map(e => e.getBoundingClientRect().right)"
    )
    assert 0 < max(places) <= 1280
    page.hover("#compare-count")
    says(page, "#help p", "How many ways to decode")
    choose(page, 2, "Method", "Draft model")
    choose(page, 2, "Draft length", "3")
    compare(page)
    assert [row.split("\n")[0] for row in page.evaluate(COLUMN, 0)] == [
        "1 Draft model, length 5",
        "2 Draft model, length 3",
        "3 Plain only",
    ]
    assert "Plain decoding runs as well" in page.inner_text(".comparison .status-why")
    assert re.search(TOLD, status(page))
    number = status(page).split()[1].rstrip(",")
    page.click(f"#compare-use:has-text('Use lane {number}')")
    page.wait_for_selector("#run", state="visible")
    expect(page.get_by_label("Draft length", exact=True).first).to_have_value({"1": "5", "2": "3"}[number])


def test_what_cannot_be_is_one_sentence(shared: Any, engine: Any) -> None:
    page = shared
    fill_in(page.locator("#compare-prompt textarea"), "  ")
    compare(page)
    assert status(page).startswith("The prompt is empty")
    assert page.get_attribute(".comparison .status", "role") == "alert"
    page.fill("#compare-prompt textarea", "def f():\n")
    compare(page)
    assert "Lane 1" in status(page)


def test_the_api_compares_too(app: str) -> None:
    """The same rows and documents for whoever calls the page from a program, or one sentence."""
    client = Client(app, verbose=False)
    lanes = [{"method": "draft", "draft_length": 3}, {"method": "plain"}]
    found = client.predict(lanes=lanes, prompt="def f(x):\n", max_new_tokens=12, api_name="/compare")
    assert [row["method"] for row in found["rows"]] == ["draft", "plain"]
    one, other = found["document"]["runs"]
    assert one["token_ids"] == other["token_ids"]
    with pytest.raises(Exception, match="Lane 2: There is no method 'magic'"):
        client.predict(lanes=[{}, {"method": "magic"}], prompt="x", api_name="/compare")
