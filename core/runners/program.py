"""Programs of the native pass: the steps that `native.cpp` runs, the weights they read, the memory they work in.

The structures here mirror those of `native.cpp`, name by name. Widths of row buffers and columns of weights are filled
up with zeros to multiples of 32, heads to 16: the zeros add nothing to any sum.

Every tensor that a pass writes to names its type: PyTorch's default is everybody's, and transformers changes it for as
long as it loads a model in some other thread.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.library import library

FLOAT32, BFLOAT16, INT4, NF4, INT8 = range(5)
EMBED, COPY, ENTER, NORM, PRODUCT, GATED, HEADS, TURN, ATTEND, LOGITS = range(10)
ADDED, WIDE, GELU, FOR_ALL, KEYS, BLOCK, AHEAD = 1, 2, 4, 8, 16, 32, 64
GROUP, TILE = 32, 16
ALONE = 4
"""Rows up to which every thread makes its activations for itself."""
MOST_TOLD, MOST_COLUMNS = 64, 512 * 1024
"""Rows, and columns of logits, of which a pass tells the likeliest token."""
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Dettmers et al. 2023 (arXiv 2305.14314), appendix E."""


class CWeight(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "tiles", "ins", "unused")),
        *((name, c_void_p) for name in ("data", "bias")),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("op", "flags", "source", "to", "at", "width", "kind", "layer")),
        *((name, c_float) for name in ("eps", "factor")),
        ("weight", POINTER(CWeight)),
        *((name, c_void_p) for name in ("norm", "other_norm", "table")),
    ]


class CProgram(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("width", "heads", "key_heads", "size", "padded", "wide_cache")),
        *((name, c_int32) for name in ("buffers", "steps")),
        *((name, c_void_p) for name in ("widths", "step")),
    ]


class Turning(Structure):
    _fields_ = [("cosines", c_void_p), ("sines", c_void_p), ("window", c_int64)]


ROW = 6
"""Numbers of a row: slot, position, cell, shared, own, own_count."""


class Pass(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "first", "last", "threads", "wanted", "stride", "columns", "shares")),
        *((name, c_void_p) for name in ("ids", "rows", "cells", "caches", "capacities", "turnings")),
        *((name, c_void_p) for name in ("buffers", "activations", "output", "logits", "likeliest", "told")),
    ]


@cache
def native() -> ctypes.CDLL:
    """The compiled code, made ready. Raises `core.runners.library.Unavailable`."""
    found = library()
    row = ROW * sizeof(c_int32)
    sizes = (sizeof(CWeight), sizeof(Step), sizeof(CProgram), row, sizeof(Pass))
    assert found.native_layout() == sum(size * 1000**i for i, size in enumerate(sizes)), "native.cpp is another version"
    found.native_levels((c_float * 16)(*NF4_LEVELS))
    return found


def filled(size: int, unit: int = GROUP) -> int:
    """A size rounded up to a multiple of a unit."""
    return -(-size // unit) * unit


def fill(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with rows and columns of zeros added up to so many."""
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def vector(values: Tensor, size: int) -> Tensor:
    """Float32 [size] with zeros behind the values."""
    return F.pad(values.detach().float(), (0, size - len(values))).contiguous()


class Pages:
    """Memory in large pages, where the system has them, for what every pass reads from end to end: with small ones a
    single row took a third longer."""

    CHUNK, PAGE = 1 << 25, 1 << 21

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def hold(self, data: Tensor) -> Tensor:
        """A copy of a tensor there."""
        size = filled(data.numel() * data.element_size(), 64)
        if size > len(self._chunk):
            self._chunk = self._new_chunk(max(size, self.CHUNK))
        taken, self._chunk = self._chunk[:size], self._chunk[size:]
        held = taken[: data.numel() * data.element_size()].view(data.dtype).view(data.shape)
        return held.copy_(data)

    def _new_chunk(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self.PAGE)
        if advice := getattr(mmap, "MADV_HUGEPAGE", None):
            with suppress(OSError):  # a system without them
                memory.madvise(advice)
        chunk = torch.frombuffer(memory, dtype=torch.uint8)
        return chunk[-chunk.data_ptr() % self.PAGE :][:size]


pages = Pages()


class Weight:
    """A matrix as the native pass reads it; `data` is what lies in memory, `shape` that of the matrix it came from."""

    def __init__(self, kind: int, data: Tensor, tiles: int, ins: int, bias: Tensor | None = None) -> None:
        self.kind, self.data, self.bias = kind, data, bias
        self.tiles, self.ins = tiles, ins
        self.c = CWeight(kind, tiles, ins, 0, data.data_ptr(), None if bias is None else bias.data_ptr())

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        return self  # never written to, and its addresses are its own


class Program:
    """A network's steps in the order they run, with all that they point to."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        width: int = GROUP,
        heads: int = 1,
        key_heads: int = 1,
        size: int = TILE,
        wide_cache: bool = False,
    ) -> None:
        """`widths` of the row buffers; `size` of a head."""
        self.widths = [filled(each) for each in widths]
        self.heads, self.key_heads, self.size, self.padded = heads, key_heads, size, filled(size, TILE)
        self.width, self.wide_cache = width, wide_cache
        self.steps: list[Step] = []
        self.starts: list[int] = []
        """Of a network's: the step at which each layer begins, and the one after the last."""
        self.held: list[Any] = []
        self.outs = 0
        """Columns of the logits, those that fill up included."""
        self.widest = GROUP
        self._c: CProgram | None = None

    def add(self, op: int, source: int = 0, to: int = 0, **fields: Any) -> None:
        """A step; tensors and weights among its fields are kept alive."""
        weight: Weight | None = fields.pop("weight", None)
        for name in ("norm", "other_norm", "table"):
            if (tensor := fields.get(name)) is not None:
                self.held.append(tensor)
                fields[name] = tensor.data_ptr()
        step = Step(op=op, source=source, to=to, **fields)
        if weight is not None:
            self.held.append(weight)
            step.weight = ctypes.pointer(weight.c)
            self.widest = max(self.widest, weight.ins)
            if op == LOGITS:
                self.outs = weight.tiles * TILE
        self.steps.append(step)

    @property
    def c(self) -> CProgram:
        if self._c is None:
            self._widths = (c_int32 * len(self.widths))(*self.widths)
            self._steps = (Step * len(self.steps))(*self.steps)
            build = (self.width, self.heads, self.key_heads, self.size, self.padded, int(self.wide_cache))
            addresses = ctypes.addressof(self._widths), ctypes.addressof(self._steps)
            self._c = CProgram(*build, len(self.widths), len(self.steps), *addresses)
        return self._c


class Workspace:
    """What passes of programs of the same buffers work in: row buffers, and activations for all and for each thread.
    Grown as needed; what many rows took is given back by the next pass over few."""

    FEW = 64

    def __init__(self, widths: Sequence[int], widest: int) -> None:
        self._widths, self._widest = list(widths), widest
        self._rows = self._threads = 0
        self.buffers: list[Tensor] = []
        self.c = Pass()

    def fit(self, rows: int, threads: int) -> Pass:
        """The pass to be filled in, with room for so many rows."""
        if rows > self._rows or threads > self._threads or (self._rows > self.FEW >= rows):
            self._rows, self._threads = max(rows, 16), max(threads, self._threads)
            with torch.inference_mode(False):  # transformers' own forward writes into them too
                self.buffers = [torch.zeros(self._rows, width, dtype=torch.float32) for width in self._widths]
            a_row = 4 * self._widest + 2 * GROUP
            sizes = [self._rows * a_row] * 2 + [ALONE * a_row] * (2 * self._threads)
            self._activations = [torch.empty(size // 4, dtype=torch.int32) for size in sizes]
            self._pointers = [_pointers(self.buffers), _pointers(self._activations)]
            self.c.buffers, self.c.activations = (ctypes.addressof(each) for each in self._pointers)
        self.c.n, self.c.threads = rows, threads
        return self.c


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))


class Team:
    """The threads of native passes, one team for the process; `size` None: as many as PyTorch has."""

    size: int | None = None

    def threads(self) -> int:
        return self.size or torch.get_num_threads()


team = Team()


def run(program: Program, each: Pass) -> None:
    native().native_pass(byref(program.c), byref(each))
