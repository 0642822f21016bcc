"""A target and its draft: do they speak the same tokens?"""

from __future__ import annotations

from dataclasses import dataclass

from core.model import Model
from core.vocabulary import Translation


@dataclass
class Pair:
    """Loaded models; `draft` is None where only the target's own drafters (n-gram, early exit) are wanted, and
    `translation` is there where the two have different tokens."""

    target: Model
    draft: Model | None = None
    translation: Translation | None = None


def same_tokens(target: Model, draft: Model) -> bool:
    """Whether the ids of one mean the same to the other. Equal vocabulary size is not enough."""
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
