"""Bits per byte of a finished folder on held-out text, in all and by position in the context."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .windows import Windows

BUCKETS = ((0, 128), (128, 512), (512, 1024), (1024, 2048))


def count_bytes(tokenizer) -> Tensor:
    """Bytes of every token of the vocabulary [vocabulary]; special tokens have none."""
    special = set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if i in special else len(piece) for i, piece in enumerate(pieces)])


@torch.no_grad()
def measure_bits(
    network: nn.Module, windows: Windows, tokenizer, count: int = 24, length: int = 2048
) -> dict[str, float]:
    """Bits per byte over `count` windows: `all`, and for each bucket of positions `0-127`, ..."""
    sizes = count_bytes(tokenizer)
    ids, labels = windows.take(length, count, {})
    nats = torch.zeros(length)
    covered = torch.zeros(length)
    for row, label in zip(ids, labels, strict=True):
        logits = network(row[None].to(network.device)).logits[0].float().cpu()
        nats += F.cross_entropy(logits, label, reduction="none")
        covered += sizes[label]
    bits = {"all": (nats.sum() / covered.sum() / math.log(2)).item()}
    for first, last in BUCKETS:
        if first < length:
            part = slice(first, last)
            bits[f"{first}-{min(last, length) - 1}"] = (nats[part].sum() / covered[part].sum() / math.log(2)).item()
    return bits
