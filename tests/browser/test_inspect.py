"""Looking at a token and its round, at trees, at the timeline; and the run once more, moment by moment."""

from __future__ import annotations

from typing import Any

import pytest
from driving import run_to_end, set_number, until, wait_idle
from races import candidates, corrected_round, document_of, scripted_race, tree_round

from core.records import Round, Token

RACE = "document.querySelector('.race').race"
STATE = f"""() => {{
    const {{ root }} = {RACE};
    const parts = root.querySelectorAll('.status, .pane, .numbers, .legend, .timeline, [data-chart=curve]');
    return [[...parts].map(e => e.outerHTML), [...root.querySelectorAll('.stream')].map(e => e.scrollTop)];
}}"""
SHOWN = "[...document.querySelectorAll('#speculative-stream .t:not(.mark)')].filter(t => t.offsetParent).length"
PENDING = "document.querySelectorAll('#speculative-stream .t.pending:not(.mark)').length"


@pytest.fixture
def from_disk(from_disk: Any) -> Any:
    """With every guess in its place, none folded into a mark, and the charts open."""

    def open_(*document: Any, **options: Any) -> Any:
        page = from_disk(*document, **options)
        page.evaluate("for (const id of ['all-guesses', 'more']) document.getElementById(id).click()")
        return page

    return open_


@pytest.fixture
def sampled(from_disk: Any) -> Any:
    return from_disk(scripted_race(temperature=0.7))


def laws(page: Any) -> list[list[str]]:
    """Rows of the first list of laws: token, p, q."""
    return page.evaluate(
        """() => [...document.querySelector('.inspector .laws').children].map(
            row => [row.querySelector('.law-name').textContent,
                    ...[...row.querySelector('.law-figures').children].map(e => e.textContent)])"""
    )


def chosen(page: Any) -> str:
    return page.evaluate("document.querySelector('.t.chosen').dataset.outcome")


def test_a_click_on_a_token_opens_its_round(sampled: Any) -> None:
    token = sampled.locator('#speculative-stream [data-outcome="rejected"]').last
    before = token.bounding_box()
    token.click()
    inspector = sampled.locator(".inspector")
    assert inspector.is_visible()
    assert inspector.inner_text().startswith("Round ")
    assert "min(1, p/q) = 0.09; drew 0.41: refused" in inspector.inner_text()
    assert inspector.locator(".scale").get_attribute("aria-label") == "drew 0.41, accepted below 0.09"
    assert token.bounding_box() == before, "the text that is read stays where it is"
    text, panel = sampled.locator("#speculative-stream").bounding_box(), inspector.bounding_box()
    assert panel["x"] >= text["x"] + text["width"], "and is not covered"
    assert not sampled.locator("#token-card").is_visible()
    sampled.keyboard.press("Escape")
    assert not inspector.is_visible()
    assert sampled.locator(".t.chosen, .t.of-round").count() == 0


def test_the_round_is_told_in_order_with_its_outcomes(sampled: Any) -> None:
    sampled.locator('#speculative-stream [data-outcome="corrected"]').first.click()
    chips = sampled.locator(".inspector .chip")
    told = [chips.nth(i).get_attribute("aria-label").rsplit(", ", 1)[1] for i in range(chips.count())]
    round_ = sampled.evaluate("document.querySelector('.t.chosen').round")
    assert told == [token["outcome"] for token in [*round_["drafted"], round_["emitted"]]]
    assert sampled.locator('.chip[aria-current="true"]').get_attribute("aria-label").endswith("corrected")
    chips.first.click()
    assert sampled.evaluate("document.querySelector('.t.chosen').position") == 0


def test_both_laws_and_the_residual_of_a_correction(from_disk: Any) -> None:
    page = from_disk(document_of(corrected_round()))
    page.click('#speculative-stream [data-outcome="rejected"]')
    assert laws(page) == [["b", "0.30", "0.60"], ["a", "0.50", "0.30"], ["c", "0.10", "≤0.05"], ["d", "≤0.10", "0.05"]]
    assert "min(1, p/q) = 0.50; drew 0.80: refused" in page.inner_text(".inspector")
    assert "not among the 3 likeliest" in page.inner_text(".inspector")
    page.click('#speculative-stream [data-outcome="corrected"]')
    rows = page.locator(".inspector .laws").nth(1).locator(".law")
    shares = [rows.nth(i).inner_text().split() for i in range(rows.count())]
    left = {"b": 0.0, "a": 0.5 - 0.3, "c": 0.1}
    assert {row[-2]: row[-1] for row in shares} == {k: f"{v / sum(left.values()):.2f}" for k, v in left.items()}
    assert "Shares among the tokens above only" in page.inner_text(".inspector")
    page.click('#speculative-stream [data-outcome="ignored"]')
    assert "it came after the last judged token" in page.inner_text(".inspector")


def test_a_draft_that_is_sure_of_itself_has_no_unknown_q(from_disk: Any) -> None:
    """An n-gram's q is one for its token and zero for any other: what is left of p is known but for its tail."""
    target = candidates(a=0.5, b=0.3)
    drafted = [Token(98, "b", "rejected", p=0.3, q=1.0, draw=0.8, top_target=target)]
    page = from_disk(document_of(Round(0, drafted, Token(97, "a", "corrected", p=0.5, top_target=target), 0, 0.01)))
    page.click('#speculative-stream [data-outcome="rejected"]')
    assert laws(page) == [["b", "0.30", "1.00"], ["a", "0.50", "0.00"]]


def test_a_greedy_round_is_told_as_greedy(from_disk: Any) -> None:
    page = from_disk(scripted_race())
    page.locator('#speculative-stream [data-outcome="rejected"]').last.click()
    words = page.inner_text(".inspector")
    assert "It is not the target’s likeliest token: refused" in words
    assert "The run is greedy" in words
    assert page.locator(".inspector .scale").count() == 0
    page.locator('#speculative-stream [data-outcome="corrected"]').last.click()
    assert "Nothing is drawn" in page.inner_text(".inspector")


def test_the_keyboard_opens_walks_and_closes(sampled: Any) -> None:
    sampled.focus("#speculative-stream .t[tabindex='0']")
    sampled.keyboard.press("Home")
    sampled.keyboard.press("Enter")
    assert sampled.inner_text(".inspector-title") == "Round 1 of 22"
    sampled.keyboard.press("ArrowRight")
    assert sampled.evaluate("document.activeElement.classList.contains('chosen')"), "it follows the focus"
    assert not sampled.locator("#token-card").is_visible()
    sampled.click('[data-go="round-on"]')
    sampled.click('[data-go="round-on"]')
    assert sampled.inner_text(".inspector-title") == "Round 3 of 22"
    assert sampled.inner_text(".scrubber-round") == "round 3 / 22", "one number for both"
    sampled.click('[data-go="token-on"]')
    sampled.click('[data-go="token-back"]')
    assert chosen(sampled) == "rejected"
    sampled.keyboard.press("Escape")
    assert sampled.evaluate("document.activeElement.dataset.outcome") == "rejected", "the focus goes back to the text"


def test_a_plain_token_is_inspected_beside_its_own_text(sampled: Any) -> None:
    sampled.locator("#plain-stream .t").last.click()
    words = sampled.inner_text(".inspector")
    assert words.startswith("Step 60 of 60")
    assert "What the target says here" in words
    text, panel = sampled.locator("#plain-stream").bounding_box(), sampled.locator(".inspector").bounding_box()
    assert panel["x"] + panel["width"] <= text["x"]


def test_a_tree_is_drawn_as_a_tree(from_disk: Any) -> None:
    page = from_disk(document_of(tree_round(), method="tree", tree="2x2"))
    page.locator('#speculative-stream [data-outcome="bonus"]').click()
    nodes = page.evaluate(
        """() => [...document.querySelectorAll('.inspector .tree-node')].map(node => ({
            text: node.querySelector('text').textContent, kind: node.dataset.kind,
            x: +node.querySelector('rect').getAttribute('x'), y: +node.querySelector('rect').getAttribute('y')}))"""
    )
    assert [(n["text"], n["kind"]) for n in nodes] == [
        ("a", "rejected"), ("b", "accepted"), ("c", "ignored"), ("d", "ignored"), ("d", "rejected"), ("c", "accepted"),
        ("✦e", "bonus"),
    ]  # fmt: skip
    assert len({n["x"] for n in nodes[:2]}) == len({n["x"] for n in nodes[2:6]}) == 1, "a column a depth"
    assert nodes[0]["x"] < nodes[2]["x"] < nodes[6]["x"]
    assert len({(n["x"], n["y"]) for n in nodes}) == len(nodes)
    kinds = page.evaluate("[...document.querySelectorAll('.inspector .tree-edge')].map(e => e.dataset.kind)")
    assert kinds == [n["kind"] for n in nodes], "an edge to every node, the accepted path by its kind"
    page.locator(".inspector .tree-node").nth(4).click()
    assert page.evaluate("document.querySelector('.t.chosen').position") == 4
    page.locator(".inspector .tree-node").nth(5).click()
    assert "Tested against what its refused siblings left of p; drew 0.70: accepted" in page.inner_text(".inspector")


def test_the_target_judges_a_tree_down_its_path(from_disk: Any) -> None:
    page = from_disk(document_of(tree_round(), method="tree", tree="2x2"))
    judged = page.evaluate(
        f"""() => {{
            const {{ replay }} = {RACE};
            replay.seek(0, 0);
            const judged = [];
            while (replay.step(1)) {{
                const {{ beat }} = replay.momentOf('speculative', replay.leader.rounds[0]);
                if (beat.kind === 'judge') judged.push(beat.index);
            }}
            return judged;
        }}"""
    )
    assert judged == [0, 1, 4, 5]


def test_the_timeline_chooses_rounds(sampled: Any) -> None:
    timeline = sampled.locator(".timeline")
    box = timeline.bounding_box()
    timeline.click(position={"x": 80, "y": box["height"] / 2})
    assert sampled.inner_text(".inspector-title") == "Round 1 of 22"
    assert timeline.get_attribute("aria-valuetext") == "round 1 of 22"
    assert sampled.locator(".timeline-mark").count() == 1
    sampled.keyboard.press("Escape")
    assert sampled.locator(".timeline-mark").count() == 0
    timeline.focus()
    sampled.keyboard.press("Home")
    for _ in range(3):
        sampled.keyboard.press("ArrowRight")
    sampled.keyboard.press("Enter")
    assert sampled.inner_text(".inspector-title") == "Round 4 of 22"


def test_a_long_runs_timeline_moves_to_the_chosen_round(from_disk: Any) -> None:
    page = from_disk(scripted_race(max_new_tokens=160))
    rounds = page.evaluate(f"{RACE}.timeline.rounds.length")
    assert f"the last 32 of {rounds}" in page.inner_text(".timeline-note")
    page.focus(".timeline")
    page.keyboard.press("Home")
    assert f"1 to 32 of {rounds}" in page.inner_text(".timeline-note")


def test_a_replay_goes_moment_by_moment_and_leaves_no_trace(sampled: Any) -> None:
    before, tokens = sampled.evaluate(STATE), sampled.locator("#speculative-stream .t:not(.mark)").count()
    sampled.evaluate(f"{RACE}.replay.seek(0, 0)")
    figures = sampled.locator("[data-number]:not([data-number=spread]):not([data-number^=speedup]), .rate b")
    assert set(figures.all_inner_texts()) == {"–"}, "nothing is known before the first round"
    assert not sampled.inner_text("[data-number=speedup]")
    sampled.locator(".scrubber input").focus()
    sampled.keyboard.press("Home")
    assert sampled.inner_text(".scrubber-round") == "round 1 / 22"
    first = sampled.evaluate(f"{RACE}.documents.speculative.rounds[0]")
    assert sampled.evaluate(SHOWN) == len(first["drafted"]) + 1
    sampled.keyboard.press("ArrowRight")
    assert sampled.inner_text(".scrubber-round") == "round 2 / 22"

    on, back = sampled.locator('[data-do="on"]'), sampled.locator('[data-do="back"]')
    shown = sampled.evaluate(SHOWN)
    drafted = sampled.evaluate(f"{RACE}.documents.speculative.rounds[2].drafted")
    for n in range(len(drafted)):
        on.click()
        assert (sampled.evaluate(SHOWN), sampled.evaluate(PENDING)) == (shown + n + 1, n + 1), "drafts come as pending"
    on.click()
    assert sampled.evaluate(PENDING) < len(drafted), "the target judges the first"
    words = sampled.inner_text(".stage-words")
    assert "min(1, p/q)" in words
    while sampled.inner_text(".scrubber-round") == "round 3 / 22":
        on.click()
    back.click()
    assert sampled.evaluate(PENDING) == 0
    assert sampled.evaluate(SHOWN) == shown + len(drafted) + 1
    assert sampled.locator("[data-number=tokens]").inner_text() != ""
    plain = sampled.evaluate(
        """() => {
            const { replay, documents } = document.querySelector('.race').race;
            const { ends } = replay.lanes.plain;
            const shown = [...document.querySelectorAll('#plain-stream .t')].filter(t => t.offsetParent).length;
            return [shown, ends.filter(end => end <= replay.time + 1e-9).length];
        }"""
    )
    assert plain[0] == plain[1], "plain decoding is shown as far as it was at that time"

    sampled.keyboard.press("Escape")
    assert sampled.locator("#speculative-stream .t:not(.mark)").count() == tokens
    assert sampled.evaluate(STATE) == before


def test_slow_motion_plays_pauses_and_goes_on(sampled: Any) -> None:
    before = sampled.evaluate(STATE)
    play = sampled.locator('[data-do="play"]')
    play.click()
    assert play.get_attribute("aria-label") == "Pause"
    factor = sampled.evaluate(f"1 / {RACE}.replay.rate")
    assert f"Both lanes on one clock, {factor:,.0f} times slower than they ran" in sampled.inner_text(".status")
    assert len(set(sampled.locator(".pane-note").all_inner_texts())) == 1, "both stand at the same time"
    until(sampled, f"{PENDING} === 5")
    until(sampled, f"{RACE}.replay.beats[{RACE}.replay.done - 1]?.kind === 'judge'")
    play.click()
    place = sampled.inner_text(".stage-words")
    sampled.wait_for_timeout(900)
    assert sampled.inner_text(".stage-words") == place
    sampled.keyboard.press("ArrowRight")
    assert sampled.inner_text(".stage-words") != place
    sampled.locator(".scrubber select").select_option("2")
    play.click()
    until(sampled, f"{RACE}.replay.finished && !{RACE}.replay.playing")
    assert sampled.evaluate(SHOWN) == sampled.locator("#speculative-stream .t:not(.mark)").count()
    sampled.click('[data-do="leave"]')
    assert sampled.evaluate(STATE) == before


def test_an_open_inspector_follows_the_replay(sampled: Any) -> None:
    sampled.locator("#speculative-stream .t:not(.mark)").first.click()
    sampled.locator(".scrubber input").fill("4")
    assert sampled.inner_text(".inspector-title").startswith("Round 4")
    sampled.click('[data-do="on"]')
    assert sampled.inner_text(".inspector-title").startswith("Round 5")
    assert "has not judged it yet" in sampled.inner_text(".inspector")
    assert sampled.locator(".inspector .scale").count() == 0
    assert sampled.locator('[data-go="round-on"]').is_disabled()


def test_less_motion_means_stepping_only(from_disk: Any) -> None:
    page = from_disk(scripted_race(), reduced_motion="reduce")
    assert page.locator('[data-do="play"]').is_disabled()
    page.click('[data-do="back"]')
    assert page.evaluate(f"{RACE}.replay.active && !{RACE}.replay.playing")
    page.focus(".scrubber input")
    page.keyboard.press(" ")
    assert not page.evaluate(f"{RACE}.replay.playing")


def test_on_a_phone_the_inspector_is_a_sheet_under_the_token(from_disk: Any) -> None:
    page = from_disk(scripted_race(temperature=0.7), viewport={"width": 390, "height": 844})
    token = page.locator('#speculative-stream [data-outcome="rejected"]').last
    token.click()
    sheet = page.locator(".inspector").bounding_box()
    assert sheet["x"] == 0
    assert sheet["width"] == 390
    assert token.bounding_box()["y"] + token.bounding_box()["height"] <= sheet["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_ends_a_replay_and_no_replay_starts_in_a_run(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    page = visit(scripted[1])
    assert page.locator('[data-do="play"]').is_disabled()
    run_to_end(page)
    page.click('[data-do="back"]')
    assert page.evaluate(f"{RACE}.replay.active")
    engine.pace = 20.0
    page.click("#run")
    assert not page.evaluate(f"{RACE}.replay.active")
    page.wait_for_selector(".race .status[data-kind=running]")  # the last race's tokens stood until now
    assert page.locator('[data-do="play"]').is_disabled()
    page.evaluate(f"{RACE}.replay.play()")
    page.locator("#speculative-stream .t").first.dispatch_event("click")
    assert page.locator(".inspector").is_visible(), "a running race can be looked at"
    engine.pace = 0.0
    wait_idle(page)
    assert page.locator(".inspector").is_visible()
    page.click("[data-go=close]")
    assert page.inner_text(".race .status-text").startswith("Identical")
    assert not page.evaluate(f"{RACE}.replay.active")
    page.keyboard.press("Escape")
    set_number(page, "New tokens", 24)
    run_to_end(page)
    assert page.evaluate(f"{RACE}.replay.length") == page.evaluate(f"{RACE}.documents.speculative.rounds.length")
