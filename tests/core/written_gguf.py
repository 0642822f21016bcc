"""Tiny GGUF files: random models written under llama.cpp's names, in any quantisation, and broken on request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from tiny import make_tokenizer, random_model
from torch import nn

WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 256, 256, 4, 2, 2
"""Whole blocks of every quantisation: the largest is of 256 weights."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Where blocks hold their scales, as fp16."""
NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.", "blk."),
    (r"self_attn\.([qk])_norm\.", r"attn_\1_norm."),
    (r"self_attn\.([qkv])_proj\.", r"attn_\1."),
    (r"self_attn\.o_proj\.", "attn_output."),
    (r"mlp\.(gate|up|down)_proj\.", r"ffn_\1."),
    (r"self_attn\.qkv_proj\.", "attn_qkv."),
    (r"mlp\.gate_up_proj\.", "ffn_up."),
    (r"input_layernorm\.", "attn_norm."),
)
NORMS = {
    "gemma2": (
        (r"post_attention_layernorm\.", "post_attention_norm."),
        (r"pre_feedforward_layernorm\.", "ffn_norm."),
        (r"post_feedforward_layernorm\.", "post_ffw_norm."),
    )
}
OTHER_NORMS = ((r"post_attention_layernorm\.", "ffn_norm."),)


def write_gguf(
    file: Path,
    family: str = "llama",
    kind: str = "F16",
    network: nn.Module | None = None,
    template: str = TEMPLATE,
    settings: dict[str, Any] | None = None,
    without: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> nn.Module:
    """Write a random model of a family with its matrices in `kind`, and return it as it was before quantising.

    `settings` are added to, or replace, those of the model; `without` leaves a tensor out; `extra` adds some."""
    tokenizer = make_tokenizer()
    network = network or make_network(family, len(tokenizer))
    config: Any = network.config
    out = GGUFWriter(file, architecture or family)
    given = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab_size,
        **(settings or {}),
    }
    for name, value in given.items():
        add = (
            out.add_string if isinstance(value, str) else out.add_uint32 if isinstance(value, int) else out.add_float32
        )
        add(f"{architecture or family}.{name}", value)
    out.add_float32(f"{architecture or family}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    out.add_float32(f"{architecture or family}.rope.freq_base", config.rope_parameters["rope_theta"])
    _add_tokenizer(out, tokenizer, template)
    for name, value in network.state_dict().items():
        theirs = renamed(name, family)
        if theirs == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = value.float().numpy()
        if family == "llama" and re.search(r"attn_[qk]\.", theirs):
            values = permuted(values, HEADS if "attn_q" in theirs else KV_HEADS)
        _add_tensor(out, theirs, values, kind if values.ndim > 1 else "F32")
    for name, value in (extra or {}).items():
        out.add_tensor(name, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return network


def make_network(family: str, vocabulary: int, **changes: Any) -> nn.Module:
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    network = random_model(family, 3, vocab=vocabulary, dtype=torch.float32, **{**shape, **changes})
    for name, parameter in network.named_parameters():
        parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1)
    return network


def renamed(name: str, family: str) -> str:
    for ours, theirs in (*NAMES, *NORMS.get(family, OTHER_NORMS)):
        name = re.sub(ours, theirs, name)
    return name


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of queries and keys (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _add_tensor(out: GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if kind in HALVES:
        out.add_tensor(name, random_blocks(values.shape, kind), raw_dtype=number)
    elif kind == "F32":
        out.add_tensor(name, values)
    else:
        out.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Bytes of a quantisation that the package gguf unpacks and cannot make: random codes, small scales."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(5)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = np.full((*blocks.shape[:-1], 1), 2e-4, np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add_tokenizer(out: GGUFWriter, tokenizer: Any, template: str) -> None:
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(words)
    out.add_token_types([3 if word == "<|end|>" else 1 for word in words])
    out.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    out.add_eos_token_id(tokenizer.eos_token_id)
    out.add_pad_token_id(tokenizer.eos_token_id)
    if template:
        out.add_chat_template(template)
