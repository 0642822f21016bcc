"""What a person takes away, finds again and opens: the bar beside the tabs, the address, the History tab."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import time
import weakref
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from driving import expect, free_port, open_tab, reload, run_to_end, says, set_number, status, wait_idle
from test_hostile import HOSTILE

from core.__main__ import parser
from core.cli import settings_of

CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
SHOWN = "document.querySelector('.race').race.documents"
NOTICE = ".take-away .notice"


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    return visit(scripted[1], **CLIPBOARD)


def shown(page: Any) -> list[dict[str, Any]]:
    """The run documents of the panes, as far as both ends keep the same digits."""
    documents = page.evaluate(f"Object.values({SHOWN})")
    return [{key: document[key] for key in ("prompt", "token_ids", "text", "settings")} for document in documents]


def digest(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: run[key] for key in ("prompt", "token_ids", "text", "settings")} for run in document["runs"]]


def download(page: Any, press: str) -> str:
    if press.startswith("[data-take"):
        page.click(".take-away summary")
    with page.expect_download() as found:
        page.click(press)
    return Path(found.value.path()).read_text(encoding="utf-8")


def share(page: Any, form: str) -> None:
    page.click(".take-away summary")
    page.click(f"[data-take={form}]")


def open_file(page: Any, name: str, text: str) -> None:
    page.set_input_files(".history input[type=file]", {"name": name, "mimeType": "", "buffer": text.encode()})


def to_history(page: Any, rows: int) -> None:
    open_tab(page, "history")
    page.wait_for_function("n => document.querySelectorAll('.history-list tbody tr').length === n", arg=rows)


def clipboard(page: Any) -> str:
    return page.evaluate("navigator.clipboard.readText()")


def noticed(page: Any, words: str) -> None:
    says(page, NOTICE, words)


# Take away, right from the Playground


def test_the_bar_by_keyboard_and_before_the_first_run(page: Any) -> None:
    page.click(".take-away summary")
    page.click("[data-take=json]")
    noticed(page, "press Run first")
    assert page.get_attribute(NOTICE, "role") == "alert"
    page.click(f"{NOTICE} button")
    assert page.is_hidden(NOTICE)
    page.focus(".take-away summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".take-away .menu-list button")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.take") == "html"
    page.keyboard.press("Escape")
    assert page.is_hidden(".take-away .menu-list")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert page.get_attribute("#run", "aria-keyshortcuts") == "Control+Enter Meta+Enter"
    assert page.get_attribute("#stop", "data-keys") == "Esc"


def test_files_hold_the_run_shown_link_and_command_what_is_set_now(page: Any) -> None:
    set_number(page, "Seed", 5)
    page.fill("#prompt textarea", "it's\n$HOME")
    run_to_end(page)
    share(page, "command")
    noticed(page, "copied")
    words = shlex.split(clipboard(page))
    parsed = parser().parse_args(words[words.index("core") + 1 :])
    assert parsed.prompt == "it's\n$HOME"
    assert settings_of(parsed).to_dict() == page.evaluate(f"{SHOWN}.speculative.settings")
    set_number(page, "Seed", 6)
    for form in ("link", "command"):
        share(page, form)
        noticed(page, f"The {form} is copied")
        assert re.search(r"seed[= ]6", clipboard(page))
    document = json.loads(download(page, "[data-take=json]"))
    assert digest(document) == shown(page)
    rows = list(csv.DictReader(StringIO(download(page, "[data-take=csv]"), newline="")))
    kept = [row for row in rows if row["run"] == "1" and row["outcome"] not in ("rejected", "ignored")]
    assert [int(row["id"]) for row in kept] == document["runs"][0]["token_ids"]
    assert download(page, "[data-take=html]").startswith("<!doctype html>")


# Settings in the address


def test_settings_survive_a_reload_and_a_link_carries_them_on(page: Any, visit: Any) -> None:
    page.fill("#prompt textarea", "def ünï(a, b):\n    # & = ?\n")
    set_number(page, "Seed", 11)
    page.locator("#method input[value=ngram]").check()
    page.wait_for_function("['seed=11', 'ngram', 'prompt='].every(part => location.search.includes(part))")
    share(page, "link")
    noticed(page, "copied")
    link = clipboard(page)
    reload(page)
    for each in (page, visit(link)):
        each.wait_for_function("document.querySelector('#prompt textarea')?.value.startsWith('def ünï(a, b):')")
        expect(each.get_by_label("Seed", exact=True).first).to_have_value("11")
        expect(each.locator("#method input:checked")).to_have_value("ngram")


def test_run_pressed_before_a_link_is_read_waits_for_it(
    scripted: tuple[Any, str], engine: Any, visit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import app.playground.take_away as bar

    pressed, read_link = Event(), bar.read_link
    monkeypatch.setattr(bar, "read_link", lambda *given: pressed.wait(60) and read_link(*given))
    page = visit(f"{scripted[1]}?seed=5")
    page.click("#run")
    pressed.set()
    wait_idle(page)
    assert page.evaluate(f"{SHOWN}.speculative.settings.seed") == 5


def test_bad_values_of_a_link_are_said_and_left_out_one_by_one(scripted: tuple[Any, str], visit: Any) -> None:
    page = visit(scripted[1] + "?seed=-4&method=<b>magic</b>&top_k=9&precision=int1", **CLIPBOARD)
    noticed(page, "The link's seed was left out")
    assert "'<b>magic</b>' is not one of the choices here" in page.inner_text(NOTICE)
    assert page.locator(f"{NOTICE} b").count() == 0
    page.wait_for_function("location.search === '?top_k=9'")
    page.fill("#prompt textarea", "x" * 2001)
    share(page, "link")
    noticed(page, "too long for a link")
    assert clipboard(page).endswith("?top_k=9")
    run_to_end(page)
    settings = page.evaluate(f"{SHOWN}.speculative.settings")
    assert (settings["top_k"], settings["seed"], settings["method"]) == (9, 0, "draft")


# History


def test_runs_are_listed_sorted_put_beside_each_other_and_removed(page: Any) -> None:
    run_to_end(page)
    speedup, accepted = (page.inner_text(f'[data-number="{name}"]') for name in ("speedup", "accepted"))
    rates = page.locator(".race .rate b").all_inner_texts()
    set_number(page, "Seed", 8)
    run_to_end(page)
    set_number(page, "New tokens", 40)
    run_to_end(page)
    to_history(page, 3)

    cells = page.locator('.history-list tr[data-number="1"] td.number-cell').all_inner_texts()
    assert (cells[2:4], cells[4:]) == (rates, [speedup, accepted])

    numbers = "[...document.querySelectorAll('.history-list tbody tr')].map(row => Number(row.dataset.number))"
    assert page.evaluate(numbers) == [3, 2, 1]
    page.locator('.history-list th[data-key="number"] button').click()
    assert page.evaluate(numbers) == [1, 2, 3]
    assert page.get_attribute('.history-list th[data-key="number"]', "aria-sort") == "ascending"
    page.locator('.history-list th[data-key="speedup"] button').click()
    ratios = [float(text.rstrip("×")) for text in page.locator(".history-list td:nth-child(11)").all_inner_texts()]
    assert ratios == sorted(ratios, reverse=True)

    page.locator('.history-list th[data-key="number"] button').click()
    page.get_by_label("Choose number 1").check()
    assert page.is_hidden(".history-beside")
    page.get_by_label("Choose number 2").check()
    assert page.locator(".history-beside tr[data-differs] td").all_inner_texts() == ["8", "0"]
    assert page.inner_text(".history-beside tr[data-differs] th").startswith("Seed")
    assert page.inner_text(".history-note").startswith("1 setting differs")
    assert page.is_disabled(".history [data-do=json]")

    page.get_by_label("Choose number 1").uncheck()
    assert json.loads(download(page, ".history [data-do=json]"))["runs"][0]["settings"]["seed"] == 8
    page.click(".history [data-do=remove]")
    page.wait_for_function("document.querySelectorAll('.history-list tbody tr').length === 2")
    assert page.locator('.history-list tr[data-number="2"]').count() == 0
    page.click(".history [data-do=clear]")
    page.wait_for_selector(".history-scroll", state="hidden")
    assert "Nothing has run yet" in page.inner_text(".history-empty")


def test_an_earlier_run_is_shown_again_but_not_over_one_that_is_going_on(page: Any, engine: Any) -> None:
    run_to_end(page)
    first = shown(page)
    page.fill("#prompt textarea", "another")
    engine.pace = 20.0
    page.click("#run")
    to_history(page, 1)
    page.get_by_role("button", name="Show number 1 in the Playground").click()
    page.wait_for_function("document.querySelector('.history-say').innerText.includes('A run is going on')")
    engine.pace = 0.0
    page.wait_for_selector('.history-list tr[data-number="2"]')
    page.get_by_role("button", name="Show number 1 in the Playground").click()
    page.wait_for_selector("#speculative-stream", state="visible")
    page.wait_for_function(f"{SHOWN}.speculative.prompt !== 'another'")
    assert shown(page) == first
    assert status(page).startswith("Identical")
    assert digest(json.loads(download(page, "[data-take=json]"))) == first
    run_to_end(page)
    assert shown(page)[0]["prompt"] == "another"


def test_a_link_says_who_can_open_it(page: Any) -> None:
    """On this machine's own address nobody else can; what can be sent is the replay page."""
    page.click(".take-away summary")
    assert page.inner_text("[data-take=link]").endswith("for this machine alone: prompt and settings")
    page.click("[data-take=link]")
    noticed(page, "Nobody else can open it: this page runs on this machine alone.")
    assert clipboard(page).startswith("http://127.0.0.1")


def test_a_copied_command_runs_as_it_is(page: Any, tmp_path: Path) -> None:
    """In any folder, with no environment active."""
    page.fill("#prompt textarea", "x = 1\ny = ")
    set_number(page, "New tokens", 4)
    share(page, "command")
    noticed(page, "copied")
    line = clipboard(page)
    assert sys.executable in line and "--max-new-tokens 4" in line
    given = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "OMP_NUM_THREADS") if name in os.environ}
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env={"PATH": os.defpath, **given}, capture_output=True)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


def test_a_saved_race_opens_in_another_visit(page: Any, scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    engine.texts = [text for text in HOSTILE if text != "\ud800"]  # which no file of UTF-8 can hold
    run_to_end(page)
    saved, before = download(page, "[data-take=json]"), page.locator("#plain-stream .t").all_inner_texts()
    other = visit(scripted[1])
    to_history(other, 0)
    for text, words in [("{", "cannot be read as JSON"), ("[]", "not a run")]:
        open_file(other, "odd.json", text)
        says(other, ".history-say", words)
    other.evaluate("document.querySelector('.history').history.open({ name: 'odd.json', size: 2e7 })")
    assert "odd.json is too large" in other.inner_text(".history-say")
    assert other.get_attribute(".history-say", "role") == "alert"
    assert other.locator(".history-list tbody tr").count() == 0
    open_file(other, "<img src=x onerror=alert(1)>.json", saved)
    other.wait_for_selector('.history-list tr[data-number="1"]')
    assert "opened: <img src=x onerror=alert(1)>.json" in other.inner_text("td.history-prompt")
    other.get_by_role("button", name="Show number 1 in the Playground").click()
    other.wait_for_selector("#plain-stream .t", state="visible")
    assert other.locator("#plain-stream .t").all_inner_texts() == before
    assert other.inner_text(".past").startswith("Opened from History: a run of pocket + pocket-draft")


# Strangers, and what is left of them


def test_a_visit_is_let_go_with_its_tab(
    scripted: tuple[Any, str], engine: Any, visit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio gives a closed tab an hour to come back, in its own tests a second."""
    import app.serving.visit

    monkeypatch.setenv("GRADIO_IS_E2E_TEST", "1")
    gc.collect()
    before = set(app.serving.visit._visits)
    gone = visit(scripted[1])
    run_to_end(gone)
    until = time.monotonic() + 15  # the end is shown a moment before the run is kept
    while not set(app.serving.visit._visits) - before and time.monotonic() < until:
        time.sleep(0.05)
    (kept,) = map(weakref.ref, set(app.serving.visit._visits) - before)
    gone.close()
    until = time.monotonic() + 15
    while kept() and time.monotonic() < until:
        time.sleep(0.2)
        gc.collect()
    assert kept() is None


def test_a_page_with_a_password_asks_for_it_first(engine: Any, chromium: Any) -> None:
    from app.page import build, launch_options

    locked = build(engine)
    _, address, _ = locked.launch(
        server_port=free_port(), auth=("me", "secret"), prevent_thread_lock=True, quiet=True, **launch_options()
    )
    page = chromium.new_page()
    page.set_default_timeout(60_000)
    page.goto(address)
    page.get_by_label("username").fill("me")
    page.get_by_label("password").fill("wrong")
    page.get_by_role("button", name="Login").click()
    page.get_by_text("Incorrect Credentials").wait_for()
    assert page.locator("#run").count() == 0
    page.reload()
    page.get_by_label("username").fill("me")
    page.get_by_label("password").fill("secret")
    page.get_by_role("button", name="Login").click()
    page.wait_for_function("document.querySelector('.race')?.race")
    run_to_end(page)
    assert status(page).startswith("Identical")
    page.close()
    locked.close(verbose=False)
