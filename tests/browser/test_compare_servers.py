"""Running servers in Compare as a person uses them: chosen, read, measured under load, and hostile."""

from __future__ import annotations

from typing import Any

from driving import expect, fill_in, open_tab, set_number
from stand_in_servers import stand_in_server
from test_compare import COLUMN, compare, to_compare

HOSTILE = ["<img src=x onerror=alert(1)>", "</div>", " {{value}}", "\u202e", "\n", "<script>", "b", " c", " d", "."]
PIECES = """lane => [...document.querySelectorAll(`.comparison .pane[data-lane="${lane}"] .stream .swatch`)].map(
    t => [t.dataset.kind ?? null, t.textContent])"""
PANE = '.comparison .pane[data-lane="{}"]'


def choose_server(page: Any, lane: int, address: str) -> None:
    page.locator(".compare-lane").nth(lane - 1).get_by_label(f"Lane {lane}: pair").click()
    page.get_by_role("option", name="a running server\u2026").last.click()  # the list of a lane before may still fade
    fill_in(page.get_by_label(f"Address of lane {lane}"), address)


def test_servers_are_chosen_read_and_measured(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """Lane 1 is ours, lane 2 a server with hostile text, lane 3 one that says little, lane 4 breaks off."""
    with (
        stand_in_server("llama.cpp", words=HOSTILE) as hostile,
        stand_in_server("OpenAI-compatible", words=HOSTILE, steps=()) as silent,
        stand_in_server("llama.cpp", fault="not JSON") as broken,
    ):
        page = to_compare(visit(scripted[1]))
        page.locator("#compare-count").get_by_label("4").check()
        set_number(page, "New tokens", 16)
        for lane, server in ((2, hostile), (3, silent), (4, broken)):
            choose_server(page, lane, server.address)
        expect(page.locator(".compare-lane").nth(1).get_by_label("Lane 2: precision")).to_be_hidden()
        compare(page)
        assert page.inner_text(f"{PANE.format(2)} h2").startswith("2 llama.cpp b11549-abc")
        shown = page.evaluate(PIECES, "2")
        assert [text for _, text in shown][:3] == HOSTILE[:3] and shown[3][1] == "\u27e8U+202E\u27e9"
        assert [kind for kind, _ in shown][:4] == [None, "accepted", "accepted", "corrected"]
        assert {kind for kind, _ in page.evaluate(PIECES, "3")} == {None}
        assert "which tokens were drafted" in page.inner_text(f"{PANE.format(3)} .untold")
        assert "is not JSON" in page.inner_text(f"{PANE.format(4)} [role=alert]")
        assert "drafted" in page.evaluate(COLUMN, 3)[1] and "the server\u2019s clock" in page.evaluate(COLUMN, 1)[1]
        assert page.evaluate(COLUMN, 6)[2] == "as lane 2"

        page.locator("#compare-count").get_by_label("3").check()
        page.locator("#many-readers button").first.click()
        page.locator("#load-readers").get_by_label("4").uncheck()
        page.locator("#load-readers").get_by_label("8").uncheck()
        page.click("#load-run")
        page.wait_for_selector("#load-status [data-kind=finished]")
        page.wait_for_selector("#load-stop:disabled")
        assert "peculation" in page.inner_text("#load-status")
        page.wait_for_function("document.querySelectorAll('#load-plots .js-plotly-plot').length === 3")

        open_tab(page, "explain")
        page.click(".question[data-question=limits] > summary")
        page.click("#explain-costs [data-open=many-readers]")
        page.wait_for_selector("#load-row", state="visible")
        open_tab(page, "explain")
        page.click("#explain-costs [data-open=many-texts]")
        page.wait_for_selector("#many-row", state="visible")
        open_tab(page, "history")
        page.wait_for_selector(".history-list tbody tr")
        assert "+ " in page.inner_text(".history-list .history-method")

        page.get_by_role("button", name="Show number 1 in Compare").click()
        page.wait_for_selector(".comparison", state="visible")
        page.wait_for_function("document.querySelector('.comparison .status-why').innerText.includes('History')")
        assert page.inner_text(f"{PANE.format(2)} h2") == "2 Plain only"  # the one that broke off wrote nothing
        assert page.evaluate(PIECES, "3") == shown
        open_tab(page, "history")
        page.get_by_role("button", name="Show number 2 in Compare").click()
        page.wait_for_selector("#load-status [data-save='2']")
        with page.expect_download() as saved:
            page.click("#load-status [data-save]")
        assert saved.value.suggested_filename == "speculative-load-2.json"
