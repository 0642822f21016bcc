"""An automated check (axe) of every tab with something in it, light and dark: no serious violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from driving import open_tab, run_to_end
from stand_in_servers import stand_in_server
from test_compare_servers import choose_server

SERIOUS = ("serious", "critical")
GRADIOS = {("aria-prohibited-attr", '<div aria-label="Empty value" class="empty')}
"""What Gradio's own elements break: rule, and how the element begins. This one is a plot before its figure."""


@pytest.fixture
def axe() -> Any:
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


def violations(axe: Any, page: Any, rules: list[str] | None = None) -> Iterator[tuple[str, str, str]]:
    """Rule, element and what is wrong with it, for each serious violation of all rules, or of these."""
    only = {"runOnly": rules} if rules else {}
    response = axe.run(page, options={"resultTypes": ["violations"], **only}).response
    assert len(response["passes"]) >= (1 if rules else 20)  # it has looked
    for found in response["violations"]:
        if found["impact"] in SERIOUS:
            for node in found["nodes"]:
                if any(found["id"] == rule and node["html"].startswith(start) for rule, start in GRADIOS):
                    continue
                yield found["id"], node["html"][:200], node["failureSummary"]


def at_rest(page: Any) -> None:
    """Wait until nothing moves any more but what does so for ever."""
    page.wait_for_function(
        """() => new Promise(requestAnimationFrame).then(() => document.getAnimations().every(
            each => each.playState !== "running" || each.effect.getComputedTiming().endTime === Infinity))"""
    )


def compare(page: Any) -> None:
    """A lane of somebody else's server among ours, and that server with a reader at a time."""
    with stand_in_server("llama.cpp") as server:
        choose_server(page, 2, server.address)
        page.click("#compare-run")
        page.wait_for_selector(".comparison tbody tr")
        page.wait_for_function("document.querySelector('.comparison').dataset.state === 'idle'")
        page.locator("#many-readers button").first.click()
        for readers in ("2", "4", "8"):
            page.locator("#load-readers").get_by_label(readers, exact=True).uncheck()
        page.click("#load-run")
        page.wait_for_selector("#load-status [data-kind=finished]")


def tune(page: Any) -> None:
    page.locator("#tune-own button").first.click()
    page.fill("#tune-own-text textarea", "Mine.\n---\nMine too.")
    page.click("#tune-run")
    page.wait_for_selector("#tune-plot-2 .js-plotly-plot .main-svg")


def train(page: Any) -> None:
    page.click("#train-start")
    page.wait_for_selector(".training .status[data-kind='finished']")
    page.locator("#train-production button").first.click()
    page.wait_for_selector("#train-vllm pre")


FILLED: dict[str, Callable[[Any], Any]] = {
    "Playground": lambda page: page.locator("#speculative-stream .t").first.click(),
    "Compare": compare,
    "Tune": tune,
    "Train": train,
    "Explain": lambda page: page.wait_for_selector("#explain-walk .steps"),
    "History": lambda page: page.wait_for_selector(".history tbody tr"),
}


def test_no_serious_violation_on_any_tab(axe: Any, scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """All rules on the light page; on the dark one, which differs by its colours alone, those of contrast."""
    page = visit(f"{scripted[1]}?__theme=light")
    page.add_style_tag(content="*, ::before, ::after { transition: none !important }")
    run_to_end(page)
    found = []
    for tab, fill in FILLED.items():
        open_tab(page, tab.lower())
        fill(page)
        at_rest(page)
        found += [(tab, *each) for each in violations(axe, page)]
        page.evaluate("document.body.classList.add('dark')")
        at_rest(page)
        found += [(f"{tab}, dark", *each) for each in violations(axe, page, ["color-contrast"])]
        page.evaluate("document.body.classList.remove('dark')")
    assert not found, "\n".join(map(str, found))


def test_the_check_finds_what_is_wrong(axe: Any, scripted: tuple[Any, str], visit: Any) -> None:
    page = visit(scripted[1])
    page.evaluate(
        """document.querySelector('.race').insertAdjacentHTML('beforeend', '<img src="data:,"><button></button>')"""
    )
    assert {rule for rule, *_ in violations(axe, page)} >= {"image-alt", "button-name"}
    page.evaluate("document.body.classList.add('dark'); document.querySelector('#header').style.color = '#222'")
    assert {rule for rule, *_ in violations(axe, page, ["color-contrast"])} == {"color-contrast"}
