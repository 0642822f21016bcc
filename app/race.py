"""A race as a stream of events: plain dictionaries, in the order in which the page draws them.

Events (`e` names the kind): `status` (what is going on, in words), `open` (a lane and the head of its run document),
`round` (one round of a lane, as in the document), `end` (the rest of a lane's document), `verdict`, `error`, `done`.
A lane's `open`, `round` and `end` events together are its run document: what is shown is what is exported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from app.device import Device
from app.engine import Engine
from app.verdict import inactive, verdict, why_slower
from core.errors import UserError
from core.metrics import first_divergence
from core.records import Run, Settings

Event = dict[str, Any]
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


def queued_race(
    device: Device, engine: Engine, prompt: str, settings: Settings, stop: Callable[[], bool], runs: list[Run]
) -> Iterator[Event]:
    """Wait for the device, load the pair where it is not loaded, race. Appends the runs to `runs`."""
    with device.turn() as turn:
        while not turn.wait(0.5):
            yield {"e": "status", "kind": "queued", "text": _queued(turn.ahead)}
            if stop():
                yield {"e": "status", "kind": "idle", "text": "Stopped while waiting; nothing was run."}
                return
        if not engine.is_loaded(settings):
            yield {"e": "status", "kind": "loading", "text": "Loading the models…"}
        pair = engine.load(settings)
        yield from race(engine, pair, prompt, settings, stop, runs)


def race(
    engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Callable[[], bool], runs: list[Run]
) -> Iterator[Event]:
    """The speculative lane (none where the method is plain) and the plain lane of the same target."""
    yield {"e": "status", "kind": "reading", "text": "Reading the prompt…"}
    lanes = _open(engine, pair, prompt, settings, stop)
    runs.extend(lane.run for lane in lanes)
    kinds = ["plain"] if settings.method == "plain" else ["speculative", "plain"]
    for kind, lane in zip(kinds, lanes):
        yield {"e": "open", "lane": kind, "run": _head(lane.run)}
    started: set[int] = set()
    going = set(range(len(lanes)))
    for index, round_ in engine.race(lanes):
        run = lanes[index].run
        event: Event = {"e": "round", "lane": kinds[index], "round": round_.to_dict()}
        if index not in started:
            started.add(index)
            event["prefill"] = run.prefill_seconds + run.draft_prefill_seconds
        yield event
        if run.stop_reason and index in going:
            going.discard(index)
            yield _end(kinds[index], run)
    for index in sorted(going):
        yield _end(kinds[index], lanes[index].run)
    yield _verdict(runs)


def _open(engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Callable[[], bool]) -> list[Any]:
    lanes: list[Any] = []
    try:
        if settings.method != "plain":
            lanes.append(engine.open_lane(pair, prompt, settings, stop))
        lanes.append(engine.open_lane(pair, prompt, replace(settings, method="plain"), stop))
    except BaseException:
        for lane in lanes:
            lane.close()
        raise
    return lanes


def _head(run: Run) -> Event:
    document = run.to_dict()
    return {key: document[key] for key in ("schema", "settings", "environment", "prompt", "prompt_ids")}


def _end(kind: str, run: Run) -> Event:
    document = run.to_dict()
    rest = {key: document[key] for key in ("token_ids", "text", "stop_reason", "metrics")}
    return {"e": "end", "lane": kind, "run": rest}


def _verdict(runs: list[Run]) -> Event:
    if len(runs) == 1:
        return {"e": "verdict", "kind": "inactive", "text": inactive(runs[0]) or "", "why": None}
    speculative, plain = runs
    greedy = speculative.settings.temperature == 0
    divergence = first_divergence(plain, speculative) if greedy else None
    found = verdict(speculative, plain, divergence)
    why = inactive(speculative) or why_slower(speculative, plain)
    return {"e": "verdict", "kind": found.kind, "text": found.text, "why": why}


def _queued(ahead: int) -> str:
    runs = "one run is" if ahead == 1 else f"{ahead} runs are"
    return f"Queued: {runs} ahead of yours on this device. It starts by itself."
