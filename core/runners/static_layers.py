"""The fused forward over a static cache: the passes that CUDA graphs capture, in few kernels and without a host wait.

A kernel that is replayed costs about two microseconds even where it has nothing to do, so a pass over a small model
costs by their number. Here q/k/v and gate/up are one product each where the weights are of floats or of int4 (NF4
keeps its matrices apart: their scales were quantised per matrix), norms are PyTorch's fused ones, keys and values are
written by one operation, and a product ends in the residual stream it is added to: 13 operations a Llama layer (and two
copies where several rows are fed) for the 36 of transformers, 17 for 48 in Qwen3. What lies between the products is in
the model's own type, as in transformers.

Queries that share a key head become rows of one product, so no key or value is repeated, however many rows are under a
mask. The mask is additive, in the type of the queries. Of the backends behind `scaled_dot_product_attention` flash
attention takes none; the memory-efficient one, cuDNN's and the plain one do (PyTorch 2.9 to 2.13, sdp_utils.cpp). Over
a long cache it goes in parts (`core.runners.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runners.architecture import Build, norms_of, scale_of
from core.runners.attention import attend, choose_parts, describe_parts, parts_for, time_attention
from core.runners.products import Stacked, stack
from core.runners.static_cache import Inputs, StaticStore


@dataclass(frozen=True)
class StaticNorm:
    """Root mean square normalisation over the last axis: x / sqrt(mean(x²) + eps) · weight."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class StaticLayer:
    """One decoder layer; norms are None where it has none. `kind`: which of the model's kinds of attention it is."""

    kind: int
    qkv: Stacked
    out: Stacked
    gate_up: Stacked
    down: Stacked
    before_attention: StaticNorm | None
    after_attention: StaticNorm | None
    before_mlp: StaticNorm | None
    after_mlp: StaticNorm | None
    query_norm: StaticNorm | None
    key_norm: StaticNorm | None


PRODUCTS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
"""Linear layers of a decoder layer that are one product, and the module they are in."""


def bring_in_int4(network: Any, device: torch.device) -> None:
    """Move a network of 16 bits to a device with its linear layers in 4 bits, product by product: there is room there
    for what is packed and one product in 16 bits, not for all. The head goes first, while there is most room."""
    products = [(network, ("lm_head",))]
    products += [(getattr(layer, part), names) for layer in network.model.layers for part, names in PRODUCTS]
    for owner, names in products:
        for name in names:
            linear = getattr(owner, name)
            if name == "lm_head":  # on the host it may be the embedding table itself
                linear.weight = torch.nn.Parameter(linear.weight.to(device), requires_grad=False)
            linear.to(device)
        stack(owner, names, int4=True)
    network.to(device)


class StaticNetwork(Build):
    """The fused weights of a model on any device; transformers' modules go on working, from the same memory. `int4`
    quantises the decoder's weights and the head."""

    def __init__(self, network: Any, int4: bool = False) -> None:
        super().__init__(network)
        decoder = network.model

        def norm(module: Any) -> StaticNorm | None:
            return None if module is None else StaticNorm(*scale_of(module, self.dtype))

        self.layers: list[StaticLayer] = []
        for layer, kind in zip(decoder.layers, self.of_layer):
            qkv, out, gate_up, down = (stack(getattr(layer, part), names, int4) for part, names in PRODUCTS)
            self.layers.append(StaticLayer(kind, qkv, out, gate_up, down, *map(norm, norms_of(layer))))
        self.norm = StaticNorm(*scale_of(decoder.norm, self.dtype))
        self.head = stack(network, ("lm_head",), int4)
        self.group = self.heads // self.kv_heads
        self.parts: dict[int, tuple[int, float]] = {}
        """In how many parts attention over long reaches goes, where that was measured (`core.runners.attention`)."""
        # cos(-a) = cos(a) and sin(-a) = -sin(a): the sign of the first half of a head comes with its angles.
        self.angles = [torch.cat([-kind.frequencies, kind.frequencies]) for kind in self.kinds]

    def measure_attention(self, limit: int) -> str | None:
        """Choose how attention over long reaches is split on this device, of a model whose context is `limit`; what was
        chosen in a sentence, None where nothing is split."""
        try:
            timed = time_attention(self.kv_heads, self.group, self.head_size, self.dtype, self.embedding.device)
            self.parts = choose_parts(timed, limit)
        except RuntimeError:  # no memory left for the longest
            return None
        return describe_parts(self.parts)

    def turns(self, at: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each kind of attention cos and signed sin [n, 1, head size] of positions [n], such that rotating x is
        x·cos + (x with its halves swapped)·sin."""
        found = []
        for kind, angles in zip(self.kinds, self.angles):
            each = at[:, None, None] * angles
            cos, sin = each.cos(), each.sin()
            if kind.scaling != 1:
                cos, sin = cos * kind.scaling, sin * kind.scaling
            found.append((cos.to(self.dtype), sin.to(self.dtype)))
        return found


class FusedPass:
    """A pass over a static cache through all layers (`what`: None), through the first so many (a number), or through
    all, noting what is at some boundaries (a tuple)."""

    def __init__(self, net: StaticNetwork, what: int | tuple[int, ...] | None = None) -> None:
        self._net = net
        self._depth = what if isinstance(what, int) else net.depth
        self._noted = what if isinstance(what, tuple) else ()

    def __call__(self, store: StaticStore, inputs: Inputs, rows: int) -> tuple[Tensor, ...]:
        """Feed the inputs where they stand: the last so many rows of logits [rows, padded vocab] of all B·n, text after
        text, and the features [B·n, …] asked for."""
        net, (texts, n) = self._net, inputs.ids.shape
        cells = (inputs.cells[:, None] + store.order(n)).flatten()
        turns = net.turns((inputs.start[:, None] + inputs.depth).flatten())
        additive = store.additive(inputs)
        masks = [additive(kind.window).repeat(1, 1, net.group, 1) for kind in net.kinds]
        cache = store.layered()
        slots = slice(inputs.first, inputs.first + texts)
        seen = cache.unflatten(3, (store.slots, -1))[:, :, :, slots, : inputs.reach].transpose(2, 3)
        hidden = net.embed(inputs.ids.flatten())
        found: dict[int, Tensor] = {}
        for i in range(self._depth):
            if i in self._noted:
                found[i] = hidden.clone()
            layer = net.layers[i]
            self._attend(layer, hidden, cache[i], cells, seen[i], turns[layer.kind], masks[layer.kind])
            self._feed_forward(layer, hidden)
        if self._depth in self._noted:
            found[self._depth] = hidden.clone()
        logits = net.head(net.norm(hidden[len(hidden) - rows :]))
        return (logits, torch.cat([found[i] for i in self._noted], 1)) if self._noted else (logits,)

    def _attend(
        self,
        layer: StaticLayer,
        hidden: Tensor,
        cache: Tensor,
        cells: Tensor,
        seen: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> None:
        """Add attention to the residual stream [B·n, width]; into the `cells` [B·n] of the cache [2, key heads, slots ·
        capacity, size] go keys and values, and of these are `seen` [2, B, key heads, reach, size]; mask
        [B, 1, group·n, reach]."""
        net, texts, reach = self._net, len(mask), mask.size(3)
        heads, kv_heads, size = net.heads, net.kv_heads, net.head_size
        x = hidden if layer.before_attention is None else layer.before_attention(hidden)
        rows = layer.qkv(x).view(-1, heads + 2 * kv_heads, size)
        queries, keys = rows[:, :heads], rows[:, heads : heads + kv_heads]
        for part, norm in ((queries, layer.query_norm), (keys, layer.key_norm)):
            if norm is not None:
                # Each head on its own or, where the norm is as wide as all heads, together.
                whole = part if len(norm.weight) == size else part.flatten(1)
                part.copy_(norm(whole).view(part.shape))
        turned, (cos, sin) = rows[:, : heads + kv_heads], turn
        swapped = turned.unflatten(2, (2, -1)).flip(2).flatten(2)
        turned.mul_(cos).addcmul_(swapped, sin)
        cache.index_copy_(2, cells, rows[:, heads:].unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3))
        asking = queries.view(texts, -1, kv_heads, net.group, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        # Several texts have blocks enough for the device without a split.
        parts = parts_for(net.parts, reach) if texts == 1 else 1
        y = attend(asking, seen[0], seen[1], mask, net.scale, parts)
        y = y.unflatten(2, (net.group, -1)).permute(0, 3, 1, 2, 4).reshape(len(hidden), -1)
        _add(layer.out, y, layer.after_attention, hidden)

    def _feed_forward(self, layer: StaticLayer, hidden: Tensor) -> None:
        x = hidden if layer.before_mlp is None else layer.before_mlp(hidden)
        gate, up = layer.gate_up.apart(x)
        inner = F.silu(gate) if self._net.silu else F.gelu(gate, approximate="tanh")
        _add(layer.down, inner.mul_(up), layer.after_mlp, hidden)


def _add(product: Stacked, x: Tensor, norm: StaticNorm | None, hidden: Tensor) -> None:
    if norm is None:
        product.add(x, hidden)
    else:
        hidden.add_(norm(product(x)))
