"""In how many bits a model's weights lie in memory: what was asked for, what was saved, what this machine can do.

Unpack NF4 weights that bitsandbytes saved, without bitsandbytes: for devices and precisions it has no kernel for.

The format (Dettmers et al. 2023, arXiv 2305.14314): two 4-bit codes a byte, high half first; each code picks one of 16
values, scaled by the absolute maximum of its block; with double quantisation those scales are 8-bit codes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from core.errors import UserError
from core.runners.architecture import why_not_family
from core.runners.products import group_for
from core.settings import SPECS

POCKET = Path(__file__).parent.parent.parent / "assets" / "pocket"
DTYPES = {"int4": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OLDEST_BITSANDBYTES = "0.50"
"""Older ones unpack a whole 4-bit weight in every pass over more than one token, which is every verification."""


@dataclass(frozen=True)
class Format:
    """`precision` names it: one of PRECISIONS but auto, or how the checkpoint was quantised; `dtype` is what it
    computes in. `taken_as_saved`: the weights were quantised before and stay so. `notes` say what is not as asked."""

    precision: str
    dtype: torch.dtype
    taken_as_saved: bool = False
    notes: list[str] = field(default_factory=list)


def choose_format(asked: str, device: torch.device, saved: Mapping[str, Any] | None, bundled: bool = False) -> Format:
    """The format for a model whose config has the quantisation `saved`. Raises UserError where nothing can be done."""
    SPECS["precision"].read(asked)
    kind = saved_format(saved)
    if kind not in (None, "nf4"):
        return _as_saved(kind, asked, device)
    wanted = _automatic(device, kind, bundled) if asked == "auto" else asked
    notes: list[str] = []
    if wanted == "int4" and device.type != "cpu":
        raise UserError("Precision int4 runs on CPUs only; choose nf4 or bf16 for this device.")
    if wanted == "nf4" and (obstacle := nf4_obstacle(device)):
        wanted = sixteen_bits(device)
        notes.append(
            f"{obstacle}, so the weights are in {wanted} instead of NF4: they take about three and a half times the "
            "memory, and as much longer to read."
        )
    if wanted == "bf16" and sixteen_bits(device) == "fp16":
        wanted = "fp16"
        notes.append("This device has no bf16, so the weights are in fp16.")
    if wanted == "nf4" and device.type == "cpu" and not fast_nf4_on_cpu():
        notes.append(
            "This CPU has no AVX512-BF16, so NF4 weights are unpacked anew in every pass, which is slow; bf16 is "
            "faster here."
        )
    return Format(wanted, DTYPES.get(wanted, compute_dtype(device)), wanted == "nf4" == kind, notes)


def refuse_int4(config: Any, name: str) -> None:
    """Raise UserError where the fused forward, which alone knows int4, cannot run a model or its weights' shapes."""
    reason = why_not_family(config)
    if reason is None:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, inner = size * config.num_attention_heads, config.intermediate_size
        keys = size * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        products = ((heads + 2 * keys, config.hidden_size), (config.hidden_size, heads))
        products += ((2 * inner, config.hidden_size), (config.hidden_size, inner))
        odd = [f"{rows} x {columns}" for rows, columns in products if not group_for(rows, columns)]
        reason = f"its kernel cannot take a weight of {odd[0]}" if odd else None
    if reason:
        raise UserError(f"{name} cannot be had in int4: {reason}; choose nf4 or bf16.")


def saved_format(saved: Mapping[str, Any] | None) -> str | None:
    """How a checkpoint was quantised: nf4, fp4 or int8 by bitsandbytes, or the name of another method; None: it was
    not."""
    if not saved:
        return None
    if saved.get("load_in_4bit"):
        return str(saved.get("bnb_4bit_quant_type", "fp4"))
    if saved.get("load_in_8bit"):
        return "int8"
    method = saved.get("quant_method")
    return str(getattr(method, "value", method) or "an unknown format")


def quantisation_of(config: Any) -> dict[str, Any] | None:
    """The quantisation a checkpoint's config states, as a dictionary."""
    saved = getattr(config, "quantization_config", None)
    return saved if saved is None or isinstance(saved, dict) else saved.to_dict()


def compute_dtype(device: torch.device) -> torch.dtype:
    return DTYPES[sixteen_bits(device)]


@cache
def sixteen_bits(device: torch.device) -> str:
    """bf16, or fp16 where the device only emulates bf16 or lacks it."""
    if device.type == "cuda" and torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "mps":
        try:
            torch.ones(1, dtype=torch.bfloat16, device=device)
        except (RuntimeError, TypeError):
            return "fp16"
    return "bf16"


def nf4_obstacle(device: torch.device) -> str | None:
    """Why NF4 cannot be had on this device, as the beginning of a sentence; None where it can."""
    try:
        found = version("bitsandbytes")
        if Version(found) < Version(OLDEST_BITSANDBYTES):
            return f"bitsandbytes {found} is older than {OLDEST_BITSANDBYTES} (pip install -U bitsandbytes)"
    except (PackageNotFoundError, InvalidVersion):
        return "bitsandbytes is not installed (pip install bitsandbytes)"
    if find_spec("accelerate") is None:
        return "accelerate is not installed (pip install accelerate), and bitsandbytes needs it"
    if device.type == "mps":
        return "bitsandbytes has no 4-bit kernel for this Apple GPU"
    return _broken_library() if device.type == "cuda" else None


def _broken_library() -> str | None:
    """bitsandbytes imports also where its compiled half does not fit this GPU's driver, and fails at its first use."""
    try:
        from bitsandbytes import cextension
    except Exception as error:  # whatever a broken installation raises
        return f"bitsandbytes cannot be imported ({type(error).__name__})"
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        return "bitsandbytes has no kernel for this GPU and its driver (python -m bitsandbytes tells why)"
    return None


@cache
def fast_nf4_on_cpu() -> bool:
    """bitsandbytes has a fused CPU kernel only for AVX512-BF16; elsewhere it unpacks the weights at every call."""
    capabilities = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "")()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "AVX512" in capabilities and "avx512_bf16" in flags


def _automatic(device: torch.device, saved: str | None, bundled: bool) -> str:
    """NF4 on CUDA and where it was saved so; on a CPU what the bundled pair's benchmark found for it, bf16 for others.
    A device that cannot have NF4 was not asked for it here, so nobody is told."""
    if device.type == "cuda":
        return "nf4"
    if device.type == "cpu" and bundled:
        wanted = json.loads((POCKET / "pocket.json").read_text())["default_precision"]["cpu"]
        return wanted if wanted != "nf4" or (fast_nf4_on_cpu() and not nf4_obstacle(device)) else "bf16"
    return "nf4" if saved == "nf4" and not bundled and not nf4_obstacle(device) else sixteen_bits(device)


def _as_saved(kind: str | None, asked: str, device: torch.device) -> Format:
    notes = (
        []
        if asked in ("auto", kind)
        else [f"The weights were saved in {kind} and are taken as they are, not in {asked}."]
    )
    if kind in ("fp4", "int8") and (obstacle := nf4_obstacle(device)):
        raise UserError(f"{obstacle}, and these weights were saved in its {kind} format; choose another checkpoint.")
    return Format(str(kind), compute_dtype(device), True, notes)


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
