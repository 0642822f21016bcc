"""What the fused forward knows of a model: its family's build, read off the loaded modules, and its fused weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.products import fuse

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma3_text")
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length of the text."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def why_not(network: Any) -> str | None:
    """None where the fused forward can run the network, else the reason."""
    if next(network.parameters()).device.type != "cpu":
        return "the model is not on a CPU"
    if reason := why_not_family(network.config):
        return reason
    if any(not fusable(module) for module in network.modules()):
        return "the weights are quantised in a format there is no fused kernel for"
    return None


def why_not_family(config: Any) -> str | None:
    """The same, as far as a config tells."""
    if config.model_type not in FAMILIES:
        return f"there is no fused forward for {config.model_type} models"
    rotations = getattr(config, "rope_parameters", None) or {}
    for rotation in [rotations] if "rope_theta" in rotations else rotations.values():
        if isinstance(rotation, dict) and rotation.get("rope_type", "default") not in ROTATIONS:
            return f"the model's rotary positions are of the kind {rotation['rope_type']}"
    if activation_of(config) not in ACTIVATIONS:
        return f"the model's activation is {activation_of(config)}"
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        return "the model caps its logits"
    if getattr(config, "use_bidirectional_attention", None):
        return "the model attends in both directions"
    return None


def activation_of(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def fusable(module: Any) -> bool:
    """Whether a layer's weight is of floats, or of 4 bits that bitsandbytes packs for its kernel on this CPU."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_floating_point():
        return True
    return hasattr(weight, "quant_state") and module.support_avx512bf16_for_cpu


class Norm:
    """Root mean square normalisation, x / sqrt(mean(x²) + eps) * weight, without a temporary in the weights' type.

    With `weight` times and `floor` = eps times the root of the width, it is x / hypot(|x|, floor) * weight."""

    def __init__(self, module: Any, work: torch.dtype) -> None:
        weight = module.weight.to(work)
        width = len(weight)
        if type(module).__name__.startswith("Gemma"):
            weight = 1 + weight
        eps = getattr(module, "variance_epsilon", None) or module.eps
        self.weight = weight * math.sqrt(width)
        self.floor = torch.tensor([math.sqrt(width * eps)], dtype=work)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x [..., width] in the working type, normalised into `out`, of whichever type; `out` may be x."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x / torch.hypot(size, self.floor), self.weight, out=out)


@dataclass(frozen=True)
class Attending:
    """What layers of one kind have in common: how far back they see (None: all), and how positions turn them."""

    window: int | None
    frequencies: Tensor
    scaling: float


class FusedLayer:
    """One decoder layer over fused weights. Norms before and after attention and mlp are None where it has none;
    `head_norms` are those of queries and keys, each head's own or, in `whole_norms`, one over all heads."""

    def __init__(self, layer: Any, kind: int, int4: bool, work: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.kind = kind
        self.qkv = fuse(attention, ("q_proj", "k_proj", "v_proj"), int4)
        self.out = fuse(attention, ("o_proj",), int4)
        self.gate_up = fuse(mlp, ("gate_proj", "up_proj"), int4)
        self.down = fuse(mlp, ("down_proj",), int4)
        names = ("input_layernorm", None, "post_attention_layernorm", None)
        if hasattr(layer, "post_feedforward_layernorm"):
            before = ("input_layernorm", "pre_feedforward_layernorm")
            names = (before[0], "post_attention_layernorm", before[1], "post_feedforward_layernorm")
        norms = [getattr(layer, name, None) if name else None for name in names]
        made = [None if norm is None else Norm(norm, work) for norm in norms]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = made
        found = [Norm(getattr(attention, f"{x}_norm"), work) for x in "qk" if hasattr(attention, f"{x}_norm")]
        self.query_key_norms = tuple(found)


class FusedNetwork:
    """The fused weights of a model, shared by all its runners; `work` is the type between the products: float32 where
    the weights have 16 bits or fewer. `int4` quantises the decoder's weights and the head."""

    def __init__(self, network: Any, int4: bool = False) -> None:
        config = network.config
        decoder = network.model
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.dtype = self.embedding.dtype
        self.work = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        self.kinds, of_layer = kinds_of(config, decoder.rotary_emb)
        self.layers = [FusedLayer(layer, kind, int4, self.work) for layer, kind in zip(decoder.layers, of_layer)]
        self.norm = Norm(decoder.norm, self.work)
        self.head = fuse(network, ("lm_head",), int4)
        attention = decoder.layers[0].self_attn
        self.scale: float = attention.scaling
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.width: int = config.hidden_size
        self.activation = ACTIVATIONS[activation_of(config)]
        self.embedding_scale: Tensor | None = getattr(decoder.embed_tokens, "embed_scale", None)

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream [n, width] of ids [n], in the working type."""
        rows = F.embedding(ids, self.embedding)
        if self.embedding_scale is not None:
            rows = rows * self.embedding_scale.to(self.dtype)
        return rows.to(self.work)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden, torch.empty(hidden.shape, dtype=self.dtype)))


def kinds_of(config: Any, rotary: Any) -> tuple[list[Attending], list[int]]:
    """The kinds of attention a model has, and which of them each layer is."""
    window = getattr(config, "sliding_window", None)
    names: list[str] = getattr(config, "layer_types", None) or ["all"] * config.num_hidden_layers
    kinds, index = [], {}
    for name in names:
        if name not in index:
            index[name] = len(kinds)
            own = f"{name}_inv_freq" if hasattr(rotary, f"{name}_inv_freq") else "inv_freq"
            scaling = getattr(rotary, own.replace("inv_freq", "attention_scaling"))
            limit = window if name in ("all", "sliding_attention") else None
            kinds.append(Attending(limit, getattr(rotary, own).float(), scaling))
    return kinds, [index[name] for name in names]
