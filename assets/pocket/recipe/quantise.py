"""What NF4 makes of the weights, so that training can end on the weights that are shipped."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BLOCK = 64
# bitsandbytes' sixteen NF4 levels (QLoRA, arXiv 2305.14314, appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def round_to_nf4(weight: Tensor) -> Tensor:
    """The weight after a round trip through NF4 in blocks of 64 (scales not rounded).

    Written as a sum of steps instead of a table look-up: compiled, that runs in vector registers.
    """
    blocks = weight.reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
    position = blocks / scale
    rounded = torch.full_like(position, LEVELS[0])
    for low, high in itertools.pairwise(LEVELS):
        rounded = rounded + torch.where(position > (low + high) / 2, high - low, 0.0)
    return (rounded * scale).reshape(weight.shape)


def list_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that ship in 4 bits: every matrix but the embeddings."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]


@contextmanager
def shipped_weights(model: nn.Module, active: bool, compiled: bool) -> Iterator[None]:
    """Inside, the matrices are as NF4 will have them: a gradient taken there is applied to the full weights after
    (straight-through)."""
    if not active:
        yield
        return
    convert = torch.compile(round_to_nf4, dynamic=False) if compiled else round_to_nf4
    matrices = list_matrices(model)
    with torch.no_grad():
        kept = [p.detach().clone() for p in matrices]
        for p in matrices:
            p.data.copy_(convert(p.detach()))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(matrices, kept, strict=True):
                p.data.copy_(value)
