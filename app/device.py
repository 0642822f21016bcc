"""One device, one run at a time: a first-come queue whose members know how many are ahead of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from threading import Condition, Event

from core.errors import UserError

CLOSING = "The program is being shut down; what was written so far is kept here."


class Turn:
    """A place in the queue."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.since: float | None = None
        """When the device became ours."""

    @property
    def ahead(self) -> int:
        """How many runs come before this one; 0 means the device is yours."""
        return self._device.position(self)

    @property
    def expected_wait(self) -> float | None:
        """Seconds until the device is probably yours, by how long the last turns took; None while nobody knows."""
        return self._device.expected_wait(self)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True once the device is yours."""
        return self._device.wait(self, seconds)


class Device:
    """Everything that computes takes a turn here, so that no run disturbs the timing of another."""

    def __init__(self, longest: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest = longest
        self._clock = clock
        self._turns: list[Turn] = []
        self._lasted: deque[float] = deque(maxlen=8)
        self._changed = Condition()
        self._closing = Event()

    @property
    def closing(self) -> bool:
        """Whether the program is about to end: whoever has the device gives it back, and nobody new gets it."""
        return self._closing.is_set()

    def close(self) -> None:
        """From now on nothing may start here. Safe in a signal handler."""
        self._closing.set()

    def drain(self, seconds: float) -> bool:
        """Wait at most so long until nobody has the device or waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._turns, seconds)

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Join the queue; leaves it when the block ends, however it ends."""
        turn = Turn(self)
        with self._changed:
            if self.closing:
                raise UserError(CLOSING)
            if len(self._turns) >= self.longest:
                raise UserError(f"{len(self._turns)} runs are waiting already; please try again in a minute.")
            self._turns.append(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._turns.remove(turn)
                if turn.since is not None:
                    self._lasted.append(self._clock() - turn.since)
                self._changed.notify_all()

    def position(self, turn: Turn) -> int:
        with self._changed:
            return self._turns.index(turn)

    def wait(self, turn: Turn, seconds: float) -> bool:
        with self._changed:
            before = self._turns.index(turn)
            self._changed.wait_for(lambda: self._turns.index(turn) < before or before == 0, seconds)
            mine = self._turns[0] is turn
            if mine and turn.since is None:
                turn.since = self._clock()
            return mine

    def expected_wait(self, turn: Turn) -> float | None:
        with self._changed:
            ahead = self._turns.index(turn)
            if not ahead or not self._lasted:
                return 0.0 if not ahead else None
            usual, running = median(self._lasted), self._turns[0].since
            left = max(0.0, usual - (self._clock() - running)) if running is not None else usual
            return left + (ahead - 1) * usual
