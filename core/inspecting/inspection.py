"""What a pair would be like, before anything is downloaded or loaded: do they fit each other, do they fit this machine,
and what may speculation bring? From configs, tokenizers and safetensors headers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from core.errors import UserError
from core.inspecting.catalogue import find_pair
from core.inspecting.likeness import Likeness, compare_vocabularies
from core.inspecting.memory import free_memory
from core.inspecting.preview import preview
from core.inspecting.sizing import Sized, size_up
from core.inspecting.verdict import judge
from core.loading import resolve_device
from core.records import POCKET_NAME
from core.theory import best_length, leviathan

SCHEMA = 1
ALPHAS = (0.6, 0.7, 0.8)
CONTEXT = 2048
"""Tokens of prompt and answer that caches are counted for, unless told otherwise."""
LANES = 2
"""Caches of the target in a race: the speculative lane's and the plain one's."""
TIGHT = 0.9
"""Share of the free memory from which a pair only just fits."""
Basis = Literal["bytes", "layers"]
Fit = Literal["yes", "tight", "no", "unknown"]
Level = Literal["good", "caution", "bad"]


@dataclass(frozen=True)
class ModelCard:
    """One model; bytes as they will lie in memory. `read_bytes` is what a pass over one token reads; `cache_bytes` are
    the keys and values of one run; `download_bytes` is 0 where its weights are here, None where nobody can be asked.
    `routed`: a token uses a few experts of many; `expert_bytes` are those that 4-bit loading leaves in 16 bits.
    `window_layers` see the last tokens only. `catalogued`: its sizes are the catalogue's, since it cannot be read,
    and the first of its notes says why. `obstacle` is a reason known beforehand why it would not run here."""

    name: str
    model_type: str
    layers: int
    hidden_size: int
    parameters: int
    active_parameters: int
    context_length: int
    precision: str
    weight_bytes: int
    read_bytes: int
    expert_bytes: int
    routed: bool
    cache_bytes: int
    window_layers: int
    download_bytes: int | None
    cached: bool
    chat: bool | None
    catalogued: bool
    notes: tuple[str, ...]
    obstacle: str | None


@dataclass(frozen=True)
class Memory:
    """Bytes a race of the pair takes on a device, against what is free there now."""

    device: str
    weights: int
    caches: int
    workspace: int
    free: int | None
    total: int | None

    @property
    def needed(self) -> int:
        return self.weights + self.caches + self.workspace

    @property
    def fits(self) -> Fit:
        if self.free is None:
            return "unknown"
        return "no" if self.needed > self.free else "tight" if self.needed > TIGHT * self.free else "yes"


@dataclass(frozen=True)
class Forecast:
    """Leviathan's speed-up at an acceptance rate and the draft length that is best there."""

    acceptance: float
    draft_length: int
    speedup: float


@dataclass(frozen=True)
class Prediction:
    """Forecasts where a draft step costs `cost_ratio` of a target step: by bytes read, or by layers launched."""

    basis: Basis
    cost_ratio: float
    holds: str
    forecasts: tuple[Forecast, ...]

    def at(self, acceptance: float) -> Forecast:
        return next(f for f in self.forecasts if f.acceptance == acceptance)


@dataclass(frozen=True)
class Inspection:
    """A pair on a machine. `predictions` begin with the one that holds here; there are none without a draft."""

    target: ModelCard
    draft: ModelCard | None
    device: str
    context: int
    memory: Memory
    likeness: Likeness | None
    layers_ratio: float | None
    bytes_ratio: float | None
    predictions: tuple[Prediction, ...]
    level: Level
    verdict: tuple[str, ...]
    pair: str | None

    def to_dict(self) -> dict[str, Any]:
        """The document `python -m core inspect --json` writes."""
        document = {"schema": SCHEMA, **asdict(self)}
        document["memory"] |= {"needed": self.memory.needed, "fits": self.memory.fits}
        return document


def inspect_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    precision: str = "auto",
    draft_precision: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    context: int = CONTEXT,
    held: int = 0,
) -> Inspection:
    """Look at a pair without loading it; with no target, at the bundled pair. `context` is in tokens; `held` are bytes
    of the device's memory that would be given back first, such as those of a pair that is to be replaced.

    Raises UserError with one sentence where a model is missing, gated, out of reach, or cannot be decoded with.
    """
    if context < 1:
        raise UserError(f"The context must be at least 1 token, not {context}.")
    place = resolve_device(device)
    if target is None:
        target, draft = POCKET_NAME, draft or POCKET_NAME
    ours = size_up(preview(target, "target", revision), place, precision)
    theirs = None
    if draft is not None:
        theirs = size_up(preview(draft, "draft"), place, precision if draft_precision == "auto" else draft_precision)
    likeness = compare_vocabularies(ours.preview, theirs.preview) if theirs else None
    memory = measure_memory(ours, theirs, place, context, held)
    predictions = predict(ours, theirs, place) if theirs and likeness and likeness.usable else ()
    cards = card(ours, context), card(theirs, context) if theirs else None
    known = find_pair(target, draft)
    level, sentences = judge(*cards, memory, likeness, predictions, context)
    return Inspection(
        *cards,
        place.type,
        context,
        memory,
        likeness,
        theirs.layers / ours.layers if theirs else None,
        theirs.weights.read / ours.weights.read if theirs else None,
        predictions,
        level,
        sentences,
        known.name if known else None,
    )


def card(model: Sized, context: int) -> ModelCard:
    found, decoder = model.preview, model.preview.decoder
    tokenizer = found.tokenizer
    return ModelCard(
        name=found.name,
        model_type=found.config.model_type,
        layers=model.layers,
        hidden_size=decoder.hidden_size,
        parameters=model.weights.parameters,
        active_parameters=model.weights.active_parameters,
        context_length=model.context_length,
        precision=model.format.precision,
        weight_bytes=model.weights.total,
        read_bytes=model.weights.read,
        expert_bytes=model.weights.experts,
        routed=model.routed,
        cache_bytes=model.cache_bytes(context),
        window_layers=(getattr(decoder, "layer_types", None) or []).count("sliding_attention"),
        download_bytes=0 if found.cached else found.stored_bytes,
        cached=found.cached,
        chat=None if tokenizer is None else bool(getattr(tokenizer, "chat_template", None)),
        notes=(*([found.note] if found.note else []), *model.format.notes),
        obstacle=model.obstacle,
        catalogued=found.note is not None,
    )


def measure_memory(target: Sized, draft: Sized | None, device: torch.device, context: int, held: int = 0) -> Memory:
    """Both models' weights, the caches of a race's lanes and the wider of the two workspaces."""
    models = [target, draft] if draft else [target]
    free = free_memory(device)
    return Memory(
        device=device.type,
        weights=sum(model.weights.total for model in models),
        caches=LANES * target.cache_bytes(context) + (draft.cache_bytes(context) if draft else 0),
        workspace=max(model.workspace_bytes(context) for model in models),
        free=None if free.free is None else free.free + held,
        total=free.total,
    )


def predict(target: Sized, draft: Sized, device: torch.device) -> tuple[Prediction, ...]:
    """What speculation may bring if a pass over several tokens costs what one over one token costs."""
    by_bytes = draft.weights.read / target.weights.read
    by_layers = draft.layers / target.layers
    if device.type == "cpu":
        return (forecast("bytes", by_bytes, "on a CPU, where a step costs the bytes it reads"),)
    eager = forecast("layers", by_layers, "without CUDA graphs, where a step costs its layers' kernel launches")
    if device.type != "cuda":
        return (forecast("layers", by_layers, "here, where a step costs its layers' kernel launches"),)
    return (forecast("bytes", by_bytes, "with CUDA graphs, where a step costs the bytes it reads"), eager)


def forecast(basis: Basis, cost_ratio: float, holds: str) -> Prediction:
    lengths = {alpha: best_length(alpha, cost_ratio) for alpha in ALPHAS}
    return Prediction(
        basis,
        cost_ratio,
        holds,
        tuple(Forecast(alpha, n, leviathan(alpha, n, cost_ratio)) for alpha, n in lengths.items()),
    )
