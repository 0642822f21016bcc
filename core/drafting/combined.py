"""N-gram first, the draft model when the text does not repeat itself."""

from __future__ import annotations

from torch import Tensor

from core.drafting import Draft
from core.drafting.model import ModelDrafter
from core.drafting.ngram import NgramDrafter
from core.drafting.translate import TranslateDrafter
from core.progress import Stop


class CombinedDrafter:
    """Asks the n-gram drafter; where it has nothing, the model drafts (and catches up on what it missed)."""

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter | TranslateDrafter) -> None:
        self._ngram, self._model = ngram, model
        self.runner = model.runner

    def size(self, length: int) -> int:
        return length

    def prefill(self, context: list[int], stop: Stop) -> float:
        return self._ngram.prefill(context, stop) + self._model.prefill(context, stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        found = self._ngram.propose(context, length, uniforms)
        return found if len(found) else self._model.propose(context, length, uniforms)

    def truncate(self, length: int) -> None:
        self._ngram.truncate(length)
        self._model.truncate(length)

    def reset(self) -> None:
        self._ngram.reset()
        self._model.reset()
