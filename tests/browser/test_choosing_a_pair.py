"""Choosing a pair as a person does: the list, the card before anything is loaded, other models, and Unload."""

from __future__ import annotations

from typing import Any

import pytest
from driving import expect, fill_in, open_tab, run_to_end, status, wait_idle

from core.errors import UserError
from core.settings import Settings

CARD = "#pair-card .pair-card"


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    page = visit(scripted[1])
    page.wait_for_selector(f"{CARD}[data-level=good]")
    return page


@pytest.fixture(scope="module")
def shared(scripted: tuple[Any, str], visit_once: Any) -> Any:
    """A page for tests that leave the pair as it was, and for the last that does not."""
    page = visit_once(scripted[1])
    page.wait_for_selector(f"{CARD}[data-level=good]")
    return page


def choose(page: Any, name: str) -> None:
    page.locator("#pair input").click()
    page.get_by_role("option").filter(has_text=name).click()


def test_the_card_tells_of_a_pair_before_it_is_loaded(page: Any) -> None:
    assert "It fits." in page.inner_text(CARD)
    choose(page, "large-pair")
    page.wait_for_selector(f"{CARD}[data-level=bad]")
    words = page.inner_text(CARD)
    assert "It does not fit." in words
    assert "8.1 GB" in words
    assert "20 GB of 12 GB free" in words
    page.click(f"{CARD} summary")
    assert "accept its terms" in page.inner_text(CARD)
    assert "Large and gated." in page.inner_text(CARD)


def test_another_gpu_is_chosen_or_typed(shared: Any) -> None:
    choose_gpu = shared.locator("#gpu input")
    choose_gpu.click()
    shared.get_by_role("option", name="RTX 4070", exact=True).click()
    shared.wait_for_selector("#outlook .outlook[data-level=good]")
    assert "A prediction for RTX 4070" in shared.inner_text("#outlook")
    shared.click("#outlook summary")
    assert "assumed: 15 µs" in shared.inner_text("#outlook")
    choose_gpu.fill("12 GB, 504 GB/s, 58 TFLOPS")
    choose_gpu.press("Enter")
    shared.wait_for_function("document.querySelector('#outlook').innerText.includes('12 GB, 504 GB/s, 58 TFLOPS (')")


def test_a_chosen_pair_is_the_one_that_runs(page: Any) -> None:
    choose(page, "small-pair")
    page.wait_for_function("location.search.includes('target=owner%2Fsmall')")
    run_to_end(page)
    settings = page.evaluate("document.querySelector('.race').race.documents.speculative.settings")
    assert (settings["target"], settings["draft"]) == ("owner/small", "owner/tiny")


AT_ONCE = """button => {
    const options = [...document.querySelectorAll("[role=option]")];
    const option = options.find(each => each.textContent.includes("small-pair"));
    option.dispatchEvent(new MouseEvent("mousedown", { bubbles: true, cancelable: true }));
    document.querySelector(button).click();
}"""


def test_run_pressed_as_a_pair_is_chosen_races_that_pair(page: Any) -> None:
    page.locator("#pair input").click()
    page.get_by_role("option").filter(has_text="small-pair").wait_for()
    page.evaluate(AT_ONCE, "#run")
    wait_idle(page)
    settings = page.evaluate("document.querySelector('.race').race.documents.speculative.settings")
    assert (settings["target"], settings["draft"]) == ("owner/small", "owner/tiny")
    page.wait_for_function("location.search.includes('target=owner%2Fsmall')")
    expect(page.locator(".past")).to_be_hidden()


@pytest.mark.parametrize("button", ["compare-run", "tune-run", "many-run", "train-start"])
def test_what_is_pressed_as_a_pair_is_chosen_is_done_with_that_pair(
    page: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, button: str
) -> None:
    asked: list[Settings] = []

    def noted(*given: Any, **_: Any) -> Any:
        values = (value for each in given for value in (each.values() if isinstance(each, dict) else [each]))
        asked.extend(each for each in values if isinstance(each, Settings))
        raise UserError("Noted.")

    for name in ("open_lane", "sweep", "batches", "training"):
        monkeypatch.setattr(engine, name, noted)
    tab, _ = button.replace("many", "tune").split("-")
    open_tab(page, tab)
    if button == "many-run":
        page.click("#many-texts button")
    page.wait_for_selector(f"#{button}", state="visible")
    page.locator("#pair input").click()
    page.get_by_role("option").filter(has_text="small-pair").wait_for()
    page.evaluate(AT_ONCE, f"#{button}")
    while not asked:
        page.wait_for_timeout(20)
    assert {(each.target, each.draft) for each in asked} == {("owner/small", "owner/tiny")}


def test_other_models_are_typed_and_what_is_missing_is_said(page: Any) -> None:
    assert page.locator("#pair-target").count() == 0
    choose(page, "other…")
    field = page.locator("#pair-target textarea, #pair-target input")
    fill_in(field, "owner/missing")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('.pair-card').innerText.includes('has no model')")
    field.fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Tab")
    page.wait_for_selector(f"{CARD}[data-level=good]")
    run_to_end(page)
    assert status(page).startswith("Identical")
    page.wait_for_function("location.search.includes('target=')")
    page.reload()
    page.wait_for_function("document.querySelector('#pair input')?.value === 'other…'")
    page.wait_for_selector("#pair-target")
    choose(page, "pocket")
    page.wait_for_selector("#pair-target", state="detached")


def test_methods_the_pair_cannot_use_are_named_with_the_reason(shared: Any) -> None:
    """The scripted target was not trained for early exit."""
    assert shared.locator('#method input[value="early-exit"]').count() == 0
    assert "was not trained for it" in shared.inner_text("#refused")


def test_unload_says_what_it_freed(shared: Any) -> None:
    shared.locator("#unload").scroll_into_view_if_needed()
    shared.click("#unload")
    shared.wait_for_function("document.querySelector('#unloaded').innerText.includes('Freed 33 MB of weights')")


def test_the_strip_of_help_covers_what_scrolls_below_it(shared: Any) -> None:
    """What lies under it is not seen through it."""
    shared.set_viewport_size({"width": 1440, "height": 700})
    strip = shared.locator("#help").bounding_box()
    top = shared.evaluate(
        "([x, y]) => document.elementFromPoint(x, y).closest('#help') !== null",
        [strip["x"] + 60, strip["y"] + strip["height"] - 20],
    )
    assert top


def test_the_picker_works_by_keyboard(shared: Any) -> None:
    shared.focus("#pair input")
    shared.keyboard.press("ArrowDown")
    shared.keyboard.press("ArrowDown")
    shared.keyboard.press("Enter")
    shared.wait_for_function("document.querySelector('#pair input').value !== 'pocket (bundled)'")
