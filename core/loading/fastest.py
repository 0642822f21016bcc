"""Which precision a model is fastest in on a GPU, found out by timing products of its own shapes there.

Fewer bits are read faster, but a kernel may give that away: bitsandbytes unpacks whole NF4 matrices from some number of
rows on, and from how many depends on the GPU and on the shape, so that what is the best for a plain step may be the
worst for checking a draft. What is timed is the products of a few layers, as captured passes would run them, for one
row and for as many as a round checks; once for a device and these shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import first_line
from core.loading.memory import as_fused, free_memory, skeleton, weights
from core.loading.precision import PRODUCTS, Measured, nf4_obstacle, product_shapes, quantisation_of, sixteen_bits
from core.runners.architecture import why_not_family
from core.runners.capture import time_replays
from core.runners.products import group_for, int4_obstacle, stack

ROWS = (1, 5)
"""A plain step, and a round that checks four drafted tokens."""
TIMED_BYTES = 1 << 29
"""Of weights in 16 bits: even their quarter is more than the caches of GPUs hold."""
ROOM = 0.6
"""Share of a GPU's memory that weights may take beside a draft, caches and captured passes."""
CLEARLY = 1.1
"""How many times as fast fewer bits must be to be worth what they lose."""

Shapes = tuple[tuple[str, int, int], ...]
_timed: dict[tuple[torch.device, Shapes, str], tuple[float, ...]] = {}


def fastest_precision(config: Any, device: torch.device, measure: bool, bundled: bool = False) -> Measured | None:
    """The precision that `auto` means for a model on a GPU, with the reason in a sentence; None where it is not to be
    measured: elsewhere, for models there is no fused forward for, and for those that were quantised before, unless they
    are bundled. Without `measure`, only what was measured before is known."""
    if device.type != "cuda" or not torch.cuda.is_available() or why_not_family(config):
        return None
    if quantisation_of(config) and not bundled:
        return None
    shapes = tuple((name, rows, columns) for name, (rows, columns) in product_shapes(config).items())
    candidates = fitting(config, device, shapes)
    if not measure and any((device, shapes, each) not in _timed for each in candidates):
        return None
    layers = _layers(shapes, config.num_hidden_layers)
    try:
        return choose({each: timed(device, shapes, each, layers) for each in candidates})
    except RuntimeError as error:  # no memory left, a capture that failed …
        least = candidates[-1]
        return Measured(least, f"Auto took {least}: products could not be timed here ({first_line(error, 100)}).")


def fitting(config: Any, device: torch.device, shapes: Shapes) -> list[str]:
    """The precisions that can be had on a GPU and leave room there, the one with the most bits first."""
    wide = sixteen_bits(device)
    network = skeleton(config)
    counted = weights(network, torch.bfloat16)
    room = ROOM * _room(device)
    found = [wide] if counted.total <= room else []
    whole = all(group_for(rows, columns) for _, rows, columns in shapes)
    packed = as_fused(counted, network, device, "int4", torch.bfloat16).total + largest_product(shapes)
    if wide == "bf16" and whole and packed <= room and not int4_obstacle(device):
        found.append("int4")
    if not nf4_obstacle(device):
        found.append("nf4")
    return found or [wide]


def largest_product(shapes: Shapes) -> int:
    """Bytes that the layers of a product take in 16 bits, on their own and joined, and their codes before they are
    packed."""
    size = {name: rows * columns for name, rows, columns in shapes}
    return 8 * max(sum(size[name] for name in names) for names in PRODUCTS)


def _room(device: torch.device) -> int:
    """Bytes this process could have on a device once it has given back what it holds."""
    free = free_memory(device)
    return (free.free or 0) + torch.cuda.memory_allocated(device)


def choose(seconds: dict[str, Sequence[float]]) -> Measured:
    """The fastest of some precisions over all `ROWS`; of those nearly as fast the one with the most bits, which comes
    first."""
    sums = {name: sum(each) for name, each in seconds.items()}
    best = min(sums.values())
    chosen = next(name for name, each in sums.items() if each <= CLEARLY * best)
    told = [f"{name} {' and '.join(f'{1e6 * each:.0f}' for each in seconds[name])}" for name in seconds]
    if len(told) == 1:
        return Measured(chosen, f"Auto took {chosen}: nothing else fits this GPU.")
    rows = " and ".join(map(str, ROWS))
    return Measured(
        chosen, f"Auto took {chosen}: a layer's products over {rows} rows take, in microseconds, {', '.join(told)}."
    )


def _layers(shapes: Shapes, most: int) -> int:
    size = 2 * sum(rows * columns for _, rows, columns in shapes)
    return max(1, min(most, -(-TIMED_BYTES // size)))


def timed(device: torch.device, shapes: Shapes, precision: str, layers: int) -> tuple[float, ...]:
    """Seconds of one layer's products in a precision, for each number of `ROWS`; measured once."""
    key = device, shapes, precision
    if key not in _timed:
        _timed[key] = time_products(device, shapes, precision, layers)
    return _timed[key]


@torch.inference_mode()
def time_products(device: torch.device, shapes: Shapes, precision: str, layers: int) -> tuple[float, ...]:
    """The same, measured now, over so many layers of random weights."""
    stacks = [Products(shapes, device, precision) for _ in range(layers)]
    return tuple(_time_rows(stacks, rows, shapes, device) / layers for rows in ROWS)


def _time_rows(stacks: Sequence[Products], rows: int, shapes: Shapes, device: torch.device) -> float:
    inputs = {columns: torch.ones(rows, columns, dtype=stacks[0].dtype, device=device) for _, _, columns in shapes}

    def work() -> None:
        for products in stacks:
            products(inputs)

    return time_replays(work, device)


class Products(nn.Module):
    """The linear layers of a decoder layer with random weights, multiplied as the fused forward does."""

    def __init__(self, shapes: Shapes, device: torch.device, precision: str) -> None:
        super().__init__()
        self.dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        for name, rows, columns in shapes:
            weight = 0.02 * torch.randn(rows, columns, dtype=self.dtype, device=device)
            setattr(self, name, _linear(weight, precision == "nf4"))
        int4 = precision == "int4"
        width = {name: columns for name, _, columns in shapes}
        self._groups = [(stack(self, names, int4), width[names[0]]) for names in PRODUCTS]

    def forward(self, inputs: dict[int, Tensor]) -> None:
        for product, columns in self._groups:
            product.apart(inputs[columns])


def _linear(weight: Tensor, nf4: bool) -> nn.Module:
    rows, columns = weight.shape
    if not nf4:
        linear = nn.Linear(columns, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear
    bits: Any = import_module("bitsandbytes.nn")  # where 4 bits are asked for
    packed = bits.Linear4bit(columns, rows, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
    packed.weight = bits.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed).to(weight.device)
    return packed.eval()
