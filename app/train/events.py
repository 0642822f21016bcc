"""A training as a stream of events, in the order in which the page draws them.

Events (`e` names the kind) beside those of `app.serving.turns`: `standing` (how far it is, twice a second), `look`
(what held-out answers showed), `sample` (an answer drafted again: a run document, by the head `before` training or
`now`), `outlook` (of all such answers the guesses accepted, and the speed-up this promises here), `over` (how it
ended).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from typing import Any

from app.serving.device import Device, Event, Stop, in_thread, leave_alone
from core.progress import duration
from core.records import Run

TELLS_PER_SECOND = 2.0


def training_events(
    session: Any, stop: Stop, device: Device, ended: Callable[[], object] = lambda: None
) -> Generator[Event, None, None]:
    """Run a `core.training.session.Session` in a thread of its own, whose settings of PyTorch stay its own, and tell of
    it. It ends, saved, after `stop` and when the reader goes away, and has the device until then; `ended()` is called
    at its end."""
    yield {"e": "status", "kind": "running", "text": "Training; other runs wait until it ends."}
    gone, looks = Flag(), SimpleQueue[Any]()

    def work() -> None:
        try:
            for look in session.run(lambda: gone.is_set() or stop()):
                looks.put(look)
        finally:
            looks.put(None)  # first: whoever waits for it has the device
            ended()

    training = in_thread(work, device, "training")
    try:
        stopping, told = False, time.monotonic()
        while True:
            try:
                found = looks.get(timeout=max(0.0, told + 1 / TELLS_PER_SECOND - time.monotonic()))
            except Empty:
                told = time.monotonic()
                yield standing_event(session)
                if stop() and not stopping:
                    stopping = True
                    yield {"e": "status", "kind": "stopping", "text": "Stopping: what was learnt is being saved…"}
                continue
            if found is None:
                break
            yield from look_events(found)
        training.result()
    finally:
        gone.set()
        leave_alone(training)
    yield standing_event(session)
    yield over_event(session)


def standing_event(session: Any) -> Event:
    standing = session.standing
    return {
        "e": "standing",
        "doing": standing.doing,
        "seconds": standing.seconds,
        "left": session.left,
        "share": session.done,
        "writing": standing.writing,
        "texts": standing.dialogues,
        "written": standing.answer_tokens,
        "seen": standing.visits,
        "loss": standing.loss,
    }


def look_events(look: Any) -> Iterator[Event]:
    """A look at held-out answers, or a sample and what all of them promise."""
    standing, outlook = look.standing, look.outlook
    told = {"seconds": standing.seconds, "seen": standing.visits}
    if look.sample is None:
        yield {"e": "look", **told, "agreement": standing.agreement}
    if outlook is not None:
        told |= {"accepted": standing.acceptance, "speed_up": outlook.speed_up, "length": outlook.length}
        told |= {"between": standing.between, "before": look.before}
        yield {"e": "outlook", **told}
    if look.sample is not None:
        lane = "before" if look.before else "now"
        yield {"e": "sample", "lane": lane, "seconds": standing.seconds, "run": drawn(look.sample)}


def drawn(run: Run) -> dict[str, Any]:
    """Of a run document what its tokens are drawn from."""
    document = run.to_dict()
    target = {"target": {"chat": document["environment"]["target"].get("chat")}}
    return {
        **{key: document[key] for key in ("settings", "prompt", "rounds", "metrics", "stop_reason")},
        "environment": target,
    }


def over_event(session: Any) -> Event:
    """How a training ended, in words."""
    standing = session.standing
    if not standing.steps:
        text = "Stopped before the head began to learn; Resume goes on from what was written."
        return {"e": "over", "kind": "stopped", "text": text}
    accepted = standing.acceptance
    share = "" if accepted is None else f", {accepted:.0%} of its guesses accepted{by_prompt(standing.between)}"
    took = f"{duration(standing.seconds)} of training{share}. The head is kept in {short(session.folder)}"
    if standing.doing == "done":
        return {"e": "over", "kind": "finished", "text": f"Done: {took}."}
    return {"e": "over", "kind": "stopped", "text": f"Stopped after {took}; Resume goes on from here, nothing is lost."}


def by_prompt(between: Sequence[float]) -> str:
    """How far an acceptance differs from prompt to prompt, of which a race shows one."""
    return " ({:.0%} to {:.0%} from prompt to prompt)".format(*between) if between else ""


def short(folder: Path) -> str:
    """A folder as people write it."""
    home = Path.home()
    return f"~/{folder.relative_to(home).as_posix()}" if folder.is_relative_to(home) else str(folder)
