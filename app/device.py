"""One device, one run at a time: a first-come queue whose members know how many are ahead of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from core.errors import UserError


class Turn:
    """A place in the queue."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def ahead(self) -> int:
        """How many runs come before this one; 0 means the device is yours."""
        return self._device.position(self)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True once the device is yours."""
        return self._device.wait(self, seconds)


class Device:
    """Everything that computes takes a turn here, so that no run disturbs the timing of another."""

    def __init__(self, longest: int = 32) -> None:
        self._longest = longest
        self._turns: list[Turn] = []
        self._changed = Condition()

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Join the queue; leaves it when the block ends, however it ends."""
        turn = Turn(self)
        with self._changed:
            if len(self._turns) >= self._longest:
                raise UserError(f"{len(self._turns)} runs are waiting already; please try again in a minute.")
            self._turns.append(turn)
        try:
            yield turn
        finally:
            with self._changed:
                self._turns.remove(turn)
                self._changed.notify_all()

    def position(self, turn: Turn) -> int:
        with self._changed:
            return self._turns.index(turn)

    def wait(self, turn: Turn, seconds: float) -> bool:
        with self._changed:
            before = self._turns.index(turn)
            self._changed.wait_for(lambda: self._turns.index(turn) < before or before == 0, seconds)
            return self._turns[0] is turn
