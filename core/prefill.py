"""Reading a prompt: long texts in chunks, so that a run can be stopped between them."""

from __future__ import annotations

from collections.abc import Sequence

from core.clock import engine_time, synchronise
from core.errors import Cancelled
from core.progress import Stop
from core.runner import Runner, ids_on

PREFILL_CHUNK = 256


def prefill(runner: Runner, ids: Sequence[int], stop: Stop) -> float:
    """Feed what the cache misses of ids, in chunks between which `stop` is asked; returns the seconds it took."""
    start = engine_time()
    while runner.length < len(ids):
        if stop():
            raise Cancelled
        chunk = ids[runner.length : min(runner.length + PREFILL_CHUNK, len(ids))]
        runner.feed(ids_on(runner.device, chunk), rows=1)
    synchronise(runner.device)
    return engine_time() - start
