"""The pairs this program suggests: `assets/pairs.toml`, and the shapes it states for a card without a network."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

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
    """A trained head on the Hub, which drafts for `target`; `licence` is None where its card alone tells."""

    id: str
    target: str
    licence: str | None


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
    heads = tuple(CatalogueHead(h["id"], h["target"], h.get("licence")) for h in document.get("heads", ()))
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
