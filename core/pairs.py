"""A target and its draft: do they speak the same tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.costs import MEASURED_LENGTHS, REPEATS, CostTable, time_rounds
from core.model import Model
from core.vocabulary import Translation


@dataclass
class Pair:
    """Loaded models; `draft` is None where only the target's own drafters (n-gram, early exit) are wanted, and
    `translation` is there where the two have different tokens."""

    target: Model
    draft: Model | None = None
    translation: Translation | None = None

    def measure_costs(self) -> tuple[CostTable, CostTable | None]:
        """The cost tables of target and draft, as passes stand in a round; measured once."""
        if self.draft is None:
            return self.target.measure_costs(), None
        if self.target.costs is None or self.draft.costs is None:
            self.target.costs, self.draft.costs = self.time_rounds()
        return self.target.costs, self.draft.costs

    def time_rounds(
        self, repeats: int = REPEATS, lengths: Sequence[int] = MEASURED_LENGTHS
    ) -> tuple[CostTable, CostTable]:
        """The same, measured now."""
        assert self.draft is not None
        context = min(model.short_context(lengths) for model in (self.target, self.draft))
        with self.target.lease() as target, self.draft.lease() as draft:
            return time_rounds(target, draft, context, repeats, lengths)


def same_tokens(target: Model, draft: Model) -> bool:
    """Whether the ids of one mean the same to the other. Equal vocabulary size is not enough."""
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
