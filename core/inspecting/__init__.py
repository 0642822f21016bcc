"""What a pair would be like, before anything is downloaded or loaded: do they fit each other, do they fit this machine,
and what may speculation bring? From configs, tokenizers and safetensors headers alone.

An inspection in words: what a person should know of a pair before loading it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from core.costs.rounds import RoundCosts
from core.drafting.methods import MTP
from core.errors import UserError
from core.inspecting.acceptance import USUAL, USUAL_RANGE, Acceptance
from core.inspecting.cards import ModelCard, card, draft_card
from core.inspecting.catalogue import find_pair, heads_for
from core.inspecting.devices import Drafter, Prediction, predict, shipped_with
from core.inspecting.files import Sized, preview, size_up
from core.inspecting.likeness import (
    Likeness,
    compare_head,
    compare_vocabularies,
    preview_bundled,
    preview_head,
    size_up_head,
)
from core.inspecting.mtp import describe_mtp, drafts_for_itself, size_up_mtp
from core.loading import resolve_device
from core.loading.memory import free_memory
from core.loading.pair import choose_pair
from core.progress import in_bytes

SCHEMA = 1
CONTEXT = 2048
"""Tokens of prompt and answer that caches are counted for, unless told otherwise."""
LANES = 2
"""Caches of the target in a race: the speculative lane's and the plain one's."""
TIGHT = 0.9
"""Share of the free memory from which a pair only just fits."""
Fit = Literal["yes", "tight", "no", "unknown"]
Level = Literal["good", "caution", "bad"]


@dataclass(frozen=True)
class Memory:
    """Bytes a race of the pair takes on a device, against what is free there now; `captures`: an estimate of what
    captured passes hold, on CUDA alone."""

    device: str
    weights: int
    caches: int
    workspace: int
    captures: int
    free: int | None
    total: int | None

    @property
    def needed(self) -> int:
        return self.weights + self.caches + self.workspace + self.captures

    @property
    def fits(self) -> Fit:
        if self.free is None:
            return "unknown"
        return "no" if self.needed > self.free else "tight" if self.needed > TIGHT * self.free else "yes"


@dataclass(frozen=True)
class Inspection:
    """A pair on a machine. `predictions` begin with the one that holds here; there are none where no draft is used.
    `acceptance` is what was measured of the pair, if it was: the predictions then lead with it."""

    target: ModelCard
    draft: ModelCard | None
    device: str
    context: int
    memory: Memory
    likeness: Likeness | None
    layers_ratio: float | None
    bytes_ratio: float | None
    predictions: tuple[Prediction, ...]
    acceptance: Acceptance | None
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
    acceptance: Acceptance | None = None,
    costs: RoundCosts | None = None,
    drafts: bool = True,
) -> Inspection:
    """Look at a pair without loading it; with no target, at this machine's default pair; with no draft, at the target
    and the bundled head that was trained for it, if one was. `context` is in tokens; `held` are bytes of the device's
    memory that would be given back first, such as those of a pair that is to be replaced; `acceptance` as measured of
    the pair, if it was, else what its files say; `costs` of its rounds here, where they were measured; `drafts`:
    whether its draft is to be used, so that anything is to be predicted of it.

    Raises UserError with one sentence where a model is missing, gated, out of reach, or cannot be decoded with.
    """
    if context < 1:
        raise UserError(f"The context must be at least 1 token, not {context}.")
    place = resolve_device(device)
    target, draft = choose_pair(target, draft)
    ours = size_up(preview(target, "target", revision), place, precision)
    theirs: Drafter | None = None
    likeness = head = None
    if drafts_for_itself(ours.preview, draft):
        theirs, likeness = size_up_mtp(ours), describe_mtp(ours.preview)
    elif head := preview_bundled(ours.preview) if draft is None else preview_head(draft):
        theirs = size_up_head(head, place, draft_precision)
        likeness = compare_head(ours.preview, head)
    elif draft is not None:
        theirs = size_up(preview(draft, "draft"), place, precision if draft_precision == "auto" else draft_precision)
        likeness = compare_vocabularies(ours.preview, theirs.preview)
    memory = measure_memory(ours, theirs, place, context, held)
    acceptance = acceptance or shipped_with(target, draft, head)
    used = drafts and likeness and likeness.usable
    predictions = predict(ours, theirs, place, acceptance, costs) if theirs and used else ()
    cards = card(ours, context), draft_card(theirs, context) if theirs else None
    known = find_pair(target, draft)
    level, sentences = judge(*cards, memory, likeness, predictions, acceptance, context)
    return Inspection(
        *cards,
        place.type,
        context,
        memory,
        likeness,
        theirs.layers / ours.layers if theirs else None,
        theirs.weights.read / ours.weights.read if theirs else None,
        predictions,
        acceptance if predictions else None,
        level,
        sentences,
        known.name if known else None,
    )


def measure_memory(target: Sized, draft: Drafter | None, device: torch.device, context: int, held: int = 0) -> Memory:
    """Both models' weights, the caches and captured passes of a race's lanes, and the wider of the two workspaces."""
    models = [target, draft] if draft else [target]
    free = free_memory(device)
    return Memory(
        device=device.type,
        weights=sum(model.weights.total for model in models),
        caches=LANES * target.cache_bytes(context) + (draft.cache_bytes(context) if draft else 0),
        workspace=max(model.workspace_bytes(context) for model in models),
        captures=LANES * target.captured_bytes(context) + (draft.captured_bytes(context) if draft else 0),
        free=None if free.free is None else free.free + held,
        total=free.total,
    )


WORTH_IT = 1.2
MANY_LAYERS, MANY_BYTES = 0.75, 0.5
Finding = tuple["Level", str]


def judge(
    target: ModelCard,
    draft: ModelCard | None,
    memory: Memory,
    likeness: Likeness | None,
    predictions: Sequence[Prediction],
    acceptance: Acceptance | None,
    context: int,
) -> tuple[Level, tuple[str, ...]]:
    """The worst level found, and all that was found, the worst first: "bad" is what will not run, "caution" what one
    should know."""
    found = [*_fit(memory, all(m.precision == "nf4" for m in (target, draft) if m)), *_model(target, context)]
    if draft is None or likeness is None:
        found.append(("good", "No draft model: it can draft with n-grams or with its own first layers."))
        if target.mtp:
            found.append(("good", "It has an MTP layer of its own: name it as its own draft, and that layer drafts."))
        if heads := heads_for(target.name):
            named = " or ".join(head.words for head in heads)
            found.append(("good", f"Trained heads are published for it: name one as the draft, {named}."))
    else:
        found += [
            *_tokens(likeness),
            *_cost(target, draft, memory),
            *_gain(predictions, acceptance),
            *_drafting(target, draft, context),
        ]
    order: list[Level] = ["bad", "caution", "good"]
    found.sort(key=lambda finding: order.index(finding[0]))
    return found[0][0], tuple(sentence for _, sentence in found)


def _fit(memory: Memory, smallest: bool) -> Iterator[Finding]:
    place = {"cpu": "RAM", "cuda": "graphics memory", "mps": "memory"}[memory.device]
    needed = f"It needs about {in_bytes(memory.needed)} of {place}"
    if memory.free is None:
        yield "caution", f"{needed}; how much is free this system does not tell."
    elif memory.fits == "no":
        way_out = "a smaller pair" if smallest else "nf4 or a smaller pair"
        yield "bad", f"{needed} and {in_bytes(memory.free)} are free: it does not fit. Choose {way_out}."
    elif memory.fits == "tight":
        yield "caution", f"{needed} and {in_bytes(memory.free)} are free: it only just fits."
    else:
        yield "good", f"{needed} and {in_bytes(memory.free)} are free: it fits."


def _model(model: ModelCard, context: int) -> Iterator[Finding]:
    for note in model.notes:
        yield "caution", note
    if model.why:
        yield "good", model.why
    if model.obstacle:
        yield "bad", model.obstacle
    if model.catalogued:
        yield "caution", "The sizes here are those of the catalogue."
    if model.expert_bytes:
        yield (
            "caution",
            f"{in_bytes(model.expert_bytes)} of its {in_bytes(model.weight_bytes)} are experts, which stay in 16 bits: "
            "4-bit loading quantises linear layers only.",
        )
    if model.routed:
        yield (
            "caution",
            "A pass over several tokens wakes more experts than a pass over one, so checking a draft costs more than "
            "predicted.",
        )
    if model.window_layers:
        yield (
            "good",
            f"{model.window_layers} of {model.layers} layers see the last tokens only; their keys are all kept, so "
            "that a rejected draft can be taken back exactly.",
        )
    if model.context_length < context:
        yield "good", f"{model.name} reads at most {model.context_length:,} tokens."


def _tokens(likeness: Likeness) -> Iterator[Finding]:
    if not likeness.usable:
        yield "bad", likeness.sentence
    else:
        yield "good" if likeness.same else "caution", likeness.sentence


def _cost(target: ModelCard, draft: ModelCard, memory: Memory) -> Iterator[Finding]:
    if draft.name == target.name and draft.model_type != MTP:
        yield "caution", "The draft is the target itself: each draft token costs as much as a plain one."
    layers, bytes_read = draft.layers / target.layers, draft.read_bytes / target.read_bytes
    if layers > 1:
        yield (
            "caution",
            f"This draft has more layers than its target ({draft.layers} against {target.layers}): expect a slowdown "
            "without CUDA graphs.",
        )
    elif layers > MANY_LAYERS and memory.device != "cpu":
        yield (
            "good" if memory.device == "cuda" else "caution",
            f"The draft has {draft.layers} layers against {target.layers}: without CUDA graphs a draft step costs "
            f"about {layers:.0%} of a target step.",
        )
    if bytes_read > MANY_BYTES:
        yield "caution", f"A draft step reads {bytes_read:.0%} of what a target step reads: there is little to gain."


def _gain(predictions: Sequence[Prediction], acceptance: Acceptance | None) -> Iterator[Finding]:
    """What the prediction that holds here says, at what was measured; else at what is usual, as an if."""
    if not predictions:
        return
    expected, holds = predictions[0].expected, predictions[0].holds
    rate = f"{expected.acceptance:.0%}"
    condition = f"If {rate} of the drafts were accepted"
    if acceptance:
        condition = f"At the {rate} accepted that were measured {acceptance.where}"
    gain = f"up to {expected.speedup:.1f}× with drafts of {expected.draft_length}, {holds}"
    if expected.draft_length == 0:
        gain = f"nothing is to be gained {holds}"
    worth = expected.draft_length and expected.speedup >= WORTH_IT
    source = "" if acceptance else f" {USUAL[0]} to {USUAL[-1]} is {USUAL_RANGE}."
    yield "good" if worth else "caution", f"{condition}, {gain}.{source}"


def _drafting(target: ModelCard, draft: ModelCard, context: int) -> Iterator[Finding]:
    if draft.obstacle:
        yield "bad", draft.obstacle
    if draft.catalogued and not target.catalogued:
        yield "caution", f"The sizes of {draft.name} are those of the catalogue."
    for note in draft.notes:
        if note.replace(draft.name, target.name) not in target.notes:
            yield "caution", note
    if draft.context_length < min(context, target.context_length):
        yield (
            "caution",
            f"The draft reads at most {draft.context_length:,} tokens; past them the target goes on alone.",
        )
    if target.chat and draft.chat is False:
        yield "caution", "The target is a chat model and the draft is not: they will agree less."
