"""Models of real shapes with random weights, built where they will run and never whole in a higher precision."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from core.loading import POCKET
from core.loading.model import Model

TARGET = {  # Llama 3.1 8B
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
DRAFT = {  # Qwen2.5 0.5B, with the target's vocabulary
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
STD = 0.02


def build(shape: dict[str, Any], precision: str, device: torch.device) -> nn.Module:
    """A causal model of this shape in bf16, its decoder's linear layers in NF4 where asked: one layer's weight at a
    time is made in bf16 on the device and quantised there."""
    options = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], max_position_embeddings=8192, **options)
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decoder = network.model
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and precision == "nf4":
                setattr(parent, name, _quantised(child, device))
    for parent in network.modules():
        for name, parameter in list(parent.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(parent, name, nn.Parameter(_random(parameter, device), requires_grad=False))
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(device)
    if config.tie_word_embeddings:
        network.lm_head.weight = decoder.embed_tokens.weight
    if left := [name for name, tensor in [*network.named_parameters(), *network.named_buffers()] if tensor.is_meta]:
        raise RuntimeError(f"{left[0]} was not built")
    return network.eval().requires_grad_(False)


def as_model(name: str, network: nn.Module, precision: str) -> Model:
    """With the bundled tokenizer: the ids past it have no text, which no figure needs."""
    config: Any = network.config
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    return Model(name, network, tokenizer, precision, frozenset(), config.max_position_embeddings, config.vocab_size)


def _quantised(linear: nn.Linear, device: torch.device) -> Linear4bit:
    packed = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = torch.randn(linear.out_features, linear.in_features, dtype=torch.bfloat16, device=device) * STD
    packed.weight = Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
    ).to(device)
    if linear.bias is not None:
        packed.bias = nn.Parameter(torch.zeros(linear.out_features, dtype=torch.bfloat16, device=device), False)
    return packed


def _random(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Norms of one, matrices of small numbers."""
    if parameter.dim() == 1:
        return torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
    return torch.randn(parameter.shape, dtype=torch.bfloat16, device=device) * STD
