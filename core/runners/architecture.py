"""What fused forwards know of a model: its family's build, read off the loaded modules; and on a CPU its program, the
steps that the native pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.library import native_obstacle
from core.runners.products import Int4, pack
from core.runners.program import (
    ADDED,
    ATTEND,
    COPY,
    EMBED,
    ENTER,
    FOR_ALL,
    GATED,
    GELU,
    GROUP,
    HEADS,
    LOGITS,
    NORM,
    PRODUCT,
    TILE,
    TURN,
    WIDE,
    Program,
    Weight,
    filled,
    vector,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma3_text")
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length of the text."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def why_not(network: Any) -> str | None:
    """None where the native pass can run the network, else the reason."""
    if next(network.parameters()).device.type != "cpu":
        return "the model is not on a CPU"
    if reason := why_not_weights(network):
        return reason
    if network.get_input_embeddings().weight.dtype == torch.float16:
        return "there is no native pass for fp16"
    reason = native_obstacle()
    return reason and f"there is no native pass here, for {reason}"


def why_not_weights(network: Any) -> str | None:
    """The same without asking for the device."""
    if reason := why_not_family(network.config):
        return reason
    if not all(map(fusable, network.modules())):
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


def fusable(module: Any) -> bool:
    """Whether a layer's weight is of floats, in 4 bits of ours already, or in bitsandbytes' NF4."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_floating_point() or isinstance(module, Int4):
        return True
    return hasattr(weight, "quant_state") and getattr(weight, "quant_type", "nf4") == "nf4"


def scale_of(module: Any, dtype: torch.dtype) -> tuple[Tensor, float]:
    """What a norm of transformers multiplies by, in a type, and its epsilon."""
    weight = module.weight.to(dtype)
    if type(module).__name__.startswith("Gemma"):
        weight = 1 + weight
    return weight, getattr(module, "variance_epsilon", None) or module.eps


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


HIDDEN, QUERIES, SEEN, OTHER, RAW = range(5)
"""Row buffers of a program: the residual stream; queries, keys and values; what attention gave; two that some need."""


@dataclass(frozen=True)
class Block:
    """The weights of a decoder layer, and its norms as vectors with their epsilon, None where it has none."""

    kind: int
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    norms: list[tuple[Tensor, float] | None]
    wide: bool
    """Whether the norms of queries and keys are as wide as all heads, not each head's own."""


class NativeNetwork(Build):
    """The weights of a model as the native pass reads them, shared by all its runners. `int4` quantises the decoder's
    weights to 4 bits and the head to 8. Raises `core.runners.library.Unavailable` where there is no compiled code."""

    def __init__(self, network: Any, int4: bool = False) -> None:
        super().__init__(network)
        self.wide_cache = self.dtype.itemsize > 2
        self._padded = filled(self.head_size, TILE)
        self._inner: int = network.config.intermediate_size
        decoder = network.model
        self.table = self.embedding if self.dtype == torch.bfloat16 else self.embedding.float()
        bits = 4 if int4 else 16
        self._blocks = [self._block(layer, kind, bits) for layer, kind in zip(decoder.layers, self.of_layer)]
        self._norm = self._vector(decoder.norm)
        self._head = pack(network, ("lm_head",), 8 if int4 else 16)
        self._programs: dict[tuple[int, ...], Program] = {}

    def _block(self, layer: Any, kind: int, bits: int) -> Block:
        attention, mlp, norms = layer.self_attn, layer.mlp, norms_of(layer)
        heads = padded_heads(self.heads + 2 * self.kv_heads, self.head_size)
        of_queries = padded_heads(self.heads, self.head_size)
        aligned = self.head_size == self._padded
        return Block(
            kind,
            pack(attention, ("q_proj", "k_proj", "v_proj"), bits, heads),
            pack(attention, ("o_proj",), bits, columns=None if aligned else of_queries),
            pack(mlp, ("gate_proj", "up_proj"), bits, gates_and_ups(self._inner)),
            pack(mlp, ("down_proj",), bits),
            [norm and self._vector(norm) for norm in norms],
            norms[4] is not None and len(norms[4].weight) != self.head_size,
        )

    def _vector(self, norm: Any) -> tuple[Tensor, float]:
        weight, eps = scale_of(norm, torch.float32)
        return vector(weight, filled(len(weight))), eps

    def program(self, boundaries: Sequence[int] = ()) -> Program:
        """The steps of a whole pass: `starts[i]` is where layer i begins, one more where the head does. What enters the
        layers at `boundaries` (the number of layers: what leaves the last) is put out side by side, in their order."""
        key = tuple(boundaries)
        if key not in self._programs:
            self._programs[key] = self._write(key)
        return self._programs[key]

    def _write(self, boundaries: tuple[int, ...]) -> Program:
        heads = (self.heads + 2 * self.kv_heads) * self._padded
        program = Program(
            [self.width, heads, self.heads * self._padded, self.width, heads],
            width=self.width,
            heads=self.heads,
            key_heads=self.kv_heads,
            size=self.head_size,
            wide_cache=self.wide_cache,
        )
        scale = 1.0 if self.embedding_scale is None else float(self.embedding_scale.to(self.dtype))
        wide = 0 if self.table.dtype == torch.bfloat16 else WIDE
        program.add(EMBED, to=HIDDEN, flags=wide, width=self.width, factor=scale, table=self.table)
        for i, block in enumerate(self._blocks):
            program.starts.append(len(program.steps))
            self._note(program, boundaries, i)
            write_layer(program, block, i, self.scale, self.silu, self.width)
        program.starts.append(len(program.steps))
        self._note(program, boundaries, self.depth)
        norm, eps = self._norm
        program.add(LOGITS, HIDDEN, width=self.width, norm=norm, eps=eps, weight=self._head)
        return program

    def _note(self, program: Program, boundaries: Sequence[int], layer: int) -> None:
        for at, boundary in enumerate(boundaries):
            if boundary == layer:
                program.add(COPY, HIDDEN, at=at * self.width, width=self.width)


def write_layer(
    program: Program,
    block: Block,
    layer: int,
    scale: float,
    silu: bool,
    width: int,
    entering: dict[str, Any] | None = None,
    seeing: int = 0,
) -> None:
    """The steps of a decoder layer over the residual stream; `entering`: what attention reads, if not that; `seeing`:
    flags of what it sees."""
    before_attention, after_attention, before_mlp, after_mlp = block.norms[:4]
    entering = entering or {"source": HIDDEN, "width": width, "weight": block.qkv, **_normed(before_attention)}
    program.add(ENTER, **entering)
    heads = of_heads(block, layer)
    program.add(HEADS, to=RAW if block.wide else QUERIES, flags=WIDE if block.wide else 0, **heads)
    if block.wide:
        del heads["weight"]
        program.add(TURN, RAW, QUERIES, flags=WIDE, **heads)
    program.add(ATTEND, QUERIES, SEEN, flags=seeing, kind=block.kind, layer=layer, factor=scale)
    program.add(ENTER, SEEN, width=program.heads * program.padded, weight=block.out)
    _add_product(program, 0, 0, block.out, after_attention, width)
    program.add(ENTER, HIDDEN, width=width, **_normed(before_mlp), weight=block.gate_up)
    gated = {"width": block.down.ins, "kind": block.down.kind, "flags": 0 if silu else GELU}
    program.add(GATED, 0, 1, weight=block.gate_up, **gated)
    program.widest = max(program.widest, block.down.ins)
    _add_product(program, 1, FOR_ALL, block.down, after_mlp, width)


def of_heads(block: Block, layer: int) -> dict[str, Any]:
    """The fields of a step HEADS."""
    of_queries, of_keys = block.norms[4:]
    normed = {"norm": of_queries[0], "other_norm": of_keys[0], "eps": of_queries[1]} if of_queries and of_keys else {}
    return {"kind": block.kind, "layer": layer, "weight": block.qkv, **normed}


def _add_product(program: Program, source: int, flags: int, weight: Weight, norm: Any, width: int) -> None:
    """Add a product to the residual stream, normalised before where the layer does that."""
    if norm is None:
        program.add(PRODUCT, source, HIDDEN, flags=flags | ADDED, weight=weight)
    else:
        program.add(PRODUCT, source, OTHER, flags=flags, weight=weight)
        program.add(NORM, OTHER, HIDDEN, flags=ADDED, width=width, **_normed(norm))


def _normed(norm: tuple[Tensor, float] | None) -> dict[str, Any]:
    return {"norm": norm[0], "eps": norm[1]} if norm else {}


def padded_heads(heads: int, size: int) -> Tensor:
    """The rows of so many heads, each filled up to a multiple of sixteen; -1 is a row of zeros."""
    rows = torch.arange(heads * size).view(heads, size)
    return F.pad(rows, (0, filled(size, TILE) - size), value=-1).flatten()


def gates_and_ups(inner: int) -> Tensor:
    """The rows of gates and ups, `inner` each, in turn by 32; -1 is a row of zeros."""
    both = torch.arange(2 * inner).view(2, inner)
    return F.pad(both, (0, filled(inner) - inner), value=-1).view(2, -1, GROUP).transpose(0, 1).flatten()


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
