"""Does a draft speak its target's tokens? Told before either is loaded: of a model, by the two tokenizers; of a trained
head, by what its config and the headers of its weights tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core.errors import UserError
from core.heads.checkpoint import Description, describe, is_head, read_config, trained_for
from core.inspecting.acceptance import Acceptance, shipped
from core.inspecting.catalogue import read_catalogue
from core.inspecting.files import Header, Preview, fetch_small, hub_headers, local_headers
from core.loading import find_file
from core.loading.head import bundled_head, fitting_layers, head_precision
from core.loading.hub import cached, local_folder
from core.loading.memory import CUBLAS_WORKSPACE, NODE_BYTES, Weights
from core.loading.pair import LEAST_SHARED, token_bytes
from core.loading.precision import DTYPES
from core.runners import PREFILL_CHUNK
from core.runners.products import GROUP
from core.runners.widths import LONGEST, WIDTHS
from core.settings import POCKET_NAME, SMOLLM2_NAME

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


@dataclass(frozen=True)
class HeadPreview:
    """A head that is not loaded; `cached` says whether its weights are on this machine. `accepted` is what was measured
    of it, and `target` whose head it is, as its config.json has it."""

    name: str
    description: Description
    headers: dict[str, Header]
    cached: bool
    accepted: Acceptance | None = None
    target: str | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(header.bytes for header in self.headers.values())


USUAL_CHAIN, NODES_OF_A_STEP = 4, 40
"""Tokens of a head's chain, and the operations in a graph that one of them takes, its draw included."""


@dataclass(frozen=True)
class SizedHead:
    """A head in the precision it would be loaded in; measured against models as `core.inspecting.files.Sized` is."""

    preview: HeadPreview
    precision: str
    weights: Weights
    device: torch.device

    @property
    def layers(self) -> int:
        return self.preview.description.shape["depth"]

    def cache_bytes(self, tokens: int) -> int:
        shape = self.preview.description.shape
        return 2 * tokens * self.layers * shape["kv_heads"] * shape["head_dim"] * self._itemsize

    def captured_bytes(self, tokens: int) -> int:
        """An estimate of what its captured chains hold on CUDA: one of usual length for each width that a round reads,
        in one reach; the logits and laws they leave, and a workspace of cuBLAS."""
        if self.device.type != "cuda":
            return 0
        vocabulary = self.preview.description.shape["draft_vocab_size"]
        chains = sum(width <= USUAL_CHAIN + 1 for width in WIDTHS)
        nodes = chains * USUAL_CHAIN * NODES_OF_A_STEP * NODE_BYTES
        return nodes + LONGEST * vocabulary * (self._itemsize + 4) + CUBLAS_WORKSPACE

    def workspace_bytes(self, tokens: int) -> int:
        """The features of a text it has not read yet: it reads a prompt chunk by chunk behind the target."""
        shape = self.preview.description.shape
        width = self.preview.description.features * shape["target_hidden_size"]
        return min(tokens, PREFILL_CHUNK) * width * self._itemsize

    @property
    def _itemsize(self) -> int:
        """Bytes of what a pass computes with: next to 4 bits, 32."""
        return 2 if self.precision == "bf16" else 4


def preview_head(name: str) -> HeadPreview | None:
    """Read what there is of a head without loading it; None where the name is not one of a head. Raises UserError with
    one sentence for a head that cannot be read or run."""
    if name in (POCKET_NAME, SMOLLM2_NAME) or find_file(name):
        return None
    folder = local_folder(name) or cached(name)
    here = folder is not None
    try:
        folder = folder or fetch_small(name)
    except UserError:
        return None  # whoever looks at it as a model says what is wrong
    if not is_head(config := read_config(folder)):
        return None
    headers = local_headers(folder, name) if here else hub_headers(name, None)
    if headers is None:
        raise UserError(f"{name} is a trained head, and the sizes of its weights cannot be asked of the Hub.")
    return HeadPreview(name, _described(config, headers, name), headers, here, shipped(config), trained_for(config))


def preview_bundled(target: Preview) -> HeadPreview | None:
    """The bundled head of a target, which is loaded with it where no draft is named."""
    folder = bundled_head(target.decoder, target.tokenizer) if target.tokenizer is not None else None
    found = preview_head(str(folder)) if folder else None
    return replace(found, name=folder.name) if folder and found else None


def _described(config: dict[str, Any], headers: dict[str, Header], name: str) -> Description:
    return describe(config, {key: header.shape for key, header in headers.items()}, name)


def size_up_head(found: HeadPreview, device: torch.device, asked: str = "auto") -> SizedHead:
    precision = head_precision(found.description.anywhere, device, asked)
    floats = {k: h.shape for k, h in found.headers.items() if h.dtype.startswith(("F", "BF"))}
    sizes = {name: math.prod(shape) * _bytes_each(name, shape, precision) for name, shape in floats.items()}
    total, counted = sum(sizes.values()), sum(map(math.prod, floats.values()))
    read = total - sizes.get("embed_tokens.weight", 0)
    return SizedHead(found, precision, Weights(round(total), round(read), counted, counted), device)


def _bytes_each(name: str, shape: tuple[int, ...], precision: str) -> float:
    """Of a head's weight in memory: in 4 bits, matrices have scale and zero for every group beside them."""
    rounded = len(shape) > 1 and name != "embed_tokens.weight"
    if precision == "int4" and rounded:
        return 0.5 + 4 / GROUP
    return DTYPES[precision].itemsize


def compare_head(target: Preview, head: HeadPreview) -> Likeness:
    """Whether a head is for this target, by what its shape tells."""
    shape = head.description.shape
    draft, whole = shape["draft_vocab_size"], shape["vocab_size"]
    rows = {"target_rows": target.decoder.vocab_size, "draft_rows": draft}
    try:
        layers = fitting_layers(head.description, head.name, target.decoder, target.name)
    except UserError as error:
        return Likeness(False, str(error), **rows)
    share = "all" if draft == whole else f"{draft:,} of the {whole:,}"
    counts = " or ".join(", ".join(map(str, found)) for found in layers)
    kind = "block drafter" if head.description.in_blocks else "head"
    whose = f" of {head.target}" if head.target else ""
    sentence = (
        f"A trained {kind}{whose}: it reads what enters layers {counts} and proposes {share} tokens of its target."
    )
    return Likeness(True, sentence, **rows)
