"""Stage times of a round, without a synchronisation of their own."""

from __future__ import annotations

import time

import torch


class Clock:
    """Marks stages as they are queued and reads them once the round has synchronised.

    On CUDA a stage is the time between two events on the stream; elsewhere work is synchronous and host time does.
    The total is host time everywhere, so whatever the stages do not cover shows up as the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []
        self._start = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> tuple[list[float], float]:
        """Seconds of each stage between marks, and of everything since the start. The device must be idle."""
        total = time.perf_counter() - self._start
        pairs = zip(self._marks, self._marks[1:])
        if self._cuda:
            return [a.elapsed_time(b) / 1000 for a, b in pairs], total
        return [b - a for a, b in pairs], total
