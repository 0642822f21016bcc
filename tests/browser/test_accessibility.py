"""An automated check (axe) of every tab, light and dark: no serious violation in what is ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from driving import run_to_end

TABS = ("Playground", "Compare", "Tune", "Explain", "History")
SERIOUS = ("serious", "critical")


@pytest.fixture
def axe() -> Any:
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


def violations(axe: Any, page: Any) -> Iterator[tuple[str, str, str]]:
    """Rule, element and what is wrong with it, for each serious violation."""
    response = axe.run(page).response
    assert len(response["passes"]) > 20  # it has looked
    for found in response["violations"]:
        if found["impact"] in SERIOUS:
            for node in found["nodes"]:
                yield found["id"], node["html"][:200], node["failureSummary"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_violation_on_any_tab(axe: Any, app: str, visit: Any, scheme: str) -> None:
    page = visit(f"{app}?__theme={scheme}", color_scheme=scheme)
    run_to_end(page)
    found = []
    for tab in TABS:
        page.get_by_role("tab", name=tab, exact=True).click()
        page.wait_for_timeout(300)
        found += [(tab, *each) for each in violations(axe, page)]
    assert not found, "\n".join(map(str, found))


def test_the_check_finds_what_is_wrong(axe: Any, app: str, visit: Any) -> None:
    page = visit(app)
    page.evaluate(
        "document.querySelector('.race').insertAdjacentHTML('beforeend', '<img src=\"data:,\"><button></button>')"
    )
    assert {rule for rule, *_ in violations(axe, page)} >= {"image-alt", "button-name"}
