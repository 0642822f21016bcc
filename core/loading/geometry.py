"""What of a model's build decides the shapes and the traffic of a pass: plain data, a part of every run document.

Read off the loaded modules rather than the config alone: fused projections, padded vocabularies and fields of the
config that an architecture ignores would otherwise make the trace wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.loading.memory import is_experts, lookup_tables
from core.loading.model import Model, quantisation_bytes

OUTPUTS = ("o_proj", "c_proj", "dense", "out_proj", "wo")
"""Names that architectures give the projection which leaves attention; the others enter it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer inside a decoder layer: `place` is "in" or "out" of attention, or "mlp"; `out` its width."""

    name: str
    place: str
    out: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one decoder. Widths are in numbers, `*_bytes` as stored in memory.

    `vocabulary` counts the rows of the head, padding included. `read_bytes`: weights every pass reads, whatever it is
    fed. `expert_bytes`: of mixture-of-experts weights, `active_experts` of `experts` for a token. `cached_bytes`: keys
    and values of one token in all layers. `runner`: the kind of forward (native, fused-graph, graph, dynamic),
    `attention` its kernel. `window`: of the `sliding_layers` layers. `longest`: tokens the context holds.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dtype: str
    runner: str
    attention: str
    projections: tuple[Projection, ...]
    position_table: bool
    window: int
    sliding_layers: int
    longest: int
    experts: int
    active_experts: int
    read_bytes: int
    head_bytes: int
    expert_bytes: int
    cached_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"projections": [asdict(p) for p in self.projections]}

    @classmethod
    def of(cls, data: Any) -> Geometry | None:
        """The geometry a run document holds; None where it has none or one that cannot be."""
        try:
            parts = {f.name: data[f.name] for f in fields(cls)}
            words = ("dtype", "runner", "attention", "projections", "position_table")
            numbers = {name: value for name, value in parts.items() if name not in words}
            if not all(type(n) is int and 0 <= n < 2**50 for n in numbers.values()):
                return None
            if not all(numbers[k] for k in ("width", "layers", "heads", "kv_heads", "head_size", "vocabulary")):
                return None
            projections = tuple(
                Projection(str(p["name"]), str(p["place"]), int(p["out"])) for p in parts["projections"]
            )
        except (KeyError, TypeError, ValueError):
            return None
        return cls(
            **numbers,
            dtype=str(parts["dtype"]),
            runner=str(parts["runner"]),
            attention=str(parts["attention"]),
            projections=projections,
            position_table=bool(parts["position_table"]),
        )


def describe_geometry(model: Model) -> Geometry | None:
    """Measure a loaded model; None where its attention is of a kind the trace does not know (latent attention)."""
    network: Any = model.network
    config = model.config
    stack = decoder_layers(network, config.num_hidden_layers)
    if stack is None or getattr(config, "kv_lora_rank", None):
        return None
    projections = tuple(_projections(stack[0]))
    heads = config.num_attention_heads
    size = _head_size(stack[0], config)
    kv_heads = _kv_heads(projections, heads, size)
    if not kv_heads:
        return None
    table, head = network.get_input_embeddings().weight, network.get_output_embeddings()
    window, sliding_layers = _sliding(config)
    looked_up = lookup_tables(network)
    parameters = dict(network.named_parameters())
    experts = {name: p for name, p in parameters.items() if is_experts(name, p)}
    expert_bytes = sum(stored_bytes(p) for p in experts.values())
    skipped = sum(stored_bytes(p) for name, p in parameters.items() if name in looked_up)
    layers = config.num_hidden_layers
    return Geometry(
        width=table.shape[1],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        vocabulary=head.out_features,
        dtype=name_of(table),
        runner=model.runner_kind.split()[0],
        attention=str(getattr(config, "_attn_implementation", None) or "eager"),
        projections=projections,
        position_table=any(isinstance(m, nn.Embedding) and m.weight is not table for m in network.modules()),
        window=window,
        sliding_layers=sliding_layers,
        longest=model.context_length,
        experts=next(iter(experts.values())).shape[0] if experts else 0,
        active_experts=(getattr(config, "num_experts_per_tok", None) or 0) if experts else 0,
        read_bytes=model.weight_bytes() - skipped - expert_bytes,
        head_bytes=sum(map(stored_bytes, (*head.parameters(), *head.buffers()))),
        expert_bytes=expert_bytes,
        cached_bytes=2 * layers * kv_heads * size * table.element_size(),
    )


def decoder_layers(network: nn.Module, count: int) -> nn.ModuleList | None:
    """The list of decoder layers, by its length and by holding attention."""
    lists = (m for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next((stack for stack in lists if any(_in_attention(name) for name, _ in stack[0].named_modules())), None)


def stored_bytes(parameter: Tensor) -> int:
    """Bytes of a weight as it lies in memory, with its scales where it is quantised."""
    return parameter.numel() * parameter.element_size() + quantisation_bytes(parameter)


def name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sliding(config: Any) -> tuple[int, int]:
    """The attention window in tokens and in how many layers it applies; (0, 0) without one."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    layers = kinds.count("sliding_attention") if kinds else config.num_hidden_layers
    return (window, layers) if window and layers else (0, 0)


def _projections(layer: nn.Module) -> Iterator[Projection]:
    for name, module in layer.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            leaf = name.rsplit(".", 1)[-1]
            inside = "out" if leaf in OUTPUTS else "in"
            out = module.nf if isinstance(module, Conv1D) else module.out_features
            yield Projection(leaf, inside if _in_attention(name) else "mlp", out)


def _in_attention(name: str) -> bool:
    return "attn" in name or "attention" in name.split(".")


def _head_size(layer: nn.Module, config: Any) -> int:
    attention = next(module for name, module in layer.named_modules() if _in_attention(name))
    for found in (getattr(attention, "head_dim", None), getattr(attention, "head_size", None)):
        if isinstance(found, int):
            return found
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kv_heads(projections: tuple[Projection, ...], heads: int, size: int) -> int:
    """Heads of keys, by the width of what makes them; 0 where that does not come out even."""
    inside = [p for p in projections if p.place == "in"]
    keys = [p.out for p in inside if p.name.startswith("k")]
    if keys:
        return keys[0] // size if keys[0] % size == 0 else 0
    rest = inside[0].out - heads * size if len(inside) == 1 else 0  # q, k and v in one product
    return rest // (2 * size) if rest % (2 * size) == 0 else 0
