"""Do two models speak the same tokens? Told from their tokenizers, before the models are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.errors import UserError
from core.inspecting.catalogue import read_catalogue
from core.inspecting.files import Preview
from core.loading.pair import LEAST_SHARED, token_bytes

ROLES = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class Likeness:
    """`same`: every token has the same id in both; None where a tokenizer is not at hand. `shared`: the share of the
    smaller vocabulary's tokens that the other has, byte by byte. `rows`: of the embedding, where more than `tokens` are
    padding. `roles`: special tokens that differ, as {role: (the target's, the draft's)}."""

    same: bool | None
    sentence: str
    shared: float | None = None
    target_tokens: int | None = None
    draft_tokens: int | None = None
    target_rows: int = 0
    draft_rows: int = 0
    roles: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether the draft can draft at all: directly, or translated byte by byte."""
        return self.same is not False or (self.shared is not None and self.shared >= LEAST_SHARED)


def compare_vocabularies(target: Preview, draft: Preview) -> Likeness:
    """Compare two tokenizers; where one is not at hand, what the catalogue says of both."""
    rows = {"target_rows": target.decoder.vocab_size, "draft_rows": draft.decoder.vocab_size}
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        same, sentence = _by_catalogue(target.name, draft.name)
        return Likeness(same, sentence, **rows)
    vocabularies = ours.get_vocab(), theirs.get_vocab()
    found: dict[str, Any] = {
        **rows,
        "target_tokens": len(vocabularies[0]),
        "draft_tokens": len(vocabularies[1]),
        "roles": differing_roles(ours, theirs),
    }
    if vocabularies[0] == vocabularies[1]:
        return Likeness(True, _same_sentence(found), shared=1.0, **found)
    try:
        shared = shared_tokens(ours, theirs, target.name, draft.name)
    except UserError as error:
        return Likeness(False, str(error), **found)
    return Likeness(False, _other_sentence(shared, found), shared=shared, **found)


def same_vocabulary(target: Preview, draft: Preview) -> bool | None:
    """Whether every token has the same id in both; None where nobody can tell."""
    if target.tokenizer is None or draft.tokenizer is None:
        return _by_catalogue(target.name, draft.name)[0]
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


def shared_tokens(ours: Any, theirs: Any, our_name: str = "target", their_name: str = "draft") -> float:
    """The share of the smaller vocabulary's tokens whose bytes are a token of the other too; special tokens apart.

    Raises UserError where a tokenizer does not tell the bytes of its tokens.
    """
    ours_bytes, theirs_bytes = (
        {piece for piece in token_bytes(t, max(t.get_vocab().values()) + 1, name) if piece}
        for t, name in ((ours, our_name), (theirs, their_name))
    )
    return len(ours_bytes & theirs_bytes) / max(1, min(len(ours_bytes), len(theirs_bytes)))


def differing_roles(ours: Any, theirs: Any) -> dict[str, tuple[str | None, str | None]]:
    """Special tokens that are not written alike, or not at the same id."""
    return {
        role: (getattr(ours, f"{role}_token"), getattr(theirs, f"{role}_token"))
        for role in ROLES
        if _role(ours, role) != _role(theirs, role)
    }


def _role(tokenizer: Any, role: str) -> tuple[str | None, int | None]:
    return getattr(tokenizer, f"{role}_token"), getattr(tokenizer, f"{role}_token_id")


def _by_catalogue(target: str, draft: str) -> tuple[bool | None, str]:
    models = read_catalogue().models
    if target in models and draft in models:
        if models[target].tokenizer == models[draft].tokenizer:
            return True, "Same tokenizer, as the catalogue says; it is compared when its files can be read."
        return (
            False,
            "Different tokenizers, as the catalogue says; how many tokens they share shows when they are read.",
        )
    return None, "Whether the tokenizers are the same cannot be told before their files can be read."


def _same_sentence(found: dict[str, Any]) -> str:
    sentence = f"Same tokenizer: {found['target_tokens']:,} tokens, each with the same id in both."
    rows = found["target_rows"], found["draft_rows"]
    if rows[0] != rows[1]:
        sentence += f" They pad it to {rows[0]:,} and {rows[1]:,} rows; the padding is cut off."
    if found["roles"]:
        role, (ours, theirs) = next(iter(found["roles"].items()))
        sentence += f" Their {role} tokens differ ({ours} and {theirs}); the target's decides."
    return sentence


def _other_sentence(shared: float, found: dict[str, Any]) -> str:
    equal_sizes = found["target_tokens"] == found["draft_tokens"]
    sentence = "Different tokenizers" + (" of the same size" if equal_sizes else "")
    if shared < LEAST_SHARED:
        return f"{sentence}, with only {shared:.1%} of their tokens in common: too few to draft with."
    return (
        f"{sentence}, with {shared:.0%} of the smaller one's tokens in common: drafts are translated byte by byte, and "
        "what has no counterpart cannot be drafted."
    )
