"""A training as a person watches it: what the head would bring here now, and one answer drafted again and again.

Costs and drafts are those of the pair that will race: its target's own passes, in its own precision.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.costs.rounds import RoundCosts, expected_tokens_by_position
from core.decoding import speculative
from core.drafting.build import round_costs
from core.drafting.head import HeadDrafter
from core.drafting.length import Fixed
from core.heads import HeadNetwork
from core.heads.block import FusedHead
from core.heads.runner import HeadRunner
from core.lanes import describe_environment
from core.loading.head import Head, best_precision, fused_head
from core.loading.model import ALL_THREADS, Model, threads
from core.loading.pair import Pair
from core.loading.precision import DTYPES
from core.progress import Stop, never
from core.records import Run
from core.sampling import Sampling
from core.settings import Settings
from core.text import Detokenizer
from core.training.dialogues import user_turn
from core.training.export import export
from core.training.loop import SHOWN_STEPS, Plan, Standing, Trainer
from core.training.pool import Entry

SHOWN_TOKENS = 96
SHOWN_LENGTH = 3
"""Tokens drafted in a round that is shown."""
SECONDS_BETWEEN_SAMPLES = 12.0


@dataclass(frozen=True)
class Outlook:
    """What acceptance so far promises on this machine, greedy: the best chain's length and its speed-up over plain."""

    speed_up: float
    length: int


@dataclass(frozen=True)
class Look:
    """What a training has to show: a look at the held-out answers with what it promises, or an answer drafted by the
    head as it was `before` training, or as it is `now`."""

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
        self._pair = pair
        self._costs: RoundCosts | None = None

    @property
    def standing(self) -> Standing:
        """As it is at this moment, whoever asks."""
        return copy.copy(self.trainer.standing)

    @property
    def left(self) -> float | None:
        """Seconds until the plan is done, as far as it can be told."""
        return self.trainer.seconds_left()

    def run(self, stop: Stop = never, clock: Callable[[], float] = time.monotonic) -> Iterator[Look]:
        """Train until the plan is done or `stop` says so, then export the head. The errors of `Trainer`.

        A training that goes on begins with all its looks so far."""
        trainer = self.trainer
        told, begun, due = 0, False, clock()
        with threads(ALL_THREADS):
            for standing in trainer.run(stop, clock):
                for look in trainer.history[told:]:
                    yield Look(look, self._outlook(look))
                told = len(trainer.history)
                early = clock() < due and standing.doing in ("writing", "learning")
                if early or not told or trainer.held_out() is None:
                    continue
                if not begun:
                    yield Look(standing, sample=self._draft(trainer.untrained()), before=True)
                    begun = True
                if standing.visits:
                    yield Look(standing, sample=self._draft(trainer.head))
                due = clock() + SECONDS_BETWEEN_SAMPLES
        if trainer.standing.steps:
            export(trainer, self.folder)

    def _outlook(self, standing: Standing) -> Outlook:
        """The best chain of as many tokens as are looked at, at this machine's costs."""
        expected = partial(expected_tokens_by_position, standing.agreement)
        best, gain = self._measured().best_chain(expected, range(1, SHOWN_STEPS + 1))
        return Outlook(gain, best)

    def _measured(self) -> RoundCosts:
        """What rounds with such a head cost here; measured once, for no weight changes it."""
        if self._costs is None:
            target = self._pair.target
            fused = self._fused(self.trainer.untrained())
            with threads(target.threads):
                drafting = Pair(target, head=Head(self.folder.name, fused, ""))
                self._costs = round_costs(drafting, Settings(method="head"))
        return self._costs

    def _fused(self, network: HeadNetwork) -> FusedHead:
        """A head as passes read it, in what they are fastest in."""
        target, copied = self._pair.target, copy.deepcopy(network).requires_grad_(False)
        precision = best_precision(network.config, target.device)
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(DTYPES[precision])
        return fused_head(copied, target, precision)

    def _draft(self, network: HeadNetwork) -> Run:
        """A held-out prompt answered greedily, this head drafting."""
        target, entry = self._pair.target, self.trainer.held_out()
        assert entry is not None
        ids = entry.ids[: entry.start]
        room = min(SHOWN_TOKENS, target.context_length - len(ids))
        settings = Settings(method="head", draft_length=SHOWN_LENGTH, max_new_tokens=room)
        run = Run(settings, describe_environment(target, None), words_of(target, entry), ids)
        text, sampling = Detokenizer(target.tokenizer, ids), Sampling.of(settings)
        fused = self._fused(network)
        with threads(target.threads), target.lease() as runner:
            drafter = HeadDrafter(HeadRunner(fused), runner.watch(fused.config.aux_layers), sampling)
            rounds = speculative(runner, drafter, run, length=Fixed(SHOWN_LENGTH), stop_ids=target.stop_ids)
            for round_ in rounds:
                run.text += text.write(round_)
        return run


def words_of(target: Model, entry: Entry) -> str:
    """The prompt of a held-out answer as a person would have typed it."""
    ids = entry.ids[: entry.start]
    if getattr(target.tokenizer, "chat_template", None):
        before, after = user_turn(target)
        if ids[: len(before)] == before and ids[-len(after) :] == after:
            ids = ids[len(before) : -len(after)]
    return target.tokenizer.decode(ids, skip_special_tokens=True)
