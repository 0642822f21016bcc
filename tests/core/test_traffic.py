"""Bytes are counted from what is stored, and limits decided from what was measured."""

import pytest
import torch
from tiny import VOCABULARY, make_tokenizer, random_model

from core.costs import CostTable
from core.costs.rounds import expected_tokens
from core.explaining.traffic import (
    batch_speed_ups,
    break_even_acceptance,
    break_even_length,
    describe_bandwidth,
    expected_by_formula,
    fixed_share,
    in_batches,
    measure,
    run_traffic,
    weights_read,
)
from core.lanes import open_lane
from core.loading.geometry import Geometry, describe_geometry
from core.loading.model import Model
from core.records import Round, Run, Settings, Token, run_from_dict


def model_of(architecture, **changes):
    network = random_model(architecture, seed=7, dtype=torch.float32, **changes)
    return Model(architecture, network, make_tokenizer(), "fp32", frozenset(), 512, VOCABULARY)


def test_a_pass_reads_every_weight_but_the_embedding_table():
    model = model_of("llama")
    table = 4 * VOCABULARY * 32
    assert weights_read(describe_geometry(model), 1) == model.weight_bytes() - table
    tied = model_of("llama", tie_word_embeddings=True)
    assert weights_read(describe_geometry(tied), 1) == tied.weight_bytes() - table  # its head has a copy of the table


def test_a_pass_reads_the_experts_it_asks():
    """One token asks 2 of 4 experts; two tokens may ask all, and no pass reads more than there are."""
    geometry = describe_geometry(model_of("mixtral"))
    rest = geometry.read_bytes
    assert [weights_read(geometry, n) - rest for n in (1, 2, 9)] == [
        geometry.expert_bytes // 2,
        geometry.expert_bytes,
        geometry.expert_bytes,
    ]


def test_an_early_exit_reads_its_layers_and_the_head():
    geometry = describe_geometry(model_of("llama"))
    in_layers = geometry.read_bytes - geometry.head_bytes
    assert weights_read(geometry, 1, layers=1) == geometry.head_bytes + in_layers // 2


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "phi3", "gemma3_text"])
def test_cached_bytes_are_those_of_the_cache(architecture):
    from core.runners.dynamic import DynamicRunner

    model = model_of(architecture)
    runner = DynamicRunner(model.network, VOCABULARY)
    runner.feed(torch.arange(1, 8))
    held = sum(t.numel() * t.element_size() for layer in runner._cache.layers for t in (layer.keys, layer.values))
    assert describe_geometry(model).cached_bytes * 7 == held


SHAPE = {"kv_heads": 1, "head_size": 4, "vocabulary": 16, "dtype": "float32", "runner": "dynamic", "attention": "sdpa"}
NONE = {"projections": (), "position_table": False, "window": 0, "sliding_layers": 0, "longest": 512, "experts": 0}
GEOMETRY = Geometry(
    width=8, layers=2, heads=2, active_experts=0, read_bytes=1000, head_bytes=100, expert_bytes=0, cached_bytes=10,
    **SHAPE, **NONE,
)  # fmt: skip
DRAFT = Geometry(
    width=4, layers=1, heads=1, active_experts=0, read_bytes=60, head_bytes=20, expert_bytes=0, cached_bytes=2,
    **SHAPE, **NONE,
)  # fmt: skip
COSTS = {"1": 0.010, "2": 0.011, "4": 0.012, "9": 0.014, "16": 0.017}


def run_of(outcomes, method="draft", prompt=10, **seconds):
    """A run whose rounds have these outcomes, and the times given for every round."""
    environment = {
        "target": {"geometry": GEOMETRY.to_dict(), "costs": COSTS},
        "draft": {"geometry": DRAFT.to_dict(), "costs": {n: s / 10 for n, s in COSTS.items()}},
        "drafter": {"exit_layer": 1, "translated": False},
    }
    run = Run(Settings(method=method), environment, "", list(range(prompt)), prefill_seconds=0.02)
    for index, kinds in enumerate(outcomes):
        drafted = [Token(1, "a", kind, parent=i - 1 if i else None) for i, kind in enumerate(kinds)]
        run.rounds.append(Round(index, drafted, Token(2, "b", "corrected" if kinds else "plain"), **seconds))
        run.token_ids += [t.id for t in run.rounds[-1].kept]
    return run


def test_traffic_of_a_run_added_up_by_hand():
    """Two rounds of two drafts, the first half accepted: 9 + 3 and 11 + 3 tokens attended to by the target."""
    run = run_of([("accepted", "rejected"), ("rejected", "ignored")], verify_seconds=0.05)
    found = run_traffic(run)
    assert found.target_weights == 2 * 1000
    assert found.draft_weights == 4 * 60
    assert found.cache == 10 * (12 + 14) + 2 * (10 + 11 + 12 + 13)
    assert found.tokens == 3
    assert found.per_token == found.total / 3
    assert found.bandwidth == pytest.approx(found.total / 0.1)


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (0.5, "more than memory delivers"),
        (1.2, "so it sets the speed here"),
        (2.2, "neither alone sets"),
        (9.1, "overhead"),
        (None, None),
    ],
)
def test_what_the_memory_delivers_tells_reading_from_overhead(most, said):
    run = run_of([(), ()], "plain", verify_seconds=0.05)
    found = run_traffic(run)
    run.environment["bandwidth"] = most and most * found.bandwidth
    assert (said in describe_bandwidth(run, found)) if said else describe_bandwidth(run, found) == ""


def test_traffic_of_other_drafters():
    """N-grams read nothing; an early exit half of the target; a trained head itself for each of its drafts, where the
    document tells its size, and a block drafter once for all; plain one pass a token."""
    outcomes = [("accepted", "rejected")]
    assert run_traffic(run_of(outcomes, "ngram")).draft_weights == 0
    assert run_traffic(run_of(outcomes, "early-exit")).draft_weights == 2 * (100 + 450)
    head = run_of(outcomes, "head")
    assert run_traffic(head) is None
    head.environment["head"] = {"weight_bytes": 30}
    assert run_traffic(head).draft_weights == 2 * 30
    head.settings.method = "block"
    assert run_traffic(head).draft_weights == 30
    plain = run_traffic(run_of([(), ()], "plain"))
    assert (plain.target_weights, plain.tokens) == (2000, 2)
    run = run_of(outcomes)
    del run.environment["target"]["geometry"]
    assert run_traffic(run) is None


def test_a_run_reads_the_target_once_a_round(pair):
    """From real runs' documents: plain decoding takes as many rounds as it writes tokens."""
    once = weights_read(describe_geometry(pair.target), 1)
    for method in ("plain", "ngram"):
        settings = Settings(method=method, max_new_tokens=40, ignore_eos=True)
        with open_lane(pair, "the quick brown fox the quick brown fox", settings) as lane:
            for _ in lane:
                pass
        found = run_traffic(run_from_dict(lane.run.to_dict()))
        assert found.tokens == 40
        assert found.target_weights == len(lane.run.rounds) * once
        assert found.draft_weights == 0


def test_break_even_acceptance_is_where_the_yield_meets_the_cost():
    """A round of two plain steps' length, drafting four: E(α, 4) = 2 at α ≈ 0.51."""
    run = run_of([("accepted", "accepted", "rejected", "ignored")] * 4, verify_seconds=0.015, draft_seconds=0.005)
    plain = run_of([()] * 4, "plain", verify_seconds=0.010)
    costs = measure(run, plain)
    assert costs.plain_measured
    assert (costs.gamma, costs.tokens, costs.round) == (4, 3, pytest.approx(0.02))
    alpha = break_even_acceptance(costs)
    assert expected_tokens(alpha, 4) == pytest.approx(2)
    assert break_even_acceptance(measure(run, run_of([()], "plain", verify_seconds=0.001))) is None


def test_break_even_length_pays_for_the_drafts_prompt():
    run = run_of([("accepted", "accepted")] * 4, verify_seconds=0.015)
    run.draft_prefill_seconds = 0.021
    plain = run_of([()] * 4, "plain", verify_seconds=0.010)
    assert break_even_length(run, measure(run, plain)) == 5  # 5 ms gained a token
    slow = run_of([("rejected",)] * 4, verify_seconds=0.015)
    assert break_even_length(slow, measure(slow, plain)) is None


def test_costs_are_those_of_the_rounds_that_drafted():
    """Rounds in which an n-gram had nothing to propose say nothing of what a draft costs."""
    run = run_of([(), ("accepted", "rejected"), ()], "ngram")
    for round_, seconds in zip(run.rounds, (0.01, 0.03, 0.01)):
        round_.verify_seconds = seconds
    costs = measure(run, run_of([()], "plain", verify_seconds=0.01))
    assert (costs.round, costs.tokens, costs.gamma) == (0.03, 2, 2)
    assert costs.speed_up == pytest.approx(0.01 / (0.05 / 4))


def test_without_a_plain_run_the_cost_table_stands_in():
    costs = measure(run_of([("rejected",)], verify_seconds=0.015), None)
    assert (costs.plain, costs.plain_measured) == (0.010, False)
    assert measure(run_of([()], "plain"), None) is None


def test_large_batches_lose_what_one_text_gains():
    """A climbing cost curve: the more rows a pass has already, the less of it is shared."""
    run = run_of([("accepted", "accepted", "rejected")] * 4, verify_seconds=0.012, draft_seconds=0.003)
    speed_ups = dict(batch_speed_ups(run, measure(run, None)))
    assert speed_ups[1] > 1.5 > 1 > speed_ups[256]


def test_a_cost_table_is_continued_by_its_own_law():
    """As steeply as its last part climbs, for many texts as for the controllers."""
    table = CostTable({1: 0.010, 2: 0.011, 8: 0.012, 16: 0.025})
    foretold = dict(in_batches(table, None, 0.0, 1.0, 1))
    assert foretold[16] == pytest.approx(0.025 / table(32))
    assert table(32) == pytest.approx(0.025 + 16 * 0.013 / 8)


def test_what_of_a_pass_is_not_paid_again():
    assert fixed_share(CostTable({1: 0.010, 2: 0.011, 16: 0.025})) == pytest.approx(0.9)
    assert fixed_share(CostTable({1: 0.02, 16: 0.01})) == 1.0


def test_the_formula_is_averaged_over_the_lengths_that_were_drafted():
    run = run_of([("accepted", "accepted"), (), ("rejected",)])
    assert expected_by_formula(run, 0.5) == pytest.approx((1.75 + 1 + 1.5) / 3)
