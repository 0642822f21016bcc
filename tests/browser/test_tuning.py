"""The tab Tune as a person uses it: choose, run, stop, read the charts, take the setting and the commands along."""

from __future__ import annotations

import json
from typing import Any

import pytest
from driving import expect, fill_in, open_tab

DRAWN = (
    "id => { const { data } = document.querySelector(`${id} .js-plotly-plot`); return data.map(t => [t.name, t.y]); }"
)
STATUS = "#tune-status .status-line"


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    page = visit(scripted[1], permissions=["clipboard-read", "clipboard-write"])
    open_tab(page, "tune")
    return page


@pytest.fixture(scope="module")
def swept(scripted: tuple[Any, str], visit_once: Any) -> Any:
    """A page after a sweep, for tests that look at it, and for the last that takes its setting."""
    page = visit_once(scripted[1], permissions=["clipboard-read", "clipboard-write"])
    open_tab(page, "tune")
    sweep(page)
    return page


def sweep(page: Any) -> None:
    page.click("#tune-run")
    page.wait_for_selector(f"{STATUS}[data-kind='finished']")
    for at in range(3):
        page.wait_for_selector(f"#tune-plot-{at} .js-plotly-plot .main-svg")


def test_before_a_sweep_the_tab_says_what_will_happen_and_what_is_missing(page: Any) -> None:
    assert "A sweep measures each draft length" in page.inner_text("#tune-empty")
    assert "80 runs of 48 tokens" in page.inner_text(STATUS)
    page.locator("#tune-lengths").get_by_label("8", exact=True).uncheck()
    page.wait_for_function("document.querySelector('#tune-status').innerText.includes('70 runs')")
    page.click("#tune-own button")
    page.wait_for_selector("#tune-own label >> text=a line of --- ends one and begins the next")
    fill_in(page.locator("#tune-own-text textarea"), "Mine.\nOf two lines.")
    page.wait_for_function("document.querySelector('#tune-status').innerText.includes('84 runs')")
    page.fill("#tune-own-text textarea", "Mine.\n---\nMine too.")
    page.wait_for_function("document.querySelector('#tune-status').innerText.includes('98 runs')")
    assert "3 times at most" in page.inner_text(STATUS)
    assert not page.locator("#tune-results").is_visible()
    for name in ("0", "1"):
        page.locator("#tune-temperatures").get_by_label(name, exact=True).uncheck()
    page.wait_for_function("document.querySelector('#tune-status').innerText.includes('Choose at least one')")
    page.click("#tune-run")
    page.wait_for_selector(f"{STATUS}[data-kind='error'] [role='alert']")
    assert "A sweep needs at least one" in page.inner_text(STATUS)
    page.locator("#tune-temperatures").get_by_label("0", exact=True).check()
    sweep(page)


def test_a_sweep_ends_in_charts_a_setting_and_commands_to_copy(swept: Any) -> None:
    page = swept
    assert not page.locator("#tune-empty").is_visible()
    document = sweep_document(page)
    measured = dict(page.evaluate(DRAWN, "#tune-plot-0"))["measured"]
    here = [point for point in document["points"] if point["temperature"] == 0]
    assert measured == [point["ratio_to_plain"]["median"] for point in here if point["draft_length"] != "auto"]
    best = next(best for best in document["best"] if best["temperature"] == 0)
    assert f"Draft length {best['recommended']}" in page.inner_text("#tune-recommendation")
    assert f"{best['ratio_to_plain']:.2f}× plain" in page.inner_text("#tune-recommendation")
    for at in range(3):
        assert page.inner_text(f"#tune-reading-{at}").endswith(".")
    assert f'"num_speculative_tokens": {best["draft_length"]}' in page.inner_text("#recipe-vllm code")
    assert max(words_colour(page)) < 130, "dark on light"
    page.click('#tune-engines [role="tab"][data-tab-id="engine-sglang"]')
    page.click("#copy-recipe-sglang")
    page.wait_for_function("document.querySelector('.take-away .notice').innerText.includes('The command is copied')")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.evaluate("document.querySelector('#recipe-sglang code').textContent")
    assert copied.startswith("python3 -m sglang.launch_server")


def words_colour(page: Any) -> list[int]:
    """Red, green and blue of the words of a chart."""
    return page.evaluate(
        "getComputedStyle(document.querySelector('#tune-plot-0 .xtick text')).fill.match(/\\d+/g).map(Number)"
    )


def sweep_document(page: Any) -> dict[str, Any]:
    """The document that the page offers to take away."""
    with page.expect_download() as download:
        page.click("#tune-download")
    return json.loads(download.value.path().read_text())


def test_another_temperature_shows_its_own_figures_and_use_it_takes_its_setting(swept: Any) -> None:
    page = swept
    page.locator("#tune-shown").get_by_label("1", exact=True).check()
    page.wait_for_function("document.querySelector('#tune-recommendation').innerText.includes('temperature 1')")
    document = sweep_document(page)
    here = [p["ratio_to_plain"]["median"] for p in document["points"] if p["temperature"] == 1]
    page.wait_for_function(
        "y => document.querySelector('#tune-plot-0 .js-plotly-plot')?.data?.[0].y[0] === y", arg=here[0]
    )
    assert dict(page.evaluate(DRAWN, "#tune-plot-0"))["measured"] == here[:-1]
    best = next(best for best in document["best"] if best["temperature"] == 1)
    page.click("#tune-use-it")
    page.wait_for_selector("#run", state="visible")
    expect(page.get_by_label("number input for Temperature")).to_have_value("1")
    expect(page.get_by_label("Draft length", exact=True)).to_have_value(str(best["recommended"]))
    expect(page.get_by_label("Draft model")).to_be_checked()


def test_where_speculation_loses_use_it_means_plain(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """In the dark, where the words of charts are light."""
    engine.acceptance = 0.06
    page = visit(scripted[1], dark=True)
    open_tab(page, "tune")
    sweep(page)
    assert min(words_colour(page)) > 130
    assert "Plain decoding is faster here" in page.inner_text("#tune-recommendation")
    page.click("#tune-use-it")
    page.wait_for_selector("#run", state="visible")
    expect(page.get_by_label("Plain only")).to_be_checked()


def test_progress_is_shown_and_stop_keeps_what_was_measured(page: Any, engine: Any) -> None:
    engine.halts_at = 0.6
    assert page.is_disabled("#tune-stop")
    page.click("#tune-run")
    page.wait_for_selector(f"{STATUS} progress")
    page.wait_for_function("document.querySelector('#tune-status progress')?.position > 0.55")
    page.click("#tune-stop")
    page.wait_for_selector(f"{STATUS}[data-kind='stopped']")
    assert "What was measured until then is shown" in page.inner_text(STATUS)
    page.wait_for_selector("#tune-recommendation .tune-head")
    page.wait_for_selector("#tune-stop:disabled")
    assert {point["temperature"] for point in sweep_document(page)["points"]} == {0}


def test_a_real_sweep_of_a_tiny_pair(app: str, visit: Any) -> None:
    page = visit(app)
    open_tab(page, "tune")
    for length in ("1", "3", "6", "8"):
        page.locator("#tune-lengths").get_by_label(length, exact=True).uncheck()
    page.locator("#tune-temperatures").get_by_label("1", exact=True).uncheck()
    fill_in(page.get_by_label("New tokens").nth(1), "16")
    sweep(page)
    document = sweep_document(page)
    assert [point["draft_length"] for point in document["points"]] == [2, 4, "auto"]
    costs = {int(n): seconds for n, seconds in document["costs"].items()}
    curve = dict(page.evaluate(DRAWN, "#tune-plot-1"))["measured"]
    assert curve == pytest.approx([costs[n] / costs[1] for n in sorted(costs)])
    assert max(costs) == 64
