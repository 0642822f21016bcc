"""The run document: complete, and the same object for page, export and replay."""

import json
from dataclasses import replace

import pytest

from core.costs import BETWEEN, MEASURED_LENGTHS
from core.lanes import open_lane, race
from core.records import Settings, run_from_dict

METHODS = ("plain", "draft", "ngram", "ngram+draft", "early-exit", "tree")
KEPT = {"accepted", "corrected", "bonus", "plain"}
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
TOP_LEVEL = {
    "schema", "settings", "environment", "prompt", "prompt_ids", "token_ids", "text", "stop_reason", "rounds",
    "metrics",
}  # fmt: skip
ROUND = {"index", "drafted", "emitted", "draft_seconds", "verify_seconds", "other_seconds"} | {
    "target_cache", "draft_length",
}  # fmt: skip
METRICS = {
    "new_tokens", "seconds", "prefill_seconds", "draft_prefill_seconds", "tokens_per_second", "rounds",
    "tokens_per_round", "acceptance_rate", "draft_utilisation", "accepted_by_position",
}  # fmt: skip


def generate(pair, tops=0, **settings):
    with open_lane(pair, PROMPT, Settings(**{"max_new_tokens": 24, "draft_length": 4, **settings}), tops=tops) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_document_is_complete(pair, method, temperature):
    """Every key of the design, for every method, greedy and sampled; and it is JSON."""
    run = generate(pair, method=method, temperature=temperature)
    document = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert set(document) == TOP_LEVEL
    assert set(document["metrics"]) == METRICS
    assert document["schema"] == 1
    assert document["settings"]["method"] == method
    assert document["stop_reason"] in ("eos", "length")
    for index, round_ in enumerate(document["rounds"]):
        cached = {"draft_cache"} if method in ("draft", "ngram+draft", "tree") else set()
        drafted_by = {"tree"} if method == "tree" and round_["drafted"] else set()
        drafted_by |= {"source"} if method == "ngram+draft" and round_["draft_length"] else set()
        chain = method != "tree" or set(round_.get("tree", "").split("x")) == {"1"}
        told = {"ended"} if chain and (round_["drafted"] or "refused" in round_) else set()
        told |= {"refused"} if round_.get("ended") == "unsure" else set()
        assert set(round_) == ROUND | cached | drafted_by | told
        assert round_["index"] == index
        for token in round_["drafted"]:
            assert {"id", "text", "p", "q", "outcome", "parent"} <= set(token)
            assert (token["draw"] is not None) == (temperature > 0 and token["outcome"] != "ignored")
        if round_["emitted"]:
            assert set(round_["emitted"]) == {"id", "text", "p", "outcome"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_token_ids_are_the_kept_ids_in_order(pair, method, temperature):
    """Accepted and emitted tokens of the rounds are the output, and their texts are its text."""
    run = generate(pair, method=method, temperature=temperature, ignore_eos=True)
    kept = [token for r in run.rounds for token in r.kept]
    assert run.token_ids == [token.id for token in kept]
    assert len(run.token_ids) == 24
    special = set(pair.target.tokenizer.all_special_ids)
    assert run.text == "".join(token.text for token in kept if token.id not in special)
    assert {token.outcome for token in kept} <= KEPT


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(pair, method):
    """Document -> run -> document changes nothing."""
    document = json.loads(json.dumps(generate(pair, method=method, temperature=0.8, tops=3).to_dict()))
    assert run_from_dict(document).to_dict() == document


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_run(pair, method):
    """Seed, settings, device and costs decide everything but the clocks; another seed writes another text."""
    one, other = (generate(pair, method=method, temperature=1.0, seed=5, draft_length="auto") for _ in range(2))
    outcomes = [[[(t.id, t.outcome, t.draw) for t in r.drafted] for r in run.rounds] for run in (one, other)]
    assert one.token_ids == other.token_ids
    assert outcomes[0] == outcomes[1]
    assert generate(pair, method=method, temperature=1.0, seed=6).token_ids != one.token_ids


def test_tops_are_what_the_models_would_rather_have_said(pair):
    """On request: candidates by falling probability, whose law is that of p and q."""
    run = generate(pair, tops=3, temperature=1.0)
    for token in (t for r in run.rounds for t in r.drafted):
        for top, probability in ((token.top_target, token.p), (token.top_draft, token.q)):
            values = [candidate.p for candidate in top]
            assert values == sorted(values, reverse=True)
            found = {candidate.id: candidate.p for candidate in top}
            assert found.get(token.id, probability) == pytest.approx(probability, abs=1e-6)
            assert token.id in found or probability <= values[-1] + 1e-6
    assert all(r.emitted.top_target for r in run.rounds if r.emitted)


def test_incomplete_or_foreign_documents_are_refused(pair):
    document = generate(pair).to_dict()
    for broken in ({**document, "schema": 2}, {k: v for k, v in document.items() if k != "rounds"}, {}, []):
        with pytest.raises(ValueError, match="run document"):
            run_from_dict(broken)


def test_environment_names_no_folders(pair, tmp_path):
    """What is exported tells machine, versions, models and costs."""
    environment = generate(pair).to_dict()["environment"]
    assert environment["device"] == "cpu"
    assert {"torch", "transformers"} <= set(environment["versions"])
    for role in ("target", "draft"):
        assert {"name", "precision", "layers", "parameters", "weight_bytes", "costs"} <= set(environment[role])
    measured = {int(n) for n in environment["target"]["costs"]}
    in_rounds = {n for n in measured if n <= MEASURED_LENGTHS[-1]}  # beyond, what wide trees of other tests asked for
    assert {*MEASURED_LENGTHS} <= in_rounds <= {*MEASURED_LENGTHS, *BETWEEN}


def test_race_takes_the_lane_with_the_least_engine_time(pair):
    """Lanes of one model share it and write what they write alone; at any moment the one behind is stepped."""
    settings = Settings(max_new_tokens=16, draft_length=3)
    lanes = [open_lane(pair, PROMPT, replace(settings, method=method)) for method in ("plain", "draft")]
    before = [0.0, 0.0]
    for index, _ in race(lanes):
        # A lane that has ended is out of the race; until then nobody behind it waits.
        others = [s for i, s in enumerate(before) if i != index and lanes[i].run.stop_reason is None]
        assert all(before[index] <= other for other in others)
        before[index] = lanes[index].seconds
    alone = generate(pair, method="plain", max_new_tokens=16)
    assert lanes[0].run.token_ids == lanes[1].run.token_ids == alone.token_ids
