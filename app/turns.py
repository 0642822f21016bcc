"""What every use of the device has in common: wait for it, load the pair, do the work, answer faults in a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from app.device import Device
from app.engine import Engine
from core.errors import UserError
from core.records import Settings

Event = dict[str, Any]
Stop = Callable[[], bool]
log = logging.getLogger(__name__)

OUR_FAULT = "Something failed on our side; the details are in the server's log. Your prompt and settings are kept."


def guarded(events: Iterator[Event]) -> Iterator[Event]:
    """Turn whatever is raised into one sentence; `done` is always the last event."""
    try:
        yield from events
    except UserError as error:
        yield {"e": "error", "text": str(error)}
    except Exception:
        log.exception("a run failed")
        yield {"e": "error", "text": OUR_FAULT}
    yield {"e": "done"}


def with_pair(
    device: Device, engine: Engine, settings: Settings, stop: Stop, work: Callable[[Any], Iterator[Event]]
) -> Iterator[Event]:
    """The events of `work(pair)` once the device is ours and the pair of `settings` is loaded; statuses until then."""
    with device.turn() as turn:
        while not turn.wait(0.5):
            yield {"e": "status", "kind": "queued", "text": _queued(turn.ahead)}
            if stop():
                yield {"e": "status", "kind": "idle", "text": "Stopped while waiting; nothing was run."}
                return
        if not engine.is_loaded(settings):
            yield {"e": "status", "kind": "loading", "text": "Loading the models…"}
        yield from work(engine.load(settings))


def _queued(ahead: int) -> str:
    runs = "one run is" if ahead == 1 else f"{ahead} runs are"
    return f"Queued: {runs} ahead of yours on this device. It starts by itself."
