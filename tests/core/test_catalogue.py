"""The catalogue: every entry whole, every claim that follows from shapes true, every pair within its memory class."""

import re

import pytest
import torch

from core.inspecting.catalogue import allowed, catalogue, find_pair, heads_for, read_catalogue, relatives
from core.inspecting.files import catalogue_config
from core.loading.memory import NF4, cache_bytes, captured_bytes, skeleton, weights, workspace_bytes

MODELS = read_catalogue().models
PAIRS = {pair.name: pair for pair in catalogue()}
HUB = [pair for pair in catalogue() if pair.target != "pocket"]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SPACE_GB = 16
"""RAM of the smallest Space, which CPU pairs are for."""


def weigh(name, nf4=True):
    return weights(skeleton(catalogue_config(name)), torch.bfloat16, NF4() if nf4 else None)


def test_a_dozen_pairs_the_bundled_one_first():
    assert 10 <= len(PAIRS) == len(catalogue()) <= 16
    assert catalogue()[0].target == catalogue()[0].draft == "pocket"
    assert {pair.memory_gb for pair in catalogue()} == {0, 8, 12, 16, 32, 48, 80}
    assert {pair.kind for pair in catalogue()} == {"code", "chat", "base", "moe", "early-exit"}
    assert [pair.memory_gb for pair in catalogue()] == sorted(pair.memory_gb for pair in catalogue())


def test_every_model_is_of_a_pair_and_told_whole():
    assert {id_ for pair in catalogue() for id_ in pair.ids} == set(MODELS)
    for model in MODELS.values():
        assert model.id in ("pocket", "smollm2") or re.fullmatch(r"[\w-]+/[\w.-]+", model.id)
        assert model.licence
        assert model.config or model.id == "pocket"


@pytest.mark.parametrize("pair", catalogue(), ids=lambda pair: pair.name)
def test_a_line_on_why(pair):
    assert pair.why.endswith((".", "?")) or "?" in pair.why
    assert 20 < len(pair.why) <= 130
    assert pair.gated == any(MODELS[id_].gated for id_ in pair.ids)
    assert find_pair(pair.target, pair.draft) == pair


@pytest.mark.parametrize("pair", HUB, ids=lambda pair: pair.name)
def test_a_pair_fits_its_class(pair):
    """In NF4 with caches and captured passes of a race over 2,048 tokens; on a CPU in bf16 on the smallest Space."""
    nf4, device = (NF4(), CUDA) if pair.memory_gb else (None, CPU)
    needed = 0
    for id_, lanes in zip(pair.ids, (2, 1)):
        config = catalogue_config(id_)
        network = skeleton(config)
        needed += weights(network, torch.bfloat16, nf4).total + lanes * cache_bytes(config, 2048, torch.bfloat16)
        needed += workspace_bytes(network, 2048, torch.bfloat16, device, nf4)
        needed += lanes * captured_bytes(network, 2048, torch.bfloat16, device, nf4)
    assert needed < 0.95 * (pair.memory_gb or SPACE_GB) * 2**30


@pytest.mark.parametrize("pair", [pair for pair in HUB if pair.draft], ids=lambda pair: pair.name)
def test_target_and_draft_share_their_tokens_and_the_draft_is_small(pair):
    target, draft = MODELS[pair.target], MODELS[pair.draft]
    assert target.tokenizer == draft.tokenizer
    assert draft in relatives(pair.target)
    assert weigh(pair.draft).read < 0.3 * weigh(pair.target).read


PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "google/gemma-3-270m-it": 268_098_176,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_give_the_published_parameter_counts(name):
    assert weigh(name).parameters == PUBLISHED[name]


def test_the_lesson_in_layers():
    pair = PAIRS["smollm2-1.7b"]
    layers = [MODELS[id_].config["num_hidden_layers"] for id_ in pair.ids]
    assert layers == [24, 30]
    assert weigh(pair.draft).parameters < weigh(pair.target).parameters / 12


def test_experts_are_counted_in_16_bits():
    moe = weigh(PAIRS["qwen3-30b-a3b"].target)
    assert moe.experts > 0.9 * moe.total
    assert moe.active_parameters < 0.12 * moe.parameters


def test_early_exit_needs_no_second_model():
    assert all(pair.draft is None for pair in catalogue() if pair.kind == "early-exit")


def test_a_public_page_loads_the_catalogue_only():
    assert allowed(None, None)
    assert allowed("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B")
    assert not allowed("Qwen/Qwen3-4B", "someone/else")
    assert not allowed("/etc", None)


def test_heads_are_named_for_their_targets():
    """Where the licence is not known here, the head's own card tells it."""
    heads = read_catalogue().heads
    assert len({head.id for head in heads}) == len(heads)
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", head.id) for head in heads)
    for target in ("meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-20b", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-32B"):
        assert heads_for(target)
        assert all(head.target == target for head in heads_for(target))
    assert all((head.accepted is None) == (head.source is None) for head in heads)
    assert "3.64 on MT-Bench, at temperature 1, says DeepSpec's paper" in heads_for("Qwen/Qwen3-4B")[-3].words
    assert heads_for("someone/else") == []
    assert allowed("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3")
    assert not allowed("Qwen/Qwen3-8B", "someone/head") and not allowed("AngelSlim/Qwen3-8B_eagle3", None)
