"""A trained head before it is loaded: what its config and the headers of its weights tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import UserError
from core.heads.checkpoint import Description, describe, is_head, read_config
from core.inspecting.files import Header, Preview, fetch_small, hub_headers, local_headers
from core.inspecting.likeness import Likeness
from core.loading import find_file
from core.loading.head import best_dtype, fitting_layers
from core.loading.hub import cached, local_folder
from core.loading.memory import Weights
from core.settings import POCKET_NAME, SMOLLM2_NAME


@dataclass(frozen=True)
class HeadPreview:
    """A head that is not loaded; `cached` says whether its weights are on this machine."""

    name: str
    description: Description
    headers: dict[str, Header]
    cached: bool

    @property
    def stored_bytes(self) -> int:
        return sum(header.bytes for header in self.headers.values())


@dataclass(frozen=True)
class SizedHead:
    """A head in the precision it would be loaded in; measured against models as `core.inspecting.files.Sized` is."""

    preview: HeadPreview
    dtype: torch.dtype
    weights: Weights
    layers: int = 1

    @property
    def precision(self) -> str:
        return {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(self.dtype, str(self.dtype))

    def cache_bytes(self, tokens: int) -> int:
        shape = self.preview.description.shape
        return 2 * tokens * shape["kv_heads"] * shape["head_dim"] * self.dtype.itemsize

    def workspace_bytes(self, tokens: int) -> int:
        """The features of a text it has not read yet."""
        shape = self.preview.description.shape
        return tokens * self.preview.description.features * shape["target_hidden_size"] * self.dtype.itemsize


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
    return HeadPreview(name, _described(config, headers, name), headers, here)


def _described(config: dict[str, Any], headers: dict[str, Header], name: str) -> Description:
    return describe(config, {key: header.shape for key, header in headers.items()}, name)


def size_up_head(found: HeadPreview, device: torch.device) -> SizedHead:
    dtype = best_dtype(device)
    floats = {k: math.prod(h.shape) for k, h in found.headers.items() if h.dtype.startswith(("F", "BF"))}
    counted = sum(floats.values())
    read = counted - floats.get("embed_tokens.weight", 0)
    return SizedHead(found, dtype, Weights(counted * dtype.itemsize, read * dtype.itemsize, counted, counted))


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
    sentence = f"A trained head: it reads what enters layers {counts} and proposes {share} tokens of its target."
    return Likeness(True, sentence, **rows)
