"""Inspections and offers as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from core.inspecting.inspection import Inspection, Memory, ModelCard, Prediction
from core.inspecting.offers import Offer, Suggestion
from core.inspecting.verdict import EXPECTED
from core.progress import in_bytes

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
    lines += [("predicted", _prediction(prediction)) for prediction in found.predictions]
    lines.append(("verdict", found.level))
    width = max(len(label) for label, _ in lines) + 2
    text = [f"{label:<{width}}{line}" for label, line in lines]
    text += [f"{'':<{width}}- {sentence}" for sentence in found.verdict]
    if drafts:
        text += ["", f"Drafts that share the target's tokens, by predicted gain at {EXPECTED:.0%} acceptance:"]
        text += [f"  {_suggestion(draft)}" for draft in drafts]
    return "\n".join(text)


def offers_table(found: Sequence[Offer]) -> str:
    """The catalogue, two lines a pair: what it is and needs, and why one would try it."""
    text = []
    for offer in found:
        pair = offer.pair
        models = f"{pair.target} + {pair.draft}" if pair.draft else f"{pair.target} (early exit)"
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
        f"{_count(model.parameters)} parameters{active}; {in_bytes(model.weight_bytes)} in {model.precision}; {here}"
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
    )


def _prediction(prediction: Prediction) -> str:
    each = "; ".join(
        f"{f.acceptance:.0%} accepted: {f.speedup:.2f}× (draft {f.draft_length})"
        if f.draft_length
        else f"{f.acceptance:.0%} accepted: no gain"
        for f in prediction.forecasts
    )
    return f"{each} {prediction.holds}"


def _suggestion(draft: Suggestion) -> str:
    gain = f"{draft.speedup:.2f}× with drafts of {draft.draft_length}" if draft.draft_length else "no gain"
    where = "on this machine" if draft.cached else "gated, not downloaded" if draft.gated else "not downloaded"
    return f"{draft.draft}: {gain}, {_layers(draft.layers)}, {in_bytes(draft.weight_bytes)}, {where}"
