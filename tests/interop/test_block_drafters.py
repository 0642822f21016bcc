"""Block drafters of vLLM's library in ours: at anchors all over a text, after rollbacks too, the same hidden states,
laws and confidence. By hand, as test_speculators.py says."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[2])]

pytest.importorskip("speculators", reason="the package speculators is not installed (tests/interop says how)")

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from tiny import VOCABULARY, random_model  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402

from core.heads.block import FusedHead  # noqa: E402
from core.heads.checkpoint import describe_head, load_weights  # noqa: E402
from core.heads.parallel import BlockHead, BlockRunner, ParallelRunner  # noqa: E402
from core.heads.runner import HeadRunner  # noqa: E402

LENGTH, LAYERS, BLOCK, MASK = 40, (0, 1, 2), 4, 5
ANCHORS = (3, 9, 10, 21, 30)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
DRAFT_IDS = list(range(1, VOCABULARY, 2))
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}


def shape(kind=Qwen3Config, layers=2, **more):
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **more,
    )
    config._attn_implementation = "eager"
    return config


def about(algorithm):
    proposal = [GreedyTokenProposalConfig(speculative_tokens=BLOCK)]
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    return SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=proposal, default_proposal_method="greedy", verifier=verifier
    )


def filled(model, ids):
    """Random weights: theirs start as NaN."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.3)
    if len(ids) < VOCABULARY:
        ids = torch.tensor(ids)
        model.load_vocab_mappings(torch.isin(torch.arange(VOCABULARY), ids), ids - torch.arange(len(ids)))
    return model.eval()


def ids_of(options):
    return DRAFT_IDS if options["draft_vocab_size"] < VOCABULARY else list(range(VOCABULARY))


def text():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    return ids, torch.randn(LENGTH, len(LAYERS) * 32, generator=generator)


def loaded(model, folder):
    model.save_pretrained(folder)
    found = describe_head(folder, "a drafter")
    assert found.candidates(2) == [LAYERS]
    return load_weights(folder, "a drafter", found.config(LAYERS), torch.float32, torch.device("cpu"))


BLOCKS = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, {}, {}),
    "dflash, reduced": (DFlashDraftModel, DFlashSpeculatorConfig, {"draft_vocab_size": len(DRAFT_IDS)}, {}),
    "dflash, causal where it slides": (DFlashDraftModel, DFlashSpeculatorConfig, {}, SLIDING),
    "dflash, sliding": (
        DFlashDraftModel,
        DFlashSpeculatorConfig,
        {"sliding_window_non_causal": True},
        SLIDING,
    ),
    "dflash from its anchor": (DFlashDraftModel, DFlashSpeculatorConfig, {"sample_from_anchor": True}, {}),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig, {"markov_rank": 6}, {}),
    "dspark, gated": (DSparkDraftModel, DSparkSpeculatorConfig, {"markov_rank": 6, "markov_head_type": "gated"}, {}),
    "dspark, rnn, reduced": (
        DSparkDraftModel,
        DSparkSpeculatorConfig,
        {"markov_rank": 6, "markov_head_type": "rnn", "draft_vocab_size": len(DRAFT_IDS)},
        {},
    ),
    "dspark that fills in": (
        DSparkDraftModel,
        DSparkSpeculatorConfig,
        {"markov_rank": 6, "sample_from_anchor": False, "confidence_head_with_markov": False},
        {},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_package_s(name, tmp_path):
    kind, config, options, layers = BLOCKS[name]
    options = {"draft_vocab_size": VOCABULARY, **options}
    model = filled(
        kind(
            config(
                transformer_layer_config=shape(**layers),
                aux_hidden_state_layer_ids=list(LAYERS),
                block_size=BLOCK,
                mask_token_id=MASK,
                speculators_config=about(name.split()[0].strip(",")),
                **options,
            )
        ),
        ids_of(options),
    )
    network = loaded(model, tmp_path)
    target = random_model("llama", 7, dtype=torch.float32)
    target.get_input_embeddings().weight.data = model.embed_tokens.weight.data
    if options["draft_vocab_size"] == VOCABULARY:
        target.get_output_embeddings().weight.data = model.lm_head.weight.data
    head = BlockHead(network, target, VOCABULARY)
    assert head.target_ids.tolist() == ids_of(options)
    runner, (ids, features) = BlockRunner(head, capacity=4), text()
    everywhere = network.blocks(head.embed, ids[None], features[None], torch.tensor([ANCHORS]))[0]
    done = 0
    for n, anchor in enumerate(ANCHORS):
        mask = torch.zeros(1, LENGTH)
        mask[0, anchor] = 1
        hidden, logits, *_ = model._backbone_forward(
            features[None], ids[None], mask, torch.zeros(1, LENGTH, 32), torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=1,
        )  # fmt: skip
        if n == 2:  # some of the text is taken back, and read again
            done -= 4
            runner.truncate(done)
        found = runner.advance(ids[done + 1 : anchor + 1], features[done:anchor], head.drafted)
        done = anchor
        first = network.config.first
        torch.testing.assert_close(found, hidden[0, first:], **CLOSE)
        torch.testing.assert_close(everywhere[n], hidden[0], **CLOSE)
        base = head.logits(found)
        torch.testing.assert_close(base, logits[0, first:], **CLOSE)
        markov = getattr(model, "markov_head", None)
        if markov is None:
            continue
        tokens = ids[anchor : anchor + BLOCK]
        before = tokens if not first else torch.cat([tokens[:1], tokens[:-1]])
        theirs = logits[0] + markov.block_bias(prev_token_ids=before[None], hidden_states=hidden)[0]
        given = hidden[0]
        if model.config.confidence_head_with_markov:
            given = torch.cat([given, markov.prev_embeddings(before)], -1)
        sure = model.confidence_head(given).sigmoid()
        state = None
        for row in range(len(found)):
            previous = before[first + row : first + row + 1]
            ours, state = head.after(base[row : row + 1], found[row : row + 1], previous, state)
            torch.testing.assert_close(ours[0], theirs[first + row], **CLOSE)
            chance = head.confidence(found[row : row + 1], previous)
            assert chance == pytest.approx(sure[first + row].item(), abs=1e-4)


@torch.no_grad()
def test_p_eagle_is_the_package_s(tmp_path, monkeypatch):
    """Their training forward over chosen anchors and depths, against a pass behind the text up to each anchor."""
    model = filled(
        PEagleDraftModel(
            PEagleSpeculatorConfig(
                transformer_layer_config=shape(LlamaConfig),
                draft_vocab_size=len(DRAFT_IDS),
                eagle_aux_hidden_state_layer_ids=list(LAYERS),
                mask_token_id=MASK,
                speculators_config=about("peagle"),
            )
        ),
        DRAFT_IDS,
    )
    network = loaded(model, tmp_path)
    assert network.config.depth == 2 and network.config.block_size == BLOCK
    ids, features = text()
    depths = [(anchor, depth) for depth in range(1, BLOCK) for anchor in ANCHORS]
    rows = [(i, 0) for i in range(LENGTH)] + depths
    chosen = tuple(torch.tensor(column) for column in zip(*rows))
    monkeypatch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: chosen)
    given = {}
    monkeypatch.setattr(
        "speculators.models.peagle.core.compute_metrics", lambda **found: (given.update(found), (0, {}))[1]
    )
    model(
        features[None], ids[None], torch.zeros(1, LENGTH, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, LENGTH, 32),
    )  # fmt: skip
    head = FusedHead(network, model.embed_tokens.weight, VOCABULARY)
    runner, done = ParallelRunner(HeadRunner(head, capacity=4)), 0
    for n, anchor in enumerate(ANCHORS):
        if n == 2:
            done -= 4
            runner.truncate(done)
        output = runner.advance(ids[done : anchor + 1], features[done : anchor + 1], BLOCK)
        done = anchor + 1
        assert runner.length == done
        at = [rows.index((anchor, depth)) for depth in range(BLOCK)]
        torch.testing.assert_close(head.logits(output), given["logits"][0, at], **CLOSE)


@torch.no_grad()
def test_eagle_of_two_layers_is_the_package_s(tmp_path):
    """Drafted row after row, each behind the rows of the text up to its own and its own chain."""
    model = filled(
        Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=shape(LlamaConfig),
                draft_vocab_size=len(DRAFT_IDS),
                eagle_aux_hidden_state_layer_ids=list(LAYERS),
                norm_before_residual=True,
                speculators_config=about("eagle3"),
            )
        ),
        DRAFT_IDS,
    )
    network = loaded(model, tmp_path)
    ids, features = text()
    outputs = []
    model.layers[1].register_forward_hook(
        lambda module, args, output: outputs.append((output if isinstance(output, torch.Tensor) else output[0])[0])
    )
    model(features[None], ids[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)
    head = FusedHead(network, model.embed_tokens.weight, VOCABULARY)
    runner = HeadRunner(head, capacity=4)
    for row in range(LENGTH - 3):
        output = runner.read(ids[row : row + 1], features[row : row + 1])
        torch.testing.assert_close(output[0], outputs[0].reshape(LENGTH, -1)[row], **CLOSE)
        for step in (1, 2):
            output = runner.draft(ids[row + step : row + step + 1], output)
            torch.testing.assert_close(output[0], outputs[step].reshape(LENGTH, -1)[row], rtol=1e-3, atol=1e-3)
        runner.truncate(row + 1)
