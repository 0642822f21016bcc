"""Products of a few rows with a weight, in the layout whose kernel is the fastest on the device.

Linear layers of the same input become one product. On a CPU its weight lies as the native pass reads it
(`core.runners.program`), so the layers become shares of it and a network goes on working under transformers' own
forward, from one copy of its weights. On a GPU 16 bits stay as they are, and the layers become views of the fused
weight; 4 bits are put into the blocks of PyTorch's own kernel.

In 4 bits, groups of a row's neighbours share a scale and a zero: a weight is (code - 8) * scale + zero, codes 0 … 15,
scale and zero in bf16. On a CPU activations are rounded to 8 bits by the same groups; on CUDA they are bf16. The matrix
of the vocabulary has 8 bits there: where the likeliest token is told from the next, 4 lose most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import first_line
from core.runners.library import native_obstacle
from core.runners.program import (
    BFLOAT16,
    ENTER,
    FLOAT32,
    INT4,
    INT8,
    NF4,
    PRODUCT,
    TILE,
    Program,
    Weight,
    Workspace,
    fill,
    filled,
    pages,
    run,
    team,
    vector,
)

GROUP = 32
"""Weights that share a scale: 4.5 bits a weight with 64, 5 with 32, and as fast; the quality is that of 32."""
ROWS = 16
"""PyTorch's kernels for 4 bits take weights whose rows are a multiple of this; on CUDA of 8."""
AT_ONCE = 1 << 24
"""Weights that are quantised at a time."""
TILES = (8, 4, 2)
"""How many tiles of 16 columns the CUDA kernel may put together; more is faster."""

Fused = TypeVar("Fused", bound=nn.Module)


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
            share(owner, names, Int4(weight, bias))
            linears = [getattr(owner, name) for name in names]
    return Stacked(linears)


def group_for(rows: int, columns: int) -> int | None:
    """The size of a weight's groups; None where the kernel cannot take its shape."""
    return GROUP if rows % ROWS == 0 and columns % GROUP == 0 else None


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
    """Why 4 bits cannot be had on a device, found out by a product there; None where they can."""
    if device.type not in ("cpu", "cuda"):
        return "its kernels are for CPUs and CUDA"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device here to try PyTorch's kernel for it on"
    if device.type == "cpu" and (reason := native_obstacle()):
        return f"our own code for it cannot be had here, for {reason}"
    draws = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 128, generator=draws).to(device, torch.bfloat16) for n in (64, 3))
    try:
        found = (_packed(weight) if device.type == "cpu" else Int4(weight))(x).float()
    except (RuntimeError, NotImplementedError) as error:  # an older GPU, a build without the kernel
        return f"the kernel for it does not run here ({first_line(error, 100)})"
    expected = x.float() @ dequantise(*quantise(weight, GROUP)).t()
    wrong = not (found - expected).norm() < 0.02 * expected.norm()
    return "the kernel for it gives wrong numbers here" if wrong else None


def _packed(weight: Tensor) -> Packed:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return Packed([linear], 4)


def _blocked(codes: Tensor) -> Tensor:
    """Codes [rows, columns] in the order of the device's kernel."""
    if codes.device.type == "cpu":  # where a GPU is only tried out
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    tiles = next(tiles for tiles in TILES if codes.shape[1] % (16 * tiles) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(in_pairs(codes), tiles)


def in_pairs(codes: Tensor) -> Tensor:
    """Codes [rows, columns] two a byte, uint8 [rows, columns / 2], the even column high."""
    return (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)


class Int4(nn.Module):
    """A weight in 4 bits on a GPU, in the order of its kernel, so never saved.

    Up to 16 rows cost one tile of the tensor cores; hundreds, as a prompt has, cost several times what they would in
    bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        group = group_for(*weight.shape)
        assert group is not None
        self.group = group
        codes, scales = quantise(weight, group)
        self.weight = nn.Buffer(_blocked(codes))
        self.scales = nn.Buffer(scales)
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        # Not by way of torch.ops, which takes two microseconds more: as much as three small operations.
        if x.is_cuda:
            y = torch._weight_int4pack_mm(x, self.weight, self.group, self.scales)  # type: ignore[attr-defined]
        else:
            y = torch._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)  # type: ignore[attr-defined]
        return y if self.bias is None else y + self.bias


class Packed(nn.Module):
    """Linear layers of the same input as one product of the native pass.

    `rows` [n] are the layers' rows, counted through, in the order in which they are wanted, `columns` likewise; -1 is a
    row or column of zeros. `bits` 4 or 8 quantises floats of 16 bits or more.
    """

    def __init__(
        self,
        linears: Sequence[Any],
        bits: int = 16,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__()
        count = sum(linear.out_features for linear in linears)
        self._rows = torch.arange(count) if rows is None else rows
        self._columns = columns
        self._width = linears[0].in_features if columns is None else len(columns)
        tiles, ins = filled(len(self._rows), TILE) // TILE, filled(self._width)
        kind, data = self._laid_out(linears, bits, tiles * TILE, ins)
        data = pages.hold(data)
        bias = None
        if linears[0].bias is not None:
            bias = vector(
                picked(torch.cat([linear.bias for linear in linears])[:, None], self._rows)[:, 0], tiles * TILE
            )
        self.weight, self.bias = nn.Buffer(data), None if bias is None else nn.Buffer(bias)
        self.native = Weight(kind, data, tiles, ins, bias)
        self._alone: tuple[Program, Workspace] | None = None

    def _laid_out(self, linears: Sequence[Any], bits: int, rows: int, columns: int) -> tuple[int, Tensor]:
        if hasattr(linears[0].weight, "quant_state"):
            if self._columns is None and self._width % 64 == 0:
                codes, scales = (torch.cat(each) for each in zip(*(nf4_of(linear) for linear in linears)))
                codes, scales = (fill(picked(each, self._rows), rows, each.shape[1]) for each in (codes, scales))
                return NF4, in_tiles(codes, scales.repeat_interleave(2, 1).view(torch.int16))
            matrix = torch.cat([plain_nf4(linear) for linear in linears])
        else:
            matrix = joined(linears)[0].detach()
        matrix = picked(matrix, self._rows)
        if self._columns is not None:
            matrix = picked(matrix.t(), self._columns).t()
        matrix = fill(matrix, rows, columns)
        if bits == 8:
            return INT8, in_tiles8(*quantise8(matrix))
        if bits == 4:
            codes, scales = quantise(matrix, GROUP)
            return INT4, in_tiles(codes.to(torch.uint8), scales.transpose(0, 1).reshape(rows, -1).view(torch.int16))
        if matrix.dtype == torch.bfloat16:
            return BFLOAT16, matrix.view(rows // TILE, TILE, columns // 2, 2).transpose(1, 2).contiguous()
        return FLOAT32, matrix.float().view(rows // TILE, TILE, columns).transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Rows [n, in] times the weight, [n, rows of all layers] in their own order; for transformers' forward."""
        if self._alone is None:
            program = Program([self.native.ins, self.native.tiles * TILE])
            program.add(ENTER, 0, 0, width=self.native.ins, weight=self.native)
            program.add(PRODUCT, 0, 1, weight=self.native)
            self._alone = program, Workspace(program.widths, program.widest)
        program, workspace = self._alone
        if self._columns is not None:
            x = picked(x.t(), self._columns).t()
        n = len(x)
        each = workspace.fit(n, team.threads())
        each.first, each.last = 0, 2
        workspace.buffers[0][:n, : x.shape[1]] = x
        run(program, each)
        at = torch.empty(int(self._rows.max()) + 1, dtype=torch.long)
        at[self._rows[self._rows >= 0]] = (self._rows >= 0).nonzero()[:, 0]
        return workspace.buffers[1][:n][:, at].to(x.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return self


def picked(matrix: Tensor, rows: Tensor) -> Tensor:
    """These rows of a matrix, zeros for -1."""
    if torch.equal(rows, torch.arange(len(matrix))):
        return matrix
    found = matrix[rows.clamp_min(0)]
    return found.masked_fill_((rows < 0)[:, None], 0)


def in_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes uint8 [rows, columns] with what scales them [rows, 2 * columns / 32] in int16, two for each group: uint8
    [rows / 16, columns / 32, 320]. Of eight neighbours the first four are low, the others high in a byte; four times
    sixteen rows of such bytes are a group, and its scales follow."""
    tiles, groups = codes.shape[0] // TILE, codes.shape[1] // GROUP
    eights = codes.view(tiles, TILE, groups, 4, 2, 4)
    packed = (eights[..., 0, :] | eights[..., 1, :] << 4).permute(0, 2, 3, 1, 4).reshape(tiles, groups, 256)
    scaling = scales.reshape(tiles, TILE, groups, 2).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([packed, scaling.view(tiles, groups, 64)], 2).contiguous()


def quantise8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32 [rows, columns / 32] of a weight [rows, columns]: a group's largest is 127."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    codes = (groups / scales.clamp_min(1e-12)[..., None]).round_().to(torch.int8)
    return codes.view(weight.shape), scales


def in_tiles8(codes: Tensor, scales: Tensor) -> Tensor:
    """The same of codes int8 [rows, columns] and a scale for each group, float32 [rows, columns / 32]: uint8
    [rows / 16, columns / 32, 576], eight times sixteen rows of four neighbours, and the scales."""
    tiles, groups = codes.shape[0] // TILE, codes.shape[1] // GROUP
    packed = codes.view(tiles, TILE, groups, 8, 4).permute(0, 2, 3, 1, 4).reshape(tiles, groups, 512)
    scaling = scales.view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([packed.view(torch.uint8), scaling.view(tiles, groups, 64)], 2).contiguous()


def nf4_of(linear: Any) -> tuple[Tensor, Tensor]:
    """Codes uint8 [rows, columns] of a layer of bitsandbytes, and in float32 [rows, columns / 64] what 1 / 127 is."""
    state = linear.weight.quant_state
    packed = linear.weight.data.flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).view(linear.out_features, linear.in_features)
    scales = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(scales, state.state2) + state.offset
    return codes, (scales.float() / 127).view(linear.out_features, -1)


def plain_nf4(linear: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state).to(torch.bfloat16)


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


def share(owner: nn.Module, names: Sequence[str], product: Fused) -> Fused:
    """Put a product in the place of the linear layers that `owner` has under these names."""
    start = 0
    for name in names:
        found = Share(product, start, getattr(owner, name))
        setattr(owner, name, found)
        start += found.out_features
    return product


def pack(
    owner: nn.Module,
    names: Sequence[str],
    bits: int = 16,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Weight:
    """One weight of the native pass for the linear layers that `owner` has under these names; see `Packed`."""
    linears: list[Any] = [getattr(owner, name) for name in names]
    if isinstance(linears[0], Share) and isinstance(linears[0].product, Packed):  # packed before
        return linears[0].product.native
    return share(owner, names, Packed(linears, bits, rows, columns)).native
