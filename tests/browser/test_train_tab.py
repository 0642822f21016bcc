"""The tab Train as a person uses it: start, watch the curves and the coloured answer, stop, resume, race the head."""

from __future__ import annotations

from typing import Any

from driving import expect, open_tab, run_to_end, says, set_number, status, wait_idle

SHOWN = "document.querySelector('.training').dataset.state === 'idle'"

CROSSED = """() => {
    const word = document.querySelector(".training .worth-word").getBBox();
    const lines = [...document.querySelectorAll('[data-chart="speed"] .curve-line, [data-chart="speed"] .worth')];
    return lines.filter(line => {
        const whole = line.getTotalLength();
        return Array.from({ length: 400 }, (_, i) => line.getPointAtLength(i / 399 * whole)).some(({ x, y }) =>
            x > word.x && x < word.x + word.width && y > word.y + 2 && y < word.y + word.height - 2);
    }).length;
}"""


def lines(page: Any, chart: str) -> dict[str, int]:
    """How many points each line of a chart has."""
    return page.evaluate(
        """name => Object.fromEntries([...document.querySelectorAll(`[data-chart="${name}"] .curve-line`)].map(
            line => [line.dataset.lane, line.getAttribute("d").split(/[ML]/).length - 1]))""",
        chart,
    )


def choose_length(page: Any, length: str) -> None:
    page.get_by_label("Draft length", exact=True).click()
    page.locator("li").and_(page.get_by_role("option", name=length, exact=True)).click()


def test_a_head_is_trained_stopped_resumed_and_raced(app: str, visit: Any) -> None:
    page = visit(app)
    open_tab(page, "train")
    page.wait_for_selector("#train-words p")
    assert "writes texts of its own" in page.inner_text("#train-words")
    assert page.is_disabled("#train-resume") and page.is_disabled("#train-stop") and not page.is_visible("#train-kept")

    set_number(page, "Train for", 30)
    page.click("#train-start")
    page.wait_for_selector('.training .pane[data-lane="now"] .t')
    page.click("#train-stop")
    page.wait_for_function(SHOWN)
    assert "nothing is lost" in page.inner_text(".training .status-text")
    drawn = lines(page, "acceptance")
    assert set(drawn) == {"1st", "2nd", "3rd", "4th", "5th"} and min(drawn.values()) >= 2
    assert page.text_content(".training .worth-word") == "worth using from here"
    assert page.evaluate(CROSSED) == 0, "no line runs through the word"
    texts = page.evaluate(
        """() => ["before", "now"].map(name => document.querySelector(".training").view.lanes[name].pane.text)"""
    )
    assert texts[0] == texts[1] != ""

    page.wait_for_selector("#train-resume:not([disabled])")
    page.get_by_label("thousand tokens").check()
    set_number(page, "Train for", 1)
    page.click("#train-resume")
    page.wait_for_selector(".training .status[data-kind='finished']")
    assert min(lines(page, "acceptance").values()) > min(drawn.values())
    says(page, "[data-number='accepted'] small", "on each")

    page.select_option("[data-method]", "ngram")
    choose_length(page, "7")
    page.click("#train-race")
    page.wait_for_selector("#run", state="visible")
    page.wait_for_selector("#speculative-stream .t[data-q]", state="attached")  # a rejected guess is folded away
    wait_idle(page)
    assert page.is_checked('#method input[value="head"]')
    assert "Identical" in status(page)
    assert "“Race it” changed your settings: the new head as draft, method Trained head" in page.inner_text("#lent")
    page.click("#lent button")
    page.wait_for_selector("#lent", state="hidden")
    expect(page.locator('#method input[value="ngram"]')).to_be_checked()
    expect(page.get_by_label("Draft length", exact=True)).to_have_value("7")
    says(page, ".race .past", "what is chosen now has not run yet")
    page.wait_for_function("!document.querySelector('#pair input').value.startsWith('other')")
    page.wait_for_selector('#method input[value="draft"]')
    run_to_end(page)
    run = page.evaluate("document.querySelector('.race').race.documents.speculative.settings")
    assert (run["method"], run["draft_length"]) == ("ngram", 7)


def test_a_block_drafter_is_trained_and_raced(app: str, visit: Any) -> None:
    page = visit(app)
    open_tab(page, "train")
    page.get_by_label("DSpark", exact=True).check()
    page.wait_for_function("document.querySelector('#train-words').innerText.includes('a DSpark head of one layer')")
    page.get_by_label("thousand tokens").check()
    set_number(page, "Train for", 1)
    page.click("#train-start")
    page.wait_for_selector(".training .status[data-kind='finished']")
    assert set(lines(page, "acceptance")) == {"1st", "2nd", "3rd", "4th", "5th"}
    page.wait_for_selector("#train-kinds .legendtext")
    assert page.locator("#train-kinds .legendtext").all_text_contents() == ["EAGLE-3", "DSpark"]
    page.click("#train-production button")
    page.wait_for_selector("#train-vllm pre", state="visible")
    assert '"method": "dspark"' in page.inner_text("#train-vllm")

    page.click("#train-race")
    page.wait_for_selector("#run", state="visible")
    page.wait_for_selector("#speculative-stream .t[data-q]", state="attached")
    wait_idle(page)
    assert page.is_checked('#method input[value="block"]')
    assert "Identical" in status(page)
