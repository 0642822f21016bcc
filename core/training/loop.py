"""Train for as long as one likes: write dialogues, learn from them, tell how far the head is; stop and go on at will.

The target writes a block whenever the head has seen what there is EPOCHS times. Everything needed to go on lies in the
folder `training` of the output: the dialogues with their features, and a state of the head and its optimisers.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import Cancelled, UserError
from core.heads import HeadNetwork
from core.loading.model import Model
from core.progress import Stop, never
from core.training import config_for, frequent_ids, new_head
from core.training.dialogues import BLOCK, WRITING, Dialogue, block_seconds, require_time, write_block
from core.training.kept import PROGRESS, TRAINING, on_disk, read_progress, require_room
from core.training.pool import Entry, Pool, grouped
from core.training.unroll import STEPS, Learner, agreement

SHOWN_STEPS = 5
"""Positions of a draft whose acceptance is told."""
EPOCHS = 4
FIRST_BLOCKS = 2
"""Written before the first step where the head's vocabulary has to be chosen from them and there is time for it; else
one is enough."""
ROWS = 1536
"""Of a batch."""
WARM_UP = 30
FALL = 0.5
"""The share of a limited run over which the rates fall to nothing."""
SECONDS_BETWEEN_EVALUATIONS = 2.5
"""At least."""
EVALUATING = 0.1
"""The share of the time that looking at held-out answers may take."""
SECONDS_BETWEEN_SAVES = 60.0
HELD_OUT_SHOWN = 64
ENOUGH_TO_SEE = 64
"""Tokens of an answer that is worth showing."""
MOST_BYTES = 40 * 10**9
"""Of features on the disk; from there on the head learns from what there is."""


@dataclass(frozen=True)
class Plan:
    """How long to train: `tokens` answer tokens (each time one is seen counts), or `seconds`, or until stopped.
    `prompts`: a person's own, else the target writes them."""

    tokens: int | None = None
    seconds: float | None = None
    prompts: Sequence[str] | None = None
    seed: int = 0


@dataclass
class Standing:
    """How far a head is. `writing`: tokens drawn of the texts in the making; `visits`: answer tokens learnt from, each
    time counted; `agreement[i]`: on held-out answers, the share of greedy drafts whose first i + 1 tokens are the
    target's own choice; `overlap`: Σ min(p, q) at the first token, which is what is accepted of it at temperature 1.
    None, and empty, before the first evaluation."""

    doing: str = "writing"
    seconds: float = 0.0
    dialogues: int = 0
    answer_tokens: int = 0
    writing: int = 0
    steps: int = 0
    visits: int = 0
    loss: float | None = None
    agreement: list[float] = field(default_factory=list)
    overlap: float | None = None

    @property
    def tokens_per_pass(self) -> float | None:
        """What greedy chains of SHOWN_STEPS would give: 1 + Σ agreement."""
        return 1 + sum(self.agreement) if self.agreement else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_pass": self.tokens_per_pass}


def as_line(standing: Standing) -> str:
    return json.dumps(asdict(standing)) + "\n"


class Trainer:
    """A head in training. `run()` yields a Standing after every change worth showing; `head` is what to draft with,
    `history` what each look at the held-out answers found.

    Raises UserError where the folder holds a training that was not asked for, or none that was, or cannot be written.
    """

    def __init__(self, target: Model, folder: Path, plan: Plan, resume: bool = False) -> None:
        self.target, self.plan = target, plan
        self.config = config_for(target)
        self.standing = Standing()
        self.history: list[Standing] = []
        self._elapsed: Callable[[], float] = float
        self._folder = folder / TRAINING
        if self._folder.exists() and not resume:
            raise UserError(f"{folder} holds a training already; go on with --resume, or name another folder.")
        if resume and not self._folder.exists():
            raise UserError(f"{folder} holds no training to resume.")
        self._block_seconds = 0.0
        if plan.seconds:
            self._block_seconds = block_seconds(target, plan.prompts is None)
            if not self._state_file.exists():
                require_time(plan.seconds, target, plan.prompts is None, self._block_seconds)
        with on_disk(folder):
            self._open()

    def _open(self) -> None:
        self._same_target()
        self._keep_prompts()
        self._pool = Pool(self._folder, self.config.feature_width, self.config.draft_vocab_size)
        self._written: dict[int, list[Dialogue]] = {}
        self._blocks = 0
        """Blocks of dialogues learnt from so far; a run before this one may have left more in the pool."""
        self._epoch = self._at = self._epoch_blocks = 0
        """The epoch, its next batch, and how many blocks it goes over."""
        self._order: list[list[Entry]] = []
        self._learner: Learner | None = None
        if self._state_file.exists():
            self._load()

    def go_on(self) -> None:
        """Where all of the plan is behind, take it for so much more."""
        plan, standing = self.plan, self.standing
        if self._done() >= 1:
            tokens = plan.tokens and plan.tokens + standing.visits
            self.plan = replace(plan, tokens=tokens, seconds=plan.seconds and plan.seconds + standing.seconds)

    @property
    def head(self) -> HeadNetwork:
        """The running average of the weights, in float32."""
        if self._learner is None:
            raise UserError("The head has not begun to learn; let it train a little longer.")
        return self._learner.average

    def run(self, stop: Stop = never, clock: Callable[[], float] = time.monotonic) -> Iterator[Standing]:
        """Train until the plan is done or `stop` says so. The state is saved now and then, and at the end whatever
        ends it; a later Trainer with `resume` goes on from there, step by step as if nothing had been."""
        with on_disk(self._folder.parent):
            yield from self._run(stop, clock)

    def _run(self, stop: Stop, clock: Callable[[], float]) -> Iterator[Standing]:
        standing = self.standing
        began = clock() - standing.seconds
        self._elapsed = lambda: clock() - began
        saved = clock()
        due = saved + SECONDS_BETWEEN_EVALUATIONS
        try:
            while not stop() and self._done() < 1:
                if self._needs_text():
                    standing.doing = "writing"
                    yield copy.deepcopy(standing)
                    self._write(stop)
                else:
                    standing.doing = "learning"
                    if self._learner is None:
                        self._learner = Learner(self.untrained())
                        due = clock()
                    else:
                        self._step()
                now = clock()
                standing.seconds = self._elapsed()
                if self._learner and now >= due:
                    self._evaluate()
                    due = clock() + max(SECONDS_BETWEEN_EVALUATIONS, (clock() - now) / EVALUATING)
                    yield copy.deepcopy(standing)
                if now - saved >= SECONDS_BETWEEN_SAVES:
                    self.save()
                    saved = clock()
        except Cancelled:
            pass
        finally:
            self.save()
        if self._learner:
            self._evaluate(overlap=True)
        standing.doing = "done" if self._done() >= 1 else "stopped"
        yield copy.deepcopy(standing)

    def save(self) -> None:
        """Write the state, replacing the one before in one move."""
        if self._learner is None:
            return
        require_room(self._folder, self._state_bytes())
        state = {
            "learner": self._learner.state_dict(),
            "standing": asdict(self.standing),
            "order": [self._blocks, self._epoch, self._at, self._epoch_blocks],
        }
        beside = self._state_file.with_suffix(".new")
        torch.save(state, beside)
        os.replace(beside, self._state_file)

    def _state_bytes(self) -> int:
        """Of a state on the disk, nearly: the weights, their average, and at most two moments of each."""
        parameters = sum(p.numel() for p in self._learner.head.parameters()) if self._learner else 0
        return 4 * 4 * parameters

    def _load(self) -> None:
        state = torch.load(self._state_file, weights_only=True, map_location=self.target.device)
        self._learner = Learner(self.untrained())
        self._learner.load_state_dict(state["learner"])
        self.standing = Standing(**state["standing"])
        found = [Standing(**line) for line in read_progress(self._folder)]
        self.history = [each for each in found if each.visits <= self.standing.visits]
        self._progress_file.write_text("".join(map(as_line, self.history)), encoding="utf-8")
        self._blocks, self._epoch, self._at, self._epoch_blocks = state["order"]
        self._order = self._ordered()

    def _same_target(self) -> None:
        """Note whose head this is; refuse to go on with another's."""
        note = self._folder / "target.json"
        shape = json.loads(json.dumps(asdict(self.config)))
        if not note.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(shape), encoding="utf-8")
        elif json.loads(note.read_text(encoding="utf-8")) != shape:
            raise UserError(f"{self._folder.parent} holds the training of a head for another target.")

    def _keep_prompts(self) -> None:
        """A training that goes on answers the prompts it began with, unless it is given others."""
        file = self._folder / "prompts.json"
        if self.plan.prompts is not None:
            file.write_text(json.dumps(list(self.plan.prompts)), encoding="utf-8")
        elif file.exists():
            self.plan = replace(self.plan, prompts=json.loads(file.read_text(encoding="utf-8")))

    @property
    def _state_file(self) -> Path:
        return self._folder / "state.pt"

    @property
    def _progress_file(self) -> Path:
        return self._folder / PROGRESS

    # Text

    @property
    def _first_blocks(self) -> int:
        seconds = self.plan.seconds
        haste = seconds is not None and FIRST_BLOCKS * self._block_seconds > WRITING * seconds
        return FIRST_BLOCKS if self.config.draft_vocab_size < self.target.vocab_size and not haste else 1

    def _needs_text(self) -> bool:
        if self._blocks < self._first_blocks:
            return True
        if self.plan.seconds and self.plan.seconds - self.standing.seconds < 2 * self._block_seconds:
            return False  # time to learn from another block would be lacking
        return self.standing.visits >= EPOCHS * self.standing.answer_tokens and self._pool.bytes() < MOST_BYTES

    def _write(self, stop: Stop) -> None:
        """The next block of dialogues: written, or found in the pool where a run before this one came further."""
        began = self._elapsed()
        if len(self._pool) < (self._blocks + 1) * BLOCK:
            ids = self._draft_ids(stop)
            block = self._written.pop(self._blocks, None) or self._block(self._blocks, stop)
            # Behind the text there must be room for a state, so that all that is learnt from it can be kept.
            self._pool.add(self.target, block, self.config.aux_layers, ids, self._state_bytes())
        self._block_seconds = max(self._block_seconds, self._elapsed() - began)
        self.standing.writing = 0
        self._blocks += 1
        entries = self._pool.entries[: self._blocks * BLOCK]
        self.standing.dialogues = len(entries)
        self.standing.answer_tokens = sum(len(entry.ids) - entry.start for entry in entries)

    def _block(self, index: int, stop: Stop) -> list[Dialogue]:
        plan = self.plan
        return write_block(self.target, index, plan.seed, plan.prompts, stop, self._count, self._enough(index))

    def _enough(self, index: int) -> Stop:
        """When a block of the first texts has had its part of a limited time."""
        if not self.plan.seconds or self._learner is not None or index >= self._first_blocks:
            return never
        until = WRITING * self.plan.seconds * (index + 1) / self._first_blocks
        return lambda: self._elapsed() >= until

    def _count(self, tokens: int) -> None:
        self.standing.writing += tokens
        self.standing.seconds = self._elapsed()

    def _draft_ids(self, stop: Stop = never) -> Tensor:
        """The head's vocabulary: what the first blocks use most, chosen once."""
        file = self._folder / "draft_ids.pt"
        if not file.exists():
            self._written = {i: self._block(i, stop) for i in range(self._first_blocks)}
            answers = [d.ids[d.start :] for block in self._written.values() for d in block]
            torch.save(frequent_ids(answers, self.target.vocab_size, self.config.draft_vocab_size), file)
        return torch.load(file, weights_only=True)

    # Learning

    def _done(self) -> float:
        """The share of the plan that is behind; 0 throughout where there is no end to it."""
        plan, standing = self.plan, self.standing
        shares = [
            standing.visits / plan.tokens if plan.tokens else 0.0,
            standing.seconds / plan.seconds if plan.seconds else 0.0,
        ]
        return max(shares)

    def seconds_left(self) -> float | None:
        """Until the plan is done, as far as can be told."""
        if self.plan.seconds:
            return max(0.0, self.plan.seconds - self.standing.seconds)
        done = self._done()
        return self.standing.seconds * (1 - done) / done if done else None

    def _step(self) -> None:
        assert self._learner is not None
        if self._at == len(self._order):
            self._epoch, self._at, self._epoch_blocks = self._epoch + 1, 0, self._blocks
            self._order = self._ordered()
        batch = self._pool.batch(self._order[self._at], STEPS, self.target.device)
        self._at += 1
        warm = min(1.0, (self.standing.steps + 1) / WARM_UP)
        loss = self._learner.step(self._embedding(), batch, warm * min(1.0, (1 - self._done()) / FALL))
        standing = self.standing
        standing.steps += 1
        standing.visits += int(batch.counted.sum())
        standing.loss = loss if standing.loss is None else standing.loss + 0.05 * (loss - standing.loss)

    def _ordered(self) -> list[list[Entry]]:
        """The batches of an epoch: texts of like length together, in an order that the seed and the epoch decide."""
        entries = self._pool.training(self._epoch_blocks * BLOCK)
        chance = random.Random(self.plan.seed * 1_000_003 + self._epoch)
        chance.shuffle(entries)
        batches = []
        for at in range(0, len(entries), 4 * BLOCK):
            some = sorted(entries[at : at + 4 * BLOCK], key=lambda entry: entry.rows)
            batches += [[some[i] for i in group] for group in grouped([entry.rows for entry in some], ROWS)]
        chance.shuffle(batches)
        return batches

    def _evaluate(self, overlap: bool = False) -> None:
        """Agreement on the held-out texts of the lowest temperature, where the text is what the target would choose, or
        nearly; and `overlap` on those written at temperature 1."""
        every = self._pool.held_out()
        coolest = min((entry.temperature for entry in every), default=0.0)
        if found := self._agreement([entry for entry in every if entry.temperature == coolest]):
            self.standing.agreement = found[0]
        if overlap and (found := self._agreement([entry for entry in every if entry.temperature == 1.0])):
            self.standing.overlap = found[1]
        if not self.history or self.history[-1].visits < self.standing.visits:
            self.history.append(copy.deepcopy(self.standing))
            with self._progress_file.open("a", encoding="utf-8") as file:
                file.write(as_line(self.standing))

    def _agreement(self, held: list[Entry]) -> tuple[list[float], float] | None:
        held = sorted(held[:HELD_OUT_SHOWN], key=lambda entry: entry.rows)
        groups = grouped([entry.rows for entry in held], ROWS)
        batches = (self._pool.batch([held[i] for i in g], SHOWN_STEPS, self.target.device) for g in groups)
        return agreement(self.head, self._embedding(), batches, SHOWN_STEPS) if held else None

    def _embedding(self) -> Tensor:
        network: Any = self.target.network
        weight = network.get_input_embeddings().weight.detach()
        return weight.float() if weight.dtype == torch.float16 else weight  # gradients would underflow

    def untrained(self) -> HeadNetwork:
        """The head as it was before its first step."""
        return new_head(self.target, self.config, self._draft_ids(), self.plan.seed)

    def held_out(self) -> Entry | None:
        """The answer by which one can see how far the head is: the first that is long, or the longest of all."""
        every = self._pool.held_out()
        long = (entry for entry in every if len(entry.ids) - entry.start >= ENOUGH_TO_SEE)
        return next(long, max(every, key=lambda entry: len(entry.ids) - entry.start, default=None))
