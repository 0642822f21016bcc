"""How many CPU threads a model is run with.

Threads meet at the end of every operation. If another program holds one core for a moment, all wait for it, and a pass
of a small model becomes tens of times slower; so more threads must earn their place by a clear gain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch

WORTH_IT = 1.3


def fastest_threads(work: Callable[[], object], repeats: int = 7) -> int:
    """One thread, unless all of them do `work` at least 1.3 times as fast; OMP_NUM_THREADS decides where it is set."""
    most = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or most == 1:
        return most
    seconds = {n: _time(work, n, repeats) for n in (1, most)}
    best = most if seconds[1] > WORTH_IT * seconds[most] else 1
    torch.set_num_threads(best)
    return best


def use_threads(count: int) -> None:
    """Threads are a setting of the calling thread, and a server's calls come from many."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _time(work: Callable[[], object], threads: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    samples = []
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        work()
        if repeat >= 2:
            samples.append(time.perf_counter() - start)
    return median(samples)
