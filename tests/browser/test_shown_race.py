"""What the page shows of a race against its run document, over a real (tiny) pair."""

from __future__ import annotations

import re
from typing import Any

import pytest
from driving import fill_in, run_to_end, set_number, status, wait_idle
from gradio_client import Client

SHOWN = """lane => [...document.querySelectorAll(`#${lane}-stream [data-outcome]`)].map(
    t => [t.dataset.outcome, t.textContent, t.dataset.p ?? null, t.dataset.q ?? null])"""
DOCUMENTS = "document.querySelector('.race').race.documents"
RUNNING = """() => {
    const { tally } = document.querySelector('.race').race.lanes.speculative;
    tally.metrics = null;
    return [tally.rate, tally.acceptance ?? null, tally.tokensPerRound, tally.tokens];
}"""
"""The totals that the page itself counts, round by round, in place of the engine's own."""
PROMPT = "def make_pair(folder):\n"
KEPT = ("accepted", "corrected", "bonus", "plain")


@pytest.fixture(scope="module")
def client(app: str) -> Client:
    return Client(app, verbose=False)


@pytest.fixture(scope="module")
def shared(app: str, visit_once: Any) -> Any:
    """A page for tests that leave another run behind, and need nothing of the one before."""
    return visit_once(app)


def tokens(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens of a document in the order in which they are shown: of a draft first what stands."""
    drafts = ((sorted(r["drafted"], key=lambda t: t["outcome"] not in KEPT), r["emitted"]) for r in run["rounds"])
    return [t for drafted, emitted in drafts for t in [*drafted, *([emitted] if emitted else [])]]


def bare(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What of a run is the same whenever it is run."""
    return [(t["id"], t["text"], t["outcome"]) for t in tokens(run)]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_race_shows_its_run_document(app: str, visit: Any, client: Client, temperature: float) -> None:
    page = visit(app)
    page.fill("#prompt textarea", PROMPT)
    set_number(page, "New tokens", 96)
    set_number(page, "number input for Temperature", temperature)
    page.get_by_label("Draft length").click()
    page.get_by_role("option", name="4", exact=True).click()
    run_to_end(page)

    documents = page.evaluate(DOCUMENTS)
    for lane in ("speculative", "plain"):
        run = documents[lane]
        shown = page.evaluate(SHOWN, lane)
        assert [row[0] for row in shown] == [t["outcome"] for t in tokens(run)]
        assert [float(row[2]) for row in shown] == [t["p"] for t in tokens(run)]
        assert [row[3] and float(row[3]) for row in shown] == [t.get("q") for t in tokens(run)]
        kept = [t for t in tokens(run) if t["outcome"] in KEPT]
        assert [t["id"] for t in kept] == run["token_ids"]
        assert len(run["token_ids"]) == 96
    assert {row[0] for row in page.evaluate(SHOWN, "speculative")} >= {"accepted", "rejected", "corrected"}

    _, document = client.predict(
        prompt=PROMPT, temperature=temperature, max_new_tokens=96, draft_length=4, precision="fp32", api_name="/run"
    )
    assert [bare(run) for run in document["runs"]] == [bare(documents[lane]) for lane in ("speculative", "plain")]

    metrics = documents["speculative"]["metrics"]
    speedup = metrics["tokens_per_second"] / documents["plain"]["metrics"]["tokens_per_second"]
    assert page.inner_text('[data-number="speedup"]').removeprefix("≈\u2009") == f"{speedup:.2f}×"
    assert page.inner_text('[data-number="tokens"]') == f"{metrics['tokens_per_round']:.2f}"
    assert page.inner_text('[data-number="accepted"]').strip("\u2009%") == f"{100 * metrics['acceptance_rate']:.0f}"
    low, high = map(float, re.findall(r"[\d.]+", page.inner_text('[data-number="spread"]'))[:2])
    assert low < speedup < high
    unsure = "about the same" if 1 / 1.1 <= speedup <= 1.1 else "too noisy to tell"
    word = "faster" if low > 1 else "slower" if high < 1 else unsure
    assert page.inner_text('[data-number="speedup-word"]') == word
    expected = "Identical" if temperature == 0 else "drawn by lot"
    assert expected in status(page)
    assert page.evaluate(RUNNING) == pytest.approx(
        [metrics[name] for name in ("tokens_per_second", "acceptance_rate", "tokens_per_round", "new_tokens")], rel=1e-4
    )


def test_stop_ends_both_lanes_at_their_next_round(shared: Any) -> None:
    """Long before the end, whatever else the processor has to do."""
    page = shared
    set_number(page, "New tokens", 3500)
    page.click("#run")
    # As soon as it has begun: a fast machine is through before a pointer has moved there.
    page.wait_for_function(
        """() => document.querySelector('.status').innerText.startsWith('Racing')
            && !document.querySelector('#stop').click()"""
    )
    wait_idle(page)
    documents = page.evaluate(DOCUMENTS)
    assert {run["stop_reason"] for run in documents.values()} == {"cancelled"}
    assert all(len(run["token_ids"]) < 3500 for run in documents.values())
    assert status(page).startswith("Stopped")
    set_number(page, "New tokens", 32)
    run_to_end(page)
    assert status(page).startswith("Identical")


def test_a_stop_right_after_run_is_not_lost(shared: Any) -> None:
    """It may come while the run waits in Gradio's queue."""
    page = shared
    set_number(page, "New tokens", 3500)
    for _ in range(3):
        page.evaluate(
            "document.querySelector('#run').click(); setTimeout(() => document.querySelector('#stop').click(), 20)"
        )
        wait_idle(page)
        assert status(page).startswith("Stopped")


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "sentence"),
    [("   ", 32, "The prompt is empty"), ("x " * 6000, 32, "shorten it"), ("x", 4096, "past the context")],
    ids=["empty", "long", "many"],
)
def test_bad_input_is_answered_in_a_sentence(shared: Any, prompt: str, new_tokens: int, sentence: str) -> None:
    page = shared
    page.fill("#prompt textarea", prompt)
    set_number(page, "New tokens", new_tokens)
    run_to_end(page)
    assert sentence in status(page)
    assert "Traceback" not in page.inner_text("body")
    assert page.get_attribute(".race .status", "role") == "alert"
    assert page.input_value("#prompt textarea") == prompt
    page.fill("#prompt textarea", "def f(x):\n")
    set_number(page, "New tokens", 16)
    run_to_end(page)
    assert status(page).startswith("Identical")


@pytest.mark.parametrize(
    "method",
    ["ngram", "ngram+draft", "early-exit", "tree"],
)
def test_every_way_of_drafting_writes_the_plain_text(shared: Any, method: str) -> None:
    """A method brings its own control with it, and the run it makes is the one that was asked for."""
    page = shared
    assert not page.is_visible("#tree")
    page.locator(f'#method input[value="{method}"]').check()
    if method == "tree":
        fill_in(page.locator("#tree textarea, #tree input"), "2x2")
    if method == "early-exit":
        page.wait_for_selector("#exit-layer")
    set_number(page, "New tokens", 48)
    run_to_end(page)
    run = page.evaluate(DOCUMENTS)["speculative"]
    assert run["settings"]["method"] == method
    assert [row[0] for row in page.evaluate(SHOWN, "speculative")] == [t["outcome"] for t in tokens(run)]
    if method == "tree":
        assert run["settings"]["tree"] == "2x2"
        assert max(len(r["drafted"]) for r in run["rounds"]) == 6
    assert status(page).startswith("Identical")
