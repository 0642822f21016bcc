"""Stage times of a round, without a synchronisation of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

Feed = TypeVar("Feed", bound=Callable[..., Any])
T = TypeVar("T")


class _Thread(threading.local):
    off_seconds = 0.0
    timer: PassTimer | None = None


_thread = _Thread()


def engine_time() -> float:
    """Seconds of this thread's engine clock, which stands still in `off_the_clock`. Differences mean something."""
    return time.perf_counter() - _thread.off_seconds


@contextmanager
def off_the_clock(device: torch.device) -> Iterator[None]:
    """What is done once for many runs, such as capturing a pass, is not counted to the run that came first."""
    synchronise(device)
    start = engine_time()  # in which what is off the clock within stands still already
    try:
        yield
    finally:
        synchronise(device)
        _thread.off_seconds += engine_time() - start


def synchronise(device: torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` comes to, and the seconds until the device has done it."""
    synchronise(device)
    start = time.perf_counter()
    found = work()
    synchronise(device)
    return found, time.perf_counter() - start


class Clock:
    """Marks stages as they are queued and reads them once the round has synchronised.

    On CUDA a stage is the time between two events on the stream; elsewhere work is synchronous and host time does.
    The total is host time everywhere, so whatever the stages do not cover shows up as the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, float]] = []
        self._start = self.mark()

    def mark(self) -> float:
        """End a stage; the engine's time on the host."""
        now = engine_time()
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((event, _thread.off_seconds))
        else:
            self._marks.append((None, now))
        return now

    def stop(self) -> tuple[list[float], float]:
        """Seconds of each stage between marks, and of everything since the start. The device must be idle."""
        total = engine_time() - self._start
        pairs = zip(self._marks, self._marks[1:])
        if self._cuda:
            # The device was idle on both ends of what was off the clock, so the events saw all of it.
            return [a.elapsed_time(b) / 1000 - (off_b - off_a) for (a, off_a), (b, off_b) in pairs], total
        return [b - a for (_, a), (_, b) in pairs], total


class PassTimer:
    """While entered, adds up what this thread's forward passes take and nothing around them: the bare passes. What it
    does itself lies around them too, so on a CPU it is as little as can be."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks: list[Clock] = []
        self._host = 0.0

    def __enter__(self) -> PassTimer:
        _thread.timer = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.timer = None

    def time(self, feed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._device.type == "cuda":
            self._clocks.append(clock := Clock(self._device))
            result = feed(*args, **kwargs)
            clock.mark()
            return result
        start = engine_time()
        result = feed(*args, **kwargs)
        self._host += engine_time() - start
        return result

    def seconds(self) -> float:
        """Of all passes so far."""
        synchronise(self._device)
        return self._host + sum(clock.stop()[0][0] for clock in self._clocks)


def timed_pass(feed: Feed) -> Feed:
    """A runner's `feed`, which a PassTimer can hear."""

    @wraps(feed)
    def heard(*args: Any, **kwargs: Any) -> Any:
        timer = _thread.timer
        return feed(*args, **kwargs) if timer is None else timer.time(feed, args, kwargs)

    return heard  # type: ignore[return-value]
