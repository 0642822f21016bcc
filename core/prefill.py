"""Reading a prompt: long texts in chunks, so that a run can be stopped between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from core.errors import Cancelled
from core.model import synchronise
from core.runner import Runner

PREFILL_CHUNK = 256
Stop = Callable[[], bool]


def never() -> bool:
    return False


def prefill(runner: Runner, ids: Sequence[int], stop: Stop) -> float:
    """Feed what the cache misses of ids, in chunks between which `stop` is asked; returns the seconds it took."""
    start = time.perf_counter()
    while runner.length < len(ids):
        if stop():
            raise Cancelled
        chunk = ids[runner.length : min(runner.length + PREFILL_CHUNK, len(ids))]
        runner.feed(torch.tensor(chunk, device=runner.device), rows=1)
    synchronise(runner.device)
    return time.perf_counter() - start
