"""python -m core bench: what is measured and how it is counted; how fast it is, is for the benchmark to say."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import make_tokenizer, random_model
from written_gguf import write_gguf

from core import decoding
from core.__main__ import main
from core.costs import CostTable
from core.costs.rounds import PassCosts, RoundCosts, expected_tokens, promise
from core.errors import UserError
from core.heads.runner import HeadCosts
from core.loading import load_pair
from core.loading.gguf import read_header
from core.loading.model import Model
from core.measuring.bench import (
    LENGTHS,
    NEW_TOKENS,
    bench,
    bytes_read,
    contexts_of,
    copy_bandwidth,
    costs_of_rounds,
    growth,
    padded_prompt,
    run_timed,
)
from core.measuring.peers import SPECULATION, llama_peers, network_for, transformers_peers
from core.measuring.perplexity import perplexity
from core.measuring.report import table
from core.records import Round, Run, Settings, Token
from core.runners.clock import PassTimer
from core.runners.native import NativeRunner
from core.runners.products import Share
from core.text import encode_prompt

PROMPTS = ["the quick brown fox", "one two three one two three one two"]
SETTINGS = Settings(draft_length=3, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def document(pair):
    variants = {"draft": SETTINGS, "ngram": Settings(method="ngram", max_new_tokens=12, ignore_eos=True)}
    return bench(pair, PROMPTS, variants, repeats=2, peers=transformers_peers(pair))


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


def test_every_prompt_has_its_own_rows(document):
    """Means of what was measured of it alone: over all prompts they come to the method's."""
    for row in document["methods"]:
        for measure in ("acceptance_rate", "tokens_per_round"):
            found = [each[measure] for each in row["by_prompt"]]
            assert len(found) == len(PROMPTS)
            if None not in found:  # an n-gram may find nothing in a prompt
                assert sum(found) / len(found) == pytest.approx(row[measure])
        assert row["by_prompt"][0]["tokens_per_round"] >= 1 and row["by_prompt"][0]["ratio_to_plain"] > 0
    assert [line.split()[:2] for line in table(document).splitlines() if line.split()[:1] in (["1"], ["2"])] == [
        ["1", "draft"],
        ["1", "ngram"],
        ["2", "draft"],
        ["2", "ngram"],
    ]


def test_runs_that_repeat_themselves_are_told_apart(document, pair):
    """A bench says how many of its runs went in circles, and what the others gained."""
    for row in document["methods"]:
        others = row["ratio_without_repeats"]
        assert 0 <= row["repeating"] <= 1 and (others is None) == (row["repeating"] == 1)
    assert all(row["repeating"] is None for row in document["peers"])


def test_what_a_round_is_made_of(document):
    """Shares of engine time are shares; plain decoding drafts nothing and gets one token a pass."""
    plain, draft, ngram = document["methods"]
    assert (plain["tokens_per_round"], plain["acceptance_rate"]) == (1.0, None)
    assert 0 < draft["draft_share"] + draft["verify_share"] < 1
    assert plain["draft_ms"] < draft["draft_ms"] > ngram["draft_ms"]
    for row in (plain, draft, ngram):
        assert row["verify_ms"] > 0 and row["other_ms"] > 0


def test_bare_passes_are_the_passes_alone(pair, monkeypatch):
    """Efficiency counts what `feed` takes, and nothing that happens between two passes: by a clock that passes move by
    two seconds and the judge by three, it is two fifths."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("core.runners.clock.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def taking(seconds, work):
        def slow(*args, **options):
            clock.now += seconds
            return work(*args, **options)

        return slow

    monkeypatch.setattr(NativeRunner, "_pass", taking(2.0, NativeRunner._pass))
    monkeypatch.setattr("core.decoding.judge", taking(3.0, decoding.judge))
    run, share = run_timed(pair, PROMPTS[0], replace(SETTINGS, method="plain"))
    assert len(run.rounds) > 1 and share == pytest.approx(2 / 5)


def test_passes_are_heard_only_while_somebody_listens(pair):
    ids = torch.tensor([1, 2, 3])
    with pair.target.lease() as runner, PassTimer(pair.target.device) as passes:
        assert passes.seconds() == 0
        runner.feed(ids)
        once = passes.seconds()
        runner.feed(ids)
    assert passes.seconds() > once > 0
    with pair.target.lease() as runner:
        heard = passes.seconds()
        runner.feed(ids)
    assert passes.seconds() == heard


def round_of(drafted, accepted):
    outcomes = ["accepted"] * accepted + ["rejected"] * (accepted < drafted)
    outcomes += ["ignored"] * (drafted - len(outcomes))
    tokens = [Token(1, "", outcome, parent=i - 1 if i else None) for i, outcome in enumerate(outcomes)]
    return Round(0, tokens, Token(1, "", "bonus"))


def test_what_is_promised_is_the_honest_formula():
    """With one draft length throughout, and no catching up, it is the speed-up at the measured acceptance."""
    costs = RoundCosts(lambda n: 1 + 0.1 * n, lambda n: 0.2)
    dear = replace(costs, overhead=0.3)
    rounds = [round_of(4, accepted) for accepted in (0, 1, 2, 3, 0, 2)]
    expected = 1 + sum(accepted for accepted in (0, 1, 2, 3, 0, 2)) / 6
    assert promise(rounds, costs).ratio() == pytest.approx(costs.speed_up(expected, 4))
    assert promise(rounds, costs).ratio(0.3) == pytest.approx(dear.speed_up(expected, 4))
    assert promise(rounds, dear).ratio(0.3) == promise(rounds, costs).ratio(0.3)
    assert promise([round_of(0, 0)] * 5, costs).ratio() == 1
    assert expected_tokens(1.0, 4) == promise([round_of(4, 4)], costs).tokens


def test_the_draft_s_catching_up_is_charged():
    """After full acceptance the draft feeds two tokens, after plain steps as many as it missed."""
    fed = []
    costs = RoundCosts(lambda n: 1.0, lambda n: fed.append(n) or 0.1)
    promise([round_of(2, 2), round_of(2, 0), round_of(0, 0), round_of(0, 0), round_of(1, 0)], costs)
    assert [n for n in fed if n > 1] == [2, 3]


def test_of_two_drafters_each_is_held_against_its_own_rounds():
    """An n-gram's rounds cost no draft, and the model reads what it wrote before it drafts again."""
    costs = RoundCosts(lambda n: 1 + 0.1 * n, lambda n: 0.2 * n, following=0.2)
    own = [replace(round_of(2, hits), source="model") for hits in (0, 1)]
    found = [replace(round_of(4, hits), source="ngram") for hits in (4, 2)]
    apart = [promise(own, costs), promise(found, costs.without_network())]
    both = promise([*own, *found], costs)
    assert both.tokens == pytest.approx(sum(each.tokens for each in apart))
    assert both.seconds == pytest.approx(sum(each.seconds for each in apart))
    later = promise([*found, *own], costs)
    assert later.seconds == pytest.approx(both.seconds + costs.late(5 + 3))


def test_what_a_head_s_rounds_should_bring_follows_from_its_own_passes():
    read, draft = CostTable({1: 0.2, 4: 0.5}), CostTable({1: 0.1, 4: 0.4})
    passes = PassCosts(CostTable({1: 1.0, 4: 1.3}), head=HeadCosts(read, draft))
    chain, tree = (Run(Settings(method=method), {}, "", []) for method in ("head", "head-tree"))
    assert costs_of_rounds(chain, passes, False).chain(3) == pytest.approx(0.2 + 2 * 0.1 + 1.3)
    assert costs_of_rounds(tree, passes, False) is costs_of_rounds(chain, PassCosts(passes.target), False) is None


def test_promises_only_where_passes_can_be_told(document):
    plain, draft, ngram = document["methods"]
    assert plain["honest_ratio"] is None
    for row in (draft, ngram):
        assert row["honest_ratio"]["median"] > 0 and row["of_honest"]["median"] > 0
    assert set(document["costs"]) == {"target", "verify", "draft"}
    assert set(document["costs"]["target"]) == {str(n) for n in LENGTHS}
    assert document["bandwidth"] is None  # not told on a CPU


def test_growth(pair):
    """A row per context that fits; the text is as long as asked, for every method."""
    assert contexts_of("64, 128,512,max", pair.target.context_length) == [64, 128, 256]
    assert contexts_of("", 256) == []
    with pytest.raises(UserError, match="'few' is not"):
        contexts_of("128,few", 256)
    rows = growth(pair, {"draft": SETTINGS}, [64, 128])
    assert [row["context"] for row in rows] == [64, 128]
    for row in rows:
        assert row["context"] - 2 * NEW_TOKENS < row["prompt_tokens"] <= row["context"] - NEW_TOKENS
        assert [method["name"] for method in row["methods"]] == ["plain", "draft"]
        assert all(0 < m["passes_ms"] < m["round_ms"] and 0 < m["other_ms"] < m["round_ms"] for m in row["methods"])


def test_peers_draw_as_we_do(pair, monkeypatch):
    asked, drawn = {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
    network = SimpleNamespace(generate=lambda ids, **options: asked.update(options) or ids)
    monkeypatch.setattr("core.measuring.peers.network_for", lambda model: network)
    transformers_peers(pair)["transformers generate"](PROMPTS[0], replace(SETTINGS, **drawn))
    assert asked.items() >= drawn.items()


def test_padded_prompt_is_as_long_as_asked(pair):
    for length in (40, 200, 5000):
        prompt = padded_prompt(pair, length, SETTINGS)
        assert length - 16 <= len(encode_prompt(pair.target, prompt, SETTINGS)) <= length


def test_bandwidth_counts_bytes_both_ways(pair):
    """A copy reads and writes; a pass reads less than the model holds, for it looks up a row of the embeddings."""
    assert copy_bandwidth(torch.device("cpu"), 1 << 20, repeats=2) > 0
    assert 0 < bytes_read(pair.target, 0) < pair.target.weight_bytes()
    assert bytes_read(pair.target, 100) > bytes_read(pair.target, 0)


def test_peers_write_the_same_text(pair, monkeypatch):
    """What is compared must be the same work: transformers' greedy ids are ours."""
    from core.lanes import open_lane

    written = {}
    network = network_for(pair.target)
    generate = network.generate
    padding = list(range(pair.target.vocab_size, pair.target.config.vocab_size))  # ours never writes these

    def watched(ids, **options):
        return written.setdefault("ids", generate(ids, **options, suppress_tokens=padding))

    monkeypatch.setattr(network, "generate", watched)
    monkeypatch.setattr(
        "core.measuring.peers.network_for", lambda model: network if model is pair.target else network_for(model)
    )
    assert transformers_peers(pair)["transformers assisted"](PROMPTS[0], SETTINGS) > 0
    with open_lane(pair, PROMPTS[0], SETTINGS) as lane:
        for _ in lane:
            pass
    assert written["ids"][0].tolist() == lane.run.prompt_ids + lane.run.token_ids


def test_command(pair_folder, tmp_path, capsys):
    """A table to read, a document to keep; a method that does not exist is one sentence and status 2."""
    models = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--precision", "fp32"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    common = ["bench", *models, "--prompts", str(prompts), "--repeats", "1", "--max-new-tokens", "6"]
    written = tmp_path / "bench.json"
    assert main([*common, "--methods", "plain,draft", "--contexts", "64", "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == table(json.loads(written.read_text())).strip()
    assert "Verification cost: Checking 8 tokens" in shown and "round ms" in shown
    assert main([*common, "--methods", "plain,warp"]) == 2
    assert "no method 'warp'" in capsys.readouterr().err


def test_llama_cpp_asks_for_its_package_and_a_file(pair, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UserError, match=r"not installed \(pip install xllamacpp\)"):
        llama_peers(pair, "model.gguf")
    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace())
    with pytest.raises(UserError, match="--gguf FILE"):
        llama_peers(pair, None)
    with pytest.raises(UserError, match="There is no GGUF file"):
        llama_peers(pair, str(tmp_path / "none.gguf"))


def test_llama_cpp_is_given_our_prompt_and_counted_from_its_second_token(pair, monkeypatch, tmp_path):
    """Its server is asked for the very ids; the first token comes out of the prefill, so it is not counted."""
    asked = []

    class Server:
        def __init__(self, options):
            self.options = options

        def handle_completions(self, request):
            asked.append((self.options, request))
            return {"timings": {"predicted_n": 12, "predicted_ms": 110.0}}

    def options():
        return SimpleNamespace(
            **{name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch", "speculative")}
        )

    kinds = SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{kind}": kind for kind in SPECULATION})
    package = SimpleNamespace(CommonParams=options, Server=Server, common_speculative_type=kinds)
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", kind="Q8_0")
    peers = llama_peers(pair, str(tmp_path / "model.gguf"))
    assert [peer(PROMPTS[0], SETTINGS) for peer in peers.values()] == [pytest.approx(100)] * 2 * len(SPECULATION)
    assert [given.speculative.types for given, _ in asked] == [[kind] for kind in SPECULATION] * 2
    assert list(peers)[:2] == ["llama.cpp Q8_0", "llama.cpp Q8_0 ngram-simple"]
    read = [given.model.path for given, _ in asked]
    assert read[0] == str(tmp_path / "model.gguf")
    assert list(peers)[len(SPECULATION)] == f"llama.cpp {read_header(Path(read[-1])).quantisation}" == "llama.cpp Q4_0"
    assert all(given.cpuparams.n_threads == pair.target.threads for given, _ in asked)
    assert all(request["prompt"] == encode_prompt(pair.target, PROMPTS[0], SETTINGS) for _, request in asked)


def test_transformers_is_measured_on_its_own_layout(pair_folder):
    """Where the fused forward laid 16-bit weights out for its kernels, transformers' generate gets its own copy."""
    pair = load_pair(Settings(target=str(pair_folder / "target"), precision="bf16"))
    if not any(isinstance(module, Share) for module in pair.target.network.modules()):
        pytest.skip("oneDNN has no bf16 on this processor")
    fresh = network_for(pair.target)
    assert not any(isinstance(module, Share) for module in fresh.modules())
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(fresh(ids).logits, pair.target.network(ids).logits, rtol=0.05, atol=0.05)


def test_perplexity_is_that_of_the_models_own_law(pair):
    """Each window starts anew; within it every token is judged by the law after those before it."""
    ids = [5, 7, 9, 11, 5, 7, 9]
    network = pair.target.network
    laws = [
        network(torch.tensor([part])).logits[0, :, : pair.target.vocab_size].float().log_softmax(-1)
        for part in (ids[:4], ids[4:])
    ]
    losses = [-law[i, part[i + 1]] for law, part in zip(laws, (ids[:4], ids[4:])) for i in range(len(part) - 1)]
    assert perplexity(pair.target, ids, window=4) == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)


def test_perplexity_reads_no_more_at_once_than_the_model_does():
    """GPT-2 has no position past its context."""
    network = random_model("gpt2", 3, vocab=300, dtype=torch.float32, n_positions=64)
    model = Model("short", network, make_tokenizer(), "fp32", frozenset(), 64, 300)
    ids = list(range(1, 200))
    assert perplexity(model, ids) == perplexity(model, ids, window=64)


def test_perplexity_command_compares_precisions(pair_folder, capsys, tmp_path):
    (tmp_path / "held-out.txt").write_text("the quick brown fox jumps over the lazy dog")
    arguments = ["--target", str(pair_folder / "target"), "--text", str(tmp_path / "held-out.txt"), "--json", "-"]
    assert main(["perplexity", *arguments, "--precisions", "fp32,bf16"]) == 0
    rows = json.loads(capsys.readouterr().out)["precisions"]
    assert [row["precision"] for row in rows] == ["fp32", "bf16"]
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] == pytest.approx(1, rel=0.05)
