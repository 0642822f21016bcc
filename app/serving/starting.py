"""A start in a hurry: models are loaded in a thread while the page is imported, and garbage is left for later."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

from app.serving import Engine
from core.progress import Progress, Stop

HANDED_OVER = 0.0002
"""Seconds after which a thread that only runs Python lets another in; Python's own 0.005 would pass after every
operation on tensors of one that loads, while the other imports."""
T = TypeVar("T")


def load(engine: Engine, progress: Progress, stop: Stop) -> Any:
    """The first pair of an engine, with a processor left to what happens beside; so nothing is timed yet."""
    from core.loading.model import ALL_THREADS, threads

    with threads(max(1, ALL_THREADS - 1)):
        return engine.load(engine.settings, progress, stop, measure=False)


def leave_garbage() -> None:
    """Importing and loading make a million objects that stay, and looking for garbage among them takes a sixth of a
    start: nobody looks, until `clear_up`."""
    gc.disable()


def clear_up() -> None:
    """Free what the start left behind, and never look at again what it made to stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def without_stubs() -> Iterator[None]:
    """Import Gradio without the editor's stubs, which it writes anew for each of its components at every import: half
    of the import's time. A component whose class has no source file gets none."""
    real = inspect.getfile

    def getfile(thing: Any) -> str:
        if getattr(thing, "__module__", "").startswith("gradio."):
            raise OSError("no stub")
        return real(thing)

    inspect.getfile = getfile
    try:
        yield
    finally:
        inspect.getfile = real


@contextmanager
def beside(job: Callable[[Stop], T]) -> Iterator[Future[T]]:
    """Run `job(stop)` in a thread beside the block, at whose end it has ended too; an error in the block stops it."""
    stopped, interval = Event(), sys.getswitchinterval()
    sys.setswitchinterval(HANDED_OVER)
    try:
        with ThreadPoolExecutor(1, "loading") as pool:
            try:
                yield pool.submit(job, stopped.is_set)
            except BaseException:
                stopped.set()
                raise
    finally:
        sys.setswitchinterval(interval)
