"""What a person does on the page: keys, toggles, copying, waiting, the card of a token."""

from __future__ import annotations

from typing import Any

import pytest
from driving import SCREEN, open_tab, reload, run_to_end, says, set_number, status, wait_idle

from app.assets import address

STRUCK = '#speculative-stream [data-outcome="rejected"], #speculative-stream [data-outcome="ignored"]'
FIRST_SIGHT = """() => {
    const inSight = ({ width, bottom }) => width > 2 && bottom > 0;
    const seen = each => each.checkVisibility({ visibilityProperty: true, opacityProperty: true }) &&
      !each.closest("[aria-hidden=true], .visually-hidden") && inSight(each.getBoundingClientRect());
    const all = [...document.querySelectorAll("button, input, textarea, select, summary, [role=slider]")];
    const controls = all.filter(seen);
    const whole = each => each.closest("[role=tablist], [role=toolbar], .scrubber") ?? each;
    const named = controls.map(whole).map(each => each.id || each.className || each.textContent);
    const wordsIn = element => element.innerText.split(/\\s+/).length;
    const text = [...document.querySelectorAll(".line")].reduce((sum, each) => sum + wordsIn(each), 0);
    return [named, wordsIn(document.body) - text];
}"""
FOCUSED = "document.activeElement.closest('.t')?.textContent ?? null"


@pytest.fixture(scope="module")
def raced(scripted: tuple[Any, str], visit_once: Any) -> Any:
    """A page after a greedy run, for tests that look at it and leave it as it was."""
    page = visit_once(scripted[1])
    run_to_end(page)
    return page


@pytest.fixture
def page(scripted: tuple[Any, str], engine: Any, visit: Any) -> Any:
    return visit(scripted[1])


def test_a_newcomer_sees_one_picture(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """At most 15 controls and 120 words; then what one does with a run, where a row of tabs, of chips and the replay
    are one each. What was opened stays open for that visitor."""
    page = visit(scripted[1], newcomer=True)
    each, words = page.evaluate(FIRST_SIGHT.replace("controls.map(whole)", "controls"))
    assert len(each) <= 15 and words <= 120, (each, words)
    assert page.locator(".gear, #more, [data-present-toggle], #all-guesses").locator("visible=true").count() == 0
    run_to_end(page)
    folded = page.locator("#sidebar.open, .race .charts, #copy-text, #run-five, .facts, footer").locator("visible=true")
    assert folded.count() == 0
    page.click(".tour-offer .tool >> text=No, thanks")
    controls, words = page.evaluate(FIRST_SIGHT)
    assert len(set(controls)) <= 15 and words <= 120, (controls, words)
    page.click("#more")
    page.click(".gear")
    page.click(".more-chips")
    assert page.is_visible(".race .charts") and page.is_visible("#run-five")
    assert page.evaluate("document.activeElement.matches('.chip:nth-of-type(2)')")
    reload(page)
    page.wait_for_selector("#sidebar.open #pair", state="visible")
    page.locator(".chip:visible").nth(2).wait_for()
    assert page.is_visible(".gear")
    page.wait_for_selector(".race[data-more] .charts", state="visible")


def test_a_phone_begins_with_the_prompt(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """What is known of the machine, and what to point at, is for who opens the side panel."""
    page = visit(scripted[1], newcomer=True)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator("#prompt").bounding_box()["y"] < 250
    assert page.locator("#run").bounding_box()["y"] < 400
    assert not page.is_visible(".facts") and not page.locator(".help").locator("visible=true").count()


def test_nothing_moves_when_a_run_ends(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1], newcomer=True)
    places = "['#speculative-stream', '#plain-stream', '.scrubber', '#more'].map(each => document.querySelector(each))"
    boxes = f"{places}.map(each => JSON.stringify(each.getBoundingClientRect()))"
    page.wait_for_selector("[data-method] option", state="attached")
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(300)
    before = page.evaluate(boxes)
    page.click("#run")
    page.wait_for_selector("#speculative-stream .t")
    running = page.evaluate(boxes)
    wait_idle(page)
    assert before == running == page.evaluate(boxes)


def test_the_method_can_be_chosen_beside_the_target(page: Any) -> None:
    page.select_option("[data-method]", "ngram")
    page.wait_for_function("document.querySelector('#method input[value=ngram]').checked")
    page.get_by_label("Plain only").check()
    page.wait_for_function("document.querySelector('[data-method]').value === 'plain'")


def test_a_typed_prompt_has_no_caption_and_is_what_is_watched(page: Any) -> None:
    page.wait_for_function("document.querySelector('#prompt-note p').textContent")
    run_to_end(page)
    page.fill("#prompt textarea", "typed by hand")
    page.wait_for_function("!document.querySelector('#prompt-note p').textContent")
    page.click("#watch")
    page.wait_for_selector(".race[data-replay='']")
    assert page.evaluate("document.querySelector('.race').race.documents.speculative.prompt") == "typed by hand"


def test_the_page_opens_ready_to_run(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1], newcomer=True)
    page.wait_for_function("document.activeElement.id === 'run'")
    assert page.input_value("#prompt textarea").strip()
    assert status(page) == "Press Run: a small draft model guesses ahead, the target checks."
    assert page.is_disabled("#stop")
    assert "Speculative Decoding Playground" in page.inner_text("#header")
    assert "speculation on" not in page.inner_text("#header")
    page.click("#header .setup")
    page.wait_for_function("document.querySelector('#header').innerText.includes('speculation on, draft length 5')")


def test_the_header_follows_the_controls(page: Any) -> None:
    page.get_by_label("Plain only").check()
    page.wait_for_function("document.querySelector('#header').innerText.includes('speculation off')")
    assert status(page).startswith("Press Run: the target writes alone")
    beside = page.locator("#speculative-stream, .race .numbers").locator("visible=true")
    assert beside.count() == 0
    page.get_by_label("N-gram").check()
    page.wait_for_function("document.querySelector('.race .numbers').checkVisibility()")
    page.get_by_label("Plain only").check()
    run_to_end(page)
    assert "Speculation is off" in status(page)
    assert beside.count() == 0
    assert page.locator("#plain-stream .t").count() == 128


def test_keys_run_and_stop(page: Any, engine: Any) -> None:
    engine.pace = 20.0
    page.focus("#prompt textarea")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#speculative-stream .t")
    page.keyboard.press("Escape")
    wait_idle(page)
    assert status(page).startswith("Stopped")


MARKS_OVER_LINES = """() => {
    const stream = document.querySelector("#speculative-stream");
    let most = 0;
    for (let width = 160; width < 480; width += 4) {
        stream.style.width = width + "px";
        most = Math.max(most, [...stream.querySelectorAll(".mark")].filter(m => m.getClientRects().length > 1).length);
    }
    stream.style.width = "";
    return most;
}"""
"""How many marks a line's end parts from their number, at the worst of many widths."""


def test_refused_guesses_fold_into_a_mark(raced: Any) -> None:
    """What stands reads as text; the rest opens on hover, with its round, or by one switch."""
    page = raced
    struck, marks = page.locator(STRUCK), page.locator("#speculative-stream .mark")
    assert struck.count() > 0
    assert not any(struck.nth(i).is_visible() for i in range(struck.count()))
    numbers = [int(text[1:]) for text in marks.all_inner_texts()]
    assert sum(numbers) == struck.count() and all(numbers)
    assert page.evaluate(MARKS_OVER_LINES) == 0
    page.evaluate("document.querySelector('#speculative-stream').scrollTop = 0")
    marks.first.hover()
    guesses = "guess" if numbers[0] == 1 else "guesses"
    says(page, "#token-card", f"{numbers[0]} {guesses} folded away: 1 refused")
    assert page.locator("#token-card .swatch").count() == numbers[0]
    marks.first.click()
    assert struck.first.is_visible() and not marks.first.is_visible() and page.is_visible(".inspector")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector(".inspector", state="hidden")
    assert not struck.first.is_visible()
    page.click("#all-guesses")
    assert all(struck.nth(i).is_visible() for i in range(struck.count())) and not marks.first.is_visible()
    assert page.get_attribute("#all-guesses", "aria-pressed") == "true"
    page.click("#all-guesses")
    assert not struck.first.is_visible()


def test_copying_takes_the_output_only(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    engine.texts = ["a", " b\n", "\x07c", "😀"]
    page = visit(scripted[1], permissions=["clipboard-read", "clipboard-write"])
    run_to_end(page)
    text = page.evaluate("document.querySelector('.race').race.documents.plain.text")
    assert "\x07" in text
    page.click("#copy-text")
    page.wait_for_function("document.querySelector('#copy-text').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.evaluate("document.getSelection().selectAllChildren(document.querySelector('#speculative-stream'))")
    page.keyboard.press("Control+c")
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_arrow_keys_walk_through_tokens_and_show_their_card(raced: Any) -> None:
    page = raced
    page.evaluate("document.querySelector('#speculative-stream').scrollTop = 0")
    page.focus("#speculative-stream .t[tabindex='0']")
    first = page.evaluate(FOCUSED)
    card = page.locator("#token-card")
    assert card.is_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(FOCUSED) is not None
    assert card.is_visible()
    page.keyboard.press("Home")
    assert page.evaluate(FOCUSED) == first
    assert page.locator("#speculative-stream .t[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert not card.is_visible()


def test_the_card_tells_a_tokens_story_and_leaves_its_line_free(page: Any) -> None:
    set_number(page, "number input for Temperature", 0.7)
    run_to_end(page)
    page.click("#all-guesses")
    page.evaluate("document.querySelector('#speculative-stream').scrollTop = 0")
    token = page.locator('#speculative-stream [data-outcome="rejected"]').first
    token.hover()
    card = page.locator("#token-card")
    card.wait_for(state="visible")
    words = card.inner_text()
    assert "Greedy" not in words
    assert "Rejected" in words
    assert "min(1, p/q) = 0.09; drew 0.41" in words
    assert "target would say" in words
    assert "draft would say" in words
    assert token.get_attribute("aria-describedby") == "token-card"
    at, box = token.bounding_box(), card.bounding_box()
    assert at
    assert box
    assert box["y"] >= at["y"] + at["height"] or box["y"] + box["height"] <= at["y"]


def test_the_card_of_a_greedy_run_has_the_models_own_probabilities(raced: Any) -> None:
    page = raced
    page.click("#all-guesses")
    page.evaluate("document.querySelector('#speculative-stream').scrollTop = 0")
    page.locator('#speculative-stream [data-outcome="rejected"]').first.hover()
    says(page, "#token-card", "Greedy: only the likeliest stands. It is not the target’s likeliest token: refused.")
    words = page.locator("#token-card").inner_text()
    page.click("#all-guesses")
    assert "p, target\n0.71\nq, draft\n0.91" in words, "not the 0 and 1 that greedy decoding makes of them"


def test_the_first_run_can_be_watched_and_toured(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """Watch runs first where nothing ran; the tour is offered until it was taken; all above the fold of a projector."""
    page = visit(f"{scripted[1]}?temperature=0.7&max_new_tokens=24", newcomer=True)
    page.set_viewport_size({"width": 1280, "height": 720})
    assert page.is_disabled("#copy-text") and page.is_enabled("#all-guesses")
    page.click("#watch")
    page.wait_for_selector(".race[data-replay] #speculative-stream .t.pending")
    assert "times slower than they ran" in status(page)
    page.wait_for_selector('.stage-phases [data-phase="check"][data-on]')
    bar = page.locator(".scrubber").bounding_box()
    assert bar["y"] + bar["height"] <= 720 and page.evaluate("scrollY") == 0
    page.wait_for_selector(".stage .scale")
    page.keyboard.press("Space")
    assert page.get_attribute('[data-do="play"]', "aria-label") == "Play" and page.is_enabled("#copy-text")
    judged = page.locator('#speculative-stream .t[data-outcome="accepted"]:not(.later):not(.pending)').count()
    assert page.inner_text('.legend li:has([data-kind="accepted"]) b') == str(judged), "in the midst of a round too"
    page.keyboard.press("Escape")
    assert "Guess, check, keep" in page.inner_text(".tour-offer")
    page.click(".tour-offer .tool >> text=Show me")
    assert "tokens: words or pieces of words" in page.inner_text(".tour")
    page.click(".tour .tool >> text=Next: check")
    assert "p is 0.08, q 0.91: it stays in 9\u2009% of cases; drawn was 0.41, so it is struck" in page.inner_text(
        ".tour"
    )
    page.click(".tour .tool >> text=Next: keep")
    assert "from one pass" in page.inner_text(".tour")
    page.click(".tour .tool >> text=Done")
    assert not page.locator(".tour").is_visible() and not page.locator(".race[data-replay]").count()
    reload(page)
    run_to_end(page)
    assert not page.locator(".tour").is_visible() and not page.inner_text(".tour-offer")


LAID_OUT = """([width, height]) => {
    const column = document.querySelector(".numbers");
    const words = [...column.querySelectorAll("[data-number], .status, .past")].filter(each => each.checkVisibility());
    const boxes = words.map(each => each.getBoundingClientRect());
    const apart = boxes.every((box, i) => !i || box.top >= boxes[i - 1].bottom);
    const whole = column.scrollHeight <= column.clientHeight;
    return innerWidth === width && innerHeight === height && { apart, whole };
}"""


def laid_out(page: Any, width: int, height: int) -> Any:
    """Whether what stands between the panes is whole, and nothing of it over another, on such a screen."""
    page.set_viewport_size({"width": width, "height": height})
    return page.wait_for_function(LAID_OUT, arg=[width, height]).json_value()


def test_five_runs_show_their_spread_and_a_projector_what_counts(page: Any) -> None:
    """On a low screen too, beside the verdict and three numbers."""
    page.click("#run-five")
    page.wait_for_selector("#stop:not([disabled])")
    page.wait_for_function("document.querySelector('[data-number=spread]').textContent.startsWith('5 runs: ')")
    page.wait_for_function("document.querySelector('#stop').disabled")
    page.click(".gear")
    assert laid_out(page, 1280, 700) == {"apart": True, "whole": True}
    page.click(".gear")
    page.set_viewport_size({"width": 1280, "height": 720})
    small = page.locator("#plain-stream .t").first.bounding_box()
    page.click("[data-present-toggle]")
    page.wait_for_selector("#sidebar:not(.open)")
    page.click('[data-do="back"]')
    page.wait_for_function("document.documentElement.scrollHeight <= 720")
    for place in (
        "#prompt textarea",
        "#run",
        "#plain-stream",
        "[data-number=speedup]",
        "[data-number=cost]",
        ".scrubber",
    ):
        box = page.locator(place).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 720, place
    assert (page.locator("#plain-stream .t").first.bounding_box() or {})["height"] > 1.4 * small["height"]
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.is_visible("#header")


def test_a_second_run_in_the_same_tab_waits_for_the_first(page: Any, engine: Any) -> None:
    engine.pace = 20.0
    page.click("#run")
    page.wait_for_selector("#speculative-stream .t")
    page.fill("#prompt textarea", "another")
    page.click("#run")
    page.wait_for_function("document.querySelector('.status').innerText.startsWith('Queued')")
    page.wait_for_selector("#plain-stream .t")
    assert status(page).startswith("Queued"), "and stays so when the other lane begins"
    engine.pace = 0.0
    page.wait_for_function(
        "document.querySelector('.race').race.documents.speculative?.prompt === 'another'"
        " && document.querySelector('.race').dataset.state === 'idle'"
    )
    assert status(page).startswith("Identical")


def test_run_pressed_the_moment_a_race_ends_is_not_lost(page: Any) -> None:
    page.evaluate(
        """() => {
            const race = document.querySelector('.race').race;
            const verdict = race.verdict.bind(race);
            window.races = 0;
            race.verdict = event => {
                verdict(event);
                window.races += 1;
                if (window.races < 4) document.querySelector('#run').click();
            };
        }"""
    )
    page.click("#run")
    page.wait_for_function("window.races === 4")
    wait_idle(page)
    assert status(page).startswith("Identical")


def test_another_visitor_waits_and_is_told(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    engine.pace = 20.0
    first, second = visit(scripted[1]), visit(scripted[1])
    first.click("#run")
    first.wait_for_selector("#speculative-stream .t")
    second.click("#run")
    second.wait_for_function("document.querySelector('.status').innerText.includes('one run is ahead of yours')")
    engine.pace = 0.0
    wait_idle(second)
    assert status(second).startswith("Identical")


def test_a_fault_of_ours_is_a_sentence_too(page: Any) -> None:
    run_to_end(page)
    assert page.is_hidden(".past")
    page.fill("#prompt textarea", "explode")
    run_to_end(page)
    assert status(page).startswith("Something failed on our side")
    assert "a fault of ours" not in page.inner_text("body")
    assert "Shown is the one before it: pocket + pocket-draft (method draft)." in page.inner_text(".past")
    page.click(".gear")
    for width, height in ((1280, 900), (900, 900), (1280, 700)):
        assert laid_out(page, width, height)["apart"], "its long words lie over nothing"
    page.click(".gear")
    page.set_viewport_size(SCREEN)
    page.fill("#prompt textarea", "another")
    run_to_end(page)
    assert page.is_hidden(".past")
    page.get_by_label("N-gram").first.check()
    page.wait_for_function("document.querySelector('.past').textContent.includes('what is chosen now has not run yet')")


def test_a_closed_tab_frees_the_device(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    """Its race would take minutes, longer than the next visitor waits here."""
    engine.pace = 5.0
    gone = visit(scripted[1])
    set_number(gone, "New tokens", 2000)
    gone.click("#run")
    gone.wait_for_selector("#speculative-stream .t")
    gone.close()
    page = visit(scripted[1])
    set_number(page, "New tokens", 16)
    run_to_end(page)
    assert status(page).startswith("Identical")


def test_chips_are_one_stop_and_fill_the_prompt_which_grows(page: Any) -> None:
    chips = page.locator(".prompt-chips:visible .chip")
    focused = "document.activeElement.textContent.trim()"
    before = page.input_value("#prompt textarea")
    chips.first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == chips.nth(1).inner_text()
    assert [chips.nth(i).get_attribute("tabindex") for i in range(3)] == ["-1", "0", "-1"]
    page.keyboard.press("Enter")
    page.wait_for_function("before => document.querySelector('#prompt textarea').value !== before", arg=before)
    page.keyboard.press("End")
    assert page.evaluate(focused) == chips.last.inner_text()
    page.keyboard.press("Tab")
    assert not page.evaluate("document.activeElement.matches('.prompt-chips .chip')")
    heights = []
    for lines in (1, 5, 60):
        page.fill("#prompt textarea", "a line\n" * lines)
        heights.append(page.locator("#prompt textarea").bounding_box()["height"])
    assert heights[0] < heights[1] < heights[2] < 200


def test_controls_explain_themselves(raced: Any) -> None:
    raced.hover("#method")
    says(raced, ".help", "last word")


def test_a_phone_shows_both_lanes_all_tabs_and_takes_a_tap(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1], has_touch=True, newcomer=True)
    page.set_viewport_size({"width": 390, "height": 844})
    reload(page)
    page.wait_for_selector("#sidebar:not(.open)")
    run_to_end(page)
    places = [page.locator(f"#{lane}-stream").bounding_box() for lane in ("speculative", "plain")]
    assert all(box["y"] >= 0 and box["y"] + box["height"] <= 844 for box in places), "both lanes at once"
    assert page.locator('#tabs [role="tab"]:visible').count() == 6
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    speculative, plain = page.locator("#speculative-stream"), page.locator("#plain-stream")
    assert (speculative.bounding_box() or {})["y"] < (plain.bounding_box() or {})["y"]
    page.click(".tour-offer .tool >> text=Show me")
    for place in ("#speculative-stream", "#plain-stream", ".tour", ".stage-panel"):
        page.wait_for_function(
            """place => { const box = document.querySelector(place).getBoundingClientRect();
                return box.top >= 0 && box.bottom <= innerHeight; }""",
            arg=place,
        )
    page.click(".tour .tool >> text=Close")
    marks = page.locator("#speculative-stream .mark")
    for n in (marks.count() - 2, marks.count() - 1):
        marks.nth(n).tap()
        opened = "mark => mark.guess.classList.contains('chosen') && mark.guess.checkVisibility()"
        page.wait_for_function(opened, arg=marks.nth(n).element_handle())


def test_a_pane_whose_script_does_not_come_says_so(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1])
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setBlockedURLs", {"urls": ["*/train/train.js"]})  # a route would turn the cache off
    reload(page)
    open_tab(page, "train")
    page.wait_for_selector("#training .not-loaded")
    assert "Reload the page" in page.inner_text("#training .not-loaded")
    open_tab(page, "playground")
    run_to_end(page)
    session.detach()


LISTENERS = """() => {
    const { addEventListener, removeEventListener } = Document.prototype;
    window.heard = 0;
    document.addEventListener = (...given) => (window.heard += 1, addEventListener.apply(document, given));
    document.removeEventListener = (...given) => (window.heard -= 1, removeEventListener.apply(document, given));
}"""
MOUNTED_AND_GONE = """async modules => {
    const { Runs } = await import(new URL(modules[0], document.baseURI));
    for (let times = 0; times < 3; times += 1) {
        const root = document.createElement("div");
        document.body.append(root);
        new Runs({ root, busy: false, card: {} }, { name: "gone", run: ["a"], stop: "b" });
        root.remove();
    }
    const added = window.heard;
    for (const type of ["click", "keydown", "gone-over"]) document.dispatchEvent(new Event(type));
    return [added, window.heard];
}"""


def test_nothing_is_heard_for_what_is_gone(page: Any) -> None:
    page.evaluate(LISTENERS)
    assert page.evaluate(MOUNTED_AND_GONE, [address("page/runs.js")]) == [9, 0]
