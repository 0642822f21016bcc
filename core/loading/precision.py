"""In how many bits a model's weights lie in memory: what was asked for, what was saved, what this machine can do; and a
folder of safetensors as a network on a device, in that format. Counts bytes as they are read.

NF4 weights that bitsandbytes saved are unpacked without it for devices and precisions it has no kernel for. Their
format (Dettmers et al. 2023, arXiv 2305.14314): two 4-bit codes a byte, high half first; each code picks one of 16
values, scaled by the absolute maximum of its block; with double quantisation those scales are 8-bit codes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import InvalidVersion, Version
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from core.errors import UserError
from core.progress import Meter, Progress
from core.runners.architecture import why_not_family
from core.runners.products import group_for, int4_obstacle
from core.runners.static_layers import bring_in_int4
from core.settings import SPECS

POCKET = Path(__file__).parent.parent.parent / "assets" / "pocket"
DTYPES = {"int4": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "int4"}
"""What the widths of unquantised weights are called."""
Placement = Literal["one", "spread"]
SLACK = 1.05
"""How much more than its weights a load is given: buffers, and the tensor that is being quantised."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""
OLDEST_BITSANDBYTES = "0.50"
"""Older ones unpack a whole 4-bit weight in every pass over more than one token, which is every verification."""


@dataclass(frozen=True)
class Format:
    """`precision` names it: one of PRECISIONS but auto, or how the checkpoint was quantised; `dtype` is what it
    computes in. `taken_as_saved`: the weights were quantised before and stay so. `notes` say what is not as asked,
    `why` why it is what `auto` means here, where that was measured."""

    precision: str
    dtype: torch.dtype
    taken_as_saved: bool = False
    notes: list[str] = field(default_factory=list)
    why: str | None = None


@dataclass(frozen=True)
class Measured:
    """What `auto` means for a model by measurement, and why, in a sentence."""

    precision: str
    why: str


def choose_format(
    asked: str,
    device: torch.device,
    saved: Mapping[str, Any] | None,
    bundled: bool = False,
    measured: Measured | None = None,
    here: bool = True,
    packs: bool = False,
) -> Format:
    """The format for a model whose config has the quantisation `saved`; `measured` is what its shapes are fastest in;
    where the device is not `here`, its kernels are believed; `packs`: its build allows int4.
    Raises UserError where nothing can be done."""
    SPECS["precision"].read(asked)
    kind = saved_format(saved)
    if kind not in (None, "nf4"):
        return _as_saved(kind, asked, device)
    if asked == "auto" and measured:
        found = measured.precision
        return Format(found, DTYPES.get(found, compute_dtype(device)), found == "nf4" == kind, why=measured.why)
    wanted = _automatic(device, kind, bundled, packs) if asked == "auto" else asked
    notes: list[str] = []
    if wanted == "int4" and here and (obstacle := int4_obstacle(device)):
        raise UserError(f"Precision int4 cannot be had on this device: {obstacle}; choose nf4 or bf16.")
    if wanted == "nf4" and (obstacle := nf4_obstacle(device)):
        wanted = sixteen_bits(device)
        notes.append(
            f"{obstacle}, so the weights are in {wanted} instead of NF4: they take about three and a half times the "
            "memory, and as much longer to read."
        )
    if wanted == "bf16" and sixteen_bits(device) == "fp16":
        wanted = "fp16"
        notes.append("This device has no bf16, so the weights are in fp16.")
    if wanted == "nf4" and device.type == "cpu" and int4_obstacle(device) and not fast_nf4_on_cpu():
        notes.append(
            "There is no native pass here and this CPU has no AVX512-BF16, so NF4 weights are unpacked anew in every "
            "pass, which is slow; bf16 is faster here."
        )
    return Format(wanted, DTYPES.get(wanted, compute_dtype(device)), wanted == "nf4" == kind, notes)


def refuse_int4(config: Any, name: str) -> None:
    """Raise UserError where a model cannot be had in int4."""
    if reason := why_not_int4(config):
        raise UserError(f"{name} cannot be had in int4: {reason}; choose nf4 or bf16.")


def why_not_int4(config: Any) -> str | None:
    """Why the fused forward, which alone knows int4, cannot run a model or its weights' shapes; None where it can."""
    if reason := why_not_family(config):
        return reason
    shapes = product_shapes(config)
    products = [(sum(shapes[name][0] for name in names), shapes[names[0]][1]) for names in PRODUCTS]
    odd = [f"{rows} x {columns}" for rows, columns in products if not group_for(rows, columns)]
    return f"its kernel cannot take a weight of {odd[0]}" if odd else None


PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linear layers of a decoder layer that the fused forward multiplies as one."""


def product_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the linear layers of a decoder layer that the fused forward covers, by name."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, heads, inner = config.hidden_size, size * config.num_attention_heads, config.intermediate_size
    keys = size * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    into = {"q_proj": heads, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner}
    return {name: (rows, width) for name, rows in into.items()} | {
        "o_proj": (width, heads),
        "down_proj": (width, inner),
    }


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


def pocket_facts() -> dict[str, Any]:
    """What is said of the bundled pair beside its models' configurations."""
    return json.loads((POCKET / "pocket.json").read_text(encoding="utf-8"))


def _automatic(device: torch.device, saved: str | None, bundled: bool, packs: bool) -> str:
    """Without a measurement NF4 on CUDA and where it was saved so; on a CPU four bits where the native pass has them,
    elsewhere 16. A device that cannot have NF4 was not asked for it here, so nobody is told."""
    if device.type == "cuda":
        return "nf4"
    native = device.type == "cpu" and not int4_obstacle(device)
    if saved == "nf4" and not nf4_obstacle(device) and (native or not bundled or packed_for_cpu(device)):
        return "nf4"
    return "int4" if native and packs else sixteen_bits(device)


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


def load_network(
    folder: Path,
    name: str,
    config: Any,
    device: torch.device,
    format_: Format,
    placement: Placement,
    progress: Progress,
) -> nn.Module:
    """The network of a folder in a format. Raises what transformers and safetensors raise."""
    if saved_format(quantisation_of(config)) == "nf4" and not format_.taken_as_saved:
        return _load_unpacked(folder, name, config, device, format_.dtype, progress)
    options: dict[str, Any] = {"dtype": format_.dtype}
    if format_.precision == "nf4" and not format_.taken_as_saved:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=format_.dtype,
        )
    packing = format_.precision == "int4" and device.type == "cuda" and placement == "one"
    if packing:
        options["device_map"] = {"": "cpu"}
    elif device.type == "cuda":
        options |= device_map(placement, device)
    with _counted(folder, name, progress):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # counted below instead
            output_loading_info=True,
            **options,
        )
    network, found = loaded
    # What a file lacks would be filled with random numbers, without a word.
    if absent := sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]):
        raise ValueError(f"its weights do not fit its config ({absent[0]})")
    quantised = format_.precision == "nf4" or format_.taken_as_saved
    if quantised:
        _leave_odd_shapes(network)
    if packing:
        bring_in_int4(network, device)
    return network if quantised or device.type == "cuda" else nn.Module.to(network, device)


def _leave_odd_shapes(network: nn.Module) -> None:
    """bitsandbytes packs 4-bit weights for its CPU kernel at their first pass, and fails on those that are not made of
    whole blocks; told that there is no such kernel, it unpacks them instead."""
    layer: Any
    for layer in network.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu") and (layer.out_features % 32 or layer.in_features % 64):
            layer.support_avx512bf16_for_cpu = False


def placed(needed: int, free: Sequence[int]) -> Placement | None:
    """Where weights of so many bytes go, given what is free on each GPU: on the first alone; spread over all, layer by
    layer, where the first is too small; None where they do not fit. Never partly into the memory of the CPU: every pass
    would then wait for the bus, and a comparison of speeds would compare buses."""
    if not free or needed * SLACK <= free[0]:
        return "one" if free else None
    # A layer is not cut in two, so some of every GPU stays empty.
    return "spread" if len(free) > 1 and needed * SLACK <= 0.9 * sum(free) else None


def device_map(placement: Placement, device: torch.device) -> dict[str, Any]:
    """The options of `from_pretrained` for a placement on CUDA devices."""
    if placement == "one":
        return {"device_map": {"": device.index or 0}}
    free = {i: torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())}
    return {"device_map": "auto", "max_memory": {**free, "cpu": 0}}


def packed_for_cpu(device: torch.device) -> bool:
    """Whether 4-bit weights will be repacked for the fused CPU kernel."""
    return device.type == "cpu" and fast_nf4_on_cpu()


@contextmanager
def _counted(folder: Path, name: str, progress: Progress) -> Iterator[None]:
    """Tell how many bytes of the files have become weights, while transformers loads them.

    transformers shows a bar over the weights of the network; each entry knows by name the tensors it is made of."""
    sizes = tensor_bytes(folder)
    meter = Meter(f"Reading {name}", sum(sizes.values()), progress)

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != "Loading weights" or not args:
            return factory(*args, **options)
        return _metered(args[0], sizes, meter)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
    if meter.done < meter.total:  # tied or unused tensors that no weight was made of
        meter.add(meter.total - meter.done)


def _metered(entries: Any, sizes: dict[str, int], meter: Meter) -> Iterator[Any]:
    for entry in entries:
        yield entry  # the reader makes the weight before it asks for the next
        sources = getattr(entry[1], "layer_targets", {}).values()
        meter.add(sum(sizes.get(source, 0) for found in sources for source in found))


def header_of(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file as its header has them: eight bytes tell the length of a JSON text, then comes
    that text. Raises OSError, ValueError, LookupError, TypeError or AttributeError for a file that is none, or that was
    cut short."""
    with file.open("rb") as stream:
        length, size = int.from_bytes(stream.read(8), "little"), file.stat().st_size
        if length > min(LONGEST_HEADER, size):
            raise ValueError("its header is longer than the file")
        header = json.loads(stream.read(length))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if any(tensor["data_offsets"][1] > size - length - 8 for tensor in tensors.values()):
        raise ValueError("it is shorter than its header says")
    return tensors


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of every tensor in a folder's safetensors files. A file that is none has no tensors here; reading it will
    say what is wrong."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            spans = {name: tensor["data_offsets"] for name, tensor in header_of(file).items()}
            sizes |= {name: end - start for name, (start, end) in spans.items()}
    return sizes


def _load_unpacked(
    folder: Path, name: str, config: Any, device: torch.device, dtype: torch.dtype, progress: Progress
) -> nn.Module:
    """Weights saved in NF4, unpacked without bitsandbytes."""
    meter = Meter(f"Reading {name}", sum(file.stat().st_size for file in folder.glob("*.safetensors")), progress)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        meter.add(file.stat().st_size)
    config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = network.load_state_dict(dequantised(tensors, dtype), strict=False)
    tied = set(network.all_tied_weights_keys or ())
    if unexpected or set(missing) - tied:
        raise ValueError(f"its weights do not fit its config ({[*unexpected, *missing][0]})")
    network.tie_weights()
    return network.to(device)
