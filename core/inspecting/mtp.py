"""A target's own MTP layer before anything is loaded: what it takes, measured against the target as a draft is."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import UserError
from core.inspecting.files import Preview, Sized
from core.inspecting.likeness import Likeness
from core.loading.memory import Weights
from core.loading.mtp import check_mtp, speaks_of_mtp, weigh_mtp
from core.loading.precision import NAMES
from core.runners import PREFILL_CHUNK


@dataclass(frozen=True)
class SizedMtp:
    """The layer in the precision it would be loaded in, which is that of the target's passes."""

    target: Sized
    precision: str
    weights: Weights
    layers: int = 1

    def cache_bytes(self, tokens: int) -> int:
        return self.target.cache_bytes(tokens) // self.target.layers

    def captured_bytes(self, tokens: int) -> int:
        """Its passes are not captured."""
        return 0

    def workspace_bytes(self, tokens: int) -> int:
        """The hidden states of a text it has not read yet: it reads a prompt chunk by chunk behind the target."""
        return min(tokens, PREFILL_CHUNK) * self.target.preview.decoder.hidden_size * self.target.format.dtype.itemsize


def drafts_for_itself(target: Preview, draft: str | None) -> bool:
    """Whether the draft named for a target is the target's own layer."""
    return draft == target.name and speaks_of_mtp(target.config)


def has_mtp(target: Sized) -> bool:
    """Whether the files of a target hold a layer that can draft for it."""
    try:
        return speaks_of_mtp(target.preview.config) and target.preview.headers is not None and bool(size_up_mtp(target))
    except UserError:
        return False


def size_up_mtp(target: Sized) -> SizedMtp:
    """Raises UserError where the layer cannot be run."""
    found = target.preview
    if found.headers is not None:
        check_mtp(found.name, found.config, target.network, found.headers)
    return SizedMtp(target, NAMES[target.format.dtype], weigh_mtp(target.network, target.format.dtype))


def describe_mtp(target: Preview) -> Likeness:
    rows = target.decoder.vocab_size
    sentence = f"{target.name} drafts with its own MTP layer, which reads what leaves its last one."
    return Likeness(True, sentence, target_rows=rows, draft_rows=rows)
