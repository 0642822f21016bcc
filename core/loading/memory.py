"""What a model will take in memory, computed from its config alone: weights, keys and values, and room to work.

The model is built without storage (PyTorch's meta device), so the shapes, ties and layers counted here are those that
loading will make.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION, get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from core.runners import PREFILL_CHUNK
from core.runners.architecture import why_not_family
from core.runners.capture import MOST_CAPTURED
from core.runners.products import group_for
from core.runners.widths import LONGEST, ROUND, WIDTHS, capacity_for, reach_for, reaches_up_to

NF4_BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share a scale, in bitsandbytes' double quantisation."""
NF4_CODES, SCALE_CODES = 4 * 16, 4 * 256
"""Bytes of the code books that every 4-bit weight brings along, for itself and for its quantised scales."""
CUDA_LIBRARIES = 96 * 2**20
"""Bytes that cuBLAS and the kernels take at their first use."""
CUBLAS_WORKSPACE = 32 * 2**20
"""What PyTorch gives cuBLAS to work in, at most (on Hopper): once more in the memory of captured passes."""
NODES_OF_A_LAYER, NODE_BYTES = 14, 32 * 2**10
"""Operations of a layer in a graph, and what each takes on the device, by what vLLM tells of Llama 3.2 1B: 35 graphs of
16 layers took 0.21 GiB (its pull request 11349)."""
OTHER_SENSES = ("vision", "visual", "audio", "multi_modal")
"""Parts of models that also see or hear; text does not pass through them."""
VERIFIED_ROWS = 17
"""Rows of logits a round is assumed to hold: sixteen drafted tokens and one more."""


@dataclass(frozen=True)
class Weights:
    """Bytes of weights in memory. `read` is what a pass over one token touches: neither the embedding table, of which
    it looks up a row, nor the experts that are not asked. `experts` are the bytes of mixture-of-experts weights that
    4-bit loading leaves in 16 bits."""

    total: int
    read: int
    parameters: int
    active_parameters: int
    experts: int = 0


@dataclass(frozen=True)
class NF4:
    """How bitsandbytes lays out 4-bit weights: scales quantised once more (`double`), or as its fused CPU kernel wants
    them; `kept` are the modules a checkpoint says it left alone, None for transformers' own choice."""

    double: bool = True
    packed_for_cpu: bool = False
    kept: tuple[str, ...] | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None, packed_for_cpu: bool) -> NF4:
        """The layout of a checkpoint saved in NF4, or the one loading makes of any other."""
        if not saved:
            return cls(packed_for_cpu=packed_for_cpu)
        kept = saved.get("llm_int8_skip_modules")
        return cls(bool(saved.get("bnb_4bit_use_double_quant")), packed_for_cpu, tuple(kept) if kept else None)


@dataclass(frozen=True)
class Free:
    """Bytes free for a new model on a device, and all it has; None where the system does not tell."""

    free: int | None
    total: int | None


def skeleton(config: Any) -> nn.Module:
    """The network of a config with its shapes and ties, without storage."""
    plain = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(type(config).from_dict(plain), dtype=torch.bfloat16)


def weights(network: nn.Module, dtype: torch.dtype, nf4: NF4 | None = None) -> Weights:
    """Count the weights of a skeleton as loading would lay them out: in `dtype`, and with `nf4` its linear layers in
    4-bit."""
    config = network.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    quantised = quantised_weights(network, nf4.kept) if nf4 else {}
    looked_up = lookup_tables(network)
    total = read = parameters = active = experts = 0
    for name, parameter in network.named_parameters():
        count = parameter.numel()
        size = nf4_bytes(*quantised[name], nf4) if nf4 and name in quantised else count * dtype.itemsize
        share = routed_share(name, parameter, config)
        total += size
        read += 0 if name in looked_up else round(size * share)
        parameters += count
        active += 0 if name in looked_up else round(count * share)
        experts += size if nf4 and is_experts(name, parameter) and name not in quantised else 0
    buffers = sum(b.numel() * b.element_size() for b in network.buffers())
    return Weights(total + buffers, read + buffers, parameters, active, experts)


def as_fused(
    counted: Weights,
    network: nn.Module,
    device: torch.device,
    precision: str,
    dtype: torch.dtype,
    nf4: NF4 | None = None,
) -> Weights:
    """The weights of a skeleton, `counted` in `dtype` or as `nf4`, as the fused forward lays them out, where it can run
    the model: in int4 its linear layers have 4 bits, and a head tied to the embeddings has a copy of its own; so it has
    on a CPU, where in int4 that head has 8 bits, and the codes of NF4 lie beside a scale for 32 of them."""
    apart = precision == "int4" if device.type == "cuda" else device.type == "cpu" and dtype != torch.float16
    if not apart or why_not_family(network.config):
        return counted
    table = network.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    quantised = quantised_weights(network, nf4.kept) if nf4 else {}
    total, read = counted.total, counted.read
    for name, module in network.named_modules():
        if type(module) is nn.Linear:
            count, shape = module.weight.numel(), module.weight.shape
            size = packed = count * dtype.itemsize
            if nf4 and (own := f"{name}.weight") in quantised:
                size = nf4_bytes(*quantised[own], nf4)
                packed = count * 5 // 8 if shape[1] % 64 == 0 else 2 * count
            elif precision == "int4" and group_for(*shape):
                bits = 9 if device.type == "cpu" and name == "lm_head" else 5
                packed = count * bits // 8
            read += packed - size
            total += packed if module.weight is table else packed - size
    return replace(counted, total=total, read=read)


def quantised_weights(network: nn.Module, kept: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
    """The weights that transformers' 4-bit loading quantises, as {name: (rows, columns)}: linear layers, save the head,
    what is tied to the embeddings, and 3-D expert weights, which are no linear layers (bitsandbytes issue 1849)."""
    kept = [
        *(get_keys_to_not_convert(network) if kept is None else kept),
        *(getattr(network, "_keep_in_fp32_modules", None) or ()),
    ]
    found = {}
    for name, module in network.named_modules():
        if not should_convert_module(name, kept):
            continue
        if isinstance(module, Conv1D):  # GPT-2's linear layers keep their weights transposed
            found[f"{name}.weight"] = (module.weight.shape[1], module.weight.shape[0])
        elif type(module) is nn.Linear:
            found[f"{name}.weight"] = (module.out_features, module.in_features)
        elif type(module).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION:  # experts it makes linear layers of
            for part, weight in module.named_parameters(recurse=False):
                found[f"{name}.{part}"] = (weight.numel() // weight.shape[1], weight.shape[1])
    return found


def nf4_bytes(rows: int, columns: int, layout: NF4) -> int:
    """Bytes of a weight in NF4 with its scales: 32 bits per 64 weights, or 8 bits with 32 bits per 256 of them, or 16
    bits in the layout of the CPU kernel, which takes shapes of whole blocks only."""
    packed, blocks = math.ceil(rows * columns / 2), math.ceil(rows * columns / NF4_BLOCK)
    if layout.packed_for_cpu and whole_blocks(rows, columns):
        return packed + 2 * blocks + NF4_CODES
    if not layout.double:
        return packed + 4 * blocks + NF4_CODES
    return packed + blocks + 4 * math.ceil(blocks / SCALE_BLOCK) + NF4_CODES + SCALE_CODES


def whole_blocks(rows: int, columns: int) -> bool:
    """Whether bitsandbytes' fused CPU kernel can take a weight."""
    return rows % 32 == 0 and columns % NF4_BLOCK == 0


def lookup_tables(network: nn.Module) -> set[str]:
    """Names of the embedding tables a pass takes single rows of; a table that is the head too is read whole."""
    head = network.get_output_embeddings()  # type: ignore[operator]
    head_weight = getattr(head, "weight", None)
    return {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and module.weight is not head_weight
    }


def is_experts(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 3 and "expert" in name


def routed_share(name: str, parameter: torch.Tensor, config: Any) -> float:
    """The share of a weight that one token of text uses: of experts the few it is routed to, of what sees or hears
    nothing, of others all."""
    if any(sense in name for sense in OTHER_SENSES):
        return 0.0
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if not is_experts(name, parameter) or not chosen:
        return 1.0
    return min(1.0, chosen / parameter.shape[0])


def cache_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of `tokens` tokens. Grouped-query attention keeps one pair per key head; layers that share the
    keys of another keep none. Sliding-window layers keep all tokens here, so that they can be rolled back exactly."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention, kept expanded
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = 2 * size * (getattr(config, "num_key_value_heads", None) or heads)
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return layers * width * tokens * dtype.itemsize


def workspace_bytes(
    network: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device, nf4: NF4 | None = None
) -> int:
    """Room for the widest moment of a run: a chunk of the prompt in one layer, or the logits of a round in float32 with
    their probabilities, target and draft side by side; and in 4-bit the largest weight unpacked."""
    config = network.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    layer = layer_bytes(config, min(tokens, PREFILL_CHUNK), tokens, dtype)
    round_ = VERIFIED_ROWS * config.vocab_size * 4 * 4
    return max(layer, round_) + largest_unpacked(network, nf4) + (CUDA_LIBRARIES if device.type == "cuda" else 0)


def captured_bytes(network: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device, nf4: NF4 | None) -> int:
    """An estimate of what captured passes of one runner hold on CUDA over texts of `tokens` tokens: their nodes, the
    room of their cache past the text, and what all share: the logits they leave, the work of the widest of them (one
    layer, its mask, its logits), a workspace of cuBLAS and in 4-bit the largest weight unpacked. Without early exit or
    a head's features, whose passes are captured beside these."""
    if device.type != "cuda":
        return 0
    config = network.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    rows = min(tokens, LONGEST)
    logits = LONGEST * config.vocab_size * dtype.itemsize
    group = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    work = layer_bytes(config, rows, group * reach_for(tokens), dtype) + logits
    graphs = min(MOST_CAPTURED, sum(width <= ROUND for width in WIDTHS) * reaches_up_to(tokens))
    nodes = graphs * NODES_OF_A_LAYER * config.num_hidden_layers * NODE_BYTES
    limit = getattr(config, "max_position_embeddings", None) or tokens
    room = cache_bytes(config, capacity_for(tokens, limit), dtype) - cache_bytes(config, tokens, dtype)
    return logits + work + CUBLAS_WORKSPACE + largest_unpacked(network, nf4) + nodes + room


def layer_bytes(config: Any, rows: int, seen: int, dtype: torch.dtype) -> int:
    """What a layer works in: rows of its width and of the mlp's, and a mask of `seen` columns."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    return rows * (6 * config.hidden_size + 3 * inner + seen) * dtype.itemsize


def largest_unpacked(network: nn.Module, nf4: NF4 | None) -> int:
    """Bytes of the largest 4-bit weight in 16 bits; 0 where none is in 4 bits."""
    quantised = quantised_weights(network, nf4.kept) if nf4 else {}
    return max((2 * rows * columns for rows, columns in quantised.values()), default=0)


def free_memory(device: torch.device) -> Free:
    """What this process may still take on a device; what PyTorch holds in reserve counts as free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Free(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Free(total - torch.mps.driver_allocated_memory(), total)
    return smaller(system_memory(), container_memory())


def system_memory() -> Free:
    """RAM without swap: the kernel's own estimate on Linux, elsewhere what the C library tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
        return Free(found["MemAvailable"], found["MemTotal"])
    except (OSError, KeyError, ValueError, IndexError):
        return Free(pages("SC_AVPHYS_PAGES"), pages("SC_PHYS_PAGES"))


def pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> Free:
    """The limit of the container this runs in, version 2 or 1 of control groups; None without one."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            total, taken = int((root / limit).read_text()), int((root / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return Free(max(0, total - taken + reclaimable(root / limit)), total)
    return Free(None, None)


def reclaimable(limit: Path) -> int:
    """Bytes of files the kernel keeps in a container's memory and gives back when asked."""
    try:
        lines = limit.with_name("memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, IndexError):
        return 0


def smaller(one: Free, other: Free) -> Free:
    known = [found for found in (one, other) if found.free is not None]
    return min(known, key=lambda found: found.free or 0, default=Free(None, None))
