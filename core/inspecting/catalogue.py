"""The pairs this program suggests, and the models that are on this machine already.

`assets/pairs.toml` holds the pairs, and the shapes it states for a card without a network. Models are looked for where
other programs keep theirs; nothing is written. Hub cache: safetensors, and GGUF files of snapshots. LM Studio:
`~/.lmstudio/models`. llama.cpp: `~/.cache/llama.cpp`. Ollama: blobs called by their digest; a manifest for each name
and tag says which of them holds the weights.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from core.loading.gguf import is_gguf
from core.loading.hub import cached

CATALOGUE = Path(__file__).parent.parent.parent / "assets" / "pairs.toml"
Kind = Literal["code", "chat", "base", "moe", "early-exit"]


@dataclass(frozen=True)
class CatalogueModel:
    """A model on the Hub. `tokenizer` names its vocabulary: models with the same name share one. `config` holds the
    entries of its config.json that fix its size; empty where they could not be confirmed."""

    id: str
    tokenizer: str
    gated: bool
    licence: str | None
    config: dict[str, Any]


@dataclass(frozen=True)
class CataloguePair:
    """A pair worth trying. `memory_gb` is the class of graphics memory it is meant for, 0 for a CPU; `draft` is None
    where the target drafts with its own first layers; `why` is one line on what it teaches."""

    name: str
    target: str
    draft: str | None
    memory_gb: int
    kind: Kind
    gated: bool
    licence: str | None
    why: str

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.target, self.draft) if self.draft else (self.target,)


@dataclass(frozen=True)
class CatalogueHead:
    """A trained head or block drafter on the Hub, which drafts for `target`; `licence` is None where its card alone
    tells. `accepted` is what was published of it, and `source` where."""

    id: str
    target: str
    licence: str | None
    accepted: str | None = None
    source: str | None = None

    @property
    def words(self) -> str:
        """Its name, with what it takes to choose it."""
        known = [self.licence or "licence: see its card"]
        known += [f"{self.accepted}, says {self.source}"] if self.accepted else []
        return f"{self.id} ({'; '.join(known)})"


@dataclass(frozen=True)
class Catalogue:
    pairs: tuple[CataloguePair, ...]
    models: dict[str, CatalogueModel]
    heads: tuple[CatalogueHead, ...]


def catalogue() -> tuple[CataloguePair, ...]:
    """The pairs of the catalogue, the bundled one first."""
    return read_catalogue().pairs


@cache
def read_catalogue(path: Path = CATALOGUE) -> Catalogue:
    """Read the file. A pair is gated when one of its models is; its licence is the target's."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    models = {
        id_: CatalogueModel(
            id_, entry["tokenizer"], entry.get("gated", False), entry.get("licence"), entry.get("config", {})
        )
        for id_, entry in document["models"].items()
    }
    heads = tuple(
        CatalogueHead(h["id"], h["target"], h.get("licence"), h.get("accepted"), h.get("source"))
        for h in document.get("heads", ())
    )
    return Catalogue(tuple(_pair(entry, models) for entry in document["pairs"]), models, heads)


def _pair(entry: dict[str, Any], models: dict[str, CatalogueModel]) -> CataloguePair:
    target, draft = entry["target"], entry.get("draft")
    return CataloguePair(
        entry["name"],
        target,
        draft,
        entry["memory_gb"],
        entry["kind"],
        any(models[id_].gated for id_ in (target, draft) if id_),
        models[target].licence,
        entry["why"],
    )


def find_pair(target: str, draft: str | None = None) -> CataloguePair | None:
    """The catalogue's pair of these models, if it has one."""
    return next((p for p in catalogue() if (p.target, p.draft) == (target, draft)), None)


def allowed(target: str | None, draft: str | None) -> bool:
    """Whether a public page may load this: the models of the catalogue, in any combination, or nothing named."""
    known = read_catalogue()
    drafts = {*known.models, *(head.id for head in known.heads)}
    return (target is None or target in known.models) and (draft is None or draft in drafts)


def heads_for(target: str) -> list[CatalogueHead]:
    """The trained heads the catalogue knows for a target."""
    return [head for head in read_catalogue().heads if head.target == target]


def relatives(target: str) -> list[CatalogueModel]:
    """Other models of the catalogue with the target's vocabulary."""
    models = read_catalogue().models
    if target not in models:
        return []
    return [m for m in models.values() if m.tokenizer == models[target].tokenizer and m.id != target]


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


def cached_models() -> list[str]:
    """Hub ids of models whose weights are all in the local cache."""
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    names = sorted(repository.repo_id for repository in found.repos if repository.repo_type == "model")
    return [name for name in names if cached(name) is not None]


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
