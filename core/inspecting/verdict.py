"""An inspection in words: what a person should know of a pair before loading it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.inspecting.likeness import Likeness
from core.progress import in_bytes

if TYPE_CHECKING:
    from core.inspecting.inspection import Level, Memory, ModelCard, Prediction

EXPECTED = 0.7
"""The acceptance rate the verdict speaks of."""
WORTH_IT = 1.2
MANY_LAYERS, MANY_BYTES = 0.75, 0.5
Finding = tuple["Level", str]


def judge(
    target: ModelCard,
    draft: ModelCard | None,
    memory: Memory,
    likeness: Likeness | None,
    predictions: Sequence[Prediction],
    context: int,
) -> tuple[Level, tuple[str, ...]]:
    """The worst level found, and all that was found, the worst first: "bad" is what will not run, "caution" what one
    should know."""
    found = [*_fit(memory, all(m.precision == "nf4" for m in (target, draft) if m)), *_model(target, context)]
    if draft is None or likeness is None:
        found.append(("good", "No draft model: it can draft with n-grams or with its own first layers."))
    else:
        found += [
            *_tokens(likeness),
            *_cost(target, draft, memory),
            *_gain(predictions),
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
    if draft.name == target.name:
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


def _gain(predictions: Sequence[Prediction]) -> Iterator[Finding]:
    if not predictions:
        return
    first = predictions[0]
    expected = first.at(EXPECTED)
    if expected.draft_length == 0:
        yield "caution", f"At {EXPECTED:.0%} acceptance nothing is to be gained {first.holds}."
        return
    yield (
        "good" if expected.speedup >= WORTH_IT else "caution",
        f"At {EXPECTED:.0%} acceptance up to {expected.speedup:.1f}× with drafts of {expected.draft_length}, "
        f"{first.holds}.",
    )


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
