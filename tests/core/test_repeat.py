"""The same seed, settings and draft lengths give the same run, whatever the costs are measured to be."""

import json
from dataclasses import replace

import pytest

from core.__main__ import main
from core.costs import CostTable
from core.drafting.methods import METHODS
from core.errors import UserError
from core.lanes import open_lane, other_surroundings, repeat
from core.records import run_from_dict
from core.settings import Settings

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"


@pytest.fixture
def costs(pair):
    """Sets what passes of the pair are said to cost; as measured again afterwards."""
    kept = pair.target.costs, pair.draft.costs

    def set_costs(target, draft):
        lengths = (1, 2, 4, 6, 9, 16)
        pair.target.costs = CostTable({n: target * (1 + 0.01 * n) for n in lengths})
        pair.draft.costs = CostTable({n: draft * (1 + 0.01 * n) for n in lengths}, following=draft)

    yield set_costs
    pair.target.costs, pair.draft.costs = kept


def generate(pair, method, **settings):
    chosen = Settings(method=method, temperature=1.0, seed=5, max_new_tokens=48, ignore_eos=True, **settings)
    with open_lane(pair, PROMPT, chosen) as lane:
        for _ in lane:
            pass
    return run_from_dict(json.loads(json.dumps(lane.run.to_dict())))


def decided(run):
    return [[(t.id, t.outcome, t.parent, t.draw) for t in (*r.drafted, r.emitted)] for r in run.rounds]


@pytest.mark.parametrize(
    "method", [method for method in METHODS if METHODS[method].network != "head"]
)  # there is none for the pair
def test_a_run_is_repeated_from_its_document_under_other_costs(pair, costs, method):
    """Lengths and shapes are the document's: with the costs of now, the method chooses others."""
    costs(1.0, 0.05)
    settings = {"exit_layer": 1} if method == "early-exit" else {}
    then = generate(pair, method, **settings)
    costs(1.0, 0.3)
    other = generate(pair, method, **settings)
    now, difference = repeat(pair, then)
    assert difference is None
    assert decided(now) == decided(then)
    assert now.text == then.text
    if method in ("draft", "ngram+draft", "tree"):
        assert [len(r.drafted) for r in other.rounds] != [len(r.drafted) for r in then.rounds]


def test_numbers_of_a_round_do_not_follow_the_lengths_before_it(pair):
    """Two draft lengths: the draws of a round are the same ones."""
    one, other = (generate(pair, "draft", draft_length=length) for length in (1, 4))
    for a, b in zip(one.rounds[:-1], other.rounds[:-1]):
        assert a.drafted[0].draw == b.drafted[0].draw


def test_a_run_that_was_stopped_is_repeated_as_far_as_it_came(pair):
    chosen = Settings(temperature=1.0, max_new_tokens=48, ignore_eos=True)
    with open_lane(pair, PROMPT, chosen) as lane:
        for _ in range(3):
            next(lane)
    now, difference = repeat(pair, lane.run)
    assert difference is None
    assert now.token_ids == lane.run.token_ids


def test_the_first_difference_is_named(pair):
    then = generate(pair, "draft", draft_length=3)
    then.rounds[2].emitted.id += 1
    then.settings = replace(then.settings)
    now, difference = repeat(pair, then)
    assert difference.startswith("Round 2 differs: the token after the draft was ")
    assert len(now.rounds) == 3
    elsewhere = replace(generate(pair, "draft", draft_length=3), prompt="the fox")
    assert "The prompt's" in repeat(pair, elsewhere)[1]


def test_what_is_not_as_it_was_is_said(pair):
    then = generate(pair, "plain")
    assert other_surroundings(pair, then) == []
    then.environment["versions"]["torch"] = "1.0"
    then.environment["target"]["precision"] = "bf16"
    found = other_surroundings(pair, then)
    assert [sentence.split()[:2] for sentence in found] == [["torch", "1.0"], ["target's", "precision"]]


def test_older_documents_say_why_not(pair):
    then = generate(pair, "draft")
    then.rounds[0].draft_length = None
    with pytest.raises(UserError, match="does not say how deep each round was to draft"):
        repeat(pair, then)


def test_command(pair_folder, tmp_path, capsys):
    """Status 0 and one line where it is the same run, 1 where not, 2 for what cannot be repeated."""
    file, again = tmp_path / "run.json", tmp_path / "again.json"
    models = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--precision", "fp32"]
    sampled = ["--temperature", "0.9", "--max-new-tokens", "24", "--ignore-eos", "--device", "cpu"]
    assert main(["generate", *models, *sampled, "--prompt", PROMPT, "--json", str(file)]) == 0
    capsys.readouterr()
    assert main(["generate", "--repeat", str(file), "--json", str(again)]) == 0
    assert "draft: identical, 24 tokens in" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert json.loads(again.read_text())["token_ids"] == document["token_ids"]
    changed = json.loads(file.read_text())
    changed["rounds"][0]["emitted"]["id"] += 1
    file.write_text(json.dumps({"schema": 1, "runs": [document, changed]}))
    assert main(["generate", "--repeat", str(file)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("draft: identical") and told[1].startswith("draft: different. Round 0 differs")
    file.write_text('{"schema": 1}')
    assert main(["generate", "--repeat", str(file)]) == 2
    for place, value in (("prompt", 5), ("environment", []), ("settings", {**document["settings"], "seed": "x"})):
        file.write_text(json.dumps({**document, place: value}))
        assert main(["generate", "--repeat", str(file)]) == 2, place
    assert main(["generate", "--repeat", str(tmp_path / "none.json")]) == 2
    assert main(["generate", "--repeat", str(file), "--seed", "3"]) == 2
    assert all("Traceback" not in line for line in capsys.readouterr().err.splitlines())
