"""A model that is not loaded, weighed in the format it would be loaded in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from core.errors import UserError, first_line
from core.inspecting.memory import (
    NF4,
    Weights,
    cache_bytes,
    quantised_weights,
    routed_share,
    skeleton,
    weights,
    whole_blocks,
    workspace_bytes,
)
from core.inspecting.preview import Preview
from core.precision import Format, choose_format, quantisation_of
from core.records import POCKET_NAME
from core.weights import packed_for_cpu

BITS = {"fp4": 4, "gptq": 4, "awq": 4}
"""Bits of a weight in formats whose config may not say it; others have eight."""


@dataclass(frozen=True)
class Sized:
    """A preview, the format its weights would have on a device, and what they come to; `layout` is theirs in NF4."""

    preview: Preview
    format: Format
    device: torch.device
    network: nn.Module
    layout: NF4 | None
    weights: Weights

    @property
    def obstacle(self) -> str | None:
        """Why it could not be loaded or run here, in a sentence; None where nothing is known to be in the way."""
        return self._lacking() or self._odd_shapes()

    def _lacking(self) -> str | None:
        """Files that hold fewer weights than the config describes. A tied head may be stored or not."""
        if self.format.taken_as_saved or self.preview.headers is None or quantisation_of(self.preview.config):
            return None
        stored = sum(math.prod(header.shape) for header in self.preview.headers.values())
        if stored >= 0.99 * self.weights.parameters:
            return None
        return (
            f"The files of {self.preview.name} hold {stored:,} weights and its config describes "
            f"{self.weights.parameters:,}: they do not belong together."
        )

    def _odd_shapes(self) -> str | None:
        if self.layout is None or not self.layout.packed_for_cpu:
            return None
        shapes = quantised_weights(self.network, self.layout.kept)
        odd = [name for name, shape in shapes.items() if not whole_blocks(*shape)]
        if not odd:
            return None
        return (
            f"bitsandbytes' 4-bit kernel for CPUs takes rows by 32 and columns by 64, and {len(odd)} weights of "
            f"{self.preview.name} are not so ({odd[0]}): choose bf16."
        )

    @property
    def routed(self) -> bool:
        """Whether a token uses some of the weights only, as in a mixture of experts."""
        named = self.network.named_parameters()
        return any(routed_share(name, weight, self.preview.decoder) not in (0.0, 1.0) for name, weight in named)

    @property
    def layers(self) -> int:
        return self.preview.decoder.num_hidden_layers

    @property
    def context_length(self) -> int:
        return getattr(self.preview.decoder, "max_position_embeddings", None) or 2048

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of one run of `tokens` tokens, no more than the model's context holds."""
        return cache_bytes(self.preview.config, min(tokens, self.context_length), self.format.dtype)

    def workspace_bytes(self, tokens: int) -> int:
        return workspace_bytes(
            self.network, min(tokens, self.context_length), self.format.dtype, self.device, self.layout
        )


def size_up(found: Preview, device: torch.device, precision: str = "auto") -> Sized:
    """Weigh a model as loading would lay it out. Raises UserError for a precision that cannot be had, or a config that
    no network can be built from."""
    saved = quantisation_of(found.config)
    format_ = choose_format(precision, device, saved, found.name.split()[0] == POCKET_NAME)
    try:
        network = skeleton(found.config)
    except (ValueError, LookupError, ImportError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.name} cannot be loaded: {first_line(error)}") from error
    if format_.taken_as_saved and format_.precision != "nf4":
        return Sized(found, format_, device, network, None, stored_weights(found, format_, network))
    layout = NF4.of(saved, packed_for_cpu(device)) if format_.precision == "nf4" else None
    # Beside weights that were quantised before, transformers leaves the others as they were saved.
    dtype = found.dtype or format_.dtype if format_.taken_as_saved else format_.dtype
    return Sized(found, format_, device, network, layout, weights(network, dtype, layout))


def stored_weights(found: Preview, format_: Format, network: nn.Module) -> Weights:
    """Weights that stay as their files hold them; where the headers cannot be read, by the bits of the format."""
    plain = weights(network, format_.dtype)
    looked_up = plain.total - plain.read
    bits = (quantisation_of(found.config) or {}).get("bits") or BITS.get(format_.precision, 8)
    total = found.stored_bytes or looked_up + round(plain.read * bits / (8 * format_.dtype.itemsize))
    return Weights(total, max(0, total - looked_up), plain.parameters, plain.active_parameters)
