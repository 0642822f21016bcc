"""A head's forward for drafting: few operations over fused weights, and one key/value cache; what its passes cost here.

The cache holds stable rows, whose features are the target's own, and behind them the recurrent rows of the round in
progress, which `truncate` drops. Results are those of `core.heads` to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.clock import synchronise
from core.costs import CostTable
from core.heads import HeadNetwork

ROWS, REPEATS = (1, 2, 4, 8), 7
"""Of the timed passes."""


class FusedHead:
    """The weights of a head as passes read them, shared by all its runners.

    `embedding` [vocab, hidden] is the head's own or the target's. Draft tokens past the target's real vocabulary are
    cut off: they are padding, and can never be right.
    """

    def __init__(self, network: HeadNetwork, embedding: Tensor, vocab_size: int) -> None:
        config, layer = network.config, network.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.network, self.config = network, config
        self.embedding = network.embed_tokens.weight if config.own_embedding else embedding
        self.fc = network.fc.weight
        self.dtype, self.device = self.fc.dtype, self.fc.device
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = torch.cat([p.weight for p in projections])
        self.bias = torch.cat([p.bias for p in projections]) if config.attention_bias else None
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down = mlp.down_proj.weight
        real = network.draft_ids < vocab_size
        self.target_ids = network.draft_ids[real]
        self.head = network.lm_head.weight[real]
        self.vocab_size = vocab_size

    def rotation(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin [capacity, 1, head_dim] such that rotating x is x·cos + roll(x)·sin."""
        cos, sin = self.network.rotary(self.fc.float(), torch.arange(capacity, device=self.device)[None])
        half = self.config.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos[0][:, None].to(self.dtype), sin[0][:, None].to(self.dtype)

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        return F.linear(self.network.norm(output), self.head)

    def on_target(self, rows: Tensor, fill: float) -> Tensor:
        """Rows [n, draft vocabulary] over the target's vocabulary [n, vocab], `fill` for what the head cannot say."""
        full = torch.full((len(rows), self.vocab_size), fill, dtype=rows.dtype, device=rows.device)
        return full.index_copy_(1, self.target_ids, rows)


class HeadRunner:
    """One key/value cache over a head. `length` counts its rows; row i stands at position i (attention sees distances
    only, so that a text whose beginning the head has not read may begin at 0 too)."""

    def __init__(self, head: FusedHead, capacity: int = 512) -> None:
        self.head = head
        self.device = head.device
        self.length = 0
        self._capacity = 0
        self._grow(capacity)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def read(self, ids: Tensor, features: Tensor) -> Tensor:
        """Append stable rows: ids [n] and the target's features [n, …] of the token before each; output [n, hidden]."""
        return self._pass(ids, self.head.network.join(features.to(self.head.dtype)), None, None)

    def draft(
        self, ids: Tensor, outputs: Tensor, positions: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Append recurrent rows: ids [n] and the outputs [n, hidden] they were proposed from; output [n, hidden].

        Of a tree, `positions` [n] and `visible` bool [n, length + n] tell where each row stands and what it sees."""
        return self._pass(ids, self.head.network.feed_back(outputs), positions, visible)

    @torch.inference_mode()
    def _pass(self, ids: Tensor, inputs: Tensor, positions: Tensor | None, visible: Tensor | None) -> Tensor:
        head, config, layer = self.head, self.head.config, self.head.network.midlayer
        n, start = len(ids), self.length
        end = start + n
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        normed = layer.hidden_norm(inputs)
        embedded = F.embedding(ids, head.embedding).to(head.dtype)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        qkv = F.linear(x, head.qkv, head.bias).view(n, heads + 2 * kv_heads, size)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.qk_norm:
            attention = layer.self_attn
            qk = torch.cat([attention.q_norm(qk[:, :heads]), attention.k_norm(qk[:, heads:])], 1)
        at = slice(start, end) if positions is None else positions
        qk = torch.addcmul(qk * self._cos[at], qk.roll(size // 2, -1), self._sin[at])
        self._keys[:, start:end] = qk[:, heads:].transpose(0, 1)
        self._values[:, start:end] = v.transpose(0, 1)
        group = heads // kv_heads
        # Queries that share a key head become rows of one product: no repeated keys.
        q = qk[:, :heads].view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * n, size)
        mask = None
        if visible is not None or n > 1:
            if visible is None:
                visible = torch.ones(n, end, dtype=torch.bool, device=self.device).tril(start)
            mask = visible.repeat(group, 1)
        seen = F.scaled_dot_product_attention(q[None], self._keys[None, :, :end], self._values[None, :, :end], mask)
        seen = seen.view(heads, n, size).transpose(0, 1).reshape(n, heads * size)
        residual = normed if config.norm_before_residual else inputs
        hidden = residual + F.linear(seen, head.out, head.out_bias)
        gate, up = F.linear(layer.post_attention_layernorm(hidden), head.gate_up).chunk(2, -1)
        self.length = end
        return hidden + F.linear(F.silu(gate) * up, head.down)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        config = self.head.config
        shape = (config.kv_heads, capacity, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.head.dtype, device=self.device) for _ in range(2))
        if self._capacity:
            keys[:, : self._capacity] = self._keys
            values[:, : self._capacity] = self._values
        self._keys, self._values = keys, values
        self._cos, self._sin = self.head.rotation(capacity)
        self._capacity = capacity


@dataclass(frozen=True)
class HeadCosts:
    """Seconds of a pass that reads n rows of features and proposes one token, `read`; and of one that drafts on from n
    of its own outputs and proposes after each, `draft`."""

    read: CostTable
    draft: CostTable

    def to_dict(self) -> dict[str, Any]:
        return {"read": self.read.to_dict(), "draft": self.draft.to_dict()}


@torch.inference_mode()
def time_head(target: Any, head: FusedHead, context: int, repeats: int = REPEATS) -> HeadCosts:
    """Passes of a head behind passes of its target's runner, which push it out of the processor's caches."""
    features = target.watch(head.config.aux_layers)
    runner = HeadRunner(head)

    def ones(n: int) -> Tensor:
        return torch.ones(n, dtype=torch.long, device=runner.device)

    target.feed(ones(context), rows=1)
    runner.read(ones(context), features.take(context))
    read: dict[int, list[float]] = {n: [] for n in ROWS}
    draft: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(repeats + 1):
        for n in ROWS:
            target.feed(ones(n))
            rows = features.take(context + n)
            output, seconds = _time(runner, lambda rows=rows, n=n: runner.read(ones(n), rows)[-1:])
            read[n].append(seconds)
            _, seconds = _time(runner, lambda output=output, n=n: runner.draft(ones(n), output.expand(n, -1)))
            draft[n].append(seconds)
            runner.truncate(context)
            target.truncate(context)
    return HeadCosts(*(CostTable({n: median(s[1:]) for n, s in table.items()}) for table in (read, draft)))


def _time(runner: HeadRunner, one_pass: Callable[[], Tensor]) -> tuple[Tensor, float]:
    synchronise(runner.device)
    start = time.perf_counter()
    output = one_pass()
    runner.head.logits(output).max(-1)
    synchronise(runner.device)
    return output, time.perf_counter() - start
