"""A head's forward for drafting: few operations over fused weights, in the part of Python that TorchScript compiles.

On a CPU a head costs by the bytes of its matrices, and what is between them by its operations: the matrices of its
block are in 4 bits where their shapes allow it, and called without Python (`core.runners.layers`). Results are those of
`core.heads` to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    products += ((2 * inner, hidden), (hidden, inner), (ROWS, hidden))
    return all(group_for(rows, columns) for rows, columns in products)


def rounds_vocabulary() -> bool:
    """Whether a head in 4 bits has the matrix of its vocabulary in 4 bits too. Of the acceptance that rounding costs,
    most is lost there, where the likeliest token is told from the next; so only where 16 bits have no fast kernel."""
    return not has_blocks(torch.bfloat16)


class Block(nn.Module):
    """The passes of a head, n rows at a time. Nothing of it changes in a pass.

    Activations are in `work` between the products and in `dtype` in them."""

    fc: Weight
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    head: Weight
    fc_norms: list[Tensor]
    query_norm: Tensor | None
    key_norm: Tensor | None

    def __init__(
        self, network: HeadNetwork, weights: Sequence[Weight], embedding: Tensor, vocabulary: int, work: torch.dtype
    ) -> None:
        super().__init__()
        config, layer = network.config, network.midlayer

        def norm(module: Any) -> Tensor:
            return module.weight.detach().to(work)

        self.dtype, self.work = network.norm.weight.dtype, work
        self.fc, self.qkv, self.out, self.gate_up, self.down, self.head = weights
        self.embedding = embedding.detach()
        self.embedding_norm, self.hidden_norm = norm(layer.input_layernorm), norm(layer.hidden_norm)
        self.mlp_norm, self.norm = norm(layer.post_attention_layernorm), norm(network.norm)
        self.fc_norms = []
        if config.norm_before_fc:
            self.fc_norms = [norm(network.input_norm)]
        if config.fc_norm:
            self.fc_norms = [norm(each) for each in network.fc_norm]
        self.query_norm = norm(layer.self_attn.q_norm) if config.qk_norm else None
        self.key_norm = norm(layer.self_attn.k_norm) if config.qk_norm else None
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
        """A pass of ids [n] with inputs [n, hidden], whose keys and values are put at row `start` of the cache [2, key
        heads, capacity, size]. cos, sin [n, 1, size] turn the rows; `mask` bool [heads / key heads · n, start + n] is
        true where a row may look, None: everywhere. Output [n, hidden]."""
        n, size, heads, kv_heads = ids.size(0), self.size, self.heads, self.kv_heads
        group, end = heads // kv_heads, start + n
        normed = self.normalise(inputs, self.hidden_norm)
        embedded = self.normalise(F.embedding(ids, self.embedding).to(self.work), self.embedding_norm)
        qkv = self.product(torch.cat([embedded, normed], -1), self.qkv).view(n, heads + 2 * kv_heads, size)
        qk = qkv[:, : heads + kv_heads]
        query_norm, key_norm = self.query_norm, self.key_norm
        if query_norm is not None and key_norm is not None:
            qk = torch.cat([self.normalise(qk[:, :heads], query_norm), self.normalise(qk[:, heads:], key_norm)], 1)
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        cache[0, :, start:end] = qk[:, heads:].transpose(0, 1)
        cache[1, :, start:end] = qkv[:, heads + kv_heads :].transpose(0, 1)
        # Queries that share a key head become rows of one product: no repeated keys.
        q = qk[:, :heads].view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, size)
        seen = F.scaled_dot_product_attention(q, cache[None, 0, :, :end], cache[None, 1, :, :end], mask)
        seen = seen.view(heads, n, size).transpose(0, 1).reshape(n, heads * size)
        hidden = (normed if self.normed_residual else inputs) + self.product(seen, self.out)
        gate, up = self.product(self.normalise(hidden, self.mlp_norm), self.gate_up).chunk(2, -1)
        return hidden + self.product(F.silu(gate) * up, self.down)

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
        attention, mlp = network.midlayer.self_attn, network.midlayer.mlp
        layers: list[tuple[nn.Module, tuple[str, ...]]] = [
            (network, ("fc",)),
            (attention, ("q_proj", "k_proj", "v_proj")),
            (attention, ("o_proj",)),
            (mlp, ("gate_proj", "up_proj")),
            (mlp, ("down_proj",)),
        ]
        on_cpu = self.device.type == "cpu"
        weights = [fuse(*each, int4) if on_cpu else _dense(*each) for each in layers]
        rounded = int4 and rounds_vocabulary()
        vocabulary = _vocabulary(network, real, rounded), ("lm_head",)
        weights.append(fuse(*vocabulary, rounded) if on_cpu else _dense(*vocabulary))
        self.work = torch.float32 if on_cpu and self.dtype.itemsize == 2 else self.dtype
        self.block: Any = Block(network, weights, self.table, len(self.target_ids), self.work)
        if on_cpu:
            self.block = compiled(self.block)

    @property
    def layers(self) -> tuple[int, ...]:
        """The boundaries of the target whose hidden states it reads."""
        return self.config.aux_layers

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
        cos, sin = self.network.rotary(like, torch.arange(capacity, device=self.device)[None])
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
