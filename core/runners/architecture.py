"""What the fused forward knows of a model: its family's build, read off the loaded modules, and its fused weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.kernels import has_kernels
from core.runners.layers import Layer, Layers, Nf4Layers, Norm, compiled
from core.runners.products import Int4, fuse

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma3_text")
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length of the text."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def why_not(network: Any) -> str | None:
    """None where the fused forward can run the network, else the reason."""
    if next(network.parameters()).device.type != "cpu":
        return "the model is not on a CPU"
    return why_not_weights(network, packed=True)


def why_not_weights(network: Any, packed: bool = False) -> str | None:
    """The same without asking for the device; `packed`: 4 bits have to be in the layout of a CPU's kernel."""
    if reason := why_not_family(network.config):
        return reason
    if any(not fusable(module, packed) for module in network.modules()):
        return "the weights are quantised in a format there is no fused kernel for"
    return None


def why_not_family(config: Any) -> str | None:
    """The same, as far as a config tells."""
    if config.model_type not in FAMILIES:
        return f"there is no fused forward for {config.model_type} models"
    if odd := [kind for kind in rotations(config) if kind not in ROTATIONS]:
        return f"the model's rotary positions are of the kind {odd[0]}"
    if activation_of(config) not in ACTIVATIONS:
        return f"the model's activation is {activation_of(config)}"
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        return "the model caps its logits"
    if getattr(config, "use_bidirectional_attention", None):
        return "the model attends in both directions"
    return None


def rotations(config: Any) -> list[str]:
    """The kinds of rotary positions that a config asks for, one for every kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [found] if "rope_theta" in found else found.values()
    return [rotation.get("rope_type", "default") for rotation in each if isinstance(rotation, dict)]


def activation_of(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def fusable(module: Any, packed: bool) -> bool:
    """Whether a layer's weight is of floats, in 4 bits of ours already, or in those of bitsandbytes; `packed`: for its
    kernel on this CPU."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_floating_point() or isinstance(module, Int4):
        return True
    return hasattr(weight, "quant_state") and (not packed or module.support_avx512bf16_for_cpu)


def scale_of(module: Any, dtype: torch.dtype) -> tuple[Tensor, float]:
    """What a norm of transformers multiplies by, in a type, and its epsilon."""
    weight = module.weight.to(dtype)
    if type(module).__name__.startswith("Gemma"):
        weight = 1 + weight
    return weight, getattr(module, "variance_epsilon", None) or module.eps


def norm_of(module: Any, work: torch.dtype) -> Norm:
    """A norm of transformers in the working type."""
    weight, eps = scale_of(module, work)
    width = len(weight)
    return Norm(weight * math.sqrt(width), torch.tensor([math.sqrt(width * eps)], dtype=work))


@dataclass(frozen=True)
class Attending:
    """What layers of one kind have in common: how far back they see (None: all), and how positions turn them."""

    window: int | None
    frequencies: Tensor
    scaling: float


def norms_of(layer: Any) -> list[Any]:
    """The norms of a decoder layer of transformers, None where it has none: before and after attention, before and
    after mlp, of queries and of keys."""
    names = ("input_layernorm", None, "post_attention_layernorm", None)
    if hasattr(layer, "post_feedforward_layernorm"):
        before = ("input_layernorm", "pre_feedforward_layernorm")
        names = (before[0], "post_attention_layernorm", before[1], "post_feedforward_layernorm")
    norms = [getattr(layer, name, None) if name else None for name in names]
    return norms + [getattr(layer.self_attn, f"{part}_norm", None) for part in "qk"]


def layer_of(layer: Any, kind: int, int4: bool, work: torch.dtype) -> Layer:
    """One decoder layer of transformers over fused weights; `int4` quantises them."""
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        kind,
        fuse(attention, ("q_proj", "k_proj", "v_proj"), int4),
        fuse(attention, ("o_proj",), int4),
        fuse(mlp, ("gate_proj", "up_proj"), int4),
        fuse(mlp, ("down_proj",), int4),
        *(None if norm is None else norm_of(norm, work) for norm in norms_of(layer)),
    )


class Build:
    """What every fused forward knows of a model: its sizes, its kinds of attention and which of them each layer is."""

    def __init__(self, network: Any) -> None:
        config, decoder = network.config, network.model
        attention = decoder.layers[0].self_attn
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.embedding_scale: Tensor | None = getattr(decoder.embed_tokens, "embed_scale", None)
        self.dtype = self.embedding.dtype
        self.kinds, self.of_layer = kinds_of(config, decoder.rotary_emb)
        self.depth = len(decoder.layers)
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = attention.head_dim
        self.width: int = config.hidden_size
        self.scale: float = attention.scaling
        self.silu = activation_of(config) == "silu"

    def embed(self, ids: Tensor) -> Tensor:
        """The rows [n, width] of the embedding table for ids [n]."""
        rows = F.embedding(ids, self.embedding)
        return rows if self.embedding_scale is None else rows * self.embedding_scale.to(self.dtype)


class FusedNetwork(Build):
    """The fused weights of a model on a CPU, shared by all its runners; `work` is the type between the products:
    float32 where the weights have 16 bits or fewer. `int4` quantises the decoder's weights and the head."""

    def __init__(self, network: Any, int4: bool = False) -> None:
        super().__init__(network)
        decoder = network.model
        self.work = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        layers = [layer_of(layer, kind, int4, self.work) for layer, kind in zip(decoder.layers, self.of_layer)]
        head = fuse(network, ("lm_head",), int4)
        made = Nf4Layers if any(weight.kind == "nf4" for weight in layers[0][1:5]) else Layers
        self.as_written = made(
            layers,
            norm_of(decoder.norm, self.work),
            head,
            self.heads,
            self.kv_heads,
            self.scale,
            self.silu,
            network.config.intermediate_size,
            self.dtype,
            self._suits_kernels(network.config.intermediate_size),
        )
        self.layers = compiled(self.as_written)

    def _suits_kernels(self, inner: int) -> bool:
        """Whether our own kernels, which go in steps of sixteen floats, can do what lies between the products."""
        whole = all(size % 16 == 0 for size in (self.width, self.head_size, inner))
        return self.dtype == torch.bfloat16 and whole and has_kernels()

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream [n, width] of ids [n], in the working type."""
        return super().embed(ids).to(self.work)


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
