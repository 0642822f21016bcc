"""One device, one run at a time: a first-come queue whose members know how many are ahead of them.

A long job in a thread, watched from a generator of events: the page hears how far it is and can still stop. Gradio
closes such a generator on its event loop when a tab closes, so nothing here waits for a job then: the job keeps the
device, and gives it back by itself when it ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Condition, Thread
from threading import Event as Flag
from typing import Any, TypeVar

from core.errors import Cancelled, UserError
from core.progress import Progress, Stop

log = logging.getLogger(__name__)

CLOSING = "The program is being shut down; what was written so far is kept here."


@dataclass(frozen=True)
class Asked:
    """A run that somebody asked for, called like any `Stop`: whether that visitor has pressed Stop since."""

    visitor: str
    flag: Flag = field(default_factory=Flag)

    def __call__(self) -> bool:
        return self.flag.is_set()


class Turn:
    """A place in the queue."""

    def __init__(self, device: Device, purpose: str | None = None, visitor: str | None = None) -> None:
        self._device = device
        self.purpose = purpose
        """What goes on in it, in words, where that takes as long as somebody likes: not like other turns."""
        self.visitor = visitor
        self.holders = 1
        """The reader of its events, and jobs that are still at work."""
        self.since: float | None = None
        """When the device became ours."""
        self.ends: float | None = None
        """When it is probably somebody else's, where that was told."""

    def tell_left(self, seconds: float) -> None:
        """How long this turn will still take."""
        self.ends = self._device.now() + seconds

    @property
    def at_work(self) -> tuple[str | None, float]:
        """The `purpose` of the turn that has the device, and for how many seconds it has had it."""
        return self._device.at_work()

    @property
    def ahead(self) -> int:
        """How many runs come before this one; 0 means the device is yours."""
        return self._device.position(self)

    @property
    def expected_wait(self) -> float | None:
        """Seconds until the device is probably yours: by what those ahead told, or how long the last turns took that
        had no purpose of their own. None while nobody knows."""
        return self._device.expected_wait(self)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True once the device is yours."""
        return self._device.wait(self, seconds)


class Device:
    """Everything that computes takes a turn here, so that no run disturbs the timing of another.

    `longest`: how many may wait or run; `of_one`: how many of them for one visitor; `seconds`: how long one may run.
    None: as many, as long as they like.
    """

    def __init__(self, longest: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest = longest
        self.of_one: int | None = None
        self.seconds: float | None = None
        self._clock = clock
        self._turns: list[Turn] = []
        self._lasted: deque[float] = deque(maxlen=8)
        self._changed = Condition()
        self._closing = Flag()

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
    def turn(self, purpose: str | None = None, visitor: str | None = None) -> Iterator[Turn]:
        """Join the queue; leaves it when the block ends, however it ends, and no job holds the device any more."""
        turn = Turn(self, purpose, visitor)
        with self._changed:
            if self.closing:
                raise UserError(CLOSING)
            if len(self._turns) >= self.longest:
                raise UserError(f"{len(self._turns)} runs are waiting already; please try again in a minute.")
            if visitor and self.of_one and sum(each.visitor == visitor for each in self._turns) >= self.of_one:
                raise UserError("Your earlier runs are waiting already; please let them end, or stop them, first.")
            self._turns.append(turn)
        try:
            yield turn
        finally:
            self._leave(turn)

    def hold(self) -> Callable[[], None]:
        """Whoever has the device keeps it until what this returns is called, whatever becomes of the turn's block."""
        with self._changed:
            if not self._turns:
                return lambda: None
            turn = self._turns[0]
            turn.holders += 1
        return lambda: self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        with self._changed:
            turn.holders -= 1
            if turn.holders:
                return
            self._turns.remove(turn)
            if turn.since is not None and turn.purpose is None:
                self._lasted.append(self._clock() - turn.since)
            self._changed.notify_all()

    def overdue(self, turn: Turn) -> bool:
        """Whether a turn has lasted longer than one may."""
        return self.seconds is not None and turn.since is not None and self._clock() - turn.since > self.seconds

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

    def now(self) -> float:
        return self._clock()

    def at_work(self) -> tuple[str | None, float]:
        with self._changed:
            first = self._turns[0]
            return first.purpose, self.now() - (self.now() if first.since is None else first.since)

    def expected_wait(self, turn: Turn) -> float | None:
        with self._changed:
            waits = [self._left(each) for each in self._turns[: self._turns.index(turn)]]
        return None if None in waits else sum(each for each in waits if each is not None)

    def _left(self, turn: Turn) -> float | None:
        """Seconds that a turn will probably still take."""
        if turn.ends is not None:
            return max(0.0, turn.ends - self.now())
        if turn.purpose or not self._lasted:
            return None
        gone = 0.0 if turn.since is None else self.now() - turn.since
        return max(0.0, median(self._lasted) - gone)


ONCE = "what a start leaves for later is measured, once"


def when_free(device: Device, *jobs: Callable[[], object]) -> None:
    """Do some jobs in a turn of their own as soon as the device is free: while the first visitors are still reading."""
    with suppress(UserError), device.turn(ONCE) as turn:
        while not turn.wait(0.5):
            if device.closing:
                return
        for job in jobs:
            if not device.closing:
                job()


T = TypeVar("T")
Event = dict[str, Any]
LOOKS_PER_SECOND = 5.0


def in_thread(job: Callable[[], T], device: Device | None, name: str = "background") -> Future[T]:
    """Run a job in a thread of its own; whoever has the `device` keeps it until the job ends."""
    give_back = device.hold() if device else lambda: None
    future: Future[T] = Future()

    def run() -> None:
        try:
            found = job()
        except BaseException as error:
            give_back()
            future.set_exception(error)
        else:
            give_back()
            future.set_result(found)

    try:
        Thread(target=run, name=name, daemon=True).start()
    except BaseException:  # the machine has no more threads
        give_back()
        raise
    return future


def leave_alone(future: Future[Any]) -> None:
    """Nobody waits for a job any more: what goes wrong in it goes to the log."""

    def report(ended: Future[Any]) -> None:
        error = ended.exception()
        if error is not None and not isinstance(error, (UserError, Cancelled)):
            log.error("a job failed that nobody waits for any more", exc_info=error)

    if not future.done():
        future.add_done_callback(report)


def in_background(
    job: Callable[[Progress, Stop], T], stop: Stop, first: str, device: Device | None = None
) -> Generator[Event, None, T]:
    """Run `job(progress, stop)` in a thread and return what it returns; what it tells comes as status events, `first`
    to begin with. The job is asked to stop after `stop`, and when the reader of the events goes away.

    A job that uses the `device` is waited for after `stop`, and keeps the device where its reader goes away; one that
    needs none is left behind.
    """
    told = deque([first], maxlen=1)
    gone = Flag()
    future = in_thread(lambda: job(told.append, lambda: gone.is_set() or stop()), device)
    shown, stopping = "", False
    try:
        while True:
            if told[-1] != shown and not stopping:
                shown = told[-1]
                yield {"e": "status", "kind": "loading", "text": shown}
            try:
                return future.result(1 / LOOKS_PER_SECOND)
            except NotYet:
                if future.done():  # the job's own
                    raise
            if stop() and device is None:
                raise Cancelled("Stopped while downloading; the files that came whole are kept.")
            if stop() and not stopping:
                stopping = True
                yield {"e": "status", "kind": "loading", "text": "Stopping: what is being loaded is freed in a moment."}
    finally:
        gone.set()
        leave_alone(future)
