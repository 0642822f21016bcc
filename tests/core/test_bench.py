"""python -m core bench: what is measured and how it is counted; how fast it is, is for the benchmark to say."""

import json

import pytest

from core.__main__ import main
from core.bench import bench, table
from core.peers import run_peer
from core.records import Settings

PROMPTS = ["the quick brown fox", "one two three one two three one two"]
SETTINGS = Settings(draft_length=3, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def document(pair):
    variants = {"draft": SETTINGS, "ngram": Settings(method="ngram", max_new_tokens=12, ignore_eos=True)}
    return bench(pair, PROMPTS, variants, repeats=2, peers=True)


def test_every_method_and_peer_has_its_row(document):
    """Plain decoding is measured whether asked for or not: it is what all others are held against."""
    assert [row["name"] for row in document["methods"]] == ["plain", "draft", "ngram"]
    assert [row["name"] for row in document["peers"]] == ["transformers generate", "transformers assisted"]
    assert json.loads(json.dumps(document)) == document


def test_ratios_are_taken_pair_by_pair(document):
    """Plain against itself is 1 in every pair, so its spread has no width; a spread is ordered."""
    plain = document["methods"][0]
    assert plain["ratio_to_plain"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for row in document["methods"] + document["peers"]:
        for spread in (row["tokens_per_second"], row["ratio_to_plain"]):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_what_a_round_is_made_of(document):
    """Shares of engine time are shares; plain decoding drafts nothing and gets one token a pass."""
    plain, draft, _ = document["methods"]
    assert (plain["tokens_per_round"], plain["acceptance_rate"]) == (1.0, None)
    assert 0 < draft["efficiency"] <= 1
    assert draft["draft_share"] + draft["verify_share"] == pytest.approx(draft["efficiency"])


def test_peers_write_the_same_text(pair, monkeypatch):
    """What is compared must be the same work: transformers' greedy ids are ours."""
    from core.decoding import open_lane

    written = {}
    generate = pair.target.network.generate
    padding = list(range(pair.target.vocab_size, pair.target.config.vocab_size))  # ours never writes these

    def watched(ids, **options):
        return written.setdefault("ids", generate(ids, **options, suppress_tokens=padding))

    monkeypatch.setattr(pair.target.network, "generate", watched)
    assert run_peer(pair, "transformers assisted", PROMPTS[0], SETTINGS) > 0
    lane = open_lane(pair, PROMPTS[0], SETTINGS)
    while lane.step() is not None:
        pass
    lane.close()
    assert written["ids"][0].tolist() == lane.run.prompt_ids + lane.run.token_ids


def test_command(pair_folder, tmp_path, capsys):
    """A table to read, a document to keep; a method that does not exist is one sentence and status 2."""
    models = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--precision", "fp32"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    common = ["bench", *models, "--prompts", str(prompts), "--repeats", "1", "--max-new-tokens", "6"]
    assert main([*common, "--methods", "plain,draft", "--json", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out.strip() == table(json.loads((tmp_path / "bench.json").read_text()))
    assert main([*common, "--methods", "plain,warp"]) == 2
    assert "no method 'warp'" in capsys.readouterr().err
