"""Heads of ours in vLLM's library of draft heads, and the other way round: the same hidden states and draft tokens.

The package (speculators 0.9) brings much of its own, so these tests run where it is installed, by hand:

    python -m venv /tmp/interop && /tmp/interop/bin/pip install -r requirements.txt pytest speculators==0.9.*
    /tmp/interop/bin/python -m pytest tests/interop
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[2])]

pytest.importorskip("speculators", reason="the package speculators is not installed (tests/interop says how)")

from heads import CONFIG, VARIANTS, random_head  # noqa: E402
from speculators.convert.eagle.eagle3_converter import Eagle3Converter  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from tiny import PADDED, random_model  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

from core.heads import HeadNetwork  # noqa: E402
from core.heads.block import FusedHead  # noqa: E402
from core.heads.checkpoint import describe_head, load_weights, save_head  # noqa: E402
from core.heads.runner import HeadRunner  # noqa: E402

STEPS, ROWS, LAYERS = 3, 24, (2, 3, 4)
DRAFT_IDS = list(range(3, 259, 2))
FLAGS = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
THEIRS_LACK = ("head norms", "other width", "two features", "two layers", "three layers, head norms")
OURS = [name for name in VARIANTS if name not in THEIRS_LACK]
"""Those that the package's converter knows: one layer, no norms of queries and keys, three features of its width."""
THEIRS = ["plain", "normed residual", "joined norm", "a norm each, fed back", "head norms", "scaled positions"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Llama and its folder, whose config and embeddings the package reads."""
    folder = tmp_path_factory.mktemp("target")
    network = random_model("llama", 7, PADDED, torch.float32, num_hidden_layers=6)
    network.save_pretrained(folder)
    return folder, network


def passes_of_theirs(model: Eagle3DraftModel, ids: torch.Tensor, features: torch.Tensor) -> list[tuple]:
    """Of each step the outputs [ROWS, hidden] and draft tokens; every step is given the text's own next token."""
    outputs = []
    hook = model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    with torch.no_grad():
        tokens = model(features[None], ids[None], torch.zeros(1, len(ids), dtype=torch.long), ttt_steps=STEPS)
    hook.remove()
    return [(output, row[0]) for output, row in zip(outputs, tokens, strict=True)]


def passes_of_ours(head: FusedHead, ids: torch.Tensor, features: torch.Tensor) -> list[tuple]:
    """The same as drafting does it: row after row is read, and from each of them some are drafted and dropped."""
    runner, steps = HeadRunner(head, capacity=4), [[] for _ in range(STEPS)]
    for row in range(ROWS - STEPS):
        output = runner.read(ids[row : row + 1], features[row : row + 1])
        for step in range(STEPS):
            if step:
                output = runner.draft(ids[row + step : row + step + 1], output)
            steps[step].append(output)
        runner.truncate(row + 1)
    return [(torch.cat(outputs), head.logits(torch.cat(outputs)).argmax(-1)) for outputs in steps]


def assert_same(model: Eagle3DraftModel, network: HeadNetwork, embedding: torch.Tensor) -> None:
    """Weights, maps, and what is made of random text and features."""
    weights = {key.replace("midlayer.", "layers.0."): value for key, value in network.named_parameters()}
    found = dict(model.named_parameters())
    assert {key for key in weights if not torch.equal(weights[key], found[key])} == set()
    torch.testing.assert_close(model.embed_tokens.weight, embedding, rtol=0, atol=0)
    assert torch.equal(model.d2t, network.d2t) and torch.equal(model.t2d, network.t2d)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, PADDED, (ROWS,), generator=generator)
    features = torch.randn(ROWS, network.config.feature_width, generator=generator)
    both = zip(
        passes_of_theirs(model, ids, features), passes_of_ours(FusedHead(network, embedding, PADDED), ids, features)
    )
    for (their_outputs, their_tokens), (outputs, tokens) in both:
        torch.testing.assert_close(outputs, their_outputs[: len(outputs)], **CLOSE)
        assert torch.equal(tokens, their_tokens[: len(tokens)])
        assert len(tokens.unique()) > 5


@pytest.mark.parametrize("variant", OURS)
def test_a_head_of_ours_in_the_package(variant, target, tmp_path):
    folder, verifier = target
    options = {"vocab_size": PADDED, "aux_layers": LAYERS, **VARIANTS[variant]}
    network = random_head(dtype=torch.float32, ids=DRAFT_IDS, **options)
    save_head(network, tmp_path / "ours", torch.float32)
    Eagle3Converter().convert(
        tmp_path / "ours",
        tmp_path / "theirs",
        str(folder),
        validate=False,
        norm_before_residual=network.config.norm_before_residual,  # the one flag it does not take from config.json
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
    )
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "theirs")
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(tmp_path / "theirs", config=config).eval()
    # Its converter drops the weights of norms before fc.
    norms = {key: value for key, value in network.state_dict().items() if key.startswith(("input_norm", "fc_norm"))}
    model.load_state_dict(norms, strict=False)
    embedding = verifier.get_input_embeddings().weight
    if network.config.own_embedding:
        embedding = network.embed_tokens.weight
    else:
        # It takes the target's only where its own are NaN; transformers 5 leaves there whatever memory held.
        model.embed_tokens.load_state_dict({"weight": embedding})
    assert_same(model, network, embedding)
    model.save_pretrained(tmp_path / "saved")
    again = describe_head(tmp_path / "saved", "a head")
    assert again.config(again.candidates(6)[0]) == replace(network.config, own_embedding=True)


@pytest.mark.parametrize("variant", THEIRS)
def test_a_head_of_the_package_in_ours(variant, tmp_path):
    options = VARIANTS[variant]
    kind = Qwen3Config if options.get("qk_norm") else LlamaConfig
    layer = kind(
        vocab_size=PADDED,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=CONFIG.heads,
        num_key_value_heads=CONFIG.kv_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.rms_norm_eps,
        rope_parameters=options.get("rope", CONFIG.rope),
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(DRAFT_IDS),
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        **{flag: value for flag, value in options.items() if flag in FLAGS},
    )
    model = Eagle3DraftModel(config).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.3)
    ids = torch.tensor(DRAFT_IDS)
    model.load_vocab_mappings(torch.isin(torch.arange(PADDED), ids), ids - torch.arange(len(ids)))
    model.save_pretrained(tmp_path)
    found = describe_head(tmp_path, "a head")
    assert found.candidates(6) == [LAYERS]
    network = load_weights(tmp_path, "a head", found.config(LAYERS), torch.float32, torch.device("cpu"))
    assert torch.equal(network.draft_ids, ids)
    assert_same(model, network, network.embed_tokens.weight)
