"""Hugging Face Spaces. On ZeroGPU a race is a job in a forked process, which has a GPU for a while: settings go in and
events come out, plain data both ways. The costs it measured come back with the last event and go into the next job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from app.serving import Engine
from app.serving.device import Event, Stop, in_background
from app.serving.turns import guarded
from core.errors import UserError
from core.progress import never
from core.records import Run, Settings, run_from_dict

Job = Callable[[dict[str, Any], str, dict[str, Any]], Iterator[Event]]
"""(settings, prompt, costs by role) -> events; everything can be pickled."""
WHY_DYNAMIC = "a process of ZeroGPU lives for one run, too short to capture passes for"
LOADING_SECONDS, SECONDS_PER_TOKEN, MARGIN = 30, 0.05, 10
"""Guesses for a pair that never ran here; once it did, its measured costs take the place of the second."""
SHORTEST, LONGEST = 30, 180
"""Seconds of a GPU that a job asks for."""


def on_zero_gpu() -> bool:
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def seconds_of_gpu(settings: dict[str, Any], prompt: str, costs: dict[str, Any]) -> int:
    """How long a job may take: loading, and both lanes at the price of one plain step for every token."""
    target = costs.get("target", {}).get("costs", {})
    step = float(target.get("1", SECONDS_PER_TOKEN))
    seconds = LOADING_SECONDS + 2 * settings["max_new_tokens"] * step + MARGIN
    return min(LONGEST, max(SHORTEST, math.ceil(seconds)))


def race_job(settings: dict[str, Any], prompt: str, costs: dict[str, Any]) -> Iterator[Event]:
    """Load the pair, race, and tell what passes cost. Nothing outlives it: no runner, tensor, lock or module state."""
    found: dict[str, Any] = {}

    def events() -> Iterator[Event]:
        from app.playground.race import race  # its room imports Gradio, which a start leaves for later
        from core.costs import CostTable
        from core.loading import load_pair

        chosen = Settings(**settings)
        known = {role: CostTable.from_dict(**table) for role, table in costs.items()}
        pair = yield from in_background(
            lambda tell, halt: load_pair(chosen, tell, halt, costs=known, dynamic=WHY_DYNAMIC),
            never,
            "Loading the models…",
        )
        for role, model in (("target", pair.target), ("draft", pair.draft)):
            if model is not None and model.costs is not None:
                found[role] = {"costs": model.costs.to_dict(), "following": model.costs.following}
        yield from race(Engine(chosen), pair, prompt, chosen, never, [])

    yield from guarded(events())
    yield {"e": "costs", "costs": found}


class ZeroGpu:
    """The other end of the job, in the process that serves the page."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._costs: dict[tuple[Any, ...], dict[str, Any]] = {}

    def race(self, prompt: str, settings: Settings, stop: Stop, runs: list[Run]) -> Iterator[Event]:
        """The events of a job; appends the runs that ended to `runs`. Stopping ends the job's process."""
        named = (settings.target, settings.draft, settings.revision)
        key = (*named, settings.precision, settings.draft_precision)
        documents: dict[str, dict[str, Any]] = {}
        events = self._job(settings.to_dict(), prompt, self._costs.get(key, {}))
        try:
            for event in events:
                if event["e"] == "costs":
                    self._costs[key] = event["costs"]
                elif event["e"] != "done":  # the page's own stream ends with one
                    collect(event, documents)
                    yield event
                if stop():
                    yield {"e": "status", "kind": "idle", "text": "Stopped."}
                    return
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "gradio":
                raise
            raise UserError(str(error)) from None  # what ZeroGPU tells: no quota, no GPU free
        finally:
            close = getattr(events, "close", None)
            if close:
                close()
            runs.extend(run_from_dict(each) for each in documents.values() if "stop_reason" in each)


def collect(event: Event, documents: dict[str, dict[str, Any]]) -> None:
    """Put the run documents together again, by lane, from the events that make them up."""
    if event["e"] == "open":
        documents[event["lane"]] = {**event["run"], "rounds": []}
    elif event["e"] == "round":
        documents[event["lane"]]["rounds"].append(event["round"])
    elif event["e"] == "end":
        documents[event["lane"]] |= event["run"]


def settle_in(engine: Engine) -> None:
    """On ZeroGPU: races go to a job with the GPU, everything else runs on the CPU of the page's own process."""
    if not on_zero_gpu():
        return
    try:
        spaces: Any = import_module("spaces")
    except ImportError:  # the page then runs on the CPU
        return
    engine.settings.device = "cpu"
    job = spaces.GPU(duration=seconds_of_gpu)(race_job)
    remote = ZeroGpu(job)

    def on_gpu(prompt: str, settings: Settings, stop: Stop, runs: list[Run]) -> Iterator[Event]:
        yield from remote.race(prompt, replace(settings, device="cuda"), stop, runs)

    engine.remote = on_gpu
