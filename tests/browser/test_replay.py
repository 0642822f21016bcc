"""A race opened from disk: the same tokens as the run it came from, and hostile text stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from driving import until
from races import scripted_race
from test_hostile import HOSTILE, PICTURES

SHOWN = """lane => [...document.querySelectorAll(`#${lane}-stream .t:not(.mark)`)].map(
    t => [t.dataset.outcome, t.dataset.p && +t.dataset.p, t.dataset.q ? +t.dataset.q : null])"""
RACE = "document.querySelector('.race').race"


def tokens(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [t for r in run["rounds"] for t in [*r["drafted"], *([r["emitted"]] if r["emitted"] else [])]]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_page_from_disk_shows_its_race(from_disk: Any, temperature: float) -> None:
    document = scripted_race(temperature=temperature)
    page = from_disk(document)
    for lane, run in zip(("speculative", "plain"), document["runs"]):
        assert page.evaluate(SHOWN, lane) == [[t["outcome"], t["p"], t.get("q")] for t in tokens(run)]
        assert page.evaluate("lane => document.querySelector('.race').race.documents[lane]", lane) == run
    fast, slow = (run["metrics"] for run in document["runs"])
    speedup = fast["tokens_per_second"] / slow["tokens_per_second"]
    assert page.inner_text('[data-number="speedup"]').removeprefix("≈\u2009") == f"{speedup:.2f}×"
    assert page.inner_text('[data-number="tokens"]') == f"{fast['tokens_per_round']:.2f}"
    words = "Identical to plain decoding" if not temperature else "drawn by lot"
    assert words in page.inner_text(".race .status")
    assert page.locator(".curve-line").count() == 2
    page.locator("#speculative-stream .t").last.hover()
    assert page.locator("#token-card").is_visible()


def test_a_lone_run_is_shown_too(from_disk: Any) -> None:
    speculative, plain = scripted_race()["runs"]
    for lane, run in (("speculative", speculative), ("plain", plain)):
        page = from_disk(run)
        assert page.locator(f"#{lane}-stream .t:not(.mark)").count() == len(tokens(run))
        page.click('[data-do="back"]')
        page.click('[data-do="leave"]')
        assert page.locator(".t.later").count() == 0


def test_the_page_tells_prompt_and_settings_and_gives_the_document_back(from_disk: Any) -> None:
    document = scripted_race(temperature=0.7)
    page = from_disk(document, accept_downloads=True)
    page.click("summary >> text=Prompt and settings")
    assert page.inner_text("#prompt").startswith("def f():")
    assert "temperature" in page.inner_text("#settings")
    with page.expect_download() as download:
        page.click("#save")
    assert json.loads(download.value.path().read_text(encoding="utf-8")) == document


def test_hostile_text_stays_text(from_disk: Any) -> None:
    page = from_disk(
        scripted_race([*HOSTILE, "</script><img src=x onerror=alert(1)>"], temperature=0.7, max_new_tokens=90)
    )
    title = page.title()
    shown = page.evaluate("[...document.querySelectorAll('#plain-stream .t')].map(t => t.textContent)")
    assert shown[: len(HOSTILE)] == [PICTURES.get(text, text) for text in HOSTILE]
    page.evaluate(
        f"""() => {{
            const {{ inspector, lanes, replay }} = {RACE};
            for (const span of lanes.speculative.pane.tokens()) inspector.open(span);
            replay.seek(0, 0);
            while (replay.step(1));
        }}"""
    )
    assert page.title() == title
    made = page.evaluate("[...new Set([...document.querySelectorAll('body *')].map(e => e.localName))]")
    assert not {"img", "iframe", "style", "script"} & {*made} - {"script"}
    assert page.locator("script").count() == 4, "the page's own"
    assert page.locator("style").count() == 1


def test_it_follows_the_systems_light_and_dark(from_disk: Any) -> None:
    page = from_disk(scripted_race(), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(18, 18, 17)"
    page.emulate_media(color_scheme="light")
    until(page, f"{ground} === 'rgb(250, 250, 249)'")
