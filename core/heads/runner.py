"""A head with one key/value cache; what its passes cost here.

The cache holds stable rows, whose features are the target's own, and behind them the recurrent rows of the round in
progress, which `truncate` drops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.costs import CHAIN, CostTable, table_of
from core.heads.block import FusedHead
from core.heads.graph import GraphHeadRunner
from core.heads.mtp import MtpHead, MtpRunner
from core.heads.native import NativePasses
from core.runners import Favourites, favourites_of
from core.runners.clock import timed, timed_pass
from core.sampling import likeliest

ROWS, REPEATS = (1, 2, 4, 8), 7
"""Of the timed passes."""


class HeadRunner:
    """One key/value cache over a head. `length` counts its rows; row i stands at position i (attention sees distances
    only, so that a text whose beginning the head has not read may begin at 0 too)."""

    def __init__(self, head: FusedHead, capacity: int = 512) -> None:
        self.head = head
        self.device = head.device
        self.length = 0
        assert head.native is not None
        self._passes = NativePasses(head.native, capacity)
        self._told: tuple[Tensor, Tensor] | None = None
        """The outputs of the newest pass whose logits came with it, and those."""
        self.favourites: Favourites | None = None
        """Of those rows; none where `logits` was asked for others."""

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    @timed_pass
    @torch.inference_mode()
    def read(self, ids: Tensor, features: Tensor, wanted: int = 1) -> Tensor:
        """Append stable rows: ids [n] and the target's features [n, …] of the token before each; output [n, hidden].
        Logits of the last rows `wanted` come with it."""
        return self._pass(ids, features, False, None, wanted)

    @timed_pass
    @torch.inference_mode()
    def draft(self, ids: Tensor, outputs: Tensor, seen: Tensor | None = None) -> Tensor:
        """Append recurrent rows: ids [n] and the outputs [n, hidden] they were proposed from; output [n, hidden].

        Of a tree, `seen` bool [n, m] tells which of the last m rows, these included, each sees: those of its path. The
        rows before are seen by all."""
        return self._pass(ids, self.head.network.feed_back(outputs.to(self.head.dtype)), True, seen, len(ids))

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]. Those of the last row read, and of all that were drafted
        on from, came with the pass."""
        if self._told is not None:
            rows, logits = self._told
            if output.data_ptr() == rows.data_ptr() and output.shape == rows.shape:
                return logits
        self.favourites = None
        return self.head.logits(output)

    def _pass(self, ids: Tensor, rows: Tensor, joined: bool, seen: Tensor | None, wanted: int) -> Tensor:
        start = self.length
        self.length += len(ids)
        outputs, logits, self.favourites = self._passes(ids, start, rows, joined, seen, wanted)
        self._told = outputs[len(outputs) - wanted :], logits
        return outputs


@dataclass(frozen=True)
class HeadCosts:
    """Seconds of a pass that reads n rows of features and proposes one token, `read`; and of one that drafts on from n
    of its own outputs and proposes after each, `draft`."""

    read: CostTable
    draft: CostTable

    def to_dict(self) -> dict[str, Any]:
        return {"read": self.read.to_dict(), "draft": self.draft.to_dict()}


AnyHead = FusedHead | MtpHead
AnyHeadRunner = HeadRunner | GraphHeadRunner | MtpRunner


def runner_of(head: AnyHead, capacity: int = 512) -> AnyHeadRunner:
    """A new runner with an empty cache."""
    if isinstance(head, MtpHead):
        return MtpRunner(head)
    return (HeadRunner if head.native else GraphHeadRunner)(head, capacity)


@torch.inference_mode()
def time_head(target: Any, runner: AnyHeadRunner, context: int, repeats: int = REPEATS) -> HeadCosts:
    """Passes of a head behind passes of its target's runner, which push it out of the processor's caches. Where chains
    are captured, one of them is timed: what a token more takes of it, its draw included, is a pass over one output."""
    features = target.watch(runner.head.layers)

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
            if isinstance(runner, GraphHeadRunner):
                one, more = (_time_chain(runner, context, ones(n), rows, length) for length in (1, 1 + CHAIN))
                read[n][-1] = one
                if n == 1:
                    draft[n][-1] = max(0.0, more - one) / CHAIN
            runner.truncate(context)
            target.truncate(context)
    return HeadCosts(table_of(read), table_of(draft))


def _time_chain(runner: GraphHeadRunner, context: int, ids: Tensor, rows: Tensor, length: int) -> float:
    runner.truncate(context)
    uniforms = torch.zeros(length, device=runner.device, dtype=torch.float32)

    def draft() -> None:
        runner.chain(ids, rows, length, lambda row, uniform: (row.max(-1).indices, None), "likeliest", uniforms)

    return timed(runner.device, draft)[1]


def _time(runner: AnyHeadRunner, one_pass: Callable[[], Tensor]) -> tuple[Tensor, float]:
    def propose() -> Tensor:
        output = one_pass()
        logits = runner.logits(output)
        if favourites_of(runner) is None:
            likeliest(logits)
        return output

    return timed(runner.device, propose)
