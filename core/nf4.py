"""Unpack NF4 weights that bitsandbytes saved, without bitsandbytes: for devices and precisions it has no kernel for.

The format (Dettmers et al. 2023, arXiv 2305.14314): two 4-bit codes a byte, high half first; each code picks one of 16
values, scaled by the absolute maximum of its block; with double quantisation those scales are 8-bit codes themselves.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

MARK = ".quant_state.bitsandbytes__nf4"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", MARK)


def dequantised(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A state dict with every packed weight unpacked to `dtype` and its scales gone; other floats are cast too."""
    packed = {name.removesuffix(MARK) for name in tensors if name.endswith(MARK)}
    scales = {name + part for name in packed for part in PARTS}
    return {
        name: unpack(tensors, name).to(dtype)
        if name in packed
        else value.to(dtype)
        if value.is_floating_point()
        else value
        for name, value in tensors.items()
        if name not in scales
    }


def unpack(tensors: dict[str, Tensor], name: str) -> Tensor:
    """One weight in float32, in its original shape."""
    state = json.loads(bytes(tensors[name + MARK].tolist()))
    packed = tensors[name].flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    values = tensors[name + ".quant_map"].float()[codes]
    blocks = values.view(-1, state["blocksize"])
    return (blocks * _scales(tensors, name, state)[:, None]).view(state["shape"])


def _scales(tensors: dict[str, Tensor], name: str, state: dict) -> Tensor:
    scales = tensors[name + ".absmax"]
    if name + ".nested_absmax" not in tensors:
        return scales.float()
    values = tensors[name + ".nested_quant_map"].float()[scales.long()]
    block = state["nested_blocksize"]
    nested = tensors[name + ".nested_absmax"].float().repeat_interleave(block)[: len(values)]
    return values * nested + state["nested_offset"]
