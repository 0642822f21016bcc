"""The layers of the fused forward, in the part of Python that TorchScript compiles.

On one row most operations take half a microsecond, and calling one from Python takes two more: in 30 layers of 30
operations that comes to as much as reading the weights. TorchScript's interpreter, which comes with PyTorch and needs
no compiler, calls them without Python. Where a PyTorch has it no more, the same code runs as Python.

Where `core.runners.kernels` could compile them, operations of our own stand for several of PyTorch's each.
"""

import warnings
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Compiled = TypeVar("Compiled", bound=nn.Module)

FEW = 2048
"""Rows times positions they see up to which our own kernel attends; over more PyTorch's is faster, unless there is a
single row."""


class Weight(NamedTuple):
    """What several linear layers of the same input were fused into: `kind` names the kernel whose layout `values` have.
    Of 4 bits, `group` neighbours share a scale and `shape` is that of the weight; `code` is what bitsandbytes' kernel
    asks for."""

    kind: str
    values: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    group: int = 0
    code: Tensor | None = None
    shape: tuple[int, int] = (0, 0)


def multiply(x: Tensor, weight: Weight) -> Tensor:
    """Rows [n, columns] in the weights' own type times a weight: [n, rows of the weight]."""
    if weight.kind == "words":
        out = torch.empty([x.size(0), weight.shape[0]], dtype=torch.float32)
        multiply_words(x, weight, out)
        return out.to(x.dtype)
    if weight.kind == "int4":
        scales = weight.scales
        assert scales is not None
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.values, weight.group, scales)
    elif weight.kind == "blocks":
        return torch.ops.mkldnn._linear_pointwise(x, weight.values, weight.bias, "none", [], "")
    else:
        return F.linear(x, weight.values, weight.bias)
    bias = weight.bias
    return y if bias is None else y + bias


def multiply_words(x: Tensor, weight: Weight, out: Tensor) -> None:
    """The same with 4 bits in words for our own kernel, into float32 [n, rows of the weight]."""
    scales, bias = weight.scales, weight.bias
    assert scales is not None
    torch.ops.playground.multiply_into(x.contiguous(), weight.values, scales, out)
    if bias is not None:
        out.add_(bias)


def multiply_nf4(x: Tensor, weight: Weight) -> Tensor:
    """The same with 4 bits of bitsandbytes, whose operators are there only once it is imported."""
    if weight.kind != "nf4":
        return multiply(x, weight)
    scales, code, bias = weight.scales, weight.code, weight.bias
    assert scales is not None and code is not None
    y = torch.ops.bitsandbytes.gemv_4bit(x, weight.values, weight.shape, scales, code, weight.group)
    return y if bias is None else y + bias


class Norm(NamedTuple):
    """Root mean square normalisation, x / sqrt(mean(x²) + eps) * w: with `weight` = w times and `floor` = eps times the
    root of the width, it is x / hypot(|x|, floor) * weight."""

    weight: Tensor
    floor: Tensor


def normalise(x: Tensor, norm: Norm, out: Tensor) -> Tensor:
    """x [..., width] in the working type, normalised into `out`, of whichever type; `out` may be x."""
    size = torch.linalg.vector_norm(x, 2.0, [-1], True)
    return out.copy_((x / torch.hypot(size, norm.floor)).mul_(norm.weight))


class Layer(NamedTuple):
    """One decoder layer. Norms before and after attention and mlp are None where it has none; those of queries and keys
    are each head's own or as wide as all heads. `kind`: which of the model's kinds of attention it is."""

    kind: int
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None


class Layers(nn.Module):
    """The layers of a network, its last norm and its head. Nothing of it changes in a pass."""

    layers: list[Layer]
    norm: Norm
    head: Weight

    def __init__(
        self,
        layers: list[Layer],
        norm: Norm,
        head: Weight,
        heads: int,
        kv_heads: int,
        scale: float,
        silu: bool,
        inner: int,
        dtype: torch.dtype,
        kernels: bool = False,
    ) -> None:
        """`inner`: the width of the mlp. `kernels`: whether to use our own operations, `core.runners.kernels`."""
        super().__init__()
        self.inner, self.kernels, self.few = inner, kernels, FEW
        self.dtype = dtype
        self.layers, self.norm, self.head = layers, norm, head
        self.heads, self.kv_heads, self.group = heads, kv_heads, heads // kv_heads
        self.scale, self.silu = scale, silu

    def product(self, x: Tensor, weight: Weight) -> Tensor:
        return multiply(x, weight)

    def product_into(self, x: Tensor, weight: Weight, out: Tensor) -> None:
        """Rows times a weight, in the working type."""
        if weight.kind == "words":
            multiply_words(x, weight, out)
        else:
            out.copy_(self.product(x, weight))

    def entering(self, hidden: Tensor, norm: Norm | None, x: Tensor) -> None:
        """The residual stream in the type of the weights, normalised where the layer does that first."""
        if norm is None:
            x.copy_(hidden)
        elif self.kernels:
            torch.ops.playground.normalise(hidden, norm.weight, norm.floor, x)
        else:
            normalise(hidden, norm, x)

    def forward(
        self,
        hidden: Tensor,
        first: int,
        cache: Tensor,
        start: int,
        cos: list[Tensor],
        sin: list[Tensor],
        masks: list[Tensor | None],
        begins: list[int],
        noted: list[int],
    ) -> list[Tensor]:
        """Run the residual stream [n, width] in place through the layers from `first` on that the part of the cache
        [layers, 2, key heads, capacity, size] has, as the tokens from position `start` on. For each kind of attention:
        cosines and signed sines [n, 1, size], the additive mask, and the first position that is seen. Returns copies of
        what is at the boundaries `noted`, lowest first."""
        n, size = hidden.size(0), cache.size(4)
        heads, kv_heads, group = self.heads, self.kv_heads, self.group
        end = start + n
        x = cache.new_empty([n, hidden.size(1)])
        wide = torch.empty_like(hidden)
        both = hidden.new_empty([n, 2 * self.inner])
        gate, up = both[:, : self.inner], both[:, self.inner :]
        inner = cache.new_empty([n, self.inner])
        attended = cache.new_empty([n, heads * size])
        unmasked = cache.new_empty([0])
        rows = hidden.new_empty([n, heads + 2 * kv_heads, size])
        flat = rows.view(n, -1)
        queries, keys = rows[:, :heads], rows[:, heads : heads + kv_heads]
        turned = rows[:, : heads + kv_heads]
        swapping = torch.empty_like(turned)
        low, high = turned.chunk(2, -1)
        from_high, from_low = swapping.chunk(2, -1)[1], swapping.chunk(2, -1)[0]
        keys_values = rows[:, heads:].view(n, 2, kv_heads, size).permute(1, 2, 0, 3)
        # Queries that share a key head become rows of one product: no repeated keys.
        grouped = queries.view(n, kv_heads, group, size).permute(1, 2, 0, 3)
        asking = cache.new_empty([1, kv_heads, group * n, size])
        asking_by_head = asking.view(kv_heads, group, n, size)
        own_attention = self.kernels and (n == 1 or n * end <= self.few)
        written: list[Tensor] = []
        seen_keys: list[list[Tensor]] = []
        seen_values: list[list[Tensor]] = []
        if not own_attention:
            written = list(cache[:, :, :, start:end].unbind())
            for begin in begins:
                seen = cache[:, :, None, :, begin:end]
                seen_keys.append(list(seen[:, 0].unbind()))
                seen_values.append(list(seen[:, 1].unbind()))
        found: list[Tensor] = []
        for i in range(cache.size(0)):
            layer = self.layers[first + i]
            kind = layer.kind
            if first + i in noted:
                found.append(hidden.to(x.dtype, copy=True))
            self.entering(hidden, layer.before_attention, x)
            self.product_into(x, layer.qkv, flat)
            norm = layer.query_norm
            if norm is not None:
                self.normalise_heads(queries, norm)
            norm = layer.key_norm
            if norm is not None:
                self.normalise_heads(keys, norm)
            mask = masks[kind]
            if own_attention:
                added = unmasked if mask is None else mask
                torch.ops.playground.attend(
                    rows, cos[kind], sin[kind], cache[i], added, begins[kind], start, self.scale, attended
                )
            else:
                torch.mul(turned, sin[kind], out=swapping)
                turned.mul_(cos[kind])
                low.add_(from_high)
                high.add_(from_low)
                written[i].copy_(keys_values)
                asking_by_head.copy_(grouped)
                y = F.scaled_dot_product_attention(
                    asking, seen_keys[kind][i], seen_values[kind][i], mask, scale=self.scale
                )
                attended.view(n, heads, size).copy_(y.view(heads, n, size).transpose(0, 1))
            self.product_into(attended, layer.out, wide)
            norm = layer.after_attention
            if norm is not None:
                normalise(wide, norm, wide)
            hidden.add_(wide)
            self.entering(hidden, layer.before_mlp, x)
            self.product_into(x, layer.gate_up, both)
            if self.kernels and self.silu:
                torch.ops.playground.silu_times(both, inner)
            else:
                inner.copy_((F.silu(gate) if self.silu else F.gelu(gate, approximate="tanh")).mul_(up))
            self.product_into(inner, layer.down, wide)
            norm = layer.after_mlp
            if norm is not None:
                normalise(wide, norm, wide)
            hidden.add_(wide)
        if first + cache.size(0) in noted:
            found.append(hidden.to(x.dtype, copy=True))
        return found

    def normalise_heads(self, part: Tensor, norm: Norm) -> None:
        """Each head [n, heads, size] on its own or, where the norm is as wide as all heads, together."""
        if norm.weight.size(0) != part.size(2):
            part = part.flatten(1)
        normalise(part, norm, part)

    @torch.jit.export
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows [n, width] of the last layer's residual stream as logits [n, padded vocabulary]."""
        x = torch.empty(hidden.shape, dtype=self.dtype)
        self.entering(hidden, self.norm, x)
        return self.product(x, self.head)


class Nf4Layers(Layers):
    def product(self, x: Tensor, weight: Weight) -> Tensor:
        return multiply_nf4(x, weight)


def compiled(layers: Compiled) -> Compiled:
    """The same module for TorchScript's interpreter, where this PyTorch has one that knows all they use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(layers)  # type: ignore[return-value]
        except Exception:  # whatever a compiler in its last releases raises
            return layers
