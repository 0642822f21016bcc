"""What long work is given: a way to say how far it has come, in bytes and words, and to learn that it should stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Lock
from typing import TextIO

Progress = Callable[[str], None]
"""Takes one line that replaces the one before."""
Stop = Callable[[], bool]
"""Asked now and then: whether somebody wants the work to end."""
TELLS_PER_SECOND = 4.0
SECONDS_BETWEEN_LINES = 10.0
"""Of a progress that is written into a file."""


def silent(message: str) -> None:
    pass


def never() -> bool:
    return False


def in_bytes(n: float, digits: int = 2) -> str:
    """A number of bytes to at least so many digits, in decimal units as disks and networks count them."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= size:
            return f"{n / size:.1f} {unit}" if n < 10 ** (digits - 1) * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} bytes"


def duration(seconds: float) -> str:
    """Time as people say it."""
    if seconds < 90:
        whole = max(1, round(seconds))
        return f"{whole} seconds" if whole > 1 else "1 second"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{seconds / 3600:.1f} hours"


class Meter:
    """Counts bytes from any thread and tells how far it is, a few times a second."""

    def __init__(self, what: str, total: int, tell: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.done = what, total, 0
        self._tell, self._clock = tell, clock
        self._told: float | None = None
        self._lock = Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self.done += n
            now = self._clock()
            if self._told is not None and now - self._told < 1 / TELLS_PER_SECOND and self.done < self.total:
                return
            self._told = now
            text = str(self)
        self._tell(text)

    def __str__(self) -> str:
        return f"{self.what}: {in_bytes(self.done)} of {in_bytes(self.total)}"


def console(stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress for a terminal, where a line is written over by the next one of the same kind; anywhere else a line now
    and then."""
    written: dict[str, float] = {}

    def tell(message: str) -> None:
        what, _, done = message.partition(": ")
        ended = len(set(done.split(" of "))) == 1  # "1.2 GB of 1.2 GB", or no figures
        if stream.isatty():
            print(f"\r\x1b[K{message}", end="\n" if ended else "", file=stream, flush=True)
        elif ended or clock() - written.get(what, float("-inf")) >= SECONDS_BETWEEN_LINES:
            written[what] = clock()
            print(message, file=stream, flush=True)

    return tell
