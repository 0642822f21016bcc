"""Drafters: whatever can guess the next tokens cheaply. One file each, one contract, one table of them (`methods`).

`Draft.probs[i]` is *the distribution `tokens[i]` was drawn from*. Everything lossless rests on that sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

# The table of methods is read where torch is not: what follows names its types, and imports it when it is used.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.drafting.length import Recorded
    from core.progress import Stop
    from core.records import Ended, Source
    from core.runners import Runner


@dataclass(slots=True)
class Draft:
    """A proposal: tokens [k] int64; probs [k, vocab] float32, or None where every token is a point mass (greedy,
    n-gram). `parents[i]` is the index of the token that tokens[i] continues, -1 for the context; None for a chain.
    `replacement`: siblings of a tree were drawn independently (see `core.verification.verify_tree`).
    `shape`: of a tree, how many children each node was to get, by depth. `source`: which of two drafters it is from.
    `logits` are the drafter's rows, kept only to show what it would rather have said; of a drafter with a vocabulary
    of its own, `ids` are its columns' ids in the target's. `confidences` [k] are the highest probabilities of the laws
    where somebody asked; `ended` says why the draft did, `refused` how sure it was of the token it left out for that.
    """

    tokens: Tensor
    probs: Tensor | None = None
    parents: list[int] | None = None
    replacement: bool = True
    shape: Sequence[int] | None = None
    source: Source | None = None
    logits: list[Tensor] = field(default_factory=list)
    ids: Tensor | None = None
    confidences: list[float] | None = None
    ended: Ended | None = None
    refused: float | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def none(cls, device: torch.device) -> Draft:
        """Nothing to propose: the round becomes a plain step."""
        import torch

        return cls(torch.empty(0, dtype=torch.long, device=device))


class Drafter(Protocol):
    """Proposes continuations of the committed text. It may return fewer tokens than asked, or none; after rounds that
    did not use it, it catches up on any number of tokens."""

    cache: Runner | None
    """The runner whose cache is the drafter's own, in the target's tokens, for its length to be recorded."""

    def prefill(self, context: list[int], stop: Stop) -> float:
        """Read a prompt ahead of the first draft, asking `stop` now and then; returns the seconds it took."""
        ...

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        """Draft up to `length` deep after the committed ids; uniforms [MOST_DRAFTED] in [0, 1) are its only
        randomness. What is decided here beside the tokens must be told by the draft (`shape`, `source`)."""
        ...

    def repeat(self, recorded: Recorded) -> None:
        """From now on, decide as the rounds of a recorded run did whatever is decided here beside the tokens."""
        ...

    def truncate(self, length: int) -> None:
        """Of what was fed, only the first `length` tokens of the text still stand."""
        ...

    def reset(self) -> None:
        """Forget the prompt. Nothing of it survives."""
        ...
