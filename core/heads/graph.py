"""A head on a GPU: passes and whole chains of drafted tokens captured as CUDA graphs over keys and values that stay
where they are.

Every drafted token is another length of the text, and a kernel chosen anew for each; here a pass reads a fixed reach
under a mask, padded to a fixed width (`core.runners.widths`), and the chain of a round, from the features it reads to
its last token, is one graph: one replay for the whole draft.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.heads.block import FusedHead
from core.runners.capture import Captures, Work
from core.runners.clock import timed_pass
from core.runners.widths import ROUND, USUAL, capacity_for, reach_for, width_for

Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Of a row of logits [1, draft vocab] and a uniform [1] the column that is drawn [1], and the law it was drawn from [1,
draft vocab]; None for a point mass."""


class Chain(NamedTuple):
    """A head's chain of k tokens: the logits [k, draft vocab] and laws [k, draft vocab] (None: point masses) they were
    drawn from, the tokens [k] as the target's ids, and the output [1, hidden] after the newest stable row."""

    logits: Tensor
    tokens: Tensor
    probs: Tensor | None
    output: Tensor


class GraphHeadRunner:
    """The contract of `core.heads.runner.HeadRunner`, and chains."""

    def __init__(self, head: FusedHead, capacity: int = 512) -> None:
        self.head = head
        self.device = head.device
        self.length = 0
        self._captures = Captures(self.device)
        self._capacity = 0
        self._move(capacity)

    @property
    def failure(self) -> str | None:
        """The reason in words after a capture failed, when passes have gone on eagerly."""
        return self._captures.failure

    @property
    def usual(self) -> bool:
        """Whether it holds no more memory than one that is kept for later may."""
        return self._capacity <= capacity_for(USUAL)

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        return self.head.logits(output)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    @timed_pass
    @torch.inference_mode()
    def read(self, ids: Tensor, features: Tensor, wanted: int = 1) -> Tensor:
        """Append stable rows: ids [n] and the target's features [n, …] of the token before each; output [n, hidden]. No
        logits come with it, however many are `wanted`."""
        return self._run("read", ids, features)

    @timed_pass
    @torch.inference_mode()
    def draft(self, ids: Tensor, outputs: Tensor, seen: Tensor | None = None) -> Tensor:
        """Append recurrent rows: ids [n] and the outputs [n, hidden] they were proposed from; output [n, hidden].

        Of a tree, `seen` bool [n, m] tells which of the last m rows, these included, each sees: those of its path. The
        rows before are seen by all."""
        return self._run("draft", ids, outputs, seen)

    @timed_pass
    @torch.inference_mode()
    def chain(
        self,
        ids: Tensor,
        rows: Tensor,
        length: int,
        choose: Choose,
        law: Hashable,
        uniforms: Tensor,
    ) -> Chain:
        """Append n stable rows as `read` does, then draft `length` tokens, each drawn by `choose`, for which `law`
        stands. Without ids, `rows` is the output [1, hidden] after the newest stable row."""
        n, start = len(ids), self.length
        width = width_for(n) if n <= ROUND else n
        span = max(width, n + length)
        self.reserve(start + 2 * span)  # what is captured is checked once behind itself
        reach = min(reach_for(start + n + length), self._capacity)
        work = partial(self._chain_work, reach, length, choose, bool(n))
        key = "chain", width, reach, length, law
        self.length = start + n + length - 1
        tensors = padded(ids, width), padded(rows, max(1, width)), uniforms[:length]
        if n <= ROUND:
            other = n - 1 if n > 1 and width_for(n - 1) == width else min(n + 1, width)
            found = self._captures(key, work, (*tensors, start, n), (*tensors, start + span, other))
        else:
            found = work(*tensors, *self._numbers(start, n))
        logits, tokens, output, *probs = (each.clone() for each in found)
        return Chain(logits, tokens, probs[0] if probs else None, output)

    def _chain_work(
        self,
        reach: int,
        length: int,
        choose: Choose,
        reads: bool,
        ids: Tensor,
        rows: Tensor,
        uniforms: Tensor,
        start: Tensor,
        count: Tensor,
    ) -> tuple[Tensor, ...]:
        head, net = self.head, self.head.network
        output = newest = rows
        if reads:
            read = self._pass(reach, ids, net.join(rows.to(head.dtype)), start, start + self._order[: len(ids)])
            output = newest = read.index_select(0, (count - 1)[None])
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        probs: list[Tensor] = []
        while True:
            at = len(tokens)
            row = head.network_logits(output)
            index, q = choose(row, uniforms[at : at + 1])
            tokens.append(head.target_ids[index])
            logits.append(row)
            if q is not None:
                probs.append(q)
            if len(tokens) == length:
                break
            here = start + count + at
            output = self._pass(reach, tokens[-1], net.feed_back(output), here, here[None])
        return torch.cat(logits), torch.cat(tokens), newest, *([torch.cat(probs)] if probs else [])

    def _run(self, kind: str, ids: Tensor, rows: Tensor, seen: Tensor | None = None) -> Tensor:
        n, start = len(ids), self.length
        width = width_for(n) if n <= ROUND else n
        self.reserve(start + 2 * width)
        reach = min(reach_for(start + n), self._capacity)
        given = [padded(ids, width), padded(rows, width)]
        if seen is not None:
            text = start + n - seen.shape[1]
            mask = torch.ones(
                width, reach, dtype=torch.bool, device=self.device
            )  # what a surplus row sees is no matter
            mask[:n, text : start + n] = seen
            mask[:n, start + n :] = False
            given += [padded(text - 1 + seen.sum(1), width), mask]
        self.length = start + n
        work: Work = partial(self._one_pass, kind, reach)
        if n <= ROUND:
            key = kind, width, reach, len(given)
            return self._captures(key, work, (start, *given), (start + width, *given))[0][:n].clone()
        return work(*self._numbers(start), *given)[0]

    def _one_pass(
        self,
        kind: str,
        reach: int,
        start: Tensor,
        ids: Tensor,
        rows: Tensor,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor]:
        net = self.head.network
        inputs = net.join(rows.to(self.head.dtype)) if kind == "read" else net.feed_back(rows)
        at = start + self._order[: len(ids)] if positions is None else positions
        return (self._pass(reach, ids, inputs, start, at, visible),)

    def _pass(
        self, reach: int, ids: Tensor, inputs: Tensor, start: Tensor, at: Tensor, visible: Tensor | None = None
    ) -> Tensor:
        """A pass of ids [n] with inputs [n, hidden] whose keys and values are put from row `start` on; `at` [n] are
        the rows' positions; output [n, hidden]."""
        net, n = self.head.network, len(ids)
        embedded = F.embedding(ids, self.head.table).to(self.head.dtype)
        hidden, q, *made = net.project(embedded[None], inputs[None], at)
        if visible is None:
            visible = self._order[:reach] <= at[:, None]
        slots = start + self._order[:n]
        kv_heads, (heads, _, size) = self._cache.shape[2], q[0].shape
        visible = visible.repeat(heads // kv_heads, 1)
        for i, layer in enumerate(net.stack):
            if i:
                q, *made = net.project_further(i, hidden, at)
            for held, new in zip(self._cache[i], made):
                held.index_copy_(1, slots, new[0])
            # Queries that share a key head become rows of one product: no repeated keys.
            asking = q[0].reshape(1, kv_heads, heads // kv_heads * n, size)
            keys, values = (held[None, :, :reach] for held in self._cache[i])
            seen = F.scaled_dot_product_attention(asking, keys, values, visible)
            hidden = layer.finish(hidden, seen.view(1, heads, n, size))
        return hidden[0]

    def _numbers(self, *numbers: int) -> list[Tensor]:
        return [torch.full((), number, device=self.device) for number in numbers]

    def reserve(self, length: int) -> None:
        """Make room for so many rows: growing later would void what is captured."""
        if length > self._capacity:
            self._move(max(length, capacity_for(length)))
            self._captures.forget()

    @torch.inference_mode()
    def _move(self, capacity: int) -> None:
        config = self.head.config
        shape = config.depth, 2, config.kv_heads, capacity, config.head_dim
        cache = torch.zeros(shape, dtype=self.head.dtype, device=self.device)
        if self._capacity:
            cache[:, :, :, : self._capacity] = self._cache
        self._cache, self._capacity = cache, capacity
        self._order = torch.arange(capacity, device=self.device)


def padded(rows: Tensor, width: int) -> Tensor:
    """Rows [n, …] with rows of zeros below them, so that there are `width`."""
    surplus = width - len(rows)
    return torch.cat([rows, rows.new_zeros(surplus, *rows.shape[1:])]) if surplus else rows
