"""A lane: one run in progress, with everything it leased, its ids turned into text; the race between lanes; a
recorded run repeated.

    with open_lane(pair, prompt, settings) as lane:
        for round_ in lane:
            ...

`describe_environment` says where a run happened: part of every document, so that figures can be compared.
`repeat` decodes a recorded run once more and tells whether it came out the same.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from core.decoding import speculative
from core.drafting import Drafter
from core.drafting.build import build_drafter, settle_method, whole_costs
from core.drafting.length import Fixed, Recorded
from core.drafting.methods import METHODS
from core.errors import UserError, out_of_memory, release_memory
from core.loading.geometry import describe_geometry
from core.loading.head import Head
from core.loading.model import Model
from core.loading.pair import Pair
from core.progress import Stop, never
from core.records import Round, Run, Token
from core.runners.together import Together
from core.sampling import MOST_DRAFTED
from core.settings import Settings, check
from core.text import Detokenizer, encode_prompt

COMPARED = ("name", "architecture", "precision", "runner", "layers", "parameters", "vocab_size")
"""What of a model decides its numbers, as far as a document tells."""


@dataclass
class Lane:
    """One run in progress, an iterator of its rounds. The first one takes the prefill too, and nothing is computed
    before. `with` ends the run where it stands and gives back the runners it leased."""

    run: Run
    pair: Pair
    _rounds: Iterator[Round]
    _text: Detokenizer
    _resources: ExitStack
    seconds: float = 0.0
    """Engine time so far, prefill included: what the race is scheduled by."""

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> Round:
        self.pair.target.use_threads()
        try:
            round_ = next(self._rounds)
            exhausted = False
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise
            exhausted = True
        if exhausted:  # outside the handler: the error's own frames held the tensors of the failed pass
            self._free()
            raise UserError(
                f"The memory of this device ran out {self._where()}; shorten the prompt, ask for fewer new tokens, "
                "or load the models in a smaller precision."
            )
        if not self.seconds:
            self.seconds = self.run.prefill_seconds + self.run.draft_prefill_seconds
        self.seconds += round_.seconds
        self.run.text += self._text.write(round_)
        return round_

    def close(self) -> None:
        """End the run where it stands and release what it holds; harmless when it has ended."""
        if self.run.stop_reason is None:
            self.run.stop_reason = "cancelled"
        self._rounds.close()  # type: ignore[attr-defined]
        self._resources.close()

    def _where(self) -> str:
        written = len(self.run.token_ids)
        return f"after {written:,} new tokens" if written else f"while reading {len(self.run.prompt_ids):,} tokens"

    def _free(self) -> None:
        """Give back the caches of this run and those kept for later ones."""
        self.close()
        for model in (self.pair.target, self.pair.draft):
            if model:
                model.drop_idle()
        release_memory()


def open_lane(
    pair: Pair,
    prompt: str,
    settings: Settings,
    stop: Stop = never,
    tops: int = 0,
    recorded: Sequence[Round] | None = None,
    at_once: int = 1,
) -> Lane:
    """Check the settings, lease runners, and set up a run; nothing is computed before its first step.

    `tops` > 0 records that many of the likeliest tokens at every position. With the rounds of a `recorded` run, drafts
    are as long as theirs; else as long as pays where so many texts are decoded `at_once`. Raises UserError where
    prompt, settings and pair do not go together.
    """
    pair.target.use_threads()  # what costs are not known yet is measured as the passes will run
    settings = settle_method(pair, settings)
    prompt_ids = encode_prompt(pair.target, prompt, settings)
    check_settings(pair.target, prompt_ids, settings)
    run = Run(settings, describe_environment(pair.target, pair.draft, pair.head), prompt, prompt_ids)
    text = Detokenizer(pair.target.tokenizer, prompt_ids)
    stop_ids = frozenset() if settings.ignore_eos else pair.target.stop_ids
    drafter, length = None, Fixed(1)
    with ExitStack() as resources:
        room = len(prompt_ids) + settings.max_new_tokens + MOST_DRAFTED
        target = resources.enter_context(pair.target.lease(room))
        if METHODS[settings.method].drafts:
            drafter, length = build_drafter(pair, target, settings, resources, room, at_once)
            if recorded is not None:
                length = Recorded(recorded)
                drafter.repeat(length)
            run.environment["drafter"] = describe_drafter(drafter, pair.translation is not None)
        rounds = speculative(target, drafter, run, length=length, stop_ids=stop_ids, stop=stop, tops=tops)
        return Lane(run, pair, rounds, text, resources.pop_all())


def check_settings(target: Model, prompt_ids: list[int], settings: Settings) -> None:
    """One sentence for whatever the engine cannot do with these settings."""
    check(settings)
    new, limit = settings.max_new_tokens, target.context_length
    if unknown := [token for token in prompt_ids if token >= target.vocab_size]:
        raise UserError(
            f"The prompt holds {target.tokenizer.convert_ids_to_tokens(unknown[0])}, which the tokenizer of "
            f"{target.name} knows and its weights do not; remove it."
        )
    if len(prompt_ids) >= limit:
        raise UserError(
            f"The prompt has {len(prompt_ids):,} tokens, {len(prompt_ids) - limit + 1:,} more than fit before at least "
            f"one new token in the context of {target.name} ({limit:,}); shorten it."
        )
    if len(prompt_ids) + new > limit:
        raise UserError(
            f"The prompt ({len(prompt_ids):,} tokens) and {new:,} new tokens make {len(prompt_ids) + new:,}, past the "
            f"context of {target.name} ({limit:,}); ask for at most {limit - len(prompt_ids):,} new tokens."
        )


def race(lanes: Sequence[Lane]) -> Iterator[tuple[int, Round]]:
    """Advance lanes on a shared device: next is the lane with the least engine time, prefill included.

    Every lane then shows at any moment how far it would have come in the same time on a device of its own. Yields the
    lane's index and its round; closes all lanes at the end, also when the caller goes away.
    """
    going = list(range(len(lanes)))
    try:
        while going:
            index = min(going, key=lambda i: (lanes[i].seconds, i))
            round_ = next(lanes[index], None)
            if round_ is None:
                going.remove(index)
            else:
                yield index, round_
    finally:
        for lane in lanes:
            lane.close()


class Told(NamedTuple):
    """A round of one of the texts decoded together: which text, its run so far (whose `stop_reason` tells the last of
    its rounds), and the number of the pass that judged the round with those of the others."""

    text: int
    run: Run
    round_: Round
    turn: int


def decode_together(
    pair: Pair,
    texts: Iterable[tuple[str, Settings]],
    at_once: int,
    stop: Stop = never,
    tops: int = 0,
    as_alone: bool = False,
) -> Generator[Told]:
    """Decode prompts, `at_once` of them at a time, in rounds that share their passes: each text comes out as it does
    alone, and where one ends the next takes its place. On one thread; `stop`, and going away, end all.

    Passes are shared where a forward of our own runs them (`Model.shares`); elsewhere texts take turns, round by round.
    Seconds of a round are those that went by, the others' part of them included. Drafts are as long as pays for so
    many texts, or `as_alone`, as long as pays for one.
    """
    paying = 1 if as_alone else at_once
    together = Together[tuple[int, Run, Round]](pair.target.passes)
    known: set[str] = set()

    def text(number: int, prompt: str, settings: Settings) -> Generator[tuple[int, Run, Round]]:
        with open_lane(pair, prompt, settings, stop, tops, at_once=paying) as lane:
            for round_ in lane:
                yield number, lane.run, round_

    def coming() -> Iterator[Generator[tuple[int, Run, Round]]]:
        for number, (prompt, settings) in enumerate(texts):
            settings = settle_method(pair, settings)
            if settings.method not in known:  # what its rounds cost is measured with nobody beside
                pair.target.use_threads()
                whole_costs(pair, settings, paying)
                known.add(settings.method)
            yield text(number, prompt, settings)

    with closing(together.run(coming(), at_once)) as told:
        for each in told:
            yield Told(*each, together.turns)


def finish_together(
    pair: Pair,
    texts: Sequence[tuple[str, Settings]],
    at_once: int,
    stop: Stop = never,
    tops: int = 0,
    as_alone: bool = False,
) -> list[Run]:
    """The same to the end: the runs, in the order of their texts. After `stop` some are cancelled, or missing."""
    runs = {told.text: told.run for told in decode_together(pair, texts, at_once, stop, tops, as_alone)}
    return [runs[number] for number in sorted(runs)]


def describe_environment(target: Model, draft: Model | None, head: Head | None = None) -> dict[str, Any]:
    """Facts of the machine and of the loaded models; no names of users, hosts or folders beyond what was asked for."""
    return {
        "device": target.device.type,
        "device_name": device_name(target.device),
        "threads": target.threads,
        "bandwidth": target.bandwidth,
        "versions": {name: found for name in ("torch", "transformers", "bitsandbytes") if (found := _version(name))},
        "python": platform.python_version(),
        "target": _describe_model(target),
        "draft": _describe_model(draft) if draft else None,
        "head": _describe_head(head) if head else None,
    }


def describe_drafter(drafter: Drafter, translated: bool) -> dict[str, Any]:
    """What of a run's drafter its settings do not tell: the exit layer that was chosen, and whether a draft model
    counts in tokens of its own."""
    return {"exit_layer": getattr(drafter, "exit_layer", None), "translated": translated}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores" if device.type == "cpu" else device.type


def _describe_model(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": type(model.network).__name__,
        "precision": model.precision,
        "origin": model.origin,
        "chat": bool(getattr(model.tokenizer, "chat_template", None)),
        "runner": model.runner_kind,
        "exact_rows": model.exact_rows,
        "layers": model.layers,
        "parameters": model.parameter_count(),
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "costs": model.costs.to_dict() if model.costs else None,
        "following": model.costs.following if model.costs else None,
        "notes": model.notes,
        **_laid_out(model),
    }


def _laid_out(model: Model) -> dict[str, Any]:
    kind = model.runner_kind
    if kind not in model.laid_out:
        geometry = describe_geometry(model)
        model.laid_out[kind] = {"weight_bytes": model.weight_bytes(), "geometry": geometry and geometry.to_dict()}
    return model.laid_out[kind]


def _describe_head(head: Head) -> dict[str, Any]:
    return {
        "name": head.name,
        "kind": head.kind,
        "algorithm": head.algorithm,
        "precision": head.precision,
        "layers": list(head.layers),
        "parameters": head.parameter_count(),
        "weight_bytes": head.weight_bytes(),
        "draft_vocab_size": head.fused.draft_vocab_size,
        "costs": head.costs.to_dict() if head.costs else None,
        "notes": head.notes,
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
