"""How a head is trained on what its target writes.

Here the head before its first step: the shape that fits a target, and weights taken from the target's last block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UserError
from core.heads import HeadConfig, HeadNetwork
from core.heads.checkpoint import usual_layers
from core.heads.dflash import DFlashConfig, DFlashNetwork
from core.loading.head import bundled_head
from core.loading.model import Model
from core.loading.pair import special_ids

AnyConfig = HeadConfig | DFlashConfig
DRAFT_VOCAB = 8192
KINDS = ("eagle3", "dspark", "dflash")
"""Of heads that can be trained; the first is the usual one."""
DRAFTED = 5
"""Tokens that a block drafter drafts in a pass: it is run at the width that it was trained at."""
RANK = 64
"""Of DSpark's bias by the token before."""
DIALOGUES = "dialogues.jsonl.gz"
"""Beside a bundled head: some of the texts of its target that it was trained on, and some held out of that."""


def bundled_dialogues(target: Model) -> Path | None:
    """The file of dialogues that is bundled for a target."""
    folder = bundled_head(target.config, target.tokenizer)
    return folder / DIALOGUES if folder and (folder / DIALOGUES).is_file() else None


def aux_layers(blocks: int) -> tuple[int, ...]:
    """Boundaries to take features at: an early, a middle and a late one, as EAGLE-3 does; in a shallow target three
    spaced evenly, or as many as there are."""
    if blocks >= 7:
        return usual_layers(blocks)
    return tuple(sorted({0, blocks // 2, max(blocks - 1, 0)}))


def config_for(target: Model, kind: str = KINDS[0]) -> AnyConfig:
    """One layer as wide as the target's own. Raises UserError for a target of another family than Llama's, and for a
    kind that is unknown."""
    if kind not in KINDS:
        raise UserError(f"There are no heads of the kind {kind}; choose {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    config, network = target.config, target.network
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    if not hasattr(network.base_model, "layers") or not all(isinstance(getattr(config, n, None), int) for n in needed):
        raise UserError(f"{target.name} is no model of Llama's or Qwen's kind; heads are trained for those.")
    heads = config.num_attention_heads
    shape: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCAB, target.vocab_size),
        "target_hidden_size": config.hidden_size,
        "aux_layers": aux_layers(config.num_hidden_layers),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope": {"rope_type": "default", "rope_theta": rope_theta(config)},
        "max_positions": config.max_position_embeddings,
    }
    if kind == "eagle3":
        return HeadConfig(**shape)
    shape |= {"mask_id": mask_id(target), "own_head": True, "qk_norm": True}  # other engines norm both, weights or not
    if kind == "dflash":
        return DFlashConfig(**shape, block_size=DRAFTED + 1)
    bias = {"markov_rank": RANK, "confidence": True, "confidence_with_markov": True}
    return DFlashConfig(**shape, block_size=DRAFTED, sample_from_anchor=True, **bias)


def kind_of(config: AnyConfig) -> str:
    return KINDS[0] if isinstance(config, HeadConfig) else config.algorithm


def mask_id(target: Model) -> int:
    """The token that stands for those not known yet: the tokenizer's own mask, else the last special one that neither
    begins nor ends a text, else the last of all."""
    tokenizer = target.tokenizer
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    taken = {*target.stop_ids, tokenizer.bos_token_id, tokenizer.eos_token_id}
    spare = [token for token in special_ids(tokenizer) if token not in taken and token < target.vocab_size]
    return max(spare, default=target.vocab_size - 1)


def rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def frequent_ids(answers: Sequence[Sequence[int]], vocab_size: int, count: int) -> Tensor:
    """The ids answers use most, ascending. Ties, and ids never seen, by number: a tokenizer's early ids are its
    commonest pieces."""
    seen = Counter(token for answer in answers for token in answer)
    ranked = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(ranked[:count]))


@torch.no_grad()
def new_head(
    target: Model, config: HeadConfig | DFlashConfig, draft_ids: Tensor, seed: int
) -> HeadNetwork | DFlashNetwork:
    """A head in float32 that starts as the target's last layers: the last feature passed through, logits from the
    target's own table, the embedding's half of EAGLE-3's attention small and random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = HeadNetwork(config).float() if isinstance(config, HeadConfig) else DFlashNetwork(config).float()
        if isinstance(head, HeadNetwork):
            for projection in (getattr(head.midlayer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")):
                projection.weight.normal_(0, 0.02)
    head.set_draft_ids(draft_ids)
    network: Any = target.network
    hidden = config.hidden_size
    like = network.get_input_embeddings().weight
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    head.lm_head.weight.copy_(weight_of(network.get_output_embeddings(), like)[draft_ids.to(target.device)])
    layers: list[Any] = [head.midlayer] if isinstance(head, HeadNetwork) else list(head.layers)
    for layer, block in zip(layers, network.base_model.layers[-len(layers) :]):
        theirs, ours = block.self_attn, layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(ours, name).weight
            copied(weight if name == "o_proj" else weight[:, -hidden:], getattr(theirs, name, None), like)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                copied(getattr(ours, name).weight, getattr(theirs, name, None), like)
        for name in ("gate_proj", "up_proj", "down_proj"):
            copied(getattr(layer.mlp, name).weight, getattr(block.mlp, name, None), like)
        norm = layer.hidden_norm if isinstance(head, HeadNetwork) else layer.input_layernorm
        copied(norm.weight, getattr(block, "input_layernorm", None), like)
        copied(layer.post_attention_layernorm.weight, getattr(block, "post_attention_layernorm", None), like)
    if isinstance(head, DFlashNetwork):
        # What is injected takes the place of the layers' normed inputs.
        copied(head.hidden_norm.weight, getattr(network.base_model.layers[-1], "input_layernorm", None), like)
        if head.markov_head is not None:
            head.markov_head.markov_w2.weight.zero_()
    copied(head.norm.weight, getattr(network.base_model, "norm", None), like)
    return head.to(target.device)


def copied(ours: Tensor, theirs: nn.Module | None, like: Tensor) -> None:
    """Take a layer's weight over where its shape is ours."""
    if theirs is not None and (weight := weight_of(theirs, like)).shape == ours.shape:
        ours.copy_(weight)


def weight_of(layer: Any, like: Tensor) -> Tensor:
    """The weight of a layer [out, in]; of a linear one that was quantised, or fused with others, what it makes of unit
    vectors of the type and device of `like`."""
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or (weight is not None and weight.is_floating_point()):
        return layer.weight
    unit = torch.eye(layer.in_features, dtype=like.dtype, device=like.device)
    return (layer(unit) - layer(torch.zeros_like(unit[:1]))).t()
