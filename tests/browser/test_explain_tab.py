"""The Explain tab as a person uses it: from nothing to a run explained, round by round, checked, and on a phone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from driving import open_tab, run_to_end, set_number, status, wait_idle

RESULT = "#explain-result .result"
DONE = f"{RESULT}:not([data-kind=running]):not([data-kind=queued]):not([data-kind=loading])"


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    return visit(scripted[1])


@pytest.fixture(scope="module")
def explained(scripted: tuple[Any, str], visit_once: Any) -> Any:
    """A page whose run is explained, for tests that look, choose and check; the last two run something else."""
    page = visit_once(scripted[1])
    explain(page)
    return page


def explain(page: Any, temperature: float = 0.7) -> None:
    """Run the prompt and open the tab."""
    set_number(page, "number input for Temperature", temperature)
    run_to_end(page)
    open_tab(page, "explain")
    page.wait_for_selector("#explain-walk .steps")


def document(page: Any) -> dict[str, Any]:
    return page.evaluate("document.querySelector('.race').race.documents.speculative")


def test_without_a_run_it_says_what_to_do_and_does_it(page: Any) -> None:
    open_tab(page, "explain")
    assert "Run something in the Playground first" in page.inner_text("#explain-empty")
    page.click("#explain-run")
    wait_idle(page)
    assert page.locator("#speculative-stream .t").count() > 0
    open_tab(page, "explain")
    page.wait_for_selector("#explain-walk .steps")
    page.wait_for_selector("#explain-empty", state="hidden")


def test_the_walk_is_through_the_runs_own_round(explained: Any) -> None:
    page = explained
    shown = int(page.get_attribute("#explain-walk .round", "data-round"))
    round_ = document(page)["rounds"][shown]
    chips = page.locator("#explain-walk .text .tok")
    outcomes = [chips.nth(i).get_attribute("data-outcome") for i in range(chips.count())]
    assert outcomes == [t["outcome"] for t in (*round_["drafted"], round_["emitted"])]
    assert "rejected" in outcomes
    assert page.locator("#explain-walk .step").count() == 6
    assert page.locator(".question[open]").count() == 0 and page.locator("#step-4 .answer").is_visible()
    page.click("#step-4 summary")
    page.click("#step-2 summary")
    page.click("#step-2 .tensors summary")
    rejected = next(t for t in round_["drafted"] if t["outcome"] == "rejected")
    chance = min(1, rejected["p"] / rejected["q"])
    assert f"{chance:.4f}" in page.inner_text("#step-4")
    fed = len(round_["drafted"]) + 1
    assert page.locator("#explain-walk .mask tbody tr").count() == fed
    assert f"({fed}, 4,096)" in page.inner_text("#step-2")


def test_another_round_can_be_chosen(explained: Any) -> None:
    page = explained
    page.locator("#explain-round input[type=number]").fill("2")
    page.keyboard.press("Enter")
    page.click("#step-1 summary")
    page.wait_for_selector('#explain-walk .round[data-round="1"]')
    page.wait_for_selector("#step-1 .question[open]")
    assert page.inner_text("#explain-walk h2").startswith("Round 2 of")


def test_the_numbers_are_those_of_the_run(explained: Any) -> None:
    page = explained
    metrics = document(page)["metrics"]
    words = page.text_content("#explain-costs")
    assert f"{metrics['tokens_per_round']:.2f}" in words
    assert f"α = {metrics['acceptance_rate']:.3f}" in words
    assert words.count("not here") + words.count("yes, here") == 4


def test_opening_it_during_a_run_does_not_disturb_the_run(page: Any, engine: Any) -> None:
    run_to_end(page)
    engine.pace = 2.0
    page.click("#run")
    page.wait_for_function("document.querySelector('.race').dataset.state !== 'idle'")
    open_tab(page, "explain")
    page.wait_for_selector("#explain-walk .steps")
    engine.pace = 0.0
    page.wait_for_function("document.querySelector('#explain-which input')?.value.startsWith('2 ·')")
    open_tab(page, "playground")
    wait_idle(page)
    assert status(page).startswith("Identical")


def test_the_lossless_check_and_its_broken_twin(explained: Any) -> None:
    page = explained
    assert page.get_by_label("Sampling: the same law").is_checked()
    page.click("#explain-start")
    page.wait_for_selector(DONE)
    assert "no difference from the target's own law" in page.inner_text(RESULT)
    assert "in 43% of such checks" in page.inner_text(RESULT)
    page.get_by_label("Sampling, rule broken").check()
    page.click("#explain-start")
    page.wait_for_function(f"document.querySelector('{RESULT}')?.innerText.includes('The check fails')")
    page.get_by_label("Greedy: the same text").check()
    page.click("#explain-start")
    page.wait_for_function(f"document.querySelector('{RESULT}')?.innerText.includes('8 of 8 texts agree up to ties')")


def test_a_check_can_be_stopped_and_says_what_it_saw(explained: Any, engine: Any) -> None:
    page = explained
    engine.halts_at = 0.3
    page.get_by_label("Sampling: the same law").check()
    page.wait_for_selector("#explain-stop:disabled")
    page.click("#explain-start")
    page.wait_for_selector(f"{RESULT}[data-kind=running] progress[max]")
    page.click("#explain-stop")
    page.wait_for_selector(DONE)
    assert re.search(r"[1-5]00 continuations", page.inner_text(RESULT))
    page.wait_for_selector("#explain-stop:disabled")


def test_on_a_phone_nothing_hangs_over(explained: Any) -> None:
    page = explained
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    page.set_viewport_size({"width": 1440, "height": 900})


def test_a_newer_run_is_explained_when_the_tab_is_opened_again(explained: Any) -> None:
    page = explained
    open_tab(page, "playground")
    explain(page, 0)
    page.wait_for_function("document.querySelector('#explain-which input').value.startsWith('2 ·')")
    page.wait_for_function("document.querySelector('#step-4').textContent.includes('temperature 0')")


def test_hostile_text_stays_text(explained: Any, engine: Any) -> None:
    page = explained
    engine.texts = ["<img src=x onerror=alert(1)>", "${alert(1)}", "{{alert(1)}}", "</code><script>alert(1)</script>"]
    open_tab(page, "playground")
    explain(page)
    page.wait_for_function("document.querySelector('#explain-walk').textContent.includes('<img·src=x')")
    assert page.locator("#explain img, #explain script").count() == 0


def test_a_real_pair_is_explained_and_checked(app: str, visit: Any) -> None:
    """Through the front door, over a tiny pair: real shapes, a real law."""
    page = visit(app)
    set_number(page, "New tokens", 40)
    set_number(page, "Top-k", 12)
    explain(page, 1.0)
    assert "queries float32" in re.sub(r"\s+", " ", page.text_content("#explain-walk"))
    page.click("#explain-start")
    page.wait_for_selector(DONE)
    assert re.search(r"\(p = [\d.e-]+\)", page.inner_text(RESULT))
    page.get_by_label("Greedy: the same text").check()
    page.click("#explain-start")
    page.wait_for_function(f"/texts agree|Look again/.test(document.querySelector('{RESULT}')?.innerText)")
