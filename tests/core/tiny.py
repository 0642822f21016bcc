"""Random tiny models of many architectures: enough to meet every kind of cache, small enough for milliseconds."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from core.runners.architecture import FAMILIES, NativeNetwork
from core.runners.dynamic import DynamicRunner
from core.runners.graph import GraphRunner
from core.runners.native import NativeRunner

WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 4, 2, 2, 64
PADDED, CONTEXT = 384, 256
"""Of the saved pair: the vocabulary of its weights, larger than its tokenizer's, and its context."""
COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 512},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "phi3": {},
    "cohere": {},
}
FUSED = tuple(f"{family} fused" for family in FAMILIES)
GRAPH = ("llama graph", "gemma3_text graph", "mistral graph", "gpt2 graph")
KINDS = (*ARCHITECTURES, *FUSED, *GRAPH)
"""Architectures on transformers' forward, on the fused one where there is one, and some on a static cache."""
SLIDING = ("gemma2", "gemma3_text", "mistral")
"""Those whose attention window (16 tokens) is shorter than the prompts of the tests."""


def random_model(
    architecture: str, seed: int, vocab: int = VOCABULARY, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A model with random weights, spread widely enough that its favourite token changes with the context."""
    common = {} if architecture == "gpt2" else COMMON
    ends = {"bos_token_id": None, "eos_token_id": None}
    options = {**common, **ends, **ARCHITECTURES[architecture], "vocab_size": vocab, **changes}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **options)
    network = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    return network


def make_tokenizer(extra: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE with few merges: most characters beyond ASCII are split over several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"the quick brown fox jumps over the lazy dog, and then the other one {extra}"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


@cache
def target_of(kind: str) -> nn.Module:
    return random_model(kind.split()[0], seed=7)


@cache
def draft_of(kind: str) -> nn.Module:
    """The target with noise on its weights: right often, wrong often."""
    network = copy.deepcopy(target_of(kind.split()[0]))
    torch.manual_seed(8)
    for parameter in network.parameters():
        parameter += 0.04 * torch.randn_like(parameter)
    return network


@cache
def fused_of(network: nn.Module) -> NativeNetwork:
    return NativeNetwork(copy.deepcopy(network))  # the layers of the copy become shares of their products


AnyRunner = DynamicRunner | NativeRunner | GraphRunner


def runner_for(kind: str, network: nn.Module) -> AnyRunner:
    """A new runner with an empty cache, small enough that it has to grow."""
    if kind.endswith("fused"):
        return NativeRunner(fused_of(network), VOCABULARY, capacity=16)
    if kind.endswith("graph"):
        return GraphRunner(network, VOCABULARY, capacity=16)
    return DynamicRunner(network, VOCABULARY)


def target_runner(kind: str) -> AnyRunner:
    return runner_for(kind, target_of(kind))


def draft_runner(kind: str) -> AnyRunner:
    return runner_for(kind, draft_of(kind))


def random_prompt(length: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@contextmanager
def bfloat16_by_default() -> Iterator[None]:
    """PyTorch as all threads find it for as long as transformers loads a model in one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
