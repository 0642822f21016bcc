"""Products of a few rows with a weight, in the layout whose kernel is the fastest on the device.

Linear layers of the same input become one product. Floats of 32 bits stay as they are, and the layers become views of
the fused weight; so do those of 16 bits on a GPU. On a CPU 16 bits are put into the blocks that oneDNN would otherwise
make in every pass; 4 bits into those of PyTorch's own kernel for the device. Such blocks cannot be cut, so there the
layers become shares of the product, and a network goes on working under transformers' own forward, from one copy of its
weights.

In 4 bits, groups of a row's neighbours share a scale and a zero: a weight is (code - 8) * scale + zero, codes 0 … 15,
scale and zero in bf16. The kernel multiplies with bf16 activations alone; a row's result does not depend on the rows
beside it. On a CPU it is our own where that could be compiled (`core.runners.kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import first_line
from core.runners.kernels import has_kernels
from core.runners.layers import Weight, multiply

GROUP = 32
"""Weights that share a scale: 4.5 bits a weight with 64, 5 with 32, and as fast; the quality is that of 32."""
WORDS = 32
"""The group of our own kernel."""
ROWS = 16
"""PyTorch's kernels for 4 bits take weights whose rows are a multiple of this; on CUDA of 8."""
AT_ONCE = 1 << 24
"""Weights that are quantised at a time."""
TILES = (8, 4, 2)
"""How many tiles of 16 columns the CUDA kernel may put together; more is faster."""

Fused = TypeVar("Fused", bound=nn.Module)


def fuse(owner: nn.Module, names: Sequence[str], int4: bool = False) -> Weight:
    """One weight for the linear layers that `owner` has under these names; `int4` quantises them."""
    linears: list[Any] = [getattr(owner, name) for name in names]
    first = linears[0]
    if hasattr(first.weight, "quant_state"):
        return _fuse_nf4(linears)
    weight, bias = joined(linears)
    if int4 and group_for(*weight.shape):
        return _share(owner, names, Int4(weight, bias)).fused
    if has_blocks(weight.dtype):
        product = _share(owner, names, Blocks(weight, bias))
        return Weight("blocks", product.weight, product.bias)
    _make_views(linears, weight)
    return Weight("dense", weight.detach(), bias)


def joined(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear layers of floats as of a single one."""
    first = linears[0]
    weight = first.weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])
    return weight, None if first.bias is None else torch.cat([linear.bias for linear in linears])


def _make_views(linears: Sequence[Any], weight: Tensor) -> None:
    """Let layers have their parts of a weight they were fused into, so that it lies in memory once."""
    start = 0
    for linear in linears:
        linear.weight.data = weight[start : start + linear.weight.shape[0]]
        start += linear.weight.shape[0]


class Stacked:
    """Linear layers of the same input on any device, as one product where their weights can be one: of floats, or what
    the layers are shares of. Others, such as bitsandbytes' in 4 bits, are multiplied one by one."""

    def __init__(self, linears: Sequence[Any]) -> None:
        first = linears[0]
        self._linears = linears
        self._widths = [linear.out_features for linear in linears]
        self._whole: Any = first.product if isinstance(first, Share) else None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        quantised = hasattr(first.weight, "quant_state")  # 4 bits may be stored in a type of floats
        if self._whole is None and not quantised and first.weight.is_floating_point():
            weight, self._bias = joined(linears)
            _make_views(linears, weight)
            self._weight = weight.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [n, columns] times all of them: [n, rows of all], the caller's to write into."""
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        if self._whole is not None:
            return self._whole(x)
        parts = [linear(x) for linear in self._linears]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def apart(self, x: Tensor) -> Sequence[Tensor]:
        """The same, a tensor for each layer."""
        if self._weight is None and self._whole is None:
            return [linear(x) for linear in self._linears]
        return self(x).split(self._widths, 1)

    def add(self, x: Tensor, hidden: Tensor) -> None:
        """Add the product of the only layer to `hidden` [n, rows]."""
        if self._weight is not None and self._bias is None:
            hidden.addmm_(x, self._weight.t())
        else:
            hidden.add_(self(x))


def stack(owner: nn.Module, names: Sequence[str], int4: bool = False) -> Stacked:
    """The linear layers that `owner` has under these names, as one product where that can be; `int4` quantises them."""
    linears: list[Any] = [getattr(owner, name) for name in names]
    if int4 and not isinstance(linears[0], Share):
        weight, bias = joined(linears)
        if group_for(*weight.shape):
            _share(owner, names, Int4(weight, bias))
            linears = [getattr(owner, name) for name in names]
    return Stacked(linears)


def has_blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there to lay out weights of this type. Those of 32 bits are left alone: a pass over a single
    row, which plain decoding is made of, was a third slower with them."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Blocks(nn.Module):
    """A weight in oneDNN's blocks: the numbers of `F.linear`, without making the blocks in every pass."""

    ROWS = 16
    """Of the passes the blocks are made for; those made for 1 … 16 rows were equally fast at all of them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS))
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


def group_for(rows: int, columns: int) -> int | None:
    """The size of a weight's groups; None where the kernel cannot take its shape."""
    return GROUP if rows % ROWS == 0 and columns % GROUP == 0 else None


def fast_int4() -> bool:
    """Whether PyTorch's kernel is more than a loop on this processor."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes int32 [rows, columns] and scales and zeros bf16 [columns / group, rows, 2] of a weight [rows, columns].

    The range of a group is cut into 15 equal steps; codes are the nearest to the weights given the rounded scale. Some
    rows at a time: in float32, a head's matrix would take twice what it does.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int32, device=weight.device)
    scales = torch.empty(columns // group, rows, 2, dtype=torch.bfloat16, device=weight.device)
    for at in range(0, rows, step := max(1, AT_ONCE // columns)):
        groups = weight[at : at + step].float().view(-1, columns // group, group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-8).bfloat16().float()
        zero = (low + 8 * scale).bfloat16().float()
        codes[at : at + step] = ((groups - zero) / scale).round_().add_(8).clamp_(0, 15).view(-1, columns)
        scales[:, at : at + step] = _side_by_side(scale, zero)
    return codes, scales


def _side_by_side(scale: Tensor, zero: Tensor) -> Tensor:
    return torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous().bfloat16()


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight [rows, columns] in float32 that codes and scales stand for."""
    scale, zero = scales.transpose(0, 1).float().unbind(-1)
    groups = codes.view(*scale.shape, -1).float()
    return ((groups - 8) * scale[..., None] + zero[..., None]).view(codes.shape)


@cache
def int4_obstacle(device: torch.device) -> str | None:
    """Why 4 bits of PyTorch's kernel cannot be had on a device, found out by a product there; None where they can."""
    if device.type not in ("cpu", "cuda"):
        return "PyTorch's kernels for it are for CPUs and CUDA"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device here to try PyTorch's kernel for it on"
    draws = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 128, generator=draws).to(device, torch.bfloat16) for n in (64, 3))
    try:
        found = Int4(weight)(x).float()
    except (RuntimeError, NotImplementedError) as error:  # an older GPU, a build without the kernel
        return f"PyTorch's kernel for it does not run here ({first_line(error, 100)})"
    expected = x.float() @ dequantise(*quantise(weight, GROUP)).t()
    wrong = not (found - expected).norm() < 0.02 * expected.norm()
    return "PyTorch's kernel for it gives wrong numbers here" if wrong else None


def _blocked(codes: Tensor) -> Tensor:
    """Codes [rows, columns] in the order of the device's kernel."""
    if codes.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    tiles = next(tiles for tiles in TILES if codes.shape[1] % (16 * tiles) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(in_pairs(codes), tiles)


def in_pairs(codes: Tensor) -> Tensor:
    """Codes [rows, columns] two a byte, uint8 [rows, columns / 2], the even column high."""
    return (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)


def in_words(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, as `quantise` gives them, in the order of our own kernel for CPUs: sixteen rows side by side,
    and of each its words of eight neighbours, the first lowest: uint8 [rows / 16, columns / 8, 16, 4]; scales and zeros
    [rows / 16, groups, 16, 2]."""
    rows, columns = codes.shape
    words = codes.view(rows // 16, 16, columns // 8, 8).transpose(1, 2)
    packed = (words[..., ::2] | words[..., 1::2] << 4).to(torch.uint8)
    return packed.contiguous(), scales.view(-1, rows // 16, 16, 2).transpose(0, 1).contiguous()


class Int4(nn.Module):
    """A weight in 4 bits; the order of the codes is that of this processor's instructions, so never saved.

    On CUDA up to 16 rows cost one tile of the tensor cores; hundreds, as a prompt has, cost several times what they
    would in bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        group = group_for(*weight.shape)
        assert group is not None
        self.group = group
        codes, scales = quantise(weight, group)
        self.shape = (weight.shape[0], weight.shape[1])
        for_kernel = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and group == WORDS
        self.words = for_kernel and has_kernels()
        packed, scales = in_words(codes, scales) if self.words else (_blocked(codes), scales)
        self.weight = nn.Buffer(packed)
        self.scales = nn.Buffer(scales)
        self.bias = None if bias is None else nn.Buffer(bias)

    @property
    def fused(self) -> Weight:
        """The same for the fused forward."""
        kind = "words" if self.words else "int4"
        return Weight(kind, self.weight, self.bias, self.scales, self.group, shape=self.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.words:
            return multiply(x, self.fused)
        # Not by way of torch.ops, which takes two microseconds more: as much as three small operations.
        if x.is_cuda:
            y = torch._weight_int4pack_mm(x, self.weight, self.group, self.scales)  # type: ignore[attr-defined]
        else:
            y = torch._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)  # type: ignore[attr-defined]
        return y if self.bias is None else y + self.bias


class Share(nn.Linear):
    """Of a product that several linear layers were fused into, what one of them gives; it has no weight of its own."""

    def __init__(self, product: nn.Module, start: int, linear: Any) -> None:
        nn.Module.__init__(self)
        self.weight = self.bias = None  # type: ignore[assignment]
        self.product = product
        self.start, self.in_features, self.out_features = start, linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = self.product(x.reshape(-1, self.in_features))
        return rows[:, self.start : self.start + self.out_features].view(*x.shape[:-1], self.out_features)


def _share(owner: nn.Module, names: Sequence[str], product: Fused) -> Fused:
    start = 0
    for name in names:
        share = Share(product, start, getattr(owner, name))
        setattr(owner, name, share)
        start += share.out_features
    return product


def _fuse_nf4(linears: Sequence[Any]) -> Weight:
    """The same for bitsandbytes layers: rows of its packed CPU format may be put one below the other."""
    for linear in linears:
        linear(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))  # makes bitsandbytes pack the weight
    states = [linear.weight.quant_state for linear in linears]
    packed = torch.cat([linear.weight.data for linear in linears])
    scales = torch.cat([state.absmax for state in states], dim=1).contiguous()
    code, block = states[0].code, states[0].blocksize
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    shape = sum(linear.out_features for linear in linears), linears[0].in_features
    start = 0
    for linear in linears:
        linear.weight.data = packed[start : start + linear.out_features]
        start += linear.out_features
    return Weight("nf4", packed, bias, scales, block, code, shape)
