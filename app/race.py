"""A race as a stream of events: plain dictionaries, in the order in which the page draws them.

Events (`e` names the kind): `status` (what is going on, in words), `open` (a lane and the head of its run document),
`round` (one round of a lane, as in the document), `end` (the rest of a lane's document), `verdict`, `error`, `done`.
A lane's `open`, `round` and `end` events together are its run document: what is shown is what is exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from app.device import Device
from app.engine import Engine
from app.turns import Event, Stop, with_pair
from app.verdict import inactive, verdict, why_slower
from core.metrics import first_divergence
from core.records import Run, Settings


def queued_race(
    device: Device, engine: Engine, prompt: str, settings: Settings, stop: Stop, runs: list[Run]
) -> Iterator[Event]:
    """Race once the device is ours. Appends the runs to `runs`."""
    yield from with_pair(device, engine, settings, stop, lambda pair: race(engine, pair, prompt, settings, stop, runs))


def race(engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Stop, runs: list[Run]) -> Iterator[Event]:
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


def _open(engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Stop) -> list[Any]:
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
