"""What a GGUF's settings and tensors are in transformers' terms: the config, and the names and shapes of the weights.

The families that differ in little (Llama and Mistral, Qwen2, Qwen3) are read here; for others transformers' own reader
is asked, which is slower.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoConfig

from core.errors import UserError, first_line
from core.loading.gguf import Header

FAMILIES = ("llama", "qwen2", "qwen3")
NAMES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that every file of these families has."""
ROLES = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
IGNORED = ("rope_freqs.weight", ".attn_rot_embd.weight", ".rope_freqs.weight")
"""Endings of tensors that can be computed from the config."""
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}
"""How Llama 3.1 and 3.2 stretch their positions; of a file only the outcome is known."""


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: its name and shape in transformers; `heads` is set where llama.cpp reordered its rows."""

    name: str
    shape: tuple[int, ...]
    heads: int | None = None


def read_by_us(header: Header) -> bool:
    return header.architecture in FAMILIES


def config_of(header: Header) -> dict[str, Any]:
    """The config.json of a file. Raises UserError where its architecture cannot be read, or where its settings and its
    tensors contradict each other."""
    if not read_by_us(header):
        return _asked_of_transformers(header)
    found = {ours: _number(header, theirs) for theirs, ours in NAMES.items()}
    if header.setting("expert_count"):
        raise UserError(f"{header.path.name} is a mixture of experts of the Llama family, which cannot be read here.")
    heads = found["num_attention_heads"]
    kv_heads = header.setting("attention.head_count_kv")
    if isinstance(kv_heads, list):
        if len(set(kv_heads)) != 1:
            raise UserError(f"{header.path.name} has layers of different widths, which cannot be read here.")
        kv_heads = kv_heads[0]
    head_dim = header.setting("attention.key_length") or header.setting("rope.dimension_count")
    head_dim = head_dim or found["hidden_size"] // max(1, heads)
    if header.setting("rope.dimension_count") not in (None, head_dim):
        raise UserError(f"{header.path.name} turns a part of each head only (rope), which cannot be read here.")
    table = header.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "model_type": header.architecture,
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[header.architecture] + "ForCausalLM"],
        **found,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": table.shape[0] if table and len(table.shape) == 2 else 0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, head_dim),
        **{ours: header.settings.get(f"tokenizer.ggml.{theirs}") for theirs, ours in ROLES.items()},
    }
    if header.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if header.architecture == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    _check(header, config)
    return config


def layout(header: Header, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Every tensor that a file of our families must have, by its own name, with its place."""
    width, inner, vocabulary = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, size = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    reordered = header.architecture == "llama"
    yield "token_embd.weight", Place("model.embed_tokens.weight", (vocabulary, width))
    yield "output_norm.weight", Place("model.norm.weight", (width,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", Place("lm_head.weight", (vocabulary, width))
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{i}.", f"model.layers.{i}."
        yield f"{theirs}attn_norm.weight", Place(f"{ours}input_layernorm.weight", (width,))
        yield f"{theirs}ffn_norm.weight", Place(f"{ours}post_attention_layernorm.weight", (width,))
        for name, of, rows, columns, order in (
            ("attn_q", "self_attn.q_proj", heads * size, width, heads if reordered else None),
            ("attn_k", "self_attn.k_proj", kv_heads * size, width, kv_heads if reordered else None),
            ("attn_v", "self_attn.v_proj", kv_heads * size, width, None),
            ("attn_output", "self_attn.o_proj", width, heads * size, None),
            ("ffn_gate", "mlp.gate_proj", inner, width, None),
            ("ffn_up", "mlp.up_proj", inner, width, None),
            ("ffn_down", "mlp.down_proj", width, inner, None),
        ):
            yield f"{theirs}{name}.weight", Place(f"{ours}{of}.weight", (rows, columns), order)
            if _has_bias(header.architecture, config, name):
                yield f"{theirs}{name}.bias", Place(f"{ours}{of}.bias", (rows,), order)
        if header.architecture == "qwen3":
            for name in ("q", "k"):
                yield f"{theirs}attn_{name}_norm.weight", Place(f"{ours}self_attn.{name}_norm.weight", (size,))


def _has_bias(architecture: str, config: dict[str, Any], name: str) -> bool:
    if architecture == "qwen2":
        return name in ("attn_q", "attn_k", "attn_v")
    return bool(config["attention_bias"] if name.startswith("attn") else config.get("mlp_bias"))


def _check(header: Header, config: dict[str, Any]) -> None:
    """Hold the settings against the tensors, before anything is built by them."""
    if config["num_hidden_layers"] * 5 > len(header.tensors):
        raise _contradiction(header, f"{config['num_hidden_layers']:,} layers in {len(header.tensors):,} tensors")
    wanted = dict(layout(header, config))
    for name, place in wanted.items():
        if name not in header.tensors:
            raise _contradiction(header, f"{name} is missing")
        if (shape := header.tensors[name].shape) != place.shape:
            raise _contradiction(header, f"{name} is {_times(shape)} and not {_times(place.shape)}")
    if more := [name for name in header.tensors if name not in wanted and not name.endswith(IGNORED)]:
        raise UserError(
            f"{header.path.name} has weights that a {header.architecture} model has no place for ({more[0][:60]}), so "
            "it cannot be read here."
        )


def _contradiction(header: Header, what: str) -> UserError:
    return UserError(f"{header.path.name} is broken: its settings and its weights contradict each other ({what}).")


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{n:,}" for n in shape)


def _number(header: Header, name: str) -> Any:
    found = header.setting(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
        raise UserError(f"{header.path.name} is broken: its setting {header.architecture}.{name} is {str(found)[:60]}.")
    return found


def _rope(header: Header, head_dim: int) -> dict[str, Any]:
    """How positions turn keys and queries; stretched where the file says so, by settings or by a tensor of factors."""
    base: dict[str, Any] = {"rope_theta": float(header.setting("rope.freq_base") or 10_000.0), "rope_type": "default"}
    kind, factor = header.setting("rope.scaling.type"), header.setting("rope.scaling.factor")
    if kind == "linear" and factor:
        return {**base, "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor:
        original = header.setting("rope.scaling.original_context_length")
        return {**base, "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    if kind not in (None, "none", "linear", "yarn"):
        raise UserError(f"{header.path.name} stretches its positions by {str(kind)[:40]!r}, which is unknown here.")
    if "rope_freqs.weight" not in header.tensors:
        return base
    return _llama3(header, base, head_dim)


def _llama3(header: Header, base: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters behind a tensor of factors, if Llama 3's formula with its usual bounds gives that tensor."""
    tensor = header.tensors["rope_freqs.weight"]
    factors = np.fromfile(header.path, np.float32, math.prod(tensor.shape), offset=tensor.start)
    factor = float(factors.max())
    turns = base["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    low, high, original = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], LLAMA3["original"]
    smooth = np.clip((original * turns / (2 * math.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if tensor.kind.name != "F32" or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UserError(
            f"{header.path.name} stretches its positions by factors of its own (rope_freqs), which are unknown here."
        )
    known = {k: v for k, v in LLAMA3.items() if k != "original"}
    return {**base, **known, "factor": factor, "original_max_position_embeddings": original}


def _asked_of_transformers(header: Header) -> dict[str, Any]:
    """The config that transformers makes of a file of another family."""
    layers = header.setting("block_count")
    if isinstance(layers, int) and layers > len(header.tensors):
        raise _contradiction(header, f"{layers:,} layers in {len(header.tensors):,} tensors")
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                header.path.parent, gguf_file=header.path.name, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # whatever transformers makes of a stranger's file
        raise UserError(
            f"{header.path.name} is a {header.architecture[:40]} model, which cannot be read from a GGUF file here "
            f"({first_line(error, 120)}); look for its safetensors."
        ) from error
    return {k: v for k, v in config.to_dict().items() if k != "quantization_config"}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Its reader warns of what does not concern anybody here: files are unpacked, never run packed."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
