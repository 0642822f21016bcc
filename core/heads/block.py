"""A head's forward for drafting: few operations over fused weights, in the part of Python that TorchScript compiles.

On a CPU a head costs by the bytes of its matrices, and what is between them by its operations: the matrices of its
block are in 4 bits where their shapes allow it, and called without Python (`core.runners.layers`). Results are those of
`core.heads` to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.heads import HeadConfig, HeadNetwork
from core.runners.clock import timed_pass
from core.runners.layers import Weight, compiled, multiply
from core.runners.products import ROWS, Blocks, Int4, fuse, group_for, has_blocks, joined


def fits_int4(config: HeadConfig) -> bool:
    """Whether the kernel for 4 bits takes every matrix of a head; the rows of its vocabulary can be filled up."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    projections = heads + 2 * config.kv_heads * config.head_dim
    products = ((hidden, config.feature_width), (projections, 2 * hidden), (hidden, heads))
    products += ((projections, hidden), (2 * inner, hidden), (hidden, inner), (ROWS, hidden))
    return all(group_for(rows, columns) for rows, columns in products)


def rounds_vocabulary() -> bool:
    """Whether a head in 4 bits has the matrix of its vocabulary in 4 bits too. Of the acceptance that rounding costs,
    most is lost there, where the likeliest token is told from the next; so only where 16 bits have no fast kernel."""
    return not has_blocks(torch.bfloat16)


class Layer(NamedTuple):
    """The weights of one layer, and of its norms."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    before_attention: Tensor
    before_mlp: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


class Block(nn.Module):
    """The passes of a head, n rows at a time. Nothing of it changes in a pass.

    Activations are in `work` between the products and in `dtype` in them."""

    fc: Weight
    layers: list[Layer]
    head: Weight
    fc_norms: list[Tensor]

    def __init__(
        self,
        network: HeadNetwork,
        fc: Weight,
        layers: Sequence[tuple[Weight, Weight, Weight, Weight]],
        head: Weight,
        embedding: Tensor,
        vocabulary: int,
        work: torch.dtype,
    ) -> None:
        super().__init__()
        config = network.config

        def norm(module: Any) -> Tensor:
            return module.weight.detach().to(work)

        self.dtype, self.work = network.norm.weight.dtype, work
        self.fc, self.head = fc, head
        self.layers = []
        for weights, layer in zip(layers, network.stack):
            before_mlp, attention = norm(layer.post_attention_layernorm), layer.self_attn
            query_norm = norm(attention.q_norm) if config.qk_norm else None
            key_norm = norm(attention.k_norm) if config.qk_norm else None
            self.layers.append(Layer(*weights, norm(layer.input_layernorm), before_mlp, query_norm, key_norm))
        self.embedding = embedding.detach()
        self.hidden_norm, self.norm = norm(network.midlayer.hidden_norm), norm(network.norm)
        self.fc_norms = []
        if config.norm_before_fc:
            self.fc_norms = [norm(network.input_norm)]
        if config.fc_norm:
            self.fc_norms = [norm(each) for each in network.fc_norm]
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_dim
        self.eps, self.vocabulary = config.rms_norm_eps, vocabulary
        self.normed_residual, self.normed_output = config.norm_before_residual, config.norm_output

    def product(self, x: Tensor, weight: Weight) -> Tensor:
        return multiply(x.to(self.dtype), weight).to(self.work)

    def normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, [weight.size(0)], weight, self.eps)

    @torch.jit.export
    def join(self, features: Tensor) -> Tensor:
        """Features of the target [n, feature width] as a pass's inputs [n, hidden]."""
        joined = features.to(self.work)
        if len(self.fc_norms) > 0:
            parts = joined.chunk(len(self.fc_norms), -1)
            joined = torch.cat([self.normalise(part, weight) for part, weight in zip(parts, self.fc_norms)], -1)
        return self.product(joined, self.fc)

    @torch.jit.export
    def feed_back(self, output: Tensor) -> Tensor:
        """Outputs as the inputs of recurrent rows."""
        return self.normalise(output, self.norm) if self.normed_output else output

    def forward(
        self, ids: Tensor, inputs: Tensor, cache: Tensor, start: int, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """A pass of ids [n] with inputs [n, hidden], whose keys and values are put at row `start` of the cache [layers,
        2, key heads, capacity, size]. cos, sin [n, 1, size] turn the rows; `mask` bool [heads / key heads · n, start +
        n] is true where a row may look, None: everywhere. Output [n, hidden]."""
        normed = self.normalise(inputs, self.hidden_norm)
        hidden = normed if self.normed_residual else inputs
        embedded = F.embedding(ids, self.embedding).to(self.work)
        for i, layer in enumerate(self.layers):
            if i == 0:
                x = torch.cat([self.normalise(embedded, layer.before_attention), normed], -1)
            else:
                x = self.normalise(hidden, layer.before_attention)
            hidden = hidden + self.product(self.attend(x, layer, cache[i], start, cos, sin, mask), layer.out)
            gate, up = self.product(self.normalise(hidden, layer.before_mlp), layer.gate_up).chunk(2, -1)
            hidden = hidden + self.product(F.silu(gate) * up, layer.down)
        return hidden

    def attend(
        self, x: Tensor, layer: Layer, cache: Tensor, start: int, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """What the attention of a layer gives rows [n, …]: [n, heads · size]."""
        n, size, heads, kv_heads = x.size(0), self.size, self.heads, self.kv_heads
        group, end = heads // kv_heads, start + n
        qkv = self.product(x, layer.qkv).view(n, heads + 2 * kv_heads, size)
        qk = qkv[:, : heads + kv_heads]
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if query_norm is not None and key_norm is not None:
            qk = torch.cat([self.normalise(qk[:, :heads], query_norm), self.normalise(qk[:, heads:], key_norm)], 1)
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        cache[0, :, start:end] = qk[:, heads:].transpose(0, 1)
        cache[1, :, start:end] = qkv[:, heads + kv_heads :].transpose(0, 1)
        # Queries that share a key head become rows of one product: no repeated keys.
        q = qk[:, :heads].view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, size)
        seen = F.scaled_dot_product_attention(q, cache[None, 0, :, :end], cache[None, 1, :, :end], mask)
        return seen.view(heads, n, size).transpose(0, 1).reshape(n, heads * size)

    @torch.jit.export
    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        return self.product(self.normalise(output, self.norm), self.head)[:, : self.vocabulary]


class FusedHead:
    """The weights of a head as passes read them, shared by all its runners; `int4` rounds those of its block to 4 bits,
    and its vocabulary's where 16 bits have no fast kernel.

    Those of the network become parts of them. `embedding` [vocab, hidden] is the head's own or the target's. Draft
    tokens past the target's real vocabulary are cut off: they are padding, and can never be right.
    """

    def __init__(self, network: HeadNetwork, embedding: Tensor, vocab_size: int, int4: bool = False) -> None:
        self.network, self.config, self.vocab_size = network, network.config, vocab_size
        self.device, self.dtype = network.fc.weight.device, network.fc.weight.dtype
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        real = network.draft_ids < vocab_size
        self.target_ids = network.draft_ids[real]
        self.table: Tensor = (network.embed_tokens.weight if self.config.own_embedding else embedding).detach()
        """Embeddings [vocab, hidden]."""
        if self.device.type == "cuda":  # its passes run by the network itself (core.heads.graph)
            self.work = self.dtype
            return
        on_cpu = self.device.type == "cpu"

        def weight(owner: nn.Module, *names: str, int4: bool = int4) -> Weight:
            return fuse(owner, names, int4) if on_cpu else _dense(owner, names)

        layers = [
            (
                weight(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                weight(layer.self_attn, "o_proj"),
                weight(layer.mlp, "gate_proj", "up_proj"),
                weight(layer.mlp, "down_proj"),
            )
            for layer in network.stack
        ]
        rounded = int4 and rounds_vocabulary()
        vocabulary = weight(_vocabulary(network, real, rounded), "lm_head", int4=rounded)
        self.work = torch.float32 if on_cpu and self.dtype.itemsize == 2 else self.dtype
        fc = weight(network, "fc")
        self.block: Any = Block(network, fc, layers, vocabulary, self.table, len(self.target_ids), self.work)
        if on_cpu:
            self.block = compiled(self.block)

    @property
    def layers(self) -> tuple[int, ...]:
        """The boundaries of the target whose hidden states it reads."""
        return self.config.aux_layers

    @property
    def drafted(self) -> int:
        """Tokens that a pass drafts: several of P-EAGLE."""
        return self.config.block_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def weight_bytes(self) -> int:
        """Of its own weights as they lie in memory."""
        packed = [m for m in self.network.modules() if isinstance(m, (Int4, Blocks))]
        held = [*self.network.parameters(), *(tensor for module in packed for tensor in module.buffers())]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def rotation(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [capacity, 1, head_dim] such that rotating x is x·cos + roll(x)·sin."""
        like = torch.empty(0, device=self.device)
        cos, sin = self.network.rotation(torch.arange(capacity, device=self.device), like)
        half = self.config.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos[0][:, None].to(self.work), sin[0][:, None].to(self.work)

    @timed_pass
    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]: the end of every pass whose proposals are wanted."""
        return self.block.logits(output) if hasattr(self, "block") else self.network_logits(output)

    def network_logits(self, output: Tensor) -> Tensor:
        """The same by the network itself."""
        return self.network.logits(output)[:, : len(self.target_ids)]  # its ids ascend: padding is at the end

    def on_target(self, rows: Tensor, fill: float) -> Tensor:
        """Rows [n, draft vocabulary] over the target's vocabulary [n, vocab], `fill` for what the head cannot say."""
        full = torch.full((len(rows), self.vocab_size), fill, dtype=rows.dtype, device=rows.device)
        return full.index_copy_(1, self.target_ids, rows)


def _vocabulary(network: HeadNetwork, real: Tensor, int4: bool) -> nn.Module:
    """Who has the `lm_head` that passes read: the network itself, unless rows are to be cut off or filled up."""
    surplus = -int(real.sum()) % ROWS if int4 else 0
    if real.all() and not surplus:
        return network
    cut = nn.Module()
    rows = F.pad(network.lm_head.weight.detach()[real], (0, 0, 0, surplus))
    cut.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    cut.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    return cut


def _dense(owner: nn.Module, names: Sequence[str]) -> Weight:
    """What `fuse` makes on a CPU, where there is nothing but the matrices themselves."""
    return Weight("dense", *joined([getattr(owner, name) for name in names]))
