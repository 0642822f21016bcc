"""What is shown of one model of a pair, of whatever kind, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.drafting.methods import BLOCK, HEAD, MTP
from core.inspecting.devices import Drafter
from core.inspecting.files import Sized
from core.inspecting.likeness import SizedHead
from core.inspecting.mtp import SizedMtp, has_mtp


@dataclass(frozen=True)
class ModelCard:
    """One model; bytes as they will lie in memory. `read_bytes` is what a pass over one token reads; `cache_bytes` are
    the keys and values of one run; `download_bytes` is 0 where its weights are here, None where nobody can be asked.
    `routed`: a token uses a few experts of many; `expert_bytes` are those that 4-bit loading leaves in 16 bits.
    `window_layers` see the last tokens only. `catalogued`: its sizes are the catalogue's, since it cannot be read,
    and the first of its notes says why. `obstacle` is a reason known beforehand why it could not be loaded; `origin`
    how the weights are quantised in the GGUF file they come from; `mtp`: it has a layer that can draft for it; `why`
    why it is in this precision, where that was measured."""

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
    origin: str | None = None
    mtp: bool = False
    why: str | None = None


def draft_card(draft: Drafter, context: int) -> ModelCard:
    if isinstance(draft, SizedMtp):
        return mtp_card(draft, context)
    return card(draft, context) if isinstance(draft, Sized) else head_card(draft, context)


def mtp_card(layer: SizedMtp, context: int) -> ModelCard:
    """A target's own layer as a model of one layer, which comes with the target."""
    weights = layer.weights
    return replace(
        card(layer.target, context),
        model_type=MTP,
        layers=layer.layers,
        parameters=weights.parameters,
        active_parameters=weights.active_parameters,
        precision=layer.precision,
        weight_bytes=weights.total,
        read_bytes=weights.read,
        expert_bytes=0,
        cache_bytes=layer.cache_bytes(context),
        window_layers=0,
        download_bytes=0,
        notes=(),
        obstacle=None,
        origin=None,
    )


def head_card(head: SizedHead, context: int) -> ModelCard:
    """A trained head as a model of its few layers."""
    weights, shape = head.weights, head.preview.description.shape
    return ModelCard(
        name=head.preview.name,
        model_type=BLOCK if head.preview.description.in_blocks else HEAD,
        layers=head.layers,
        hidden_size=shape["hidden_size"],
        parameters=weights.parameters,
        active_parameters=weights.active_parameters,
        context_length=shape["max_positions"],
        precision=head.precision,
        weight_bytes=weights.total,
        read_bytes=weights.read,
        expert_bytes=0,
        routed=False,
        cache_bytes=head.cache_bytes(context),
        window_layers=0,
        download_bytes=0 if head.preview.cached else head.preview.stored_bytes,
        cached=head.preview.cached,
        chat=None,
        catalogued=False,
        notes=(),
        obstacle=None,
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
        origin=found.origin,
        mtp=has_mtp(model),
        why=model.format.why,
    )
