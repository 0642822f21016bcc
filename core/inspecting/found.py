"""Models that are on this machine already, at the places where other programs keep theirs. Only looks; writes nothing.

Hub cache: safetensors, and GGUF files of snapshots. LM Studio: `~/.lmstudio/models`. llama.cpp: `~/.cache/llama.cpp`.
Ollama: blobs called by their digest; a manifest for each name and tag says which of them holds the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from core.inspecting.offers import cached_models
from core.loading.gguf import is_gguf

OLLAMA_WEIGHTS = "application/vnd.ollama.image.model"
SMALLEST = 1_000_000
"""Bytes; less is a vocabulary or a projector."""
MOST = 200


@dataclass(frozen=True)
class Found:
    """A model: what it is called, the name to load it by (a path, or a Hub id), where it lies, and its bytes."""

    label: str
    name: str
    place: str
    bytes: int


def found_here() -> list[Found]:
    """Models at the usual places, by place and name; a place that cannot be read has none."""
    hub = [Found(name, name, "Hugging Face", _hub_bytes(name)) for name in cached_models()]
    files = [*_hub_files(), *_lm_studio(), *_llama_cpp(), *_ollama()]
    return [*hub, *{each.name: each for each in files}.values()][:MOST]


def _hub_bytes(name: str) -> int:
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    newest = max(_inside(folder, "*"), key=_modified, default=folder)
    return sum(_size(file) for file in _inside(newest, "*.safetensors"))


def _hub_files() -> Iterator[Found]:
    for file in _inside(Path(constants.HF_HUB_CACHE), "models--*/snapshots/*/*.gguf"):
        owner, _, name = file.parents[2].name.removeprefix("models--").partition("--")
        yield from _file(file, f"{owner}/{name}: {file.name}", "Hugging Face")


def _lm_studio() -> Iterator[Found]:
    for folder in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for file in _inside(folder, "**/*.gguf"):
            yield from _file(file, file.name, "LM Studio")


def _llama_cpp() -> Iterator[Found]:
    folder = Path(os.environ.get("LLAMA_CACHE") or Path.home() / ".cache" / "llama.cpp")
    for file in _inside(folder, "**/*.gguf"):
        yield from _file(file, file.name, "llama.cpp")


def _ollama() -> Iterator[Found]:
    folder = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    for manifest in _inside(folder / "manifests", "**/*"):
        digest = _weights_of(manifest)
        blob = folder / "blobs" / digest.replace(":", "-") if digest else None
        if blob is not None and blob.parent == folder / "blobs" and is_gguf(blob):
            yield from _file(blob, f"{manifest.parent.name}:{manifest.name}", "Ollama")


def _weights_of(manifest: Path) -> str | None:
    """The digest of the blob that a manifest names as the weights."""
    try:
        layers: Any = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        return next((str(layer["digest"]) for layer in layers if layer["mediaType"] == OLLAMA_WEIGHTS), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(file: Path, label: str, place: str) -> Iterator[Found]:
    """A file of weights; parts after the first, and what only sees or hears, are left out."""
    size = _size(file)
    part = "-of-" in file.name and "-00001-of-" not in file.name
    if size >= SMALLEST and not part and "mmproj" not in file.name.lower():
        yield Found(label, str(file), place, size)


def _inside(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
