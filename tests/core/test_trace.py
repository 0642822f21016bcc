"""The trace tells the truth: its shapes are those that hooks see in a real pass, on every kind of runner."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import ARCHITECTURES, VOCABULARY, make_tokenizer, random_model, random_prompt
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from core import decoding
from core.errors import UserError
from core.explaining import logits_rows, trace_pass, trace_round
from core.lanes import open_lane
from core.loading.geometry import Geometry, decoder_layers, describe_geometry
from core.loading.model import Model
from core.records import Settings, run_from_dict
from core.runners.architecture import FAMILIES
from core.runners.dynamic import DynamicRunner
from core.runners.graph import GraphRunner
from core.runners.static_layers import StaticNetwork
from core.runners.widths import width_for

NAMED = ("llama", "qwen2", "gpt2")
CACHED, FED = 11, 4


def model_of(architecture: str, **changes: Any) -> Model:
    network = random_model(architecture, seed=7, dtype=torch.float32, **changes)
    return Model(architecture, network, make_tokenizer(), "fp32", frozenset(), 512, VOCABULARY)


def traced(geometry: Geometry | None, cached: int, fed: int, tree: bool = False) -> dict[str, Any]:
    assert geometry
    return {(t.stage, t.name): t for t in trace_pass(geometry, cached, fed, tree)}


@contextmanager
def watched(network: Any) -> Iterator[dict[Any, Any]]:
    """Shapes that forward hooks and the attention function see, by the names of the trace."""
    seen: dict[Any, Any] = {}
    handles = []

    def hook(key: Any, module: nn.Module) -> None:
        handles.append(module.register_forward_hook(lambda _m, _a, out: seen.__setitem__(key, tuple(out.shape))))

    layer: Any = decoder_layers(network, network.config.num_hidden_layers)[0]  # type: ignore[index]
    for name, module in layer.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            hook(("layer", name.split(".")[0], name.rsplit(".", 1)[-1]), module)
    hook("embedding", network.get_input_embeddings())
    hook("logits", network.get_output_embeddings())
    original = network.config._attn_implementation

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        answer = (eager if original == "eager" else ALL_ATTENTION_FUNCTIONS[original])(module, q, k, v, mask, **more)
        if "queries" not in seen:
            seen.update(queries=tuple(q.shape), keys=tuple(k.shape), values=tuple(v.shape))
            seen["mask"] = None if mask is None else (tuple(mask.shape), str(mask.dtype).removeprefix("torch."))
            seen["attention"] = (*answer[0].shape[:2], answer[0].shape[2] * answer[0].shape[3])
        return answer

    AttentionInterface.register("watched", attention)
    AttentionMaskInterface.register("watched", ALL_MASK_ATTENTION_FUNCTIONS[original])
    network.set_attn_implementation("watched")
    try:
        yield seen
    finally:
        network.set_attn_implementation(original)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("cached, fed", [(CACHED, FED), (CACHED, 1), (0, CACHED + FED)])
def test_shapes_are_those_that_forward_hooks_see(architecture, cached, fed):
    """A cached pass over a draft, a plain step, and the same text without a cache."""
    model = model_of(architecture)
    network: Any = model.network
    model.runner_kind = "dynamic"  # transformers' own forward, also where there is a fused one
    if architecture in ("llama", "qwen2", "qwen3"):  # fusing has made its weights views: take a fresh one
        network = random_model(architecture, seed=7, dtype=torch.float32)
    runner = DynamicRunner(network, VOCABULARY)
    ids = torch.tensor(random_prompt(cached + fed))
    if cached:
        runner.feed(ids[:cached])
    geometry = describe_geometry(model)
    with watched(network) as seen:
        logits = runner.feed(ids[cached:])
    told = traced(geometry, cached, fed)
    assert geometry
    assert told["in", "token ids"].shape == (1, len(ids[cached:]))
    assert told["in", "embedding"].shape == seen["embedding"]
    assert told["out", "logits"].shape == seen["logits"]
    assert tuple(logits.shape) == (fed, VOCABULARY)
    for name in ("queries", "attention"):
        assert told["layer", name].shape == seen[name]
    for name, held in (("keys", runner._cache.layers[0].keys), ("values", runner._cache.layers[0].values)):
        assert told["layer", name].shape == tuple(held.shape) == seen[name]
        assert told["layer", name].dtype == "float32" == str(held.dtype).removeprefix("torch.")
    mask = told["layer", "mask"]
    if architecture in NAMED:
        assert mask.stored == (seen["mask"] is not None)
    if seen["mask"] is not None:
        assert (mask.shape, mask.dtype) == seen["mask"]
    projections = {(key[1], key[2]): shape for key, shape in seen.items() if isinstance(key, tuple)}
    in_layer = [t for t in trace_pass(geometry, cached, fed) if t.stage == "layer"]
    assert sorted(projections.values()) == sorted(t.shape for t in in_layer if t.name in {k[1] for k in projections})


@pytest.mark.parametrize("architecture", NAMED)
@pytest.mark.parametrize("cached, fed", [(CACHED, FED), (CACHED, 1), (300, 3), (11, 7)])
def test_captured_passes_read_a_fixed_reach(architecture, cached, fed):
    """The static cache of core.runners.graph, whose passes run eagerly here: the same shapes that a GPU replays."""
    model = model_of(architecture)
    model.runner_kind = "graph"
    network: Any = random_model(architecture, seed=7, dtype=torch.float32)
    runner = GraphRunner(network, VOCABULARY, eager=True)
    ids = torch.tensor(random_prompt(cached + fed))
    runner.feed(ids[:cached])
    with watched(network) as seen:
        runner.feed(ids[cached:])
    told = traced(describe_geometry(model), cached, fed)
    for name in ("queries", "keys", "values", "attention"):
        assert told["layer", name].shape == seen[name]
    mask = told["layer", "mask"]
    assert (mask.shape, mask.dtype, mask.stored) == (*seen["mask"], True)


@pytest.mark.parametrize("architecture", NAMED)
def test_scores_have_the_shape_of_the_attention_weights(architecture):
    """With transformers' eager attention the weights are there to be looked at: heads × fed × everything before."""
    model = model_of(architecture)
    network: Any = random_model(architecture, seed=7, dtype=torch.float32)
    network.set_attn_implementation("eager")
    ids = torch.tensor([random_prompt(CACHED + FED)])
    past = network(ids[:, :CACHED], use_cache=True).past_key_values
    weights = network(ids[:, CACHED:], past_key_values=past, output_attentions=True).attentions[0]
    geometry = describe_geometry(model)
    assert geometry
    told = traced(Geometry.of({**geometry.to_dict(), "runner": "dynamic", "attention": "eager"}), CACHED, FED)[
        "layer", "scores"
    ]
    assert told.stored
    assert told.shape == tuple(weights.shape) == (1, geometry.heads, FED, CACHED + FED)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("cached, fed", [(11, 4), (11, 1), (0, 15)])
def test_the_native_pass_is_traced_as_its_program_says(architecture, cached, fed):
    """By the matrices of its steps, heads rounded up as they lie there; logits as they come."""
    model = model_of(architecture)
    told = traced(describe_geometry(model), cached, fed, False)
    network = model._fused
    block, program = network._blocks[0], network.program()
    heads = network.heads + 2 * network.kv_heads
    assert told["layer", "qkv"].shape == (fed, heads * network.head_size)
    assert block.qkv.tiles * 16 == heads * program.padded
    assert told["layer", "gate_up"].shape[1] <= block.gate_up.tiles * 16
    assert told["layer", "scores"].shape == (fed, network.heads, cached + fed)
    assert ("layer", "mask") not in told
    with model.lease() as runner:
        ids = torch.tensor(random_prompt(cached + fed))
        if cached:
            runner.feed(ids[:cached])
        assert told["out", "logits"].shape == tuple(runner.feed(ids[cached:]).shape)


@pytest.mark.parametrize("cached, fed, parents", [(11, 4, None), (300, 1, None), (11, 4, [-1, 0, 0, 1]), (11, 7, None)])
def test_the_captured_fused_forward_is_traced_as_it_runs(cached, fed, parents, monkeypatch):
    model = model_of("qwen3")
    model.runner_kind = GraphRunner.fused_kind
    told = traced(describe_geometry(model), cached, fed, parents is not None)
    seen: dict[str, Any] = {}
    attend = F.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen.update(queries=tuple(q.shape), keys=tuple(k.shape), values=tuple(v.shape), mask=tuple(mask.shape[2:]))
        return attend(q, k, v, mask, **options)

    network: Any = random_model("qwen3", seed=7, dtype=torch.float32)
    runner = GraphRunner(network, VOCABULARY, eager=True, fused=StaticNetwork(network))
    ids = torch.tensor(random_prompt(cached + fed))
    runner.feed(ids[:cached])
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    logits = runner.feed(ids[cached:], parents)
    assert {name: told["layer", name].shape for name in seen} == seen
    assert told["layer", "mask"].stored and told["out", "logits"].shape == (width_for(fed), VOCABULARY)
    assert logits.shape == (fed, VOCABULARY)


def test_rows_judge_what_follows_them():
    """Row 0, after the newest token, judges the first draft; the last row gives the bonus token."""
    rows = logits_rows([None, 0, 1])
    assert [row.judges for row in rows] == [(0,), (1,), (2,), ()]
    assert [row.visible for row in rows] == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]


def test_in_a_tree_a_row_sees_its_ancestors_only():
    rows = logits_rows([None, None, 0, 0, 1])
    assert [row.judges for row in rows] == [(0, 1), (2, 3), (4,), (), (), ()]
    assert [row.visible for row in rows] == [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (0, 2, 5)]


def finished(pair, prompt="the quick brown", **settings):
    chosen = Settings(temperature=0.8, max_new_tokens=24, ignore_eos=True, **settings)
    with open_lane(pair, prompt, chosen, tops=2) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "draft", "draft_length": 3},
        {"method": "draft"},
        {"method": "ngram+draft", "draft_length": 2},
        {"method": "tree", "tree": "2x2"},
        {"method": "early-exit", "draft_length": 2, "exit_layer": 1},
        {"method": "plain"},
    ],
    ids=str,
)
def test_cache_lengths_are_those_of_the_real_caches(pair, settings, monkeypatch):
    """Recorded by the round itself; replayed from the outcomes, they are the same for documents that lack them."""
    held = []
    step = decoding.take_step

    def watched_step(target, drafter, *rest):
        before = target.length
        made = step(target, drafter, *rest)
        held.append((before, target.length, drafter.cache.length if drafter and drafter.cache else None))
        return made

    monkeypatch.setattr(decoding, "take_step", watched_step)
    run = run_from_dict(finished(pair, **settings).to_dict())
    older = copy.deepcopy(run)
    for round_ in older.rounds:
        round_.target_cache = round_.draft_cache = None
    for index, (before, after, draft) in enumerate(held):
        trace, replayed = trace_round(run, index), trace_round(older, index)
        assert (trace.target_cache.before, trace.target_cache.after) == (before, after)
        assert trace.target_cache.fullest == before + len(run.rounds[index].drafted) + 1
        assert (trace.draft_cache and trace.draft_cache.after) == draft
        if draft is not None:
            assert replayed == trace
    assert any(draft is not None for *_, draft in held) == (settings["method"] not in ("early-exit", "plain"))


def test_a_round_is_traced_from_its_document(pair):
    """Cached beside uncached: γ+1 rows against the whole text, the vocabulary without its padding."""
    run = run_from_dict(finished(pair, method="draft", draft_length=3).to_dict())
    trace = trace_round(run, 1)
    tensors = {t.name: t.shape for t in trace.tensors}
    uncached = {t.name: t.shape for t in trace.uncached}
    total = trace.target_cache.before + trace.fed
    assert tensors["scores"] == (trace.fed, pair.target.config.num_attention_heads, total)
    assert uncached["scores"] == (total, pair.target.config.num_attention_heads, total)
    assert tensors["rows to judge by"] == (trace.fed, pair.target.vocab_size)
    assert tensors["logits"][-1] > pair.target.vocab_size
    with pytest.raises(UserError, match="there is no round 99"):
        trace_round(run, 99)


@pytest.mark.parametrize("wrong", [None, {}, {"width": "8"}, {"width": -1}, "x", {"layers": 10**30}])
def test_a_geometry_that_cannot_be_is_none(wrong, pair):
    good = describe_geometry(pair.target).to_dict()
    assert Geometry.of(good) == describe_geometry(pair.target)
    assert Geometry.of({**good, **wrong} if isinstance(wrong, dict) and wrong else wrong) is None


def test_latent_attention_is_not_guessed_at(pair):
    config = SimpleNamespace(num_hidden_layers=4, kv_lora_rank=8)
    assert describe_geometry(SimpleNamespace(network=pair.target.network, config=config)) is None
