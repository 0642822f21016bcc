"""What the Explain tab says, from runs made by a script: the words, the numbers, and that nothing gets in unescaped."""

import re
from html import unescape
from types import SimpleNamespace

import gradio as gr
import pytest
from fake_sweep import fake_batches
from fakes import ENVIRONMENT, FakeEngine

from app.explain import Explain
from app.explain.check import greedy_html, law_html
from app.explain.costs import costs_html
from app.explain.html import html as pieces
from app.explain.steps import interesting_round, walk
from app.serving.device import Device
from app.serving.visit import Visit
from app.tokens.markup import probability, quoted, shape, size
from core.costs.rounds import expected_tokens
from core.explaining.lossless import Cell, GreedyCheck, LawCheck
from core.measuring.sweep import finish
from core.records import Candidate, Divergence, Round, Run, Settings, Token

REQUEST = SimpleNamespace(session_hash="me")


def fake_runs(**settings):
    """A finished race of the fake engine: speculative and plain."""
    engine = FakeEngine(pace=0.0)
    lanes = [
        engine.open_lane(None, "def f():\n", Settings(method=m, max_new_tokens=40, **settings), lambda: False)
        for m in ("draft", "plain")
    ]
    list(engine.race(lanes))
    return [lane.run for lane in lanes]


def one_round(drafted, emitted, **settings):
    run = Run(Settings(**settings), ENVIRONMENT, "x = ", [1, 2, 3])
    run.rounds = [Round(0, drafted, emitted, 0.002, 0.008, 0.0001)]
    run.token_ids = [t.id for t in run.rounds[0].kept]
    return run


def words(html):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


TOP = [Candidate(5, "b", 0.7), Candidate(4, "a", 0.1)]


def sampled_run():
    drafted = [
        Token(1, "one", "accepted", p=0.9, q=0.6, draw=0.3, top_target=TOP, top_draft=TOP),
        Token(4, "a", "rejected", p=0.1, q=0.5, parent=0, draw=0.4, top_target=TOP, top_draft=[Candidate(4, "a", 0.5)]),
        Token(6, "c", "ignored", p=0.2, q=0.5, parent=1),
    ]
    return one_round(drafted, Token(5, "b", "corrected", p=0.7, top_target=TOP), temperature=1.0)


def test_six_steps_with_the_rounds_own_numbers():
    text = words(walk(sampled_run(), 0))
    steps = ["Draft", "One pass", "A row of logits", "Accept or reject", "Correct, or a bonus", "Roll back"]
    assert [text.index(step) for step in steps] == sorted(text.index(step) for step in steps)
    assert "min(1, 0.1000 / 0.5000) = 0.2000" in text
    assert "0.4000 · 0.5000 = 0.2000 ≥ 0.1000: rejected" in text
    assert "One was kept, the next was refused and replaced: 2 tokens for one pass" in text
    assert "One more draft was never judged" in text
    assert "4 rows in" in text


def test_the_shapes_are_those_of_the_round():
    """Two cached (the prompt's last token is the newest), four fed, as the native pass of a CPU has them."""
    text = words(walk(sampled_run(), 0))
    assert "token ids (4,)" in text
    assert "scores (4, 6, 6)" in text
    assert "[(6, 6, 6)]" in text
    assert "logits float32 (4, 4,096)" in text and "rows to judge by float32 (4, 4,096)" in text


def test_the_mask_lights_what_each_row_sees():
    html = walk(sampled_run(), 0)
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", html[html.index('class="mask') :], re.DOTALL)[:4]
    assert [row.count(">sees<") for row in rows] == [1, 2, 3, 4]
    assert [row.count(">hidden<") for row in rows] == [3, 2, 1, 0]
    assert "sees all 2" in rows[0]
    assert "2 more columns to the left, cached and all visible" in words(html)


def test_the_caches_before_and_after():
    html = walk(sampled_run(), 0)
    target, draft = (words(part) for part in re.findall(r'<table class="cache">.*?</table>', html, re.DOTALL))
    assert re.findall(r"\d+", target) == ["2", "6", "4"]
    assert re.findall(r"\d+", draft) == ["2", "5", "4"]


def test_greedy_is_explained_without_chance():
    drafted = [Token(4, "a", "rejected", p=0.0, q=1.0, top_target=TOP, top_draft=TOP)]
    text = words(walk(one_round(drafted, Token(5, "b", "corrected", p=1.0)), 0))
    assert "likeliest token there is b with 0.700, to a it gives 0.100: rejected" in text
    assert "Nothing is drawn" in text


def test_a_bonus_and_a_plain_round():
    drafted = [Token(1, "one", "accepted", p=0.9, q=0.6, draw=0.3)]
    bonus = words(walk(one_round(drafted, Token(5, "b", "bonus", p=0.7), temperature=1.0), 0))
    assert "gave one more for free" in bonus
    assert "The draft has not read its own last token" in bonus
    plain = words(walk(one_round([], Token(5, "b", "plain", p=0.7), method="plain"), 0))
    assert "as in plain decoding" in plain
    assert "There was no draft to judge" in plain


def test_a_tree_is_drawn_by_ancestors():
    drafted = [
        Token(1, "a", "rejected", p=0.1, q=0.5, draw=0.9),
        Token(2, "b", "accepted", p=0.6, q=0.4, draw=0.1),
        Token(3, "c", "ignored", p=0.6, q=0.4, parent=0),
    ]
    text = words(walk(one_round(drafted, Token(5, "d", "bonus", p=0.7), method="tree", temperature=1.0), 0))
    assert "grew a tree of 3 tokens in 2 passes" in text
    assert "sees its own ancestors and none of its siblings" in text


@pytest.mark.parametrize("method", ["ngram", "early-exit", "ngram+draft"])
def test_every_method_has_its_own_words(method):
    run = sampled_run()
    run.settings.method = method
    text = words(walk(run, 0))
    told = {"ngram": "No model was asked", "early-exit": "first layers", "ngram+draft": "pocket-draft guessed"}
    assert told[method] in text


@pytest.mark.parametrize(
    "method, length, said",
    [
        ("ngram", 4, "so there was nothing to copy"),
        ("ngram", "auto", "too unlikely to be worth checking"),
        ("ngram+draft", "auto", "a plain step promised more"),
    ],
)
def test_a_round_without_a_draft_says_why(method, length, said):
    run = one_round([], Token(5, "b", "plain", p=0.7), method=method, draft_length=length)
    assert said in words(walk(run, 0))


def test_what_a_model_or_a_file_wrote_is_escaped():
    hostile = '<img src=x onerror="alert(1)">'
    run = sampled_run()
    run.prompt = hostile
    run.environment = {
        **ENVIRONMENT,
        "draft": {**ENVIRONMENT["draft"], "name": hostile},
        "target": {**ENVIRONMENT["target"], "name": hostile},
    }
    for token in (*run.rounds[0].drafted, run.rounds[0].emitted):
        token.text = hostile
        token.top_target = [Candidate(1, hostile, 0.5), Candidate(2, "${alert(1)}\u202e", 0.2)]
    html = walk(run, 0) + costs_html(run, None)
    assert "<img" not in html
    assert "\u202e" not in html
    assert "&lt;img" in html
    cells = [Cell((1, 2), 5.0, 5), Cell((), 5.0, 5)]
    found = LawCheck(10, 3, cells, 0.0, 1, 1.0, 0, 4, 1)
    assert "<img" not in law_html(found, lambda ids: [hostile] * len(ids), False)


def test_the_default_round_shows_a_rejection():
    run, _ = fake_runs(temperature=0.7)
    outcomes = [t.outcome for t in run.rounds[interesting_round(run)].drafted]
    assert "rejected" in outcomes and "accepted" in outcomes


def test_expected_tokens_stand_beside_what_happened():
    run, plain = fake_runs(temperature=0.7)
    text = words(costs_html(run, plain))
    judged = [t.outcome for r in run.rounds for t in r.drafted if t.outcome != "ignored"]
    alpha = judged.count("accepted") / len(judged)
    assert f"α = {alpha:.3f}" in text
    predicted = sum(expected_tokens(alpha, len(r.drafted)) for r in run.rounds) / len(run.rounds)
    assert f"{predicted:.2f}" in text
    assert f"{40 / len(run.rounds):.2f}" in text


def test_many_texts_at_once_are_told_as_they_were_measured():
    """In place of what the cost curve predicts; where Tune measured nothing of this method, the way there."""
    run, plain = fake_runs(temperature=0.7)
    variants = {"auto": run.settings, "always 3": run.settings}
    many = finish(fake_batches(run.environment, variants, [1, 2, 4, 8], lambda: False))
    told = words(costs_html(run, plain, many=many))
    assert "From 4 texts at once yes, here" in told and "Many texts at once, measured here: auto: 1.50×" in told
    settled, many = many, {**many, "settings": {"auto": {"method": "ngram"}}}
    predicted = words(costs_html(run, plain, many=many))
    assert "Measure it here, in Tune" in predicted and "Predicted from what passes cost" in predicted
    servers = [{"engine": "vLLM", "version": "0.32"}] * 2
    load = {"servers": servers, "gains": [{"readers": 4, "ratio": 0.9, "speculative": 1}], "crossing": "It loses."}
    for measured, first in ((None, "Measured on your servers"), (settled, "Many texts at once, measured here")):
        told = words(costs_html(run, plain, load, many=measured))
        assert first in told and told.find("Predicted") in (
            -1,
            *range(told.index("Measured on your servers"), len(told)),
        )


def test_bytes_and_conditions_are_the_runs_own():
    run, plain = fake_runs(temperature=0.7)
    text = words(costs_html(run, plain))
    assert "Why is this faster on your machine?" in text and "When would it not be?" in text
    assert "Most of what is read is weights: 26.4 MB of" in text
    assert text.count("not here") == 3 and "texts at once, predicted yes, here" in text
    assert "the plain run beside it" in text


def test_a_run_that_loses_says_so():
    run, plain = fake_runs()
    for round_ in run.rounds:
        round_.verify_seconds *= 20
    text = words(costs_html(run, plain))
    assert "Why is this not faster on your machine?" in text
    assert "When would it not be?" not in text and "What may stand in the way?" in text
    assert "yes, here" in text
    assert "not even 100% would do" in text
    assert "Why is this about as fast as plain decoding on your machine?" in words(costs_html(run, run))


def test_a_run_that_noise_hides_is_not_called_level():
    run, plain = fake_runs()
    for noisy, said in ((plain, "perhaps faster"), (run, "perhaps slower")):
        noisy.rounds[3].verify_seconds *= 2000
        assert f"Why is this {said} on your machine?" in words(costs_html(run, plain))


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.43, "in 43% of such checks"), (0.002, "in 0.2% of such checks"), (1e-6, "once in 1,000,000 such checks")],
)
def test_a_p_value_in_words(p, said):
    cells = [Cell((1, 2), 50.0, 52), Cell((), 50.0, 48)]
    text = words(law_html(LawCheck(100, 3, cells, 0.2, 1, p, 0, 40, 9), lambda ids: ["a"] * len(ids), False))
    assert said in text
    assert ("fails" in text) == (p < 1e-4)


def test_greedy_results_in_words():
    same = words(greedy_html(GreedyCheck(3, 3, 120, []), ["a", "b", "c"]))
    assert "No sign of a wrong rule: 3 of 3 texts agree token for token, 120 tokens in all." in same
    parted = [(2, Divergence(7, " a", " b", gap)) for gap in (0.01, 0.8)]
    tie, wide = (words(greedy_html(GreedyCheck(3, 2, 120, [each]), ["a", "b", "c"])) for each in parted)
    assert "No sign of a wrong rule: 3 of 3 texts agree up to ties." in tie
    assert "Look again: rounding alone may not explain where 1 of 3 texts parts." in wide


def test_small_markup():
    assert quoted(" a\n\x07") == "·a⏎␇"
    assert pieces.chip("<b>", "accepted") == '<code class="tok" data-outcome="accepted">&lt;b&gt;</code>'
    assert (shape((3,)), shape((1, 4096))) == ("(3,)", "(1, 4,096)")
    assert (size(512), size(16_500_000), size(2.4e9)) == ("512 bytes", "16.5 MB", "2.4 GB")
    assert (probability(0.0001), probability(1), probability(0.25)) == ("< 0.001", "1", "0.250")


@pytest.fixture
def tab():
    return Explain(FakeEngine(pace=0.0), Device())


def visited(**settings):
    visit = Visit()
    visit.add("race", fake_runs(**settings))
    return visit


def test_opening_without_a_run_says_what_to_do(tab):
    empty, content, *_ = tab.open(Visit(), None, 0)
    assert empty["visible"] and not content["visible"]


def test_opening_asks_nothing_of_the_engine(tab):
    """No device, no model: even an engine that cannot do anything can be explained."""
    tab.engine = None
    visit = visited(temperature=0.7)
    _, content, picked, number, steps, costs, kind, seen = tab.open(visit, None, 0)
    assert content["visible"] and seen == 1
    assert kind == "law"
    assert picked["value"] == "1:0"
    assert number["value"] == interesting_round(visit.last.runs[0]) + 1
    assert "steps" in steps and "traffic" in costs


def test_a_newer_run_is_shown_and_an_older_one_stays_chosen(tab):
    visit = visited()
    visit.add("race", fake_runs(temperature=0.7))
    assert tab.open(visit, "1:0", 1)[2]["value"] == "2:0"
    assert tab.open(visit, "1:0", 2)[2]["value"] == "1:0"


def test_another_round_of_the_same_run(tab):
    visit = visited()
    assert 'data-round="2"' in tab.step(visit, "1:0", 3)
    assert 'data-round="0"' in tab.step(visit, "1:0", None)
    assert "no longer kept" in tab.step(visit, "9:0", 1)
    assert "Choose a run first" in tab.step(visit, "x", 1)


def checked(tab, kind, visit, chosen="1:0", n=300):
    return [words(value) for value in tab.check(kind, n, visit, chosen, REQUEST)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("law", "No sign of a wrong rule: 300 continuations show no difference from the target's own law."),
        ("broken", "The check fails, as it must with the rule broken"),
        ("greedy", "No sign of a wrong rule: 8 of 8 texts agree up to ties."),
    ],
)
def test_the_checks_tell_their_result(tab, kind, said):
    assert said in checked(tab, kind, visited(temperature=0.7))[-1]


def test_a_greedy_run_is_checked_at_temperature_one(tab):
    seen = []
    tab.engine.check_law = lambda pair, run, prompt, settings, *rest: seen.append(settings) or iter([])
    list(tab._events("law", 300, "a", Settings(), None, lambda: False))
    assert seen[0].temperature == 1.0


@pytest.mark.parametrize(
    ("kind", "n", "said"), [("magic", 300, "no check"), ("law", 1, "between"), ("law", "x", "number")]
)
def test_what_cannot_be_checked_is_a_sentence(tab, kind, n, said):
    assert said in checked(tab, kind, visited(), n=n)[-1]


def test_models_that_are_not_loaded_are_not_fetched_for_a_check(tab):
    """An opened document may name any model."""
    tab.engine.is_loaded = lambda settings: False
    assert "not in memory here" in checked(tab, "law", visited())[-1]


def test_the_trace_of_a_document(tab):
    document = visited(temperature=0.7).last.document()
    found = tab.trace(document)
    assert found["fed"] == 1 + len(found["tokens"]["drafted"])
    assert [row["judges"] for row in found["rows"]][:2] == [(0,), (1,)]
    assert {t["name"] for t in found["tensors"]} >= {"queries", "keys", "scores", "attention", "logits"}
    assert found["traffic"]["target_weights"] == len(document["runs"][0]["rounds"]) * 26_400_000
    assert tab.trace(document["runs"][0], 0)["index"] == 0
    for wrong in ({}, {"schema": 1}, {"schema": 1, "runs": []}):
        with pytest.raises(gr.Error):
            tab.trace(wrong)
    with pytest.raises(gr.Error, match="no round 999"):
        tab.trace(document, 999)


def test_the_lossless_function(tab):
    *_, last = tab.lossless("def f():", {"temperature": 0.8, "method": "draft"}, "law", 200)
    assert last["result"]["p_value"] == 0.43
    with pytest.raises(gr.Error, match="no setting 'heat'"):
        list(tab.lossless("a", {"heat": 1}))
