"""The decoding loop: draft, verify with one target pass, accept or correct, roll back.

`speculative` and `plain` are generators of rounds over runners; a `Lane` is one run in progress with everything it
leased; `race` steps lanes fairly by engine time. Clocks see engine work only: turning ids into text, and whatever the
caller does between rounds, is outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from core.clock import engine_time
from core.draft_length import Controller, Fixed
from core.drafting import Drafter
from core.drafting.build import build_drafter
from core.environment import describe_drafter, describe_environment
from core.errors import Cancelled, UserError
from core.exhaustion import out_of_memory, release_memory
from core.model import Model
from core.pairs import Pair
from core.prefill import prefill
from core.progress import Stop, never
from core.prompting import encode_prompt
from core.recording import record
from core.records import Round, Run, Settings
from core.rounds import take_step
from core.runner import Runner
from core.sampling import Sampling, Uniforms
from core.text import Detokenizer
from core.threads import use_threads


def plain(target: Runner, run: Run, text: Detokenizer, **options: Any) -> Iterator[Round]:
    """Decode without drafts: the same loop, one token a round."""
    return speculative(target, None, run, text, length=Fixed(1), **options)


def speculative(
    target: Runner,
    drafter: Drafter | None,
    run: Run,
    text: Detokenizer,
    *,
    length: Controller,
    stop_ids: frozenset[int] = frozenset(),
    stop: Stop = never,
    tops: int = 0,
) -> Iterator[Round]:
    """Continue run.prompt_ids until a stop id, run.settings.max_new_tokens or `stop()`; fills `run` as it goes.

    `tops` > 0 records that many of the likeliest tokens of target and drafter at every position.
    """
    settings = run.settings
    sampling = Sampling.of(settings)
    numbers = Uniforms(settings.seed, target.device)
    context = list(run.prompt_ids)
    try:
        run.prefill_seconds = prefill(target, context[:-1], stop)
        if drafter is not None:
            run.draft_prefill_seconds = drafter.prefill(context[:-1], stop)
        while run.stop_reason is None:
            if stop():
                raise Cancelled
            # One token of every round is the target's own: a draft longer than this could not be used.
            useful = settings.max_new_tokens - len(run.token_ids) - 1
            choosing = engine_time()  # the engine's work too, as is learning from the outcome
            gamma = min(length.next(), useful) if drafter is not None else 0
            choosing = engine_time() - choosing
            step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
            round_ = record(step, len(run.rounds), sampling, text, stop_ids, tops)
            learning = engine_time()
            length.observe(round_)
            round_.other_seconds += choosing + engine_time() - learning
            kept = [token.id for token in round_.kept]
            context += kept
            run.token_ids += kept
            run.rounds.append(round_)
            run.text += text.visible(round_.kept)
            if kept[-1] in stop_ids:
                run.stop_reason = "eos"
            elif len(run.token_ids) >= settings.max_new_tokens:
                run.stop_reason = "length"
            yield round_
    except (Cancelled, GeneratorExit):
        run.stop_reason = run.stop_reason or "cancelled"


@dataclass
class Lane:
    """One run in progress, with the runners it leased; `close` gives them back."""

    run: Run
    _rounds: Iterator[Round]
    _resources: ExitStack
    pair: Pair
    seconds: float = 0.0
    """Engine time so far, prefill included: what the race is scheduled by."""

    def step(self) -> Round | None:
        """Advance by one round (the first time also the prefill); None at the end."""
        use_threads(self.pair.target.threads)
        try:
            round_ = next(self._rounds, None)
            exhausted = False
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
        if round_ is not None:
            if not self.seconds:
                self.seconds = self.run.prefill_seconds + self.run.draft_prefill_seconds
            self.seconds += round_.seconds
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


def open_lane(pair: Pair, prompt: str, settings: Settings, stop: Stop = never, tops: int = 0) -> Lane:
    """Check the settings, lease runners, and set up a run; nothing is computed before its first step.

    Raises UserError where prompt, settings and pair do not go together.
    """
    prompt_ids = encode_prompt(pair.target, prompt, settings)
    check_settings(pair.target, prompt_ids, settings)
    run = Run(settings, describe_environment(pair.target, pair.draft), prompt, prompt_ids)
    text = Detokenizer(pair.target.tokenizer, prompt_ids)
    stop_ids = frozenset() if settings.ignore_eos else pair.target.stop_ids
    with ExitStack() as resources:
        target = resources.enter_context(pair.target.lease())
        if settings.method == "plain":
            rounds = plain(target, run, text, stop_ids=stop_ids, stop=stop, tops=tops)
        else:
            drafter, length = build_drafter(pair, target, settings, resources)
            run.environment["drafter"] = describe_drafter(drafter, pair.translation is not None)
            rounds = speculative(target, drafter, run, text, length=length, stop_ids=stop_ids, stop=stop, tops=tops)
        return Lane(run, rounds, resources.pop_all(), pair)


def check_settings(target: Model, prompt_ids: list[int], settings: Settings) -> None:
    """One sentence for whatever the engine cannot do with these settings."""
    Sampling.of(settings)
    new, limit = settings.max_new_tokens, target.context_length
    if new < 1:
        raise UserError(f"The number of new tokens must be at least 1, not {new}.")
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
    """Step lanes on a shared device: next is the lane with the least engine time, prefill included.

    Every lane then shows at any moment how far it would have come in the same time on a device of its own. Yields the
    lane's index and its round; closes all lanes at the end, also when the caller goes away.
    """
    going = list(range(len(lanes)))
    try:
        while going:
            index = min(going, key=lambda i: (lanes[i].seconds, i))
            round_ = lanes[index].step()
            if round_ is None:
                going.remove(index)
            else:
                yield index, round_
    finally:
        for lane in lanes:
            lane.close()
