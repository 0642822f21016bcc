"""A folder of safetensors -> a network on a device. Counts bytes as they are read, and looks for room first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from core.loading.precision import Format, dequantised, fast_nf4_on_cpu, quantisation_of, saved_format
from core.progress import Meter, Progress

Placement = Literal["one", "spread"]
SLACK = 1.05
"""How much more than its weights a load is given: buffers, and the tensor that is being quantised."""


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
    if device.type == "cuda":
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


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of every tensor in a folder's safetensors files, from their headers: eight bytes that tell the length of a
    JSON text, then that text. A file that is none has no tensors here; reading it will say what is wrong."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, file.stat().st_size)))
            spans = {key: entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        sizes |= {key: end - start for key, (start, end) in spans.items()}
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
