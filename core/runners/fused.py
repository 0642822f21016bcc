"""A forward of the Llama family for CPUs, where a pass costs by its operations: few, fused, into preallocated memory.

transformers' eager forward spends more time between the matrix products than in them at batch 1. Here q/k/v and
gate/up are one product each, and keys and values are written in place. The weights are the model's own: fused once,
and the model's layers become views of the fused ones. Results agree with transformers' to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.clock import timed_pass
from core.runners.features import Features
from core.runners.masks import tree_depths, tree_visible

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Linear = Callable[[Tensor], Tensor]


def why_not(network: Any) -> str | None:
    """None where this forward can run the network, else the reason."""
    config = network.config
    if next(network.parameters()).device.type != "cpu":
        return "the model is not on a CPU"
    if config.model_type not in FAMILIES:
        return f"there is no fused forward for {config.model_type} models"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "the model has sliding-window attention"
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default":
        return "the model scales its rotary positions"
    if config.hidden_act != "silu":
        return f"the model's activation is {config.hidden_act}"
    if any(not fusable(module) for module in network.modules()):
        return "the weights are quantised in a format there is no fused kernel for"
    return None


def fusable(module: Any) -> bool:
    """Whether a layer's weight is of floats, or of 4 bits that bitsandbytes packs for its kernel on this CPU."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_floating_point():
        return True
    return hasattr(weight, "quant_state") and module.support_avx512bf16_for_cpu


class FusedLayer:
    """One decoder layer over fused weights."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = fuse([mlp.gate_proj, mlp.up_proj])
        self.out = fuse([attention.o_proj])
        self.down = fuse([mlp.down_proj])
        self.norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.head_norms = tuple(getattr(attention, f"{x}_norm").weight for x in "qk" if hasattr(attention, f"{x}_norm"))


class FusedNetwork:
    """The fused weights of a model, shared by all its runners."""

    def __init__(self, network: Any) -> None:
        config = network.config
        decoder = network.model
        self.layers = [FusedLayer(layer) for layer in decoder.layers]
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.norm: Tensor = decoder.norm.weight
        self.head: Tensor = network.lm_head.weight
        self.eps: float = config.rms_norm_eps
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.width: int = config.hidden_size
        self._inverse_frequencies: Tensor = decoder.rotary_emb.inv_freq.float()

    def rotation(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [capacity, 1, head_size] such that rotating x is x·cos + roll(x)·sin."""
        angles = torch.outer(torch.arange(capacity).float(), self._inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        dtype = self.embedding.dtype
        return torch.cat([cos, cos], 1)[:, None].to(dtype), torch.cat([-sin, sin], 1)[:, None].to(dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(F.rms_norm(hidden, (self.width,), self.norm, self.eps), self.head)


def fuse(linears: Sequence[Any]) -> Linear:
    """One product for several linear layers of the same input; their weights become views of the fused one."""
    if hasattr(linears[0].weight, "quant_state"):
        return _fuse_nf4(linears)
    weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    start = 0
    for linear in linears:
        linear.weight.data = weight[start : start + linear.out_features]
        start += linear.out_features
    return lambda x: F.linear(x, weight, bias)


def _fuse_nf4(linears: Sequence[Any]) -> Linear:
    """The same for bitsandbytes layers: rows of its packed CPU format may be put one below the other."""
    for linear in linears:
        linear(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))  # makes bitsandbytes pack the weight
    states = [linear.weight.quant_state for linear in linears]
    packed = torch.cat([linear.weight.data for linear in linears])
    scales = torch.cat([state.absmax for state in states], dim=1).contiguous()
    code, block = states[0].code, states[0].blocksize
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    shape = [sum(linear.out_features for linear in linears), linears[0].in_features]
    start = 0
    for linear in linears:
        linear.weight.data = packed[start : start + linear.out_features]
        start += linear.out_features
    product = torch.ops.bitsandbytes.gemv_4bit.default
    if bias is None:
        return lambda x: product(x, packed, shape, scales, code, block)
    return lambda x: product(x, packed, shape, scales, code, block) + bias


class FusedRunner:
    """One key/value cache over a FusedNetwork; implements `core.runners.dynamic.Runner`."""

    kind = "fused"

    def __init__(self, network: FusedNetwork, vocab_size: int, capacity: int = 512) -> None:
        self._net = network
        self._vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._length = self._fed = 0
        self._masks: dict[int, Tensor] = {}
        self._capacity = 0
        self._grow(capacity)
        self.exit: FusedView | None = None
        self.features: Features | None = None

    @property
    def length(self) -> int:
        return self._length

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        n = len(ids)
        resumable = self.exit and parents is None and not self.features
        resumed, at = (self.exit.take(ids, self._length) if self.exit and resumable else None), 0
        if resumed is None:
            noted: dict[int, Any] | None = dict.fromkeys(self.features.layers) if self.features else None
            hidden = self.through(0, len(self._net.layers), self._net.embedding[ids], self._length, parents, noted)
            if self.features and noted:
                self.features.add(self._length, torch.cat([noted[i] for i in self.features.layers], 1))
        else:
            at, held = self.exit.layers, resumed  # type: ignore[union-attr]
            rest = self.through(0, at, self._net.embedding[ids[len(held) :]], self._length + len(held), None)
            hidden = self.through(at, len(self._net.layers), torch.cat([held, rest]), self._length, None)
        self._fed = n
        self._length += n
        return self._net.logits(hidden[n - (rows or n) :])[:, : self._vocab_size]

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self.features = Features(layers, self._length)
        return self.features

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        if self.features:
            self.features.truncate(self._length)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        if list(path) != list(range(len(path))):
            index = base + torch.tensor(list(path))
            for held in (self._keys, self._values):
                held[:, :, base : base + len(path)] = held.index_select(2, index)
        if self.features:
            self.features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> FusedView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        self.exit = FusedView(self, layers)
        return self.exit

    def reset(self) -> None:
        self._length = self._fed = 0
        self.exit = self.features = None

    def through(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        start: int,
        parents: Sequence[int] | None,
        noted: dict[int, Any] | None = None,
    ) -> Tensor:
        """Run hidden [n, width] through layers first … last-1 as the tokens from position `start` on; what enters the
        layers that `noted` names is put there."""
        net, n = self._net, len(hidden)
        end = start + n
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        if parents is None:
            cos, sin = self._cos[start:end], self._sin[start:end]
            mask = None if n == 1 else self._causal(n, start)
        else:
            at = start + torch.tensor(tree_depths(parents, n))
            cos, sin = self._cos[at], self._sin[at]
            mask = self._additive(tree_visible(parents, start))
        group, size, turned = net.heads // net.kv_heads, net.head_size, net.heads + net.kv_heads
        for i in range(first, last):
            layer = net.layers[i]
            if noted is not None and i in noted:
                noted[i] = hidden
            x = F.rms_norm(hidden, (net.width,), layer.norms[0], net.eps)
            qkv = layer.qkv(x).view(n, turned + net.kv_heads, size)
            qk, v = qkv[:, :turned], qkv[:, turned:]
            if layer.head_norms:
                qk = torch.cat(
                    [
                        F.rms_norm(part, (size,), weight, net.eps)
                        for part, weight in zip(qk.split([net.heads, net.kv_heads], 1), layer.head_norms)
                    ],
                    1,
                )
            qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            keys, values = self._keys[i], self._values[i]
            keys[:, start:end] = qk[:, net.heads :].transpose(0, 1)
            values[:, start:end] = v.transpose(0, 1)
            # Queries that share a key head become rows of one product: no repeated keys.
            q = (
                qk[:, : net.heads]
                .view(n, net.kv_heads, group, size)
                .permute(1, 2, 0, 3)
                .reshape(net.kv_heads, group * n, size)
            )
            seen = F.scaled_dot_product_attention(q[None], keys[None, :, :end], values[None, :, :end], mask)
            seen = seen.view(net.heads, n, size).transpose(0, 1).reshape(n, net.heads * size)
            hidden = hidden + layer.out(seen)
            x = F.rms_norm(hidden, (net.width,), layer.norms[1], net.eps)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        if noted is not None and last in noted:
            noted[last] = hidden
        return hidden

    def _causal(self, n: int, start: int) -> Tensor:
        """Additive mask [group·n, start+n]; a slice of one table per n, so that a pass builds nothing."""
        if n > 32:
            return self._additive(torch.ones(n, start + n, dtype=torch.bool).tril(start))
        if n not in self._masks:
            column = torch.arange(2 * self._capacity + n)
            self._masks[n] = self._additive(column[None] <= self._capacity + torch.arange(n)[:, None])
        return self._masks[n][:, self._capacity - start : self._capacity + n]

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self._net.embedding.dtype).masked_fill_(~visible, -torch.inf)
        return mask.repeat(self._net.heads // self._net.kv_heads, 1)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        net = self._net
        shape = (len(net.layers), net.kv_heads, capacity, net.head_size)
        keys, values = (torch.zeros(shape, dtype=net.embedding.dtype) for _ in range(2))
        if self._capacity:
            keys[:, :, : self._capacity] = self._keys
            values[:, :, : self._capacity] = self._values
        self._keys, self._values = keys, values
        self._cos, self._sin = net.rotation(capacity)
        self._capacity = capacity
        self._masks.clear()


class FusedView:
    """Early exit over a FusedRunner: drafts with the first layers and lets the full pass resume from where they end."""

    kind = "early exit"

    def __init__(self, full: FusedRunner, layers: int) -> None:
        self._full = full
        self.layers = layers
        self.device = full.device
        self._length = full.length
        self._ahead: list[tuple[Tensor, Tensor]] = []
        """Ids and hidden states fed since the full pass: what it need not compute again."""

    @property
    def length(self) -> int:
        # Where the full pass has been, the first layers have been too.
        return max(self._length, self._full.length)

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        full, start = self._full, self.length
        hidden = full.through(0, self.layers, full._net.embedding[ids], start, parents)
        self._ahead.append((ids, hidden))
        self._length = start + len(ids)
        return full._net.logits(hidden[len(ids) - (rows or len(ids)) :])[:, : full._vocab_size]

    def take(self, ids: Tensor, start: int) -> Tensor | None:
        """Hidden states of a prefix of ids [n] at position `start`, if the view has just fed exactly those."""
        if not self._ahead or self._length <= start:
            return None
        fed = torch.cat([part for part, _ in self._ahead])
        hidden = torch.cat([part for _, part in self._ahead])
        self._ahead.clear()
        begins = self._length - len(fed)
        if begins != start or len(fed) > len(ids) or not torch.equal(ids[: len(fed)], fed):
            return None
        return hidden if len(fed) < len(ids) else hidden[:-1]

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        self._ahead.clear()

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("an early-exit view drafts chains; the target's runner keeps the verified path")
