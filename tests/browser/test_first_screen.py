"""What a newcomer sees: a real chat model answers a question in both panes; and other models by a path."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from driving import fill_in, free_port, run_to_end, says, set_number, status, wait_idle

from app.playground import chip_prompts
from app.serving.first_screen import first_screen

sys.path.append(str(Path(__file__).parents[1] / "core"))
CARD = "#pair-card .pair-card"


@pytest.fixture
def page(real_app: str, visit: Any) -> Any:
    return visit(real_app)


def test_a_start_is_watched_until_the_page_is_there(chromium: Any) -> None:
    """The screen shows what is told, and gives way to whatever answers in its place."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path.endswith("starting") else 200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<h2>The page</h2>")

    page = chromium.new_page()
    try:
        with first_screen("127.0.0.1", free_port(), print) as (tell, port):
            page.goto(f"http://127.0.0.1:{port}")
            for line in ("Reading a model: 1 MB of 2 MB", "Reading a model: 2 MB of 2 MB"):
                tell(line)
                page.wait_for_selector(f"[role=status] >> text={line}")
        with HTTPServer(("127.0.0.1", port), Page) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            page.wait_for_selector("h2 >> text=The page")
            server.shutdown()
    finally:
        page.close()


def test_a_question_is_answered_in_both_panes(page: Any) -> None:
    """An n-gram drafts before the trained head, and they go on to where another precision is chosen, which has not been
    loaded."""
    header = page.inner_text("#header")
    assert "SmolLM2-135M-Instruct" in header and "from Q4_1" in header
    assert page.input_value("#prompt textarea") == chip_prompts(chat=True)[0].text
    page.wait_for_selector(f"{CARD}[data-level=good]")
    set_number(page, "New tokens", 48)
    run_to_end(page)
    spoken, plain = (page.inner_text(f"#{lane}-stream") for lane in ("speculative", "plain"))
    assert len(plain.split()) > 20 and len(spoken.split()) > 20
    runs = page.evaluate("Object.values(document.querySelector('.race').race.documents)")
    assert {run["settings"]["target"] for run in runs} == {"smollm2"}
    assert "<|im_start|>" not in plain
    assert status(page)
    page.locator("#precision input").click()
    page.get_by_role("option").filter(has_text="fp32").click()
    page.wait_for_function("document.querySelector('#header').innerText.includes('loads with the next run')")
    page.wait_for_function("document.querySelector('.race .past').innerText.includes('has not run yet')")
    page.wait_for_function("document.querySelector('#pair-card').innerText.includes('Draft')")
    assert page.is_checked('#method input[value="ngram+head"]')
    assert "SmolLM2-135M-Instruct" in page.inner_text("#header")
    page.locator("#gpu input").click()
    page.get_by_role("option", name="RTX 4070", exact=True).click()
    page.wait_for_selector(
        ".outlook >> text=of what it guesses is accepted, as measured on eight chat messages, greedy"
    )


def test_with_all_open_nothing_is_cut(page: Any) -> None:
    """The four numbers beside the shipped example, and the last line of the side panel that is in sight."""
    page.wait_for_function("document.querySelector('.race .past').innerText.startsWith('An example')")
    whole = """width => { const column = document.querySelector(".race .numbers").getBoundingClientRect();
        const seen = [...document.querySelectorAll(".race .number")].map(each => each.getBoundingClientRect());
        const all = seen.length === 4 && seen.every(each => Math.round(column.bottom - each.bottom) >= 0);
        return innerWidth === width && all; }"""
    for width in (1440, 1152):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(whole, arg=width)
        behind = "getComputedStyle(document.querySelector('#help'), '::before').backgroundImage"
        assert "gradient" in page.evaluate(behind)
        page.wait_for_selector(".help >> text=Point at a control")


def test_an_example_of_another_prompt_says_so(real_app: str, visit: Any) -> None:
    """A link brings its own prompt; the panes below show that of the example, until it is run."""
    page = visit(f"{real_app}?prompt=Say%20hello.")
    says(page, ".race .past", "An example, of another prompt than yours, recorded on")
    page.locator(".prompt-chips:visible .chip").first.click()
    page.wait_for_function("document.querySelector('.race .past').innerText.startsWith('An example, recorded on')")


def test_eight_messages_and_what_each_shows(page: Any) -> None:
    chips = page.locator(".prompt-chips:visible .chip")
    assert chips.count() == 8
    for i in range(8):
        before = page.inner_text("#prompt-note") if i else ""
        chips.nth(i).click()
        page.wait_for_function("before => document.querySelector('#prompt-note').innerText !== before", arg=before)
    chips.filter(has_text="Sunset").click()
    page.wait_for_function("document.querySelector('#temperature input').value === '1'")
    chips.first.click()
    page.wait_for_function("document.querySelector('#temperature input').value === '0'")


def test_the_bundled_pair_keeps_its_own(page: Any) -> None:
    names = page.locator(".prompt-chips:visible .chip").all_inner_texts()
    page.locator("#pair input").click()
    page.get_by_role("option").filter(has_text="pocket").click()
    page.wait_for_selector(".prompt-chips:visible .chip >> text=Graph search")
    assert page.locator(".prompt-chips:visible .chip").all_inner_texts() != names
    page.wait_for_selector(
        "text=Method changed to Draft model; not N-gram, then head: no trained head of the target is named."
    )


def test_a_file_is_looked_at_by_its_path(page: Any, tmp_path: Path) -> None:
    """Its header tells the card what it is; a broken one is a sentence, and the page goes on: the other one is run."""
    from written_gguf import write_gguf

    page.fill("#prompt textarea", "Two and two make")
    set_number(page, "New tokens", 16)
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    (tmp_path / "short.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:20_000])
    page.locator("#pair input").click()
    page.get_by_role("option").filter(has_text="other…").click()
    field = page.locator("#pair-target textarea, #pair-target input")
    fill_in(field, str(tmp_path / "short.gguf"))
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('.pair-card').innerText.includes('cut short')")
    run_to_end(page)
    assert "cut short" in status(page)
    field.fill(str(tmp_path / "tiny.gguf"))
    page.keyboard.press("Tab")
    page.wait_for_selector(f"{CARD}[data-level=good]")
    page.click("#run")
    page.wait_for_function("document.querySelector('#header').innerText.includes('from Q8_0')")
    wait_idle(page)
    assert status(page) == "Identical, bit for bit."
    assert not page.get_by_test_id("toast-text").count(), "the head, which this pair has not, was asked for once more"
