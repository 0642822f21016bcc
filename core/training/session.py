"""A training as a person watches it: what the head would bring here now, and answers drafted again and again.

Costs and drafts are those of the pair that will race: its target's own passes, in its own precision, on the page's own
sample prompts. So what is told of a head is what its race then shows.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from core import stream
from core.costs.rounds import RoundCosts, acceptance_rate, expected_tokens_by_position
from core.drafting.build import round_costs
from core.loading.head import Head, best_precision, running_head
from core.loading.model import ALL_THREADS, Model, threads
from core.loading.pair import Pair
from core.loading.precision import DTYPES
from core.progress import Stop, never
from core.records import Run, accepted_by_position, summarise
from core.settings import Settings
from core.text import encode_prompt, read_prompts
from core.training import KINDS, kind_of
from core.training.export import export
from core.training.learning import Network
from core.training.loop import Plan, Standing, Trainer

SHOWN_PROMPTS, SHOWN_TOKENS = 3, 64
"""What is drafted to see how good a head is: answers to so many prompts, of at most so many tokens each."""
SHOWN_LENGTH, LONGEST = 3, 5
"""Tokens drafted in a round that is shown, and the most that a promise is made for."""
SECONDS_BETWEEN_SAMPLES, DRAFTING = 12.0, 0.15
"""At least; and the share of the time that may go into samples."""
SLICE = 0.25
"""Seconds of drafting between two steps of the training."""


@dataclass(frozen=True)
class Outlook:
    """What the guesses accepted so far promise on this machine, greedy: the best chain's length and its speed-up over
    plain."""

    speed_up: float
    length: int


@dataclass(frozen=True)
class Look:
    """What a training has to show: a look at the held-out answers, or an answer drafted by the head as it was `before`
    training, or as it is now, with what all such answers promise."""

    standing: Standing
    outlook: Outlook | None = None
    sample: Run | None = None
    before: bool = False


class Session:
    """One training of a head for a pair's target: `target` is what learns to be followed, the pair's own or the same
    model in 16 bits."""

    def __init__(self, target: Model, pair: Pair, folder: Path, plan: Plan, resume: bool = False) -> None:
        self.folder = folder
        with threads(ALL_THREADS):
            self.trainer = Trainer(target, folder, plan, resume)
        self.trainer.go_on()
        self._drafts = Pair(pair.target)

    @property
    def standing(self) -> Standing:
        """As it is at this moment, whoever asks."""
        return self.trainer.now

    @property
    def left(self) -> float | None:
        """Seconds until the plan is done, as far as it can be told."""
        return self.trainer.seconds_left()

    @property
    def done(self) -> float:
        """The share of the plan that is behind."""
        return min(1.0, self.trainer.done())

    def run(self, stop: Stop = never, clock: Callable[[], float] = time.monotonic) -> Iterator[Look]:
        """Train until the plan is done or `stop` says so, then export the head. The errors of `Trainer`.

        A training that goes on begins with all its looks so far."""
        trainer = self.trainer
        told, due = 0, clock()
        drafting: Iterator[list[Run] | None] | None = None
        before, drafted = True, 0.0
        with threads(ALL_THREADS):
            for standing in trainer.run(stop, clock):
                for look in trainer.history[told:]:
                    yield Look(look, self._outlook(look.reached))
                told = len(trainer.history)
                began = clock()
                if standing.doing != "learning" or not (drafting or began >= due):
                    continue
                drafting = drafting or self._answers(trainer.untrained() if before else trainer.head)
                while (runs := next(drafting)) is None and clock() - began < SLICE:
                    pass
                drafted += clock() - began
                if runs is not None:
                    if runs:
                        yield self._sampled(runs, before)
                    due = clock() if before else clock() + max(SECONDS_BETWEEN_SAMPLES, drafted / DRAFTING)
                    drafting, before, drafted = None, False, 0.0
            if trainer.standing.doing == "done":
                for is_before in [True, False] if before else [False]:
                    *_, runs = self._answers(trainer.untrained() if is_before else trainer.head)
                    if runs:
                        yield self._sampled(runs, is_before)
        if trainer.standing.steps:
            export(trainer, self.folder)

    def _sampled(self, runs: list[Run], before: bool) -> Look:
        """What answers show together, and the first of them."""
        standing = copy.copy(self.trainer.standing)
        standing.reached = accepted_by_position([round_ for run in runs for round_ in run.rounds])
        rates = [rate for run in runs if (rate := summarise(run).acceptance_rate) is not None]
        standing.between = [min(rates), max(rates)] if len(rates) > 1 else []
        if not before:
            self.trainer.standing.reached, self.trainer.standing.between = standing.reached, standing.between
        return Look(standing, self._outlook(standing.reached), runs[0], before)

    def _outlook(self, reached: list[float]) -> Outlook | None:
        """The best chain at this machine's costs; guesses behind those that were drafted are taken to be accepted as
        often as all were."""
        if not reached:
            return None
        rate = acceptance_rate(reached)
        further = accumulate([rate] * (LONGEST - len(reached)), lambda so_far, each: so_far * each, initial=reached[-1])
        expected = partial(expected_tokens_by_position, [*reached[:-1], *further])
        best, gain = self._measured().best_chain(expected, range(1, LONGEST + 1))
        return Outlook(gain, best)

    def _measured(self) -> RoundCosts:
        """What rounds with such a head cost here; measured once, for no weight changes it."""
        pair = self._drafts if self._drafts.head else self._drafting(self.trainer.untrained())
        with pair.target.with_threads():
            return round_costs(pair, self._settings(SHOWN_TOKENS))

    def _drafting(self, network: Network) -> Pair:
        """The pair that this head would make, in what its passes are fastest in, with the costs that are known."""
        pair, copied = self._drafts, copy.deepcopy(network).requires_grad_(False)
        target, costs = pair.target, pair.head and pair.head.costs
        precision = best_precision(network.config, target.device)
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(DTYPES[precision])
        pair.head = Head(self.folder.name, running_head(copied, target, precision), precision, costs=costs)
        return pair

    def _settings(self, new_tokens: int) -> Settings:
        method = "head" if kind_of(self.trainer.config) == KINDS[0] else "block"
        return Settings(method=method, draft_length=SHOWN_LENGTH, max_new_tokens=new_tokens)

    def _prompts(self) -> list[str]:
        """A person's own, or of the page's samples those that are unlike each other; of either those that fit."""
        target, own = self._drafts.target, self.trainer.plan.prompts
        chat = bool(getattr(target.tokenizer, "chat_template", None))
        texts = list(own or [prompt.text for prompt in read_prompts(chat=chat)])
        fitting = [text for text in texts if len(encode_prompt(target, text, Settings())) <= target.context_length // 2]
        return fitting[:: max(1, len(fitting) // SHOWN_PROMPTS)][:SHOWN_PROMPTS]

    def _answers(self, network: Network) -> Iterator[list[Run] | None]:
        """Answer the prompts greedily, this head drafting; None after every round, and the runs at the end."""
        pair, runs = self._drafting(network), []
        settings = self._settings(min(SHOWN_TOKENS, pair.target.context_length // 2))
        for text in self._prompts():
            with pair.target.with_threads():
                lane = stream(pair, text, settings)
            with lane:
                while True:
                    with pair.target.with_threads():
                        round_ = next(lane, None)
                    if round_ is None:
                        break
                    yield None
            runs.append(lane.run)
        yield runs
