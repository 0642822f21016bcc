"""What a head's passes cost here: reading the rows of a round, and drafting on from its own output."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from core.clock import synchronise
from core.costs import CostTable
from core.heads.runner import FusedHead, HeadRunner

ROWS = (1, 2, 4, 8)
REPEATS = 7


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
