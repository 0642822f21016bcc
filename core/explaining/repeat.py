"""A run once more from its document: the same prompt, settings and draft lengths. Is it the same run?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.errors import UserError
from core.lanes import describe_environment, open_lane
from core.loading.pair import Pair
from core.records import Round, Run, Token

COMPARED = ("name", "architecture", "precision", "runner", "layers", "parameters", "vocab_size")
"""What of a model decides its numbers, as far as a document tells."""


def repeat(pair: Pair, then: Run) -> tuple[Run, str | None]:
    """Decode the prompt of a recorded run again, each round drafting as deep as it did then; up to the first
    difference, which is said in a sentence (None: the same tokens with the same outcomes).

    Raises UserError for a document that does not tell its draft lengths. On a CPU the threads of then are used.
    """
    if any(round_.draft_length is None for round_ in then.rounds):
        raise UserError("This run is too old to be repeated: it does not say how deep each round was to draft.")
    settings, threads = then.settings, then.environment.get("threads")
    layer = _part(then.environment, "drafter").get("exit_layer")
    if settings.method == "early-exit" and isinstance(layer, int):
        settings = replace(settings, exit_layer=layer)
    if pair.target.device.type == "cpu" and isinstance(threads, int) and 0 < threads <= 1024:
        pair.target.threads = threads
    with open_lane(pair, then.prompt, settings, recorded=then.rounds) as lane:
        now = lane.run
        if now.prompt_ids != then.prompt_ids:
            return now, f"The prompt's {len(then.prompt_ids)} tokens are others now, {len(now.prompt_ids)} of them."
        for before, after in zip(then.rounds, lane):
            if difference := round_difference(before, after):
                return now, f"Round {before.index} differs: {difference}."
    if len(now.rounds) < len(then.rounds):
        return now, f"It had {len(then.rounds)} rounds then; now it ended after {len(now.rounds)}."
    return now, None


def round_difference(then: Round, now: Round) -> str | None:
    """The first token of a round that is another, or has another outcome."""
    tokens = zip((*then.drafted, then.emitted), (*now.drafted, now.emitted))
    if len(then.drafted) != len(now.drafted):
        return f"{len(then.drafted)} tokens were drafted, now {len(now.drafted)}"
    for place, (before, after) in enumerate(tokens):
        if _decided(before) != _decided(after):
            which = f"drafted token {place + 1}" if place < len(then.drafted) else "the token after the draft"
            return f"{which} was {_shown(before)}, now it is {_shown(after)}"
    return None


def _decided(token: Token | None) -> tuple[Any, ...] | None:
    return None if token is None else (token.id, token.outcome, token.parent)


def _shown(token: Token | None) -> str:
    return "none" if token is None else f"{token.text!r} ({token.id}, {token.outcome})"


def other_surroundings(pair: Pair, then: Run) -> list[str]:
    """What of device, libraries and models is not as it was: "torch 2.12.0 then, 2.13.0 now"."""
    recorded, here = _facts(then.environment), _facts(describe_environment(pair.target, pair.draft, pair.head))
    pairs = [(name, recorded.get(name, "none"), here.get(name, "none")) for name in {**recorded, **here}]
    return [f"{name} {before} then, {after} now" for name, before, after in pairs if before != after]


def _facts(environment: dict[str, Any]) -> dict[str, Any]:
    facts = {"device": environment.get("device"), "device name": environment.get("device_name")}
    facts |= _part(environment, "versions")
    for role in ("target", "draft", "head"):
        facts |= {f"{role}'s {name}": value for name, value in _part(environment, role).items() if name in COMPARED}
    return facts


def _part(environment: dict[str, Any], name: str) -> dict[str, Any]:
    found = environment.get(name)
    return found if isinstance(found, dict) else {}
