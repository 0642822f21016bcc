"""What can be read of a model before its weights: config, tokenizer, chat template and the headers of its safetensors.

A Hub id costs a few small files and, with a network, one range request per weight file; nothing is loaded.

A model that is not loaded, weighed in the format it would be loaded in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from core.errors import UserError, first_line
from core.inspecting.catalogue import read_catalogue
from core.loading import find_file, in_one_sentence, refuse_endless, refuse_unsupported
from core.loading.conversion import converted, gguf_tokenizer, origin
from core.loading.fastest import fastest_precision
from core.loading.gguf import read_header as read_gguf_header
from core.loading.gguf_layout import config_of
from core.loading.hub import cached, explained, local_folder, out_of_reach
from core.loading.memory import (
    NF4,
    Weights,
    as_fused,
    cache_bytes,
    captured_bytes,
    routed_share,
    skeleton,
    weights,
    workspace_bytes,
)
from core.loading.pair import SMOLLM2_ID, SMOLLM2_REVISION, label_of, smollm2_cached, smollm2_file
from core.loading.precision import (
    POCKET,
    Format,
    choose_format,
    header_of,
    packed_for_cpu,
    quantisation_of,
    refuse_int4,
    why_not_int4,
)
from core.settings import POCKET_NAME, SMOLLM2_NAME

SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of an element; types that are not named take one."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Header:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS.get(self.dtype, 1)


@dataclass
class Preview:
    """A model that is not loaded. `headers` is None where neither its weights nor the Hub can be reached; `cached`
    says whether its weights are on this machine; `folder` is None where the catalogue alone is known, and `note` then
    says why. `origin` is how the weights of a GGUF file are quantised, `file` that file where it is not converted."""

    name: str
    config: Any
    folder: Path | None = None
    headers: dict[str, Header] | None = None
    cached: bool = False
    note: str | None = None
    origin: str | None = None
    file: Path | None = None

    @cached_property
    def tokenizer(self) -> Any | None:
        """Raises UserError where there are files that cannot be read; None where there are none."""
        if self.file is not None:
            return gguf_tokenizer(read_gguf_header(self.file))
        if self.folder is None:
            return None
        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # whatever the libraries make of a stranger's files
            raise UserError(f"The tokenizer of {self.name} cannot be read: {first_line(error)}") from error

    @property
    def decoder(self) -> Any:
        """The config of the text part."""
        return self.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of most of the weights that are not quantised, by the headers."""
        counts = {
            t: sum(h.bytes for h in (self.headers or {}).values() if h.dtype == t and len(h.shape) > 1) for t in FLOATS
        }
        largest = max(counts, key=lambda t: counts[t])
        return FLOATS[largest] if counts[largest] else None

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of its weight files, to be downloaded where they are not cached."""
        return None if self.headers is None else sum(h.bytes for h in self.headers.values())


def preview(name: str, role: str = "target", revision: str | None = None) -> Preview:
    """Read what there is of a model without loading it; of a model of the catalogue that cannot be reached, what the
    catalogue says.

    Raises UserError with one sentence: missing, gated, out of reach, unreadable, or of a kind that cannot be decoded.
    """
    if (here := read_named(name, role)) is not None:
        return here
    if name == SMOLLM2_NAME:
        name, revision = SMOLLM2_ID, SMOLLM2_REVISION
    if (folder := local_folder(name)) is not None:
        return read_folder(folder, name)
    if (folder := cached(name, revision)) is not None:
        return read_folder(folder, name)
    try:
        folder = fetch_small(name, revision)
        found = read_config(folder, name)
        return Preview(name, found, folder, hub_headers(name, revision))
    except UserError as error:
        known = None if revision else catalogue_config(name)
        if known is None:
            near = get_close_matches(name, read_catalogue().models, n=1, cutoff=0.75)
            if not near or near == [name]:
                raise
            raise UserError(f"{error} The catalogue has {near[0]}.") from None
        return Preview(name, known, note=str(error))


def read_named(name: str, role: str) -> Preview | None:
    """A model that comes with the program or beside it, or one in a GGUF file; None for any other."""
    label = label_of(name, role)
    if name == POCKET_NAME:
        return read_folder(POCKET / role, label)
    if name == SMOLLM2_NAME and (folder := smollm2_cached()) and not smollm2_file():
        return read_folder(folder, label)
    file = find_file(name)
    return None if file is None else read_gguf(file, label)


def read_gguf(file: Path, name: str) -> Preview:
    """A model in a GGUF file: what its header says, or the folder that it was converted to."""
    if (folder := converted(file)) is not None:
        found = read_folder(folder, name)
        found.origin = origin(folder)
        return found
    header = read_gguf_header(file)
    config = AutoConfig.for_model(**config_of(header))
    refuse_unsupported(config, name)
    headers = {
        tensor.name: Header(tensor.kind.name if tensor.kind.name in FLOATS else "F16", tensor.shape)
        for tensor in header.tensors.values()
    }
    return Preview(name, config, headers=headers, cached=True, origin=header.quantisation, file=file)


def read_folder(folder: Path, name: str) -> Preview:
    """A model whose weights are on this machine."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a transformers model folder.")
    return Preview(name, read_config(folder, name), folder, local_headers(folder, name), cached=True)


def catalogue_config(name: str) -> Any | None:
    """The config of a model of the catalogue, as far as it fixes the size; None where the catalogue does not tell."""
    known = read_catalogue().models.get(name)
    if known is None or not known.config:
        return None
    return AutoConfig.for_model(**known.config)


def fetch_small(name: str, revision: str | None = None) -> Path:
    """The config and tokenizer of a model on the Hub, in the local cache: a few megabytes at most."""
    with explained(name, revision):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL, ignore_patterns=["*/*"]))
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a transformers model folder.")
    return folder


def read_config(folder: Path, name: str) -> Any:
    refuse_endless(folder, name)
    with in_one_sentence(name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsupported(config, name)
        return config


def local_headers(folder: Path, name: str) -> dict[str, Header]:
    """The tensors of all safetensors files in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{name} has no .safetensors weights; choose a repository or folder that holds them.")
    return {k: h for file in files for k, h in read_header(file, name).items()}


def read_header(file: Path, name: str) -> dict[str, Header]:
    """The tensors of a safetensors file."""
    try:
        return {key: Header(tensor["dtype"], tuple(tensor["shape"])) for key, tensor in header_of(file).items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{name} cannot be read: {file.name} is no safetensors file ({first_line(error)})") from error


def hub_headers(name: str, revision: str | None) -> dict[str, Header] | None:
    """The same of a model on the Hub; None where it cannot be reached."""
    try:
        with explained(name, revision):
            found = _ask_hub(name, revision)
    except NotASafetensorsRepoError:
        raise UserError(f"{name} has no .safetensors weights; choose a repository or folder that holds them.") from None
    except SafetensorsParsingError as error:
        raise UserError(f"{name} cannot be read: {first_line(error)}") from None
    return found and {
        key: Header(str(tensor.dtype), tuple(tensor.shape))
        for file in found.files_metadata.values()
        for key, tensor in file.tensors.items()
    }


def _ask_hub(name: str, revision: str | None) -> Any | None:
    try:
        return HfApi().get_safetensors_metadata(name, revision=revision)
    except Exception as error:
        if out_of_reach(error):
            return None
        raise


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
        """Why it could not be loaded, in a sentence: its files hold fewer weights than the config describes. None where
        nothing is known to be in the way. A tied head may be stored or not."""
        if self.format.taken_as_saved or self.preview.headers is None or quantisation_of(self.preview.config):
            return None
        stored = sum(math.prod(header.shape) for header in self.preview.headers.values())
        if stored >= 0.99 * self.weights.parameters:
            return None
        return (
            f"The files of {self.preview.name} hold {stored:,} weights and its config describes "
            f"{self.weights.parameters:,}: they do not belong together."
        )

    @property
    def routed(self) -> bool:
        """Whether a token uses some of the weights only, as in a mixture of experts."""
        named = self.network.named_parameters()
        return any(routed_share(name, weight, self.preview.decoder) not in (0.0, 1.0) for name, weight in named)

    @property
    def precision(self) -> str:
        return self.format.precision

    @property
    def layers(self) -> int:
        return self.preview.decoder.num_hidden_layers

    @property
    def context_length(self) -> int:
        return getattr(self.preview.decoder, "max_position_embeddings", None) or 2048

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of one run of `tokens` tokens, no more than the model's context holds."""
        return cache_bytes(self.preview.config, min(tokens, self.context_length), self.format.dtype)

    def captured_bytes(self, tokens: int) -> int:
        """What the captured passes of one run hold; an estimate."""
        return captured_bytes(
            self.network, min(tokens, self.context_length), self.format.dtype, self.device, self.layout
        )

    def workspace_bytes(self, tokens: int) -> int:
        return workspace_bytes(
            self.network, min(tokens, self.context_length), self.format.dtype, self.device, self.layout
        )


def size_up(found: Preview, device: torch.device, precision: str = "auto", here: bool = True) -> Sized:
    """Weigh a model as loading would lay it out; where the device is not `here`, nothing is tried on it. Raises
    UserError for a precision that cannot be had, or a config that no network can be built from."""
    with in_one_sentence(found.name):
        saved = quantisation_of(found.config)
        bundled = found.name.split()[0] == POCKET_NAME
        known = fastest_precision(found.config, device, False, bundled) if precision == "auto" else None
        format_ = choose_format(precision, device, saved, bundled, known, here, why_not_int4(found.config) is None)
        if format_.precision == "int4":
            refuse_int4(found.config, found.name)
        network = skeleton(found.config)
        if format_.taken_as_saved and format_.precision != "nf4":
            return Sized(found, format_, device, network, None, stored_weights(found, format_, network))
        layout = NF4.of(saved, packed_for_cpu(device)) if format_.precision == "nf4" else None
        # Beside weights that were quantised before, transformers leaves the others as they were saved.
        dtype = found.dtype or format_.dtype if format_.taken_as_saved else format_.dtype
        counted = as_fused(weights(network, dtype, layout), network, device, format_.precision, format_.dtype, layout)
        return Sized(found, format_, device, network, layout, counted)


def stored_weights(found: Preview, format_: Format, network: nn.Module) -> Weights:
    """Weights that stay as their files hold them; where the headers cannot be read, by the bits of the format."""
    plain = weights(network, format_.dtype)
    looked_up = plain.total - plain.read
    bits = (quantisation_of(found.config) or {}).get("bits") or BITS.get(format_.precision, 8)
    total = found.stored_bytes or looked_up + round(plain.read * bits / (8 * format_.dtype.itemsize))
    return Weights(total, max(0, total - looked_up), plain.parameters, plain.active_parameters)
