"""Gradio's elements are still built as our looks and scripts take them to be."""

from __future__ import annotations

import re
import threading
from typing import Any

import gradio as gr
import uvicorn
from driving import free_port, open_tab, run_to_end, visitors
from fastapi import FastAPI
from test_compare import choose, choose_prompts

from app.assets import address, asset, modules
from app.page import build, launch_options

SELECTORS = """sheet => {
    const found = new CSSStyleSheet();
    found.replaceSync(sheet);
    const rules = [...found.cssRules].flatMap(rule => rule.selectorText ? [rule] : [...rule.cssRules]);
    return rules.flatMap(rule => rule.selectorText.split(", "));
}"""
MISSING = "selectors => selectors.filter(each => !document.querySelector(each.replace(/::[-a-z]+$/, '')))"
KEPT = """() => performance.getEntriesByType("resource").filter(each => each.name.includes("/scripts/"))
    .map(each => [each.name.split("/scripts/")[1].split("/").slice(1).join("/"), each.transferSize])"""
GRADIOS = """() => performance.getEntriesByType("resource")
    .filter(each => new URL(each.name).pathname.startsWith("/assets/")).map(each => each.transferSize)"""
LEAVE = """async () => {
    localStorage.setItem("left", "mine");
    sessionStorage.setItem("left", "mine");
    document.cookie = "left=mine; max-age=60";
    await caches.open("left");
}"""
LEFT = """async () => [
    localStorage.getItem("left"), sessionStorage.getItem("left"),
    document.cookie.includes("left"), await caches.has("left"),
]"""


def test_every_selector_finds_what_it_was_written_for(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(f"{scripted[1]}?__theme=dark")
    left = page.evaluate(SELECTORS, asset("page/gradio.css"))
    assert len(left) > 50
    left = page.evaluate(MISSING, left)
    page.click("#gpu input")
    page.get_by_role("option").nth(1).click()
    page.wait_for_selector("#outlook .outlook")
    left = page.evaluate(MISSING, left)
    open_tab(page, "explain")
    page.wait_for_selector("#explain-empty .lead")
    left = page.evaluate(MISSING, left)
    open_tab(page, "playground")
    run_to_end(page)
    page.click("[data-present-toggle]")
    left = page.evaluate(MISSING, left)
    page.click("[data-present-toggle]")
    open_tab(page, "explain")
    page.wait_for_selector("#explain-walk .steps")
    left = page.evaluate(MISSING, left)
    open_tab(page, "compare")
    choose_prompts(page, "repetitive")
    choose(page, 1, "Lane 1: pair", "a running server…")
    page.wait_for_selector(".compare-lane .lane-server", state="visible")
    page.locator("#many-readers button").first.click()
    page.wait_for_selector("#load-status p")
    left = page.evaluate(MISSING, left)
    open_tab(page, "history")
    page.wait_for_selector(".history")
    left = page.evaluate(MISSING, left)
    open_tab(page, "tune")
    page.wait_for_selector("#tune-empty p")
    left = page.evaluate(MISSING, left)
    page.click("#tune-run")
    page.wait_for_selector("#tune-plot-2 .js-plotly-plot .main-svg")
    left = page.evaluate(MISSING, left)
    open_tab(page, "train")
    page.click("#train-start")
    page.wait_for_selector("#train-kept")
    left = page.evaluate(MISSING, left)
    page.click("#train-race")
    page.wait_for_selector("#lent p")
    left = page.evaluate(MISSING, left)
    assert not left, left


def test_scripts_find_the_sidebar_its_infos_and_the_tabs(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1])
    module = f"const m = await import('./{address('page/gradio.js')}')"
    info = page.evaluate(f"async () => {{ {module}; return m.infoOf(document.querySelector('#method label')); }}")
    assert "last word" in info
    for tab, shown in (("history", ".history"), ("playground", "#run")):
        page.evaluate(f"async tab => {{ {module}; m.openTab(tab); }}", tab)
        page.wait_for_selector(shown, state="visible")
    page.evaluate(f"async () => {{ {module}; m.toggleSidebar(document.querySelector('#sidebar')); }}")
    page.wait_for_selector("#sidebar:not(.open)")


def test_a_visitor_finds_nothing_of_the_one_before(
    chromium: Any, idle: list[Any], scripted: tuple[Any, str], engine: Any
) -> None:
    """Tests follow each other in one page, and are none of each other's business."""
    for _ in range(2):
        visitors_of_a_test = visitors(chromium, idle)
        page = next(visitors_of_a_test)(scripted[1])
        assert page.evaluate(LEFT) == [None, None, False, False]
        page.evaluate(LEAVE)
        assert page.evaluate(LEFT) == ["mine", "mine", True, True]
        assert next(visitors_of_a_test, None) is None
        assert page.url == "about:blank" and page.context.pages == [page]


def test_a_page_opened_again_asks_for_no_script(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1], cold=True)
    first = dict(page.evaluate(KEPT))
    assert set(first) == {*modules()} - {"tokens/replay_page.js"} and all(first.values())
    assert len(page.evaluate(GRADIOS)) > 50 and any(page.evaluate(GRADIOS))
    page.reload()
    page.wait_for_function("document.querySelector('.race')?.race")
    assert set(dict(page.evaluate(KEPT)).values()) == {0}
    assert len(page.evaluate(GRADIOS)) > 50 and not any(page.evaluate(GRADIOS))


def test_the_page_works_below_a_path_of_another_server(engine: Any, visit: Any) -> None:
    options = launch_options()
    for name in ("footer_links", "run_history", "state_session_capacity"):
        options.pop(name)
    app = gr.mount_gradio_app(FastAPI(), build(engine), path="/play", **options)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    page = visit(f"http://127.0.0.1:{port}/play/")
    run_to_end(page)
    asked = page.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
    assert any(re.search(r"/play/scripts/[0-9a-f]{16}/tokens/race\.js$", name) for name in asked)
    server.should_exit = server.force_exit = True
    thread.join(10)
