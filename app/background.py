"""A long job in a thread, watched from a generator of events: the page hears how far it is and can still stop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from threading import Event as Flag
from typing import Any, TypeVar

from core.errors import Cancelled
from core.progress import Progress, Stop

T = TypeVar("T")
Event = dict[str, Any]
LOOKS_PER_SECOND = 5.0


def in_background(
    job: Callable[[Progress, Stop], T], stop: Stop, first: str, abandon: bool = False
) -> Generator[Event, None, T]:
    """Run `job(progress, stop)` in a thread and return what it returns; what it tells comes as status events, `first`
    to begin with. The job is asked to stop after `stop`, and when the reader of the events goes away.

    A job that may be abandoned is left behind then, to end by itself; any other is waited for, however it ends.
    """
    told = [first]
    gone = Flag()
    pool = ThreadPoolExecutor(1, thread_name_prefix="background")
    future = pool.submit(job, told.append, lambda: gone.is_set() or stop())
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
            if stop() and abandon:
                raise Cancelled("Stopped while downloading; what has come is kept, the next try goes on from there.")
            if stop() and not stopping:
                stopping = True
                yield {"e": "status", "kind": "loading", "text": "Stopping: what is being loaded is freed in a moment."}
    finally:
        gone.set()
        pool.shutdown(wait=not abandon, cancel_futures=True)
