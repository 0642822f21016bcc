"""python -m core sweep: what is measured, what is predicted from it, and what it says in words."""

import copy
import itertools
import json
import random

import pytest

from core.__main__ import main
from core.costs import CURVE, describe_costs
from core.costs.rounds import RoundCosts, leviathan, rule_of_thumb
from core.errors import UserError
from core.measuring.deciding import CURVE_SECONDS, Pace, promised
from core.measuring.report import describe_best, describe_latency, describe_positions, describe_prediction, report
from core.measuring.sweep import _basis, _predict, check_sweep, cost_curve, finish, sweep
from core.records import Round, Run, Settings, Token
from core.text import Prompt, one_of_each_kind, read_prompts

PROMPTS = [Prompt("fox", "the quick brown fox"), Prompt("count", "one two three one two three one two")]
SETTINGS = Settings(max_new_tokens=12, ignore_eos=True, top_k=20)
LENGTHS, TEMPERATURES = [4, 2], [1.0, 0.0]


@pytest.fixture(scope="module")
def document(pair):
    return finish(sweep(pair, PROMPTS, SETTINGS, LENGTHS, TEMPERATURES, repeats=2))


def test_every_length_and_auto_at_every_temperature(document):
    """In order, however they were asked for, with plain decoding of each temperature beside them."""
    found = [(point["temperature"], point["draft_length"]) for point in document["points"]]
    assert found == [(t, n) for t in (0.0, 1.0) for n in (2, 4, "auto")]
    assert [row["temperature"] for row in document["temperatures"]] == [0.0, 1.0]
    assert json.loads(json.dumps(document)) == document
    assert not document["stopped"]


def test_spreads_are_ordered_and_paired(document):
    for point in document["points"]:
        for spread in (point["tokens_per_second"], point["ratio_to_plain"]):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_fixed_lengths_draft_what_they_are_told(document):
    """The last round of a run may have no room for a whole draft."""
    for point in document["points"]:
        if point["draft_length"] != "auto":
            assert point["draft_length"] - 2 < point["mean_drafted"] <= point["draft_length"]
            assert len(point["accepted_by_position"]) <= point["draft_length"]
            assert point["predicted"].keys() == {"leviathan", "honest", "rule_of_thumb"}
        else:
            assert point["predicted"] is None


def test_what_four_runs_cannot_decide_is_not_recommended(document):
    """Two prompts, twice: the best fixed length is named, the choice is left open, and said to be."""
    for best in document["best"]:
        here = [p for p in document["points"] if p["temperature"] == best["temperature"]]
        fixed = max(here[:-1], key=lambda p: p["ratio_to_plain"]["median"])
        assert best["draft_length"] == fixed["draft_length"] and best["recommended"] is None
        assert [p["interval"]["count"] for p in here] == [4] * 3
        assert "After 4 runs of each" in describe_best(document, best["temperature"])


def test_latency_and_batches_go_with_every_temperature(document):
    for row, best in zip(document["temperatures"], document["best"]):
        points = [p for p in document["points"] if p["temperature"] == row["temperature"]]
        for found in (row["latency"], *(p["latency"] for p in points)):
            assert 0 < found["median"] <= found["p95"] <= found["longest"]
        assert [each["texts"] for each in best["batches"]][:3] == [1, 2, 4]
        assert "longest pause" in describe_latency(document, row["temperature"])


def test_stopping_keeps_what_was_measured(pair):
    """Of one temperature and the first prompt, plain decoding and the first length: one point."""
    seen = []
    steps = sweep(pair, PROMPTS, SETTINGS, LENGTHS, [0.0], stop=lambda: len(seen) > 2 + len(LENGTHS) + 2)
    document = finish(steps, seen.append)
    assert document["stopped"]
    assert [point["draft_length"] for point in document["points"]] == [2]
    assert "Stopped early" in report(document)


def test_what_is_left_follows_from_the_pace_of_every_setting(pair):
    """On a clock that goes on by a second with every look, each run takes one: so many are left of the repeat, which is
    known once every setting has been warmed up."""
    steps, clock = [], itertools.count()
    finish(sweep(pair, PROMPTS, SETTINGS, LENGTHS, [0.0], 2, clock=lambda: float(next(clock))), steps.append)
    _, *warming, warm = steps[: 1 + len(LENGTHS) + 2]
    assert all(step.left is None for step in warming) and warm.left == 2 * (len(LENGTHS) + 2)
    whole = steps[steps.index(warm) :]
    assert [step.left for step in whole] == [step.total - step.done for step in whole]
    assert [step.repeat for step in whole[1:]] == [1] * 8 + [2] * 8
    assert str(whole[1]).endswith("about 7 seconds left; repeat 1 of at most 2")


def test_a_setting_s_own_runs_replace_what_its_warm_up_promised():
    pace = Pace(48)
    pace.add(0, 2.0, 16, warm_up=True)
    assert pace.left([0, 0]) == 12.0 and pace.left([0, 1]) is None
    pace.add(1, 1.0, 16, warm_up=True)
    for seconds in (3.0, 5.0):
        pace.add(0, seconds, 48, warm_up=False)
    assert pace.left([0, 0, 1]) == 4.0 + 4.0 + 3.0


def test_a_sweep_is_promised_from_the_costs_of_passes():
    """Four settings, two prompts of 100 tokens at 2 ms each, and 48 + 48 + 16 tokens at 10 ms."""
    found = promised({"1": 0.01, "17": 0.034}, ["x" * 400] * 2, 4, 48)
    assert found == pytest.approx(CURVE_SECONDS + 4 * (2 * 0.2 + 1.12))


def test_stopping_at_once_leaves_nothing(pair):
    document = finish(sweep(pair, PROMPTS, SETTINGS, LENGTHS, [0.0], stop=lambda: True))
    assert (document["stopped"], document["points"], document["best"]) == (True, [], [])
    assert report(document) == "Stopped before anything was measured."


@pytest.mark.parametrize(
    ("changes", "lengths", "temperatures", "sentence"),
    [
        ({"method": "tree"}, [2], [0.0], "has no draft length to sweep"),
        ({"method": "plain"}, [2], [0.0], "has no draft length to sweep"),
        ({}, [], [0.0], "at least one draft length"),
        ({}, [0], [0.0], "between 1 and 64; 0 is not"),
        ({}, [2], [], "at least one temperature"),
        ({}, [2], [-1.0], "between 0 and 5; -1 is not"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(pair, changes, lengths, temperatures, sentence):
    with pytest.raises(UserError, match=sentence):
        check_sweep(pair, Settings(**changes), lengths, temperatures)


def simulated(alpha, gamma, rounds, seconds):
    """A run whose drafts are accepted independently with chance alpha, at made-up costs; gamma 0 is plain decoding."""
    chance = random.Random(gamma)
    run = Run(Settings(draft_length=gamma or "auto"), {}, "", [1])
    for index in range(rounds):
        accepted = next((i for i in range(gamma) if chance.random() >= alpha), gamma)
        outcomes = ["accepted"] * accepted + ["rejected", *["ignored"] * gamma][: gamma - accepted]
        drafted = [Token(1, "", outcome, parent=i - 1 if i else None) for i, outcome in enumerate(outcomes)]
        draft, verify, other = seconds(gamma)
        run.rounds.append(Round(index, drafted, Token(1, "", "plain"), draft, verify, other))
        run.token_ids += [1] * (accepted + 1)
    return run


def test_predictions_meet_a_machine_that_obeys_them():
    """Independent acceptance and exact costs: the honest formula gives the measured ratio, Leviathan's the flat one."""
    curve = type("Curve", (), {"__call__": lambda self, n: 1.0 + 0.1 * (n - 1)})()

    def seconds(gamma):
        return 0.05 * gamma, curve(gamma + 1), 0.02

    alpha, gamma = 0.8, 5
    plain, drafting = simulated(alpha, 0, 4000, seconds), simulated(alpha, gamma, 4000, seconds)
    basis = _basis({gamma: {(0, 0): drafting}}, {(0, 0): plain})
    assert basis.acceptance_rate == pytest.approx(alpha, abs=0.02)
    assert basis.draft_seconds == pytest.approx(0.05)
    assert basis.other_seconds == pytest.approx(0.02)
    assert basis.drafting == 1
    predicted = _predict(gamma, basis, curve)
    measured = len(drafting.token_ids) / sum(r.seconds for r in drafting.rounds) * 1.02
    assert predicted["honest"] == pytest.approx(measured, rel=1e-3)
    assert predicted["leviathan"] == pytest.approx(leviathan(alpha, gamma, 0.05), rel=0.05)
    assert predicted["rule_of_thumb"] == pytest.approx(rule_of_thumb(alpha, gamma), rel=0.05)
    assert _predict("auto", basis, curve) is None
    assert _predict(gamma + 1, basis, curve) is None


def test_rounds_that_propose_nothing_are_plain_steps_in_the_prediction():
    """An n-gram that finds something in half of the rounds gains less than its drafts would promise."""
    curve = type("Curve", (), {"__call__": lambda self, n: 1.0})()
    drafting = simulated(0.8, 4, 2000, lambda gamma: (0.0, 1.0, 0.0))
    idle = simulated(0.8, 0, 2000, lambda gamma: (0.0, 1.0, 0.0))
    half = Run(
        drafting.settings, {}, "", [1], drafting.token_ids + idle.token_ids, rounds=drafting.rounds + idle.rounds
    )
    basis = _basis({4: {(0, 0): half}}, {(0, 0): idle})
    assert basis.drafting == pytest.approx(0.5, abs=1e-3)
    always = RoundCosts(curve).speed_up(len(drafting.token_ids) / 2000, 4)
    predicted = _predict(4, basis, curve)["honest"]
    assert predicted == pytest.approx(len(half.token_ids) / 4000, rel=1e-3)
    assert predicted < always


def test_the_cost_curve_reaches_as_far_as_the_model(pair):
    """To the 64 rows of a batch where the context allows, each more than nothing."""
    curve = cost_curve(pair.target, budget=0.01)
    assert list(curve.seconds) == list(CURVE)
    assert min(curve.seconds.values()) > 0


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (lambda n: 1 + 0.01 * (n - 1), ["8 tokens costs 1.1× one: nearly free", "at most 2.8× is left to gain"]),
        (lambda n: 1 + 0.1 * (n - 1), ["8 tokens costs 1.7× one: cheap"]),
        (lambda n: 1 + 0.4 * (n - 1), ["each further token costs 0.40 of a pass"]),
        (lambda n: float(n), ["no cheaper than one after the other", "so nothing is left to gain"]),
        (lambda n: 1 + 0.02 * n + 0.6 * (n > 4), ["from 4 to 5: 1.1× to 1.7×"]),
    ],
)
def test_the_reading_follows_the_curve(cost, words):
    reading = describe_costs({n: cost(n) / cost(1) for n in CURVE})
    for each in words:
        assert each in reading


def test_a_short_table_is_read_too():
    """The table measured at loading has fewer entries, and a model of a short context fewer still."""
    assert describe_costs({1: 1.0, 2: 1.1, 4: 1.2, 6: 1.3}) == "Checking 6 tokens costs 1.3× one: cheap."
    assert describe_costs({1: 0.5}) == "Only a pass over one token was measured."


def test_positions_are_read_from_the_data(document):
    for temperature in TEMPERATURES:
        reached = next(r for r in document["temperatures"] if r["temperature"] == temperature)["accepted_by_position"]
        assert f"in {reached[0]:.0%} of the rounds" in describe_positions(document, temperature)


def test_doubt_is_said_where_measured_and_predicted_part(document):
    """As they do on a machine that was busy with something else."""
    busy = copy.deepcopy(document)
    temperature, length = busy["best"][0]["temperature"], busy["best"][0]["draft_length"]
    point = next(p for p in busy["points"] if (p["temperature"], p["draft_length"]) == (temperature, length))
    point["predicted"]["honest"] = 2 * point["ratio_to_plain"]["median"]
    assert "far apart" in describe_prediction(busy, temperature)
    point["predicted"]["honest"] = point["ratio_to_plain"]["median"]
    assert "far apart" not in describe_prediction(busy, temperature)


def test_one_prompt_of_each_kind():
    found = one_of_each_kind(read_prompts())
    assert [prompt.kind for prompt in found] == list(dict.fromkeys(prompt.kind for prompt in read_prompts()))


def test_command(pair_folder, tmp_path, capsys):
    """A table to read, a document to keep; what cannot be swept is one sentence and status 2."""
    models = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--precision", "fp32"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(prompt.text for prompt in PROMPTS))
    common = ["sweep", *models, "--prompts", str(prompts), "--max-new-tokens", "8"]
    written = tmp_path / "sweep.json"
    assert main([*common, "--draft-lengths", "1,3", "--temperatures", "0", "--json", str(written)]) == 0
    said = capsys.readouterr().out
    document = json.loads(written.read_text())
    assert said.strip() == report(document)
    assert [point["draft_length"] for point in document["points"]] == [1, 3, "auto"]
    assert "Verification cost: Checking 8 tokens costs" in said
    assert main([*common, "--draft-lengths", "two"]) == 2
    assert "must be numbers with commas between" in capsys.readouterr().err
    assert main([*common, "--method", "tree"]) == 2
    assert "no draft length to sweep" in capsys.readouterr().err
