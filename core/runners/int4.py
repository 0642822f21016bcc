"""Weights in 4 bits for PyTorch's own kernel: groups of a row's neighbours share a scale and a zero.

A weight is (code - 8) * scale + zero, codes 0 … 15, scale and zero in bf16. The kernel multiplies with bf16 activations
alone; a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUP = 32
"""Weights that share a scale: 4.5 bits a weight with 64, 5 with 32, and as fast; the quality is that of 32."""
ROWS = 16
"""The kernel takes weights whose rows are a multiple of this."""


def group_for(rows: int, columns: int) -> int | None:
    """The size of a weight's groups; None where the kernel cannot take its shape."""
    return GROUP if rows % ROWS == 0 and columns % GROUP == 0 else None


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes int32 [rows, columns] and scales and zeros bf16 [columns / group, rows, 2] of a weight [rows, columns].

    The range of a group is cut into 15 equal steps; codes are the nearest to the weights given the rounded scale.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((groups - zero) / scale).round_().add_(8).clamp_(0, 15)
    return codes.view(rows, columns).int(), _side_by_side(scale, zero)


def _side_by_side(scale: Tensor, zero: Tensor) -> Tensor:
    return torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous().bfloat16()


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight [rows, columns] in float32 that codes and scales stand for."""
    scale, zero = scales.transpose(0, 1).float().unbind(-1)
    groups = codes.view(*scale.shape, -1).float()
    return ((groups - 8) * scale[..., None] + zero[..., None]).view(codes.shape)


class Int4(nn.Module):
    """A weight in 4 bits; the order of the codes is that of this processor's instructions, so never saved."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        group = group_for(*weight.shape)
        assert group is not None
        self.group = group
        codes, scales = quantise(weight, group)
        self.weight = nn.Buffer(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        self.scales = nn.Buffer(scales)
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        # Not by way of torch.ops, which takes two microseconds more: as much as three small operations.
        y = torch._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)  # type: ignore[attr-defined]
        return y if self.bias is None else y + self.bias
