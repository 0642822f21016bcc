"""A target and a draft small enough to be made anew for a test: random weights, a real byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [Path(__file__).read_text(encoding="utf-8")] * 4


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def network(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    model.lm_head.weight[0] = 0  # the end of the text is never the likeliest
    return model


def make_pair(folder: Path, noise: float = 0.02) -> tuple[Path, Path]:
    """Save a target and, as its draft, the same weights with some noise: accepted often, not always."""
    words = tokenizer()
    target = network(len(words), seed=0)
    draft = network(len(words), seed=0)
    for parameter in draft.parameters():
        parameter.add_(torch.randn_like(parameter) * noise)
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


if __name__ == "__main__":
    import sys

    make_pair(Path(sys.argv[1]))
