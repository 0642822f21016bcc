"""A comparison with running servers once more: out of its document, as the lanes it was and the events of its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.compare.events import Comparison, plan_event, result_event
from app.compare.lanes import MOST
from app.compare.servers import ServerContender, answered
from app.playground.race import lane_events
from app.serving.turns import Event
from core.measuring.comparison import lanes_of, models_and_settings, same_target
from core.records import run_from_dict
from core.servers import ServerRun, server_run_from_dict
from core.text import Prompt

AGAIN = "Shown again from History."


def again(document: dict[str, Any]) -> Comparison:
    """The comparison that a document holds. Its lanes are told by what their runs say: those of one pair and settings,
    or of one server, on different prompts; servers come last. Plain decoding for which there is no pane is the baseline
    of the others' figures alone, and lanes after that are left out."""
    runs = [run_from_dict(each) for each in document.get("runs", [])]
    answers = [server_run_from_dict(each) for each in document.get("server_runs", [])]
    texts = list(dict.fromkeys(run.prompt for run in [*runs, *answers]))
    ours = lanes_of(runs, texts, models_and_settings)
    theirs = lanes_of(answers, texts, lambda run: (run.server.address, run.server.model, run.settings))
    plain = [lane for lane in ours if _first(lane).settings.method == "plain"]
    too_many = max(len(ours) + len(theirs) - MOST, 0)
    baselines = plain[max(len(plain) - too_many, 0) :]
    ours = [lane for lane in ours if not any(lane is each for each in baselines)][:MOST]
    theirs = theirs[: MOST - len(ours)]
    servers = [_contender(number, lane) for number, lane in enumerate(theirs, len(ours) + 1)]
    prompts = [Prompt(_name(text), text) for text in texts]
    found = Comparison.of([*(_first(lane).settings for lane in ours), *servers], prompts)
    for contender, lane in zip((each for each in found.contenders if not each.added), ours):
        contender.runs = lane
    for contender in (each for each in found.contenders if each.added):
        contender.runs = next(
            (lane for lane in baselines if same_target(_first(lane).settings, contender.settings)), {}
        )
    found.stopped = any(run.stop_reason == "cancelled" for run in [*runs, *answers])
    return found


def again_events(comparison: Comparison) -> Iterator[Event]:
    """As `app.compare.events.compare` gave them, lane after lane."""
    yield plan_event(comparison) | {"notes": [AGAIN]}
    for at, prompt in enumerate(comparison.prompts):
        yield {"e": "prompt", "at": at, "name": prompt.name}
        for contender in comparison.contenders:
            if at in contender.runs and not contender.added:
                yield from lane_events(str(contender.number), contender.runs[at])
        for server in comparison.servers:
            if at in server.runs:
                yield from answered(server, server.runs[at])
    yield result_event(comparison)
    yield {"e": "done"}


def _first(lane: dict[int, Any]) -> Any:
    return next(iter(lane.values()))


def _contender(number: int, lane: dict[int, ServerRun]) -> ServerContender:
    """The server as its last answer describes it."""
    *_, last = lane.values()
    return ServerContender(number, last.server.address, last.server.model, last.settings, last.server, lane)


def _name(text: str) -> str:
    return text.strip().partition("\n")[0][:40] or "a prompt"
