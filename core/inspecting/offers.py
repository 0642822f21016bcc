"""What there is to run here: the catalogue's pairs on this machine, and drafts for a target. No network needed.

Inspections and offers as text for a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from core.errors import UserError
from core.inspecting import CONTEXT, Fit, Inspection, Memory, ModelCard, measure_memory
from core.inspecting.acceptance import EXPECTED, Acceptance
from core.inspecting.catalogue import CataloguePair, cached_models, catalogue, read_catalogue, relatives
from core.inspecting.devices import Forecast, Prediction, predict
from core.inspecting.files import Preview, Sized, catalogue_config, preview, read_folder, read_named, size_up
from core.inspecting.likeness import same_vocabulary
from core.loading import resolve_device
from core.loading.hub import cached
from core.loading.pair import hub_id
from core.progress import in_bytes
from core.settings import POCKET_NAME

SCHEMA = 1
PADDING = 1024
"""Rows by which two embeddings of one vocabulary may differ."""


@dataclass(frozen=True)
class Offer:
    """A pair of the catalogue on this machine. `needed` and `free` are bytes for a race of `inspection.CONTEXT` tokens;
    `cached` says whether all its weights are here."""

    pair: CataloguePair
    cached: bool
    precision: str
    target_parameters: int
    draft_parameters: int | None
    target_layers: int
    draft_layers: int | None
    needed: int
    free: int | None
    fits: Fit


@dataclass(frozen=True)
class Suggestion:
    """A draft with the target's own tokens. `speedup` and `draft_length` are predicted at the verdict's acceptance
    rate, on the basis that holds on this device; `source` is "catalogue" or "cache"."""

    draft: str
    source: str
    cached: bool
    gated: bool
    layers: int
    parameters: int
    weight_bytes: int
    layers_ratio: float
    bytes_ratio: float
    draft_length: int
    speedup: float
    why: str | None


def offers(device: str = "auto", precision: str = "auto") -> list[Offer]:
    """The catalogue in its order, with what each pair needs here and whether it fits."""
    place = resolve_device(device)
    return [offer for pair in catalogue() if (offer := _offer(pair, place, precision))]


def offers_document(found: Sequence[Offer]) -> dict[str, Any]:
    """The document `python -m core pairs --json` writes: a pair's own entries beside what it needs here."""
    rows = [{**asdict(offer.pair), **{k: v for k, v in asdict(offer).items() if k != "pair"}} for offer in found]
    return {"schema": SCHEMA, "context": CONTEXT, "pairs": rows}


def _offer(pair: CataloguePair, place: torch.device, precision: str) -> Offer | None:
    target = at_hand(pair.target, "target")
    draft = at_hand(pair.draft, "draft") if pair.draft else None
    if target is None or (pair.draft and draft is None):
        return None
    ours = size_up(target, place, precision)
    theirs = size_up(draft, place, precision) if draft else None
    memory = measure_memory(ours, theirs, place, CONTEXT)
    return Offer(
        pair,
        target.cached and (draft is None or draft.cached),
        ours.format.precision,
        ours.weights.parameters,
        theirs.weights.parameters if theirs else None,
        ours.layers,
        theirs.layers if theirs else None,
        memory.needed,
        memory.free,
        memory.fits,
    )


def drafts_for(
    target: str, *, device: str = "auto", precision: str = "auto", revision: str | None = None
) -> list[Suggestion]:
    """Drafts that share the target's tokens, from the catalogue and the local cache, the best first. The target itself
    may be asked for on the Hub; raises UserError where it cannot be read."""
    place = resolve_device(device)
    ours = size_up(preview(target, "target", revision), place, precision)
    catalogued = {POCKET_NAME} if target == POCKET_NAME else {model.id for model in relatives(hub_id(target))}
    names = sorted(catalogued | (set(cached_models()) - {hub_id(target)}))
    found = [s for name in names if (s := _suggestion(ours, name, name in catalogued, place, precision))]
    return sorted(found, key=lambda suggestion: (-suggestion.speedup, suggestion.weight_bytes))


def _suggestion(target: Sized, name: str, catalogued: bool, place: torch.device, precision: str) -> Suggestion | None:
    """None where a model is no draft for this target: as large, of other tokens, or not to be read."""
    try:
        draft = at_hand(name, "draft")
        if draft is None or abs(draft.decoder.vocab_size - target.preview.decoder.vocab_size) > PADDING:
            return None
        theirs = size_up(draft, place, precision)
        larger = theirs.weights.total >= target.weights.total or theirs.weights.read >= target.weights.read
        if larger or not same_vocabulary(target.preview, draft):
            return None
    except UserError:
        return None
    expected = predict(target, theirs, place)[0].expected
    known = read_catalogue().models.get(name)
    return Suggestion(
        draft=name,
        source="catalogue" if catalogued else "cache",
        cached=draft.cached,
        gated=bool(known and known.gated),
        layers=theirs.layers,
        parameters=theirs.weights.parameters,
        weight_bytes=theirs.weights.total,
        layers_ratio=theirs.layers / target.layers,
        bytes_ratio=theirs.weights.read / target.weights.read,
        draft_length=expected.draft_length,
        speedup=expected.speedup,
        why=next((p.why for p in catalogue() if (p.target, p.draft) == (target.preview.name, name)), None),
    )


def at_hand(name: str, role: str) -> Preview | None:
    """What is known of a model without a network: its files where they are here and can be read, else what the
    catalogue says."""
    if (here := read_named(name, role)) is not None:
        return here
    if (folder := cached(name)) is not None:
        with suppress(UserError):
            return read_folder(folder, name)
    known = catalogue_config(name)
    return None if known is None else Preview(name, known)


FITS = {"yes": "fits", "tight": "just fits", "no": "too large", "unknown": "?"}


def inspection_card(found: Inspection, drafts: Sequence[Suggestion] = ()) -> str:
    """All of an inspection, a labelled line each, then the verdict and the drafts that share the target's tokens."""
    lines = [("target", _model(found.target)), *([("draft", _model(found.draft))] if found.draft else [])]
    if found.likeness:
        lines.append(("tokens", found.likeness.sentence))
    lines.append(("memory", _memory(found.memory, found.context)))
    if found.layers_ratio is not None and found.bytes_ratio is not None:
        lines.append(
            ("draft ÷ target", f"{found.layers_ratio:.2f} of the layers, {found.bytes_ratio:.2f} of the bytes read")
        )
    lines += [("predicted", _prediction(prediction, found.acceptance)) for prediction in found.predictions]
    lines.append(("verdict", found.level))
    width = max(len(label) for label, _ in lines) + 2
    text = [f"{label:<{width}}{line}" for label, line in lines]
    text += [f"{'':<{width}}- {sentence}" for sentence in found.verdict]
    if drafts:
        text += ["", f"Drafts that share the target's tokens, by predicted gain at {EXPECTED:.0%} acceptance:"]
        text += [f"  {_draft_line(draft)}" for draft in drafts]
    return "\n".join(text)


def offers_table(found: Sequence[Offer]) -> str:
    """The catalogue, two lines a pair: what it is and needs, and why one would try it."""
    text = []
    for offer in found:
        pair = offer.pair
        models = f"{pair.target} + {pair.draft}" if pair.draft else f"{pair.target} (no draft model)"
        marks = [
            FITS[offer.fits],
            *["cached"] * offer.cached,
            *["gated"] * pair.gated,
            *[pair.licence] * bool(pair.licence),
        ]
        text.append(f"{pair.name}: {models}" if pair.target != "pocket" else f"{pair.name}: the bundled pair")
        text.append(
            f"    {pair.kind}, for {f'{pair.memory_gb} GB of graphics memory' if pair.memory_gb else 'a CPU'}; needs "
            f"{in_bytes(offer.needed)} in {offer.precision} here: {', '.join(marks)}"
        )
        text.append(f"    {pair.why}")
    if found and found[0].free is not None:
        text += ["", f"{in_bytes(found[0].free)} are free."]
    return "\n".join(text)


def _model(model: ModelCard) -> str:
    active = f", {model.active_parameters / 1e9:.1f}B active" if model.routed else ""
    here = "on this machine" if model.cached else "not downloaded"
    if model.download_bytes:
        here = f"{in_bytes(model.download_bytes)} to download"
    return (
        f"{model.name}: {model.model_type}, {_layers(model.layers)} of {model.hidden_size:,}, "
        f"{_count(model.parameters)} parameters{active}; {in_bytes(model.weight_bytes)} in {model.precision}"
        f"{f', from {model.origin}' if model.origin else ''}; {here}"
    )


def _layers(n: int) -> str:
    return f"{n} layer" if n == 1 else f"{n} layers"


def _count(parameters: int) -> str:
    return (
        f"{parameters / 1e9:.1f}B"
        if parameters >= 1e9
        else f"{parameters / 1e6:.0f}M"
        if parameters >= 1e8
        else f"{parameters / 1e6:.1f}M"
    )


def _memory(memory: Memory, context: int) -> str:
    free = "free: unknown" if memory.free is None else f"{in_bytes(memory.free)} free"
    return (
        f"{in_bytes(memory.needed)} ({free}): weights {in_bytes(memory.weights)}, caches of {context:,} tokens "
        f"{in_bytes(memory.caches)}, workspace {in_bytes(memory.workspace)}"
        f"{f', captured passes about {in_bytes(memory.captures)}' if memory.captures else ''}"
    )


def _prediction(prediction: Prediction, acceptance: Acceptance | None) -> str:
    usual = "; ".join(_forecast(forecast) for forecast in prediction.forecasts)
    if acceptance is None or prediction.measured is None:
        return f"if accepted as is usual: {usual} {prediction.holds}"
    measured = f"{_forecast(prediction.measured)}, as measured {acceptance.where}"
    if prediction.between:
        measured += f" (by text {' to '.join(_forecast(end) for end in prediction.between)})"
    return f"{measured}; elsewhere usual: {usual}; {prediction.holds}"


def _forecast(f: Forecast) -> str:
    gain = f"{f.speedup:.2f}× (draft {f.draft_length})" if f.draft_length else "no gain"
    return f"{f.acceptance:.0%} accepted: {gain}"


def _draft_line(draft: Suggestion) -> str:
    gain = f"{draft.speedup:.2f}× with drafts of {draft.draft_length}" if draft.draft_length else "no gain"
    where = "on this machine" if draft.cached else "gated, not downloaded" if draft.gated else "not downloaded"
    return f"{draft.draft}: {gain}, {_layers(draft.layers)}, {in_bytes(draft.weight_bytes)}, {where}"
