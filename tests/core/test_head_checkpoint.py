"""Heads on disk: published formats are read, what does not fit is refused in one sentence, and ours round-trips."""

import json

import pytest
import torch
from heads import CONFIG, VARIANTS, random_head
from safetensors.torch import load_file, save_file
from tiny import HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH

from core.errors import UserError
from core.heads.checkpoint import describe_head, is_head, load_weights, read_config, save_head

FLOAT = torch.float64
CPU = torch.device("cpu")


def loaded(folder, layers=None):
    found = describe_head(folder, "a head")
    return load_weights(folder, "a head", found.config(layers or found.candidates(LAYERS)[0]), FLOAT, CPU)


def rewrite(folder, config=None, tensors=None):
    """The head of a folder with other entries in its config (None: gone) and with its tensors changed by a function."""
    if config:
        entries = {**read_config(folder), **config}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    if tensors:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def as_speculators(folder):
    """The same head in the format of vLLM's speculators."""
    old = read_config(folder)
    shape = {key: old[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
    shape |= {key: old[key] for key in ("num_key_value_heads", "rms_norm_eps", "vocab_size", "attention_bias")}
    shape |= {"num_hidden_layers": old["num_hidden_layers"], "model_type": "llama"}
    shape |= {"rope_parameters": {"rope_type": "default"}}
    shape["rope_parameters"] |= {"rope_theta": old["rope_theta"], **(old["rope_scaling"] or {})}
    flags = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/model"}},
        "transformer_layer_config": shape,
        "eagle_aux_hidden_state_layer_ids": old["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": old["target_hidden_size"],
        **{key: old[key] for key in flags},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, tensors=lambda t: {k.replace("midlayer.", "layers.0."): v for k, v in t.items()})


@pytest.mark.parametrize("format_", ["original", "speculators"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_read_again(variant, format_, tmp_path):
    """Shape, flags, layers, tokens and weights; also by way of the other format."""
    network = random_head(**VARIANTS[variant])
    save_head(network, tmp_path, FLOAT)
    # vLLM takes it that there are three where the config does not count them.
    assert read_config(tmp_path)["num_aux_hidden_states"] == len(network.config.aux_layers)
    if format_ == "speculators":
        as_speculators(tmp_path)
    again = loaded(tmp_path)
    assert is_head(read_config(tmp_path))
    assert again.config == network.config
    assert torch.equal(again.draft_ids, network.draft_ids)
    embedded, inputs = torch.randn(2, 1, 5, network.config.hidden_size, dtype=FLOAT)
    features = torch.randn(1, 5, network.config.feature_width, dtype=FLOAT)
    for joined in (inputs, network.join(features)):
        torch.testing.assert_close(again(embedded, joined, torch.arange(5)), network(embedded, joined, torch.arange(5)))
    torch.testing.assert_close(again.join(features), network.join(features))
    torch.testing.assert_close(again.feed_back(inputs), network.feed_back(inputs))


def test_a_config_as_the_first_heads_had_it(tmp_path):
    """Nothing named but the shape: the usual layers, and rotary positions of a Llama's default."""
    save_head(random_head(aux_layers=(1, 2, 3)), tmp_path, FLOAT)
    shape = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    shape |= {"num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS, "draft_vocab_size": 16, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **shape}))
    found = describe_head(tmp_path, "a head")
    assert found.candidates(32) == [(2, 16, 29)]
    assert found.config((2, 16, 29)).rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert is_head(read_config(tmp_path))


@pytest.mark.parametrize("ids, depth, candidates", [([1, 2], 4, [(1, 2), (2, 3)]), ([2, 4], 4, [(2, 4)])], ids=str)
def test_layers_that_are_named_without_saying_how_they_are_counted(ids, depth, candidates, tmp_path):
    """SGLang's entry has meant what leaves a layer; of the last layer only one count is possible."""
    save_head(random_head(aux_layers=(1, 2)), tmp_path, FLOAT)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, "eagle_aux_hidden_state_layer_ids": None}
    rewrite(tmp_path, nested)
    assert describe_head(tmp_path, "a head").candidates(depth) == candidates


def test_one_word_for_two_norms(tmp_path):
    """In SpecForge's configs norm_output is the norm before lm_head, unless the head also has fc_norm (EAGLE-3.1)."""
    for flags, fed_back in (({}, False), ({"fc_norm": True}, True)):
        save_head(random_head(**flags), tmp_path, FLOAT)
        rewrite(tmp_path, {"norm_output": True, "norm_output_feedback": None})
        assert loaded(tmp_path).config.norm_output is fed_back


@pytest.mark.parametrize(
    "asked", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}, {"fc_norm": 1}]
)
def test_a_norm_that_the_config_asks_for_must_be_there(asked, tmp_path):
    save_head(random_head(), tmp_path, FLOAT)
    rewrite(tmp_path, {"norm_before_fc": None, **asked})
    with pytest.raises(UserError, match=r"asks for a norm that its weights lack \((input_norm|fc_norm\.0)\.weight\)"):
        describe_head(tmp_path, "a head")


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    save_head(random_head(ids=list(range(VOCABULARY))), tmp_path, FLOAT)
    rewrite(tmp_path, tensors=lambda t: {k: v for k, v in t.items() if k not in ("d2t", "t2d")})
    assert loaded(tmp_path).draft_ids.tolist() == list(range(VOCABULARY))


def without(*names):
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def with_absolute_ids(tensors):
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


@pytest.mark.parametrize(
    "config, tensors, sentence",
    [
        ({}, without("fc.weight"), "no weights of an EAGLE-3 head"),
        ({}, without("lm_head.weight"), "is a head of EAGLE-1 or 2, .*; of trained drafters, EAGLE-3, P-EAGLE,"),
        ({"architectures": ["Qwen3NextMTP"]}, lambda t: {"mtp.fc.weight": t["fc.weight"]}, r"\(MTP\), a part of the"),
        ({}, lambda t: {"model.layers.61.eh_proj.weight": t["fc.weight"]}, r"\(MTP\)"),
        ({}, lambda t: {"medusa_head.0.0.linear.weight": t["fc.weight"]}, "holds Medusa heads"),
        ({}, without("midlayer.mlp.up_proj.weight"), "do not fit its config"),
        ({}, without("d2t"), "does not say which"),
        ({}, with_absolute_ids, "not of offsets"),
        ({"hidden_size": None}, None, "lacks or garbles 'hidden_size'"),
        ({"num_hidden_layers": 10**9}, None, "lacks or garbles 'num_hidden_layers'"),
        ({"intermediate_size": 40}, None, "do not have the shapes"),
        ({"num_hidden_layers": 2}, None, r"do not fit its config \(layers\.1\."),
        ({"speculators_model_type": "dflash2"}, None, "of the kind dflash2"),
        ({"speculators_model_type": "dflash"}, None, "said to be of the kind dflash, and its weights are not"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(config, tensors, sentence, tmp_path):
    save_head(random_head(), tmp_path, FLOAT)
    rewrite(tmp_path, config, tensors)
    with pytest.raises(UserError, match=sentence):
        loaded(tmp_path)


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    save_head(random_head(), tmp_path, FLOAT)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"torch.load\('pytorch_model.bin', weights_only=True\)"):
        describe_head(tmp_path, "a head")


def test_a_model_is_no_head():
    assert not is_head({"architectures": ["LlamaForCausalLM"], "hidden_size": 8})
    assert all(is_head({"architectures": [name]}) for name in ("EAGLEModel", "Qwen3NextMTP", "MedusaModel"))
    assert CONFIG.feature_width == 3 * WIDTH
