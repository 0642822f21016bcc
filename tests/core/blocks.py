"""Random block drafters for the tiny models, and some that have learnt a text by heart."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from heads import REDUCED, true_features
from tiny import HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH

from core.heads.dflash import DFlashConfig, DFlashNetwork

BLOCK_CONFIG = DFlashConfig(
    hidden_size=WIDTH,
    intermediate_size=48,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=WIDTH // HEADS,
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    target_hidden_size=WIDTH,
    aux_layers=(1, LAYERS),
    depth=2,
    qk_norm=True,
    block_size=4,
    mask_id=2,
)
REDUCED_HEAD = {"draft_vocab_size": len(REDUCED), "own_head": True}
DSPARK = {"sample_from_anchor": True, "markov_rank": 6, "confidence": True, "confidence_with_markov": True}
BLOCK_VARIANTS = {
    "dflash": {},
    "dflash, reduced": REDUCED_HEAD,
    "dflash, causal": {"causal": (True, True)},
    "dflash, sliding": {"causal": (True, False), "windows": (6, None)},
    "dspark": DSPARK,
    "dspark, gated, reduced": {**DSPARK, **REDUCED_HEAD, "markov_head": "gated"},
    "dspark, rnn": {**DSPARK, "markov_head": "rnn", "confidence_with_markov": False},
    "own embedding": {"own_embedding": True, "own_head": True, "attention_bias": True, "qk_norm": False},
}


def random_block(seed: int = 1, dtype: torch.dtype = torch.float64, spread: float = 0.3, **changes) -> DFlashNetwork:
    torch.manual_seed(seed)
    network = DFlashNetwork(replace(BLOCK_CONFIG, **changes)).to(dtype)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(std=spread)
        elif "bias" in name or "norm" in name:
            parameter.uniform_(0.5, 1.5)
    if network.config.draft_vocab_size < VOCABULARY:
        network.set_draft_ids(torch.tensor(REDUCED))
    network.rotary = network.rotary.float()
    return network.eval()


def blocks_afresh(network, target, context, anchors):
    """Hidden states [A, block, hidden] of blocks at anchors, from transformers' own hidden states of the text."""
    ids = torch.tensor([context])
    features = true_features(target, ids, network.config.aux_layers)
    table = network.embed_tokens if network.config.own_embedding else target.get_input_embeddings()
    return network.blocks(table, ids, features, torch.tensor([anchors]))[0]


def taught_block(target, text: list[int], steps: int = 120, **changes) -> DFlashNetwork:
    """One that has learnt a text of its target by heart, with a head of its own."""
    network = random_block(spread=0.1, own_head=True, **changes).requires_grad_(True)
    ids, rows, first = torch.tensor([text]), network.config.block_size, network.config.first
    anchors = torch.arange(1, len(text) - rows)[None]
    wanted = ids[0][anchors[0][:, None] + 1 + torch.arange(network.config.drafted)]
    features = true_features(target, ids, network.config.aux_layers)
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        hidden = network.blocks(target.get_input_embeddings(), ids, features, anchors)[0, :, first:]
        logits = network.logits(hidden)
        optimiser.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimiser.step()
    return network.requires_grad_(False)
