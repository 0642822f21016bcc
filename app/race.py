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
from app.turns import Event, Stop, fetching, with_device, with_pair
from app.verdict import inactive, verdict, why_slower
from core.metrics import first_divergence
from core.records import Run, Settings


def queued_race(
    device: Device, engine: Engine, prompt: str, settings: Settings, stop: Stop, runs: list[Run]
) -> Iterator[Event]:
    """Race once the device is ours. Appends the runs to `runs`."""
    if (remote := engine.remote) is not None:
        engine.admit(settings)
        yield from fetching(engine, settings, stop)
        yield from with_device(device, stop, lambda: remote(prompt, settings, stop, runs))
        return
    yield from with_pair(device, engine, settings, stop, lambda pair: race(engine, pair, prompt, settings, stop, runs))


def race(engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Stop, runs: list[Run]) -> Iterator[Event]:
    """The speculative lane (none where the method is plain) and the plain lane of the same target."""
    yield {"e": "status", "kind": "reading", "text": "Reading the prompt…"}
    lanes = _open(engine, pair, prompt, settings, stop)
    runs.extend(lane.run for lane in lanes)
    kinds = ["plain"] if settings.method == "plain" else ["speculative", "plain"]
    for kind, lane in zip(kinds, lanes):
        yield {"e": "open", "lane": kind, "run": run_head(lane.run)}
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
            yield end_event(kinds[index], run)
    for index in sorted(going):
        yield end_event(kinds[index], lanes[index].run)
    yield verdict_event(runs)


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


def run_head(run: Run) -> Event:
    document = run.to_dict()
    return {key: document[key] for key in ("schema", "settings", "environment", "prompt", "prompt_ids")}


def end_event(kind: str, run: Run) -> Event:
    document = run.to_dict()
    rest = {key: document[key] for key in ("token_ids", "text", "stop_reason", "metrics")}
    return {"e": "end", "lane": kind, "run": rest}


def lane_events(kind: str, run: Run) -> Iterator[Event]:
    """The events of a lane that is over: its run document in parts."""
    yield {"e": "open", "lane": kind, "run": run_head(run)}
    for index, round_ in enumerate(run.rounds):
        event: Event = {"e": "round", "lane": kind, "round": round_.to_dict()}
        if not index:
            event["prefill"] = run.prefill_seconds + run.draft_prefill_seconds
        yield event
    yield end_event(kind, run)


def verdict_event(runs: list[Run]) -> Event:
    """What a finished race says of itself; `runs`: speculative and plain, or one run alone."""
    if len(runs) == 1:
        alone = "One run, without plain decoding beside it to compare."
        return {"e": "verdict", "kind": "inactive", "text": inactive(runs[0]) or alone, "why": None}
    speculative, plain = runs
    greedy = speculative.settings.temperature == 0
    divergence = first_divergence(plain, speculative) if greedy else None
    found = verdict(speculative, plain, divergence)
    why = inactive(speculative) or why_slower(speculative, plain)
    return {"e": "verdict", "kind": found.kind, "text": found.text, "why": why}
