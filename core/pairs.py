"""A target and its draft: do they speak the same tokens?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.errors import UserError
from core.model import Model


@dataclass
class Pair:
    """Loaded models; `draft` is None where only the target's own drafters (n-gram, early exit) are wanted."""

    target: Model
    draft: Model | None = None


def check_same_tokens(target: Any, draft: Any, names: tuple[str, str]) -> None:
    """Refuse tokenizers that give different meanings to ids. Equal vocabulary size is not enough."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sum(theirs.get(token) != index for token, index in ours.items()) + len(theirs.keys() - ours.keys())
    raise UserError(
        f"{names[1]} cannot draft for {names[0]}: their vocabularies differ in {differing:,} of {len(ours):,} tokens, "
        "so its token ids would mean other words. Choose a draft of the same model family, or the n-gram method."
    )
