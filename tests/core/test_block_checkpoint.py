"""Block drafters on disk: every published layout is read, ours round-trip, and what cannot be run is said."""

import json
from dataclasses import replace

import pytest
import torch
from blocks import BLOCK_VARIANTS, DSPARK, random_block
from heads import random_head
from safetensors.torch import load_file, save_file
from tiny import CONTEXT, LAYERS, PADDED, random_prompt

from core import generate, load_pair
from core.drafting.build import shares_passes
from core.drafting.methods import BLOCK, HEAD
from core.errors import UserError
from core.heads.checkpoint import describe_head, is_head, load_weights, read_config, save_block, save_head
from core.heads.parallel import NativeBlockRunner
from core.lanes import finish_together
from core.records import Settings

FLOAT, CPU = torch.float64, torch.device("cpu")


def loaded(folder, depth=LAYERS):
    found = describe_head(folder, "a drafter")
    return load_weights(folder, "a drafter", found.config(found.candidates(depth)[0]), FLOAT, CPU)


def rewrite(folder, config=None, tensors=None):
    entries = {**read_config(folder), **(config or {})}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    if tensors:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def states(network):
    generator = torch.Generator().manual_seed(4)
    config = network.config
    ids = torch.randint(0, config.vocab_size, (1, 20), generator=generator)
    features = torch.randn(1, 20, config.feature_width, generator=generator, dtype=FLOAT)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator, dtype=FLOAT)
    return network.blocks(lambda tokens: table[tokens], ids, features, torch.tensor([[3, 11, 19]]))


@pytest.mark.parametrize("variant", [name for name in BLOCK_VARIANTS if "sliding" not in name])
def test_saved_and_read_again(variant, tmp_path):
    """z-lab's layout, and DeepSpec's where rows predict the next token."""
    network = random_block(**BLOCK_VARIANTS[variant])
    save_block(network, tmp_path, LAYERS, FLOAT)
    config = read_config(tmp_path)
    assert is_head(config)
    spark = network.config.sample_from_anchor
    assert config["architectures"] == ["Qwen3DSparkModel" if spark else "DFlashDraftModel"]
    named = config["target_layer_ids"] if spark else config["dflash_config"]["target_layer_ids"]
    assert named == [0, LAYERS - 1]  # by what leaves a layer
    again = loaded(tmp_path)
    assert again.config == network.config
    assert torch.equal(again.draft_ids, network.draft_ids)
    torch.testing.assert_close(states(again), states(network))


def test_sliding_layers_are_causal_in_their_block_where_nothing_is_said(tmp_path):
    save_block(random_block(windows=(6, None), causal=(True, False)), tmp_path, LAYERS, FLOAT)
    assert loaded(tmp_path).config.causal == (True, False)
    rewrite(tmp_path, {"is_causal": False})
    assert loaded(tmp_path).config.causal == (False, False)


def test_copies_of_the_target_s_are_read_as_its_own(tmp_path):
    """As DeepSpec ships them, for servers that take nothing from the target."""
    network = random_block(**DSPARK)
    width, vocabulary = network.config.hidden_size, network.config.vocab_size
    copies = {name: torch.randn(vocabulary, width) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_block(network, tmp_path, LAYERS, FLOAT, copies)
    again = loaded(tmp_path)
    assert again.config == replace(network.config, own_embedding=True, own_head=True)
    torch.testing.assert_close(again.lm_head.weight, copies["lm_head.weight"].double())


def test_specforge_s_layout(tmp_path):
    """Everything in dflash_config, and two modules of early files in a container."""
    network = random_block(**DSPARK)
    save_block(network, tmp_path, LAYERS, FLOAT)
    entries = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    old = read_config(tmp_path)
    nested = {"projector_type": "dspark", **{key: old[key] for key in entries}}
    gone = dict.fromkeys((*entries, "sample_from_anchor"))
    heads = ("markov_head.", "confidence_head.")
    rewrite(
        tmp_path,
        {**gone, "architectures": ["DSparkDraftModel"], "dflash_config": nested},
        lambda t: {f"logit_head.{k}" if k.startswith(heads) else k: v for k, v in t.items()},
    )
    again = loaded(tmp_path)
    assert again.config == network.config
    torch.testing.assert_close(states(again), states(network))


def test_layers_that_nothing_names_or_that_may_mean_either(tmp_path):
    save_block(random_block(), tmp_path, LAYERS, FLOAT)
    nested = read_config(tmp_path)["dflash_config"]
    rewrite(tmp_path, {"dflash_config": {"mask_token_id": 2}})
    assert describe_head(tmp_path, "it").candidates(36) == [(2, 34)]
    rewrite(tmp_path, {"dflash_config": {**nested, "target_layer_ids": None, "aux_hidden_state_layer_ids": [1, 9]}})
    assert describe_head(tmp_path, "it").candidates(36) == [(1, 9), (2, 10)]


def with_tensor(name):
    return lambda tensors: {**tensors, name: torch.zeros(2, 2)}


@pytest.mark.parametrize(
    "config, tensors, sentence",
    [
        ({}, with_tensor("candidate_selector.hidden_projection.weight"), "is a DFlash2 drafter"),
        ({}, with_tensor("prefix_gru.weight_ih_l0"), "is a Domino drafter"),
        ({}, with_tensor("layers.0.pre_feedforward_layernorm.weight"), "layers are of Gemma 4's kind"),
        ({"dflash_config": {"markov_head_type": "lstm"}}, None, "in a way called lstm"),
        ({"dflash_config": {}}, None, "lacks or garbles 'mask_token_id'"),
        ({"speculators_model_type": "eagle3"}, None, "said to be of the kind eagle3, and its weights are not"),
        ({"speculators_model_type": "mlp"}, None, "of the kind mlp; of trained drafters"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(config, tensors, sentence, tmp_path):
    save_block(random_block(), tmp_path, LAYERS, FLOAT)
    rewrite(tmp_path, config, tensors)
    with pytest.raises(UserError, match=sentence):
        loaded(tmp_path)


def test_p_eagle_needs_to_say_its_mask(tmp_path):
    network = random_head(mask_id=2, block_size=5, aux_layers=(0, 1, 2))
    save_head(network, tmp_path, FLOAT)
    assert loaded(tmp_path).config == network.config
    rewrite(tmp_path, {"mask_token_id": None})
    with pytest.raises(UserError, match="lacks or garbles 'mask_token_id'"):
        loaded(tmp_path)


def test_a_pair_drafts_with_a_block_drafter_by_its_name(pair_folder, tmp_path):
    """Found to be one, its costs measured, and the method `draft` means it; the text is the target's own."""
    wide = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": PADDED, "draft_vocab_size": PADDED}
    network = random_block(dtype=torch.float32, head_dim=16, aux_layers=(1, 4), max_positions=CONTEXT, **wide)
    save_block(network, tmp_path, 4, torch.float32)
    settings = Settings(target=str(pair_folder / "target"), draft=str(tmp_path), precision="fp32", device="cpu")
    pair = load_pair(settings)
    assert pair.head is not None and pair.head.kind == BLOCK != HEAD and pair.head.algorithm == "dflash"
    prompt = pair.target.tokenizer.decode(random_prompt(12))
    asked = replace(settings, max_new_tokens=12, method="draft", draft_length=3)
    run = generate(pair, prompt, asked)
    plain = generate(pair, prompt, replace(asked, method="plain"))
    assert run.settings.method == "block" and run.token_ids == plain.token_ids
    assert any(round_.drafted for round_ in run.rounds)
    assert run.environment["head"]["kind"] == BLOCK
    with pair.head.lease() as runner:
        assert isinstance(runner, NativeBlockRunner)
    assert shares_passes(pair, run.settings)
    assert [each.token_ids for each in finish_together(pair, [(prompt, asked)] * 2, 2)] == [run.token_ids] * 2
