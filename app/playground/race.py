"""A race as a stream of events: plain dictionaries, in the order in which the page draws them.

Events (`e` names the kind): `asked` (the controls that decide pair and method, of the page's own runs), `status` (what
is going on, in words), `open` (a lane and the head of its run document), `round` (one round of a lane, as in the
document), `end` (the rest of a lane's document), `verdict`, `error`, `done`.
A lane's `open`, `round` and `end` events together are its run document: what is shown is what is exported.

What a finished race says in words: is the text the same, was it faster, and if not, why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.serving import Engine
from app.serving.device import Device
from app.serving.turns import Event, Stop, fetching, with_device, with_pair
from app.tokens.markup import plural
from core.measuring.deciding import speedup_range
from core.records import Divergence, Metrics, Round, Run, Settings, first_divergence, repeats_itself, summarise


def queued_race(
    device: Device,
    engine: Engine,
    prompt: str,
    settings: Settings,
    stop: Stop,
    runs: list[Run],
    settle: Callable[[Any, Settings], Settings] = lambda pair, settings: settings,
) -> Iterator[Event]:
    """Race once the device is ours. Appends the runs to `runs`. What `settle` makes of the settings is run, once their
    pair is loaded."""
    if (remote := engine.remote) is not None:
        engine.admit(settings)
        yield from fetching(engine, settings, stop)
        yield from with_device(device, stop, lambda: remote(prompt, settings, stop, runs))
        return

    def work(pair: Any) -> Iterator[Event]:
        return race(engine, pair, prompt, settle(pair, settings), stop, runs)

    yield from with_pair(device, engine, settings, stop, work)


def race(engine: Engine, pair: Any, prompt: str, settings: Settings, stop: Stop, runs: list[Run]) -> Iterator[Event]:
    """The speculative lane (none where the method is plain) and the plain lane of the same target."""
    yield {"e": "status", "kind": "reading", "text": "Reading the prompt…"}
    lanes = _open(engine, pair, prompt, settings, stop)
    runs.extend(lane.run for lane in lanes)
    kinds = ["plain"] if settings.method == "plain" else ["speculative", "plain"]
    for kind, lane in zip(kinds, lanes):
        yield {"e": "open", "lane": kind, "run": run_head(lane.run)}
    going = set(range(len(lanes)))
    for index, round_ in engine.race(lanes):
        run = lanes[index].run
        yield round_event(kinds[index], run, round_)
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


def round_event(kind: str, run: Run, round_: Round) -> Event:
    """A round as in the document; with a lane's first, how long its prompt took to read."""
    event: Event = {"e": "round", "lane": kind, "round": round_.to_dict()}
    if not round_.index:
        event["prefill"] = run.prefill_seconds + run.draft_prefill_seconds
    return event


def end_event(kind: str, run: Run) -> Event:
    document = run.to_dict()
    rest = {key: document[key] for key in ("token_ids", "text", "stop_reason", "metrics")}
    return {"e": "end", "lane": kind, "run": rest}


def lane_events(kind: str, run: Run) -> Iterator[Event]:
    """The events of a lane that is over: its run document in parts."""
    yield {"e": "open", "lane": kind, "run": run_head(run)}
    for round_ in run.rounds:
        yield round_event(kind, run, round_)
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
    why = inactive(speculative) or why_slower(speculative, plain) or why_easy(speculative)
    said = {"kind": found.kind, "text": found.text, "why": why, "more": found.more}
    return {"e": "verdict", **said, "range": list(speedup_range(speculative, plain))}


Kind = Literal["identical", "diverged", "wrong", "chance", "stopped", "inactive"]


@dataclass(frozen=True)
class Verdict:
    """`more`: what is said to who asks why."""

    kind: Kind
    text: str
    more: str = ""


def verdict(speculative: Run, plain: Run, divergence: Divergence | None) -> Verdict:
    """How the two texts compare; `divergence`: where they first differ under greedy decoding, or None."""
    if "cancelled" in (speculative.stop_reason, plain.stop_reason):
        return Verdict("stopped", _stopped(speculative, plain, divergence))
    if speculative.settings.temperature > 0:
        return Verdict(
            "chance",
            "Same law, other draws: every token is drawn by lot, in both lanes with the target's own odds.",
        )
    exact = bool((speculative.environment.get("target") or {}).get("exact_rows"))
    if divergence is None:
        all_ = f"Identical to plain decoding, all {plural(len(speculative.token_ids), 'token')}."
        return Verdict("identical", "Identical, bit for bit." if exact else all_)
    if exact:
        return Verdict(
            "wrong", f"The texts part at token {divergence.position + 1}, which they must not here.", MUST_NOT
        )
    return Verdict("diverged", _diverged(divergence), _why_diverged(divergence))


MUST_NOT = (
    "This target computes every token alike, alone or among others, so both lanes must write the same. Please report "
    "it, with the run as JSON (Share)."
)
TIE = 0.1
"""Logits that lie no further apart than rounding may move them."""


def _stopped(speculative: Run, plain: Run, divergence: Divergence | None) -> str:
    both = min(len(speculative.token_ids), len(plain.token_ids))
    if speculative.settings.temperature > 0 or not both:
        return "Stopped."
    if divergence is None:
        return f"Stopped. Both lanes began with the same {plural(both, 'token')}."
    return "Stopped. " + _diverged(divergence)


def _diverged(divergence: Divergence) -> str:
    """One quiet line: that the texts part is no fault of the rule."""
    at, gap = f"Same rule, same law; the texts part at token {divergence.position + 1}", divergence.logit_gap
    if gap is None:
        return f"{at}."
    if gap > TIE:
        return f"{at}, where the target's two best tokens lie {gap:.2g} apart."
    return f"{at}, where the target's two best tokens tie{'' if gap else ' to the last digit'}."


def _why_diverged(divergence: Divergence) -> str:
    gap = divergence.logit_gap
    apart = "" if gap is None else f", whose logits lie {gap:.2g} apart" if gap else ", whose logits are equal"
    return (
        f"Plain wrote {divergence.first_text!r}, speculative {divergence.second_text!r}{apart}. A pass over several "
        "tokens rounds its last digits differently from a pass over one, and that decides a tie. From there on each "
        "text is one the target would write."
    )


def inactive(run: Run) -> str | None:
    """Why nothing was drafted, where nothing was."""
    if run.settings.method == "plain":
        return "Speculation is off (method: plain). Choose another method to race against plain decoding."
    if run.rounds and not any(round_.drafted for round_ in run.rounds):
        return f"The drafter proposed nothing in {plural(len(run.rounds), 'round')}, so every round was a plain step."
    return None


def why_slower(speculative: Run, plain: Run) -> str | None:
    """The main reason where speculation lost: the one cost whose removal would have gained most. None where it won, or
    where the difference is no larger than the noise."""
    fast, slow = summarise(speculative), summarise(plain)
    if not fast.rounds or not slow.new_tokens or speedup_range(speculative, plain)[1] >= 1:
        return None
    drafted = sum(len(r.drafted) for r in speculative.rounds)
    if not drafted:
        return inactive(speculative)
    idle = sum(not r.drafted for r in speculative.rounds)
    if 2 * idle > fast.rounds:
        return (
            f"{idle} of {fast.rounds} rounds were plain steps: on this machine, drafting for this text costs more than "
            "it brings."
        )
    return max(_remedies(speculative, fast, slow.seconds / slow.new_tokens, drafted))[1]


def why_easy(speculative: Run) -> str | None:
    """What a speed-up owes to a text that goes round in circles."""
    return "The text repeats itself: drafting is easy here." if repeats_itself(speculative.token_ids) else None


def _remedies(run: Run, metrics: Metrics, step: float, drafted: int) -> list[tuple[float, str]]:
    """(tokens per second with this cost removed, the sentence that names it), for each of the three costs."""
    rounds = metrics.rounds
    draft = sum(r.draft_seconds for r in run.rounds)
    verify = sum(r.verify_seconds for r in run.rounds)
    accepted = metrics.acceptance_rate or 0.0
    return [
        (
            (drafted + rounds) / metrics.seconds,
            f"Mostly because of acceptance: {accepted:.0%} of the judged drafts were accepted, so a round gave only "
            f"{metrics.tokens_per_round:.1f} tokens.",
        ),
        (
            metrics.new_tokens / max(1e-9, metrics.seconds - verify + min(verify, rounds * step)),
            f"Mostly because of verification: checking a draft took {verify / rounds / step:.1f} times a plain step.",
        ),
        (
            metrics.new_tokens / max(1e-9, metrics.seconds - draft),
            f"Mostly because of drafting: proposing {drafted / rounds:.1f} tokens a round took "
            f"{draft / rounds / step:.1f} times a plain step.",
        ),
    ]
