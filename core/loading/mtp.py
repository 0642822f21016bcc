"""A target's own MTP layer: whether there is one to run, what it takes, and read from the target's own files.

Its draft is then the target itself, by name. transformers (5.20 on) knows where the families it runs keep the layer
(GLM-4.5, DeepSeek-V3, Mellum 2), and reads it in 16 or 32 bits, unquantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import __version__ as installed
from transformers.modeling_layers import MtpModel

from core.errors import UserError, first_line, out_of_memory
from core.heads.mtp import MtpHead
from core.loading.head import Head
from core.loading.memory import Weights, routed_share, skeleton
from core.loading.model import Model
from core.loading.precision import NAMES, quantisation_of, tensor_bytes


def speaks_of_mtp(config: Any) -> bool:
    """Whether a config tells of MTP layers in a way that transformers knows."""
    return bool(getattr(config.get_text_config(decoder=True), "num_mtp_layers", None))


def check_mtp(name: str, config: Any, network: Any, tensors: Iterable[str]) -> None:
    """Raise UserError where the MTP layer that a config speaks of cannot be run: `network` is the model's, without
    storage, and `tensors` are the names in its files."""
    count = config.get_text_config(decoder=True).num_mtp_layers
    if not hasattr(MtpModel, "forward_layer"):
        raise UserError(
            f"{name} can draft with its own MTP layer on transformers 5.20 or newer, and {installed} is installed (pip "
            "install -U transformers)."
        )
    if count > 1:
        raise UserError(f"{name} has {count} MTP layers; here a target can draft with one, and not with several.")
    if quantisation_of(config):
        raise UserError(
            f"{name} was saved quantised, and transformers reads MTP layers in 16 or 32 bits only; choose the "
            "checkpoint that is not quantised."
        )
    try:
        wanted = MtpModel.get_mtp_weights_regex(network)
    except (TypeError, ValueError) as error:
        raise UserError(f"transformers does not know where {name} would keep its MTP layer.") from error
    if not any(wanted.search(tensor) for tensor in tensors):
        raise UserError(
            f"{name} has no MTP layer in its files, although its config speaks of one; leave the draft out."
        )


def mtp_bytes(name: str, folder: Path, config: Any, dtype: torch.dtype) -> int:
    """What loading the layer takes. The same errors as `check_mtp`."""
    network = skeleton(config)
    check_mtp(name, config, network, tensor_bytes(folder))
    return weigh_mtp(network, dtype).total


def weigh_mtp(network: Any, dtype: torch.dtype) -> Weights:
    """The weights of the layer of a network without storage, in `dtype`; a pass reads the target's head too."""
    with torch.device("meta"):
        own: nn.Module = MtpModel(network, 1).layers
    config = network.config.get_text_config(decoder=True)
    head = network.get_output_embeddings().weight.numel()
    sizes = [(p.numel(), routed_share(name, p, config)) for name, p in own.named_parameters()]
    total, active = sum(count for count, _ in sizes), round(sum(count * share for count, share in sizes)) + head
    return Weights(total * dtype.itemsize, active * dtype.itemsize, total, active)


def load_mtp(name: str, target: Model) -> Head:
    """The MTP layer of a loaded target, which was checked. Raises UserError where its weights do not fit."""
    network: Any = target.network
    device = next(network.get_decoder().layers[-1].parameters()).device
    try:
        model = MtpModel.from_pretrained(network, device_map={"": device})
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise UserError(f"The MTP layer of {name} cannot be read: {first_line(error)}") from error
    model.eval().requires_grad_(False)
    head = MtpHead(model, network, target.vocab_size)
    return Head(name, head, NAMES[network.config.dtype])
