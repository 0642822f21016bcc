"""A GGUF file: what its header says of the model in it, checked before anything is believed.

The header holds everything but the weights: settings of the model under llama.cpp's names, the vocabulary, the chat
template, and of every tensor its name, shape, kind of quantisation and place (github.com/ggml-org/ggml, docs/gguf.md).
Nothing is allocated by a number that a file states: all counts are held against the file's own size first.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from core.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Kinds of values in a header, as `struct` calls them."""
STRING, ARRAY = 8, 9
SMALLEST_ENTRY, SMALLEST_TENSOR = 13, 24
"""Bytes of a setting and of a tensor's entry, without their names."""
MOST_DIMENSIONS = 4
Kind = GGMLQuantizationType


@dataclass(frozen=True)
class StoredTensor:
    """`shape` is PyTorch's, the slowest dimension first; `start` and `bytes` are its place in the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """`settings` are the file's own, by llama.cpp's names."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", "unnamed"))

    @property
    def quantisation(self) -> str:
        """The kind that most of the weights are of, such as Q4_1."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.kind.name] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0]

    def setting(self, name: str) -> Any:
        """A setting of this architecture, None where the file has none of that name."""
        return self.settings.get(f"{self.architecture}.{name}")


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF by its first bytes, whatever it is called (Ollama's have no suffix), or says so."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Raises UserError with one sentence for a file that is broken, or of a kind that cannot be read."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()
    except (struct.error, IndexError):
        raise UserError(f"{path.name} ends within its header: it was cut short, or is broken.") from None
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}.") from None
    except ValueError:  # what cannot be mapped: an empty file
        raise UserError(f"{path.name} is empty.") from None


class _Reader:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, 0

    def header(self) -> Header:
        if self.content[:4] != MAGIC:
            raise UserError(f"{self.path.name} is no GGUF file: it does not begin with the word GGUF.")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            found = "in the byte order of another machine" if version & 0xFFFF == 0 else f"of version {version}"
            raise UserError(f"{self.path.name} is a GGUF file {found}; versions 2 and 3, little-endian, can be read.")
        tensors, entries = self.number("Q"), self.number("Q")
        self.hold(entries, SMALLEST_ENTRY, "settings")
        self.hold(tensors, SMALLEST_TENSOR, "tensors")
        settings: dict[str, Any] = {}
        for _ in range(entries):
            name = self.string()
            settings[name] = self.value(self.number("I"))
        found = list(self.tensors(tensors))
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"its alignment is {alignment!r}")
        data = -(-self.at // alignment) * alignment
        header = Header(self.path, settings, {entry[0]: self.placed(data, *entry) for entry in found})
        if not header.tensors:
            raise UserError(f"{self.path.name} holds no weights: it is a vocabulary, or settings alone.")
        if len(header.tensors) < len(found):
            raise self.broken("two tensors have one name")
        if settings.get("split.count", 1) not in (0, 1):
            raise UserError(
                f"{self.path.name} is one of {settings['split.count']} parts of a model; join them first "
                "(llama-gguf-split --merge), or choose a file that is whole."
            )
        return header

    def tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        for _ in range(count):
            name, dimensions = self.string(), self.number("I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise self.broken(f"its tensor {name[:60]!r} has {dimensions} dimensions")
            shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
            yield name, shape, self.number("I"), self.number("Q")

    def placed(self, data: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> StoredTensor:
        try:
            kind = Kind(number)
        except ValueError:
            raise UserError(
                f"{self.path.name} is quantised in a way that is unknown here (number {number}); a newer version of "
                "the package gguf may know it (pip install -U gguf)."
            ) from None
        if not readable(kind):
            raise UserError(f"{self.path.name} is quantised in {kind.name}, which the package gguf cannot unpack.")
        block, size = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if not elements or shape[-1] % block:
            raise self.broken(f"its tensor {name[:60]!r} has the shape {list(shape)}")
        tensor = StoredTensor(name, shape, kind, data + offset, elements // block * size)
        if tensor.start + tensor.bytes > len(self.content):
            missing = tensor.start + tensor.bytes - len(self.content)
            raise UserError(
                f"{self.path.name} is shorter than its header says (by {missing:,} bytes or more): it was cut short, "
                "as by a download that did not end."
            )
        return tensor

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.broken(f"a setting is of kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner == STRING:
            self.hold(count, 8, "words")
            return [self.string() for _ in range(count)]
        if inner not in SCALARS:
            raise self.broken(f"a list is of kind {inner}")
        self.hold(count, struct.calcsize(SCALARS[inner]), "values")
        found = struct.unpack_from(f"<{count}{SCALARS[inner]}", self.content, self.at)
        self.at += count * struct.calcsize(SCALARS[inner])
        return list(found)

    def number(self, kind: str) -> Any:
        (found,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return found

    def string(self) -> str:
        length = self.number("Q")
        self.hold(length, 1, "characters")
        found = self.content[self.at : self.at + length]
        self.at += length
        return found.decode("utf-8", errors="replace")

    def hold(self, count: int, size: int, what: str) -> None:
        """Raise where so many things of a size cannot lie in what is left of the file."""
        if count * size > len(self.content) - self.at:
            raise UserError(
                f"{self.path.name} says that it holds {count:,} {what}, more than fit into it: it was cut short, or is "
                "broken."
            )

    def broken(self, why: str) -> UserError:
        return UserError(f"{self.path.name} is broken: {why}.")


@cache
def readable(kind: Kind) -> bool:
    """Whether the package gguf can unpack a kind."""
    block, size = GGML_QUANT_SIZES[kind]
    try:
        return dequantize(np.zeros((1, size), np.uint8), kind).size == block
    except (NotImplementedError, ValueError):
        return False
