"""What every use of the device has in common: wait for it, load the pair, do the work, answer faults in a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any

from app.serving import Engine
from app.serving.device import CLOSING, Asked, Device, Event, Stop, Turn, in_background
from core.errors import Cancelled, UserError
from core.progress import duration, never
from core.records import Settings

log = logging.getLogger(__name__)

OUR_FAULT = "Something failed on our side; the details are in the server's log. Your prompt and settings are kept."


def guarded(events: Iterator[Event]) -> Iterator[Event]:
    """Turn whatever is raised into one sentence; `done` is always the last event."""
    try:
        yield from events
    except Cancelled as stopped:
        yield {"e": "status", "kind": "idle", "text": sentence(stopped)}
    except Exception as error:
        yield {"e": "error", "text": sentence(error)}
    yield {"e": "done"}


def sentence(error: Exception) -> str:
    """What a person is told of an error: its own sentence, or for a fault of ours that the log has the details."""
    if isinstance(error, (UserError, Cancelled)):
        return str(error) or "Stopped."
    log.error("a run failed", exc_info=error)
    return OUR_FAULT


def with_pair(
    device: Device,
    engine: Engine,
    settings: Settings,
    stop: Stop,
    work: Callable[[Any], Iterator[Event]],
    purpose: str | None = None,
) -> Iterator[Event]:
    """The events of `work(pair)` once the device is ours and the pair of `settings` is loaded; statuses until then.

    What has to be downloaded is fetched first, while others use the device.
    """

    def load_and_work() -> Iterator[Event]:
        yield from work((yield from loading(device, engine, settings, stop)))

    yield from fetching(engine, settings, stop)
    yield from with_device(device, stop, load_and_work, purpose)


def with_device(
    device: Device, stop: Stop, work: Callable[[], Iterator[Event]], purpose: str | None = None
) -> Iterator[Event]:
    """The events of `work()` once the device is ours; statuses until then. `purpose`: see `Turn`. UserError once it has
    lasted longer than a turn may."""
    with device.turn(purpose, stop.visitor if isinstance(stop, Asked) else None) as turn:
        while not turn.wait(0.5):
            yield {"e": "status", "kind": "queued", "text": _queued(turn)}
            if stop():
                yield {"e": "status", "kind": "idle", "text": "Stopped while waiting; nothing was run."}
                return
            if device.closing:
                raise UserError(CLOSING)
        for event in work():
            if (left := event.get("left")) is not None:
                turn.tell_left(left)
            yield event
            if device.closing:
                raise UserError(CLOSING)
            if device.overdue(turn):
                longest = duration(device.seconds or 0)
                raise UserError(f"On this public page a run ends after {longest}; ask for less at a time.")


def fetching(engine: Engine, settings: Settings, stop: Stop = never) -> Iterator[Event]:
    """Download what the pair of `settings` lacks on this machine, saying how far it is. Needs no turn on the device."""
    if not engine.is_loaded(settings):

        def fetch(tell: Any, halt: Stop) -> None:
            engine.fetch(settings, tell, halt)

        yield from in_background(fetch, stop, "Looking for the models…")


def loading(device: Device, engine: Engine, settings: Settings, stop: Stop = never) -> Generator[Event, None, Any]:
    """Load the pair of `settings` and return it, saying how far it is. The device must be ours."""
    if engine.is_loaded(settings):
        return engine.load(settings)

    def load(tell: Any, halt: Stop) -> Any:
        return engine.load(settings, tell, halt)

    return (yield from in_background(load, stop, "Loading the models…", device))


def _queued(turn: Turn) -> str:
    """The place in line, what goes on now, and how long that will probably be."""
    ahead = max(1, turn.ahead)  # it may have become ours this very moment
    runs = "one run is" if ahead == 1 else f"{ahead} runs are"
    purpose, lasted = turn.at_work
    place = f"Queued: {runs} ahead of yours on this device"
    wait = turn.expected_wait
    if wait is None:
        return f"{place}; now {purpose or 'a run goes on'}, for {duration(lasted)} so far. Yours starts by itself."
    going = f"; now {purpose}" if purpose else ""
    return f"{place}{going}. Yours starts by itself in about {duration(wait)}."


def as_events(steps: Generator[Any, None, dict[str, Any]]) -> Iterator[Event]:
    """Progress by the steps of a measurement, and at last its document."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            yield {"e": "document", "document": end.value}
            return
        yield {"e": "progress", "done": step.done, "total": step.total, "left": step.left, "text": str(step)}
