"""Random trained heads for the tiny models: enough to draft with, right only by chance unless made to be."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from tiny import HEADS, KV_HEADS, LAYERS, VOCABULARY, WIDTH

from core.heads import HeadConfig, HeadNetwork
from core.heads.block import FusedHead

REDUCED = [0, 3, 5, 8, 9, 12, 17, 20, 21, 22, 30, 31, 40, 47, 55, 63]
"""The target's tokens that a head with a reduced vocabulary can propose."""
CONFIG = HeadConfig(
    hidden_size=WIDTH,
    intermediate_size=48,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=WIDTH // HEADS,
    vocab_size=VOCABULARY,
    draft_vocab_size=len(REDUCED),
    target_hidden_size=WIDTH,
    aux_layers=(0, 1, LAYERS),
)
VARIANTS = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "joined norm": {"norm_before_fc": True},
    "a norm each, fed back": {"fc_norm": True, "norm_output": True},
    "biases": {"attention_bias": True},
    "head norms": {"qk_norm": True},
    "own embedding": {"own_embedding": True},
    "scaled positions": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "other width": {"target_hidden_size": WIDTH, "hidden_size": 16, "head_dim": 8, "own_embedding": True},
    "two features": {"aux_layers": (1, 2)},
    "two layers": {"depth": 2},
    "three layers, head norms": {"depth": 3, "qk_norm": True, "norm_before_residual": True},
}


def random_head(
    seed: int = 1, dtype: torch.dtype = torch.float64, spread: float = 0.3, ids: list[int] = REDUCED, **changes: object
) -> HeadNetwork:
    """A head with random weights; a larger `spread` is a surer one, 0 says the same of everything."""
    torch.manual_seed(seed)
    network = HeadNetwork(replace(CONFIG, **{"draft_vocab_size": len(ids), **changes})).to(dtype)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(std=spread)
        elif "bias" in name or "norm" in name:
            parameter.uniform_(0.5, 1.5)
    network.set_draft_ids(torch.tensor(ids))
    network.rotary = network.rotary.float()
    return network.eval()


def fused_head(network: HeadNetwork, target: torch.nn.Module, vocabulary: int = VOCABULARY) -> FusedHead:
    return FusedHead(network, target.get_input_embeddings().weight, vocabulary)


def true_features(target: torch.nn.Module, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """Hidden states of ids [1, n] at boundaries, the last before the final norm, by hooks on the model itself."""
    stack = next(m for m in target.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    found = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, i=i: found.update({i: args[0], i + 1: out}))
        for i, layer in enumerate(stack)
    ]
    target(ids)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[i] for i in layers], -1)


def taught_head(target: torch.nn.Module, text: list[int], ids: list[int], steps: int = 150) -> HeadNetwork:
    """A head that has learnt one text of its target by heart, as far as it can say its tokens."""
    network = random_head(spread=0.1, ids=ids).requires_grad_(True)
    at = {token: i for i, token in enumerate(ids)}
    wanted = torch.tensor([at.get(token, -100) for token in text[2:]])
    features = true_features(target, torch.tensor([text[:-2]]), network.config.aux_layers)
    embedded = target.get_input_embeddings()(torch.tensor([text[1:-1]]))
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        output, _ = network(embedded, network.join(features), torch.arange(len(text) - 2))
        loss = F.cross_entropy(network.logits(output)[0], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.requires_grad_(False)
