"""Train for as long as one likes: get texts, learn from them, tell how far the head is; stop and go on at will.

Texts are those of a file first, then what the target writes. It reads a portion of them whenever the head has seen
those before EPOCHS times, so that reading, writing and learning go on in turn. Everything needed to go on lies in the
folder `training` of the output: the dialogues with their features, and a state of the head and its optimisers.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.costs.rounds import acceptance_rate
from core.disk import made_whole, write_whole
from core.errors import Cancelled, UserError
from core.heads import HeadConfig
from core.heads.checkpoint import describe_head, load_weights
from core.heads.dflash import DFlashConfig
from core.loading.head import check_target
from core.loading.model import Model
from core.progress import Stop, never
from core.training import KINDS, bundled_dialogues, config_for, frequent_ids, kind_of, new_head
from core.training.dialogues import Dialogue, block_seconds, block_size, read_dialogues, write_block
from core.training.kept import PLAN, PROGRESS, TRAINING, on_disk, read_progress, require_room
from core.training.learning import Learner, Network, agreements, steps_ahead
from core.training.pool import ROWS_A_PASS, ROWS_A_PASS_ON_CUDA, Entry, Pool, grouped
from core.training.unroll import STEPS

EPOCHS, EPOCHS_GOING_ON = 4, 2
"""How often texts are seen before others are read: by a head that knows nothing, and by one that was trained before."""
ROWS, ROWS_AT_ONCE = 1536, 768
"""Of a step; and of the batches in it, after each of which the standing moves."""
ROWS_GOING_ON = 2304
"""Of a step of a head that was trained before: what is left to learn shows above the noise of more rows alone."""
SORTED_TOGETHER = 256
"""Dialogues that are sorted by length to be batched."""
WARM_UP = 12
ONE_PASS = 100, 0.4
"""For how many steps, and for what share of a limited training at most, a new head learns with a single pass: the first
token of a draft comes first, and cheapest."""
GOING_ON_RATE = 0.1
"""The share of the full rates for a head that was trained before."""
FALL = 0.5
"""The share of a limited run over which the rates fall to nothing."""
WRITING = 0.4
"""The share of a limited time that may go into the first texts: from there on they are cut."""
SECONDS_BETWEEN_EVALUATIONS = 2.5
"""At least."""
EVALUATING = 0.1
"""The share of the time that looking at held-out answers may take."""
SECONDS_BETWEEN_SAVES = 60.0
HELD_OUT_SHOWN, HELD_OUT_SOON = 64, 12
"""Held-out answers that a look takes; and in the first minutes."""
FIRST_MINUTES = 600.0
ENDED = ("done", "stopped")
ENOUGH_TO_SEE = 64
"""Tokens of an answer that is worth showing."""
MOST_BYTES = 40 * 10**9
"""Of features on the disk; from there on the head learns from what there is."""


@dataclass(frozen=True)
class Plan:
    """How long to train: `tokens` answer tokens (each time one is seen counts), or `seconds`, or until stopped.
    `prompts`: a person's own, else the target writes them. `dialogues`: a file of texts to learn from first, without
    prompts the bundled ones where there are any for the target; `head`: the folder of a trained head to go on from,
    else a new one of this `kind`, without which it is the usual one."""

    tokens: int | None = None
    seconds: float | None = None
    prompts: Sequence[str] | None = None
    seed: int = 0
    dialogues: Path | None = None
    head: Path | None = None
    kind: str | None = None


@dataclass
class Standing:
    """How far a head is. `writing`: tokens drawn of the texts in the making; `answer_tokens`: those that there are to
    learn from, `visits` how many were learnt from, each time counted; `agreement[i]`: on held-out answers, the share of
    greedy drafts whose first i + 1 tokens are the target's own choice; `overlap`: Σ min(p, q) at the first token, which
    is what is accepted of it at temperature 1; `reached[i]`: the share of rounds that accepted at least i + 1 tokens
    when the head was last drafted with, in a `Session`, and `between` what was accepted in the worst and the best of
    its answers. None, and empty, before the first evaluation."""

    doing: str = "reading"
    seconds: float = 0.0
    dialogues: int = 0
    answer_tokens: int = 0
    writing: int = 0
    steps: int = 0
    visits: int = 0
    loss: float | None = None
    agreement: list[float] = field(default_factory=list)
    overlap: float | None = None
    reached: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        """Of the guesses that were judged, when it last drafted for the pair it is to race in."""
        return acceptance_rate(self.reached) if self.reached else None

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
        self.standing = Standing()
        self.history: list[Standing] = []
        self._elapsed: Callable[[], float] = float
        self._folder = folder / TRAINING
        if self._folder.exists() and not resume:
            raise UserError(f"{folder} holds a training already; go on with --resume, or name another folder.")
        if resume and not self._folder.exists():
            raise UserError(f"{folder} holds no training to resume.")
        file = plan.dialogues or (None if plan.prompts else bundled_dialogues(target))
        given = read_dialogues(file, target) if file and not resume else []
        config_for(target, plan.kind or KINDS[0])  # refuses a target that heads cannot be trained for
        if plan.head and not resume:
            self._trained(plan.head)
        with on_disk(folder):
            self._open(given)

    def _open(self, given: list[Dialogue]) -> None:
        self._recall()
        head, kind = self.plan.head, self.plan.kind or KINDS[0]
        self.config = self._trained(head).config if head else config_for(self.target, kind)
        self._same_target()
        rows = ROWS_A_PASS_ON_CUDA if self.target.device.type == "cuda" else ROWS_A_PASS
        self._pool = Pool(self._folder, self.config.feature_width, self.config.draft_vocab_size, rows)
        if given:
            self._pool.write(given)
        self._given = (self._folder / "given").exists() or bool(given)
        if given:
            (self._folder / "given").touch()
        self._available = 0
        """Dialogues learnt from so far; a run before this one may have left more in the pool."""
        self._epoch = self._at = self._epoch_texts = 0
        """The epoch, its next batch, and how many dialogues it goes over."""
        self._order: list[list[Entry]] = []
        self._learner: Learner | None = None
        self._block_seconds: float | None = None
        if self._state_file.exists():
            self._load()
        else:
            self._progress_file.unlink(missing_ok=True)  # of looks at a head that was not kept

    def go_on(self) -> None:
        """Where all of the plan is behind, take it for so much more."""
        plan, standing = self.plan, self.standing
        if self.done() >= 1:
            tokens = plan.tokens and plan.tokens + standing.visits
            self.plan = replace(plan, tokens=tokens, seconds=plan.seconds and plan.seconds + standing.seconds)

    @property
    def now(self) -> Standing:
        """A copy of the standing with the time it is now, for whoever asks from another thread."""
        standing = copy.copy(self.standing)
        if standing.doing not in ENDED:
            standing.seconds = max(standing.seconds, self._elapsed())
        return standing

    @property
    def head(self) -> Network:
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
        looking: Iterator[bool] | None = None
        looked = 0.0
        standing.doing = "reading"
        yield copy.deepcopy(standing)
        try:
            while not stop() and (self.done() < 1 or not standing.steps):
                if self._needs_text():
                    self._read(stop)
                elif self._learner is None:
                    self._learner = Learner(self.untrained())
                    due = clock()
                else:
                    standing.doing = "learning"
                    self._step()
                now = clock()
                standing.seconds = self._elapsed()
                if self._learner and (looking or now >= due):
                    looking = looking or self._looking()
                    found = next(looking)
                    looked += clock() - now
                    if found:
                        due = clock() + max(SECONDS_BETWEEN_EVALUATIONS, looked / EVALUATING)
                        looking, looked = None, 0.0
                yield copy.deepcopy(standing)
                if now - saved >= SECONDS_BETWEEN_SAVES:
                    self.save()
                    saved = clock()
        except Cancelled:
            pass
        finally:
            self.save()
        if self._learner:
            standing.doing = "checking"
            for _ in self._looking(overlap=True):
                standing.seconds = max(standing.seconds, self._elapsed())
                yield copy.deepcopy(standing)
        standing.doing = ENDED[0] if self.done() >= 1 else ENDED[1]
        yield copy.deepcopy(standing)

    def save(self) -> None:
        """Write the state, replacing the one before in one move."""
        if self._learner is None:
            return
        require_room(self._folder, self._state_bytes())
        state = {
            "learner": self._learner.state_dict(),
            "standing": asdict(self.standing),
            "order": [self._available, self._epoch, self._at, self._epoch_texts],
        }
        with made_whole(self._state_file) as file:
            torch.save(state, file)

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
        write_whole(self._progress_file, "".join(map(as_line, self.history)))
        self._available, self._epoch, self._at, self._epoch_texts = state["order"]
        self._order = self._ordered()

    def _same_target(self) -> None:
        """Note whose head this is; refuse to go on with another's."""
        note = self._folder / "target.json"
        shape = json.loads(json.dumps(asdict(self.config)))
        if not note.exists():
            write_whole(note, json.dumps(shape))
        elif json.loads(note.read_text(encoding="utf-8")) != shape:
            raise UserError(f"{self._folder.parent} holds the training of a head for another target.")

    def _recall(self) -> None:
        """A training that goes on answers the prompts it began with, unless it is given others; its head is of the
        kind, and was at first the one, that it began with. Raises UserError where another kind is asked for."""
        file, plan = self._folder / PLAN, self.plan
        kind = plan.kind or KINDS[0]
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            prompts = kept["prompts"] if plan.prompts is None else plan.prompts
            plan = replace(plan, prompts=prompts, head=Path(kept["head"]) if kept["head"] else None)
            kind = kept.get("kind", KINDS[0])
        elif plan.head:
            kind = kind_of(self._trained(plan.head).config)
        if plan.kind not in (None, kind):
            raise UserError(f"What is to be gone on from is of the kind {kind}; it cannot become {plan.kind}.")
        self._folder.mkdir(parents=True, exist_ok=True)
        self.plan = plan = replace(plan, kind=kind)
        begun_with = plan.head and str(plan.head.resolve())
        kept = {"prompts": plan.prompts and list(plan.prompts), "head": begun_with, "kind": plan.kind}
        write_whole(file, json.dumps(kept))

    @property
    def _state_file(self) -> Path:
        return self._folder / "state.pt"

    @property
    def _progress_file(self) -> Path:
        return self._folder / PROGRESS

    # Text

    def _needs_text(self) -> bool:
        training = self._pool.training(self._available)
        plan, standing = self.plan, self.standing
        unread = self._available < len(self._pool.texts)
        if not training or (unread and sum(entry.rows for entry in training) < self._rows_of_step):
            return True
        if not unread and plan.seconds and plan.seconds - standing.seconds < 2 * self._seconds_of_block():
            return False  # time to learn from another block would be lacking
        epochs = EPOCHS_GOING_ON if plan.head else EPOCHS
        return standing.visits >= epochs * standing.answer_tokens and self._pool.bytes() < MOST_BYTES

    @property
    def _rows_of_step(self) -> int:
        return ROWS_GOING_ON if self.plan.head else ROWS

    def _seconds_of_block(self) -> float:
        if self._block_seconds is None:
            self._block_seconds = block_seconds(self.target, self.plan.prompts is None)
        return self._block_seconds

    def _read(self, stop: Stop) -> None:
        """The next portion of texts: read, or found in the pool where a run before this one came further."""
        pool, standing = self._pool, self.standing
        if self._available == len(pool.texts):
            self._write(stop)
        standing.doing = "reading"
        if self._available == len(pool):
            # Behind the text there must be room for a state, so that all that is learnt from it can be kept.
            pool.read(self.target, self.config.aux_layers, self._draft_ids(), self._state_bytes())
        self._available = pool.portion(self._available)
        standing.dialogues = self._available
        standing.answer_tokens = sum(entry.counted for entry in pool.training(self._available))

    def _write(self, stop: Stop) -> None:
        """The next block of dialogues."""
        began, plan, standing = self._elapsed(), self.plan, self.standing
        index = self._pool.writes - self._given
        standing.doing, standing.writing = "writing", 0
        block = write_block(self.target, index, plan.seed, plan.prompts, stop, self._count, self._enough())
        self._pool.write(block)
        self._block_seconds = (self._elapsed() - began) * block_size(index + 1) / block_size(index)

    def _enough(self) -> Stop:
        """When the first texts have had their part of a limited time."""
        if not self.plan.seconds or self._learner is not None:
            return never
        until = WRITING * self.plan.seconds
        return lambda: self._elapsed() >= until

    def _count(self, tokens: int) -> None:
        self.standing.writing += tokens
        self.standing.seconds = self._elapsed()

    def _draft_ids(self) -> Tensor:
        """The head's vocabulary: what the first texts use most, chosen once."""
        file = self._folder / "draft_ids.pt"
        if not file.exists():
            answers = [d.ids[d.start :] for d in self._pool.texts]
            ids = frequent_ids(answers, self.target.vocab_size, self.config.draft_vocab_size)
            with made_whole(file) as beside:
                torch.save(self._trained(self.plan.head).draft_ids.cpu() if self.plan.head else ids, beside)
        return torch.load(file, weights_only=True)

    # Learning

    def done(self) -> float:
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
        done = self.done()
        return self.standing.seconds * (1 - done) / done if done else None

    def _step(self) -> None:
        assert self._learner is not None
        standing = self.standing
        if self._at == len(self._order):
            self._epoch, self._at, self._epoch_texts = self._epoch + 1, 0, self._available
            self._order = self._ordered()
        groups, rows = [], 0
        for group in self._order[self._at :]:
            rows += sum(entry.rows for entry in group)
            if groups and rows > self._rows_of_step:
                break
            groups.append(group)
        steps, share = ONE_PASS
        alone = not self.plan.head and standing.steps < steps and self.done() < share
        passes = 1 if alone else STEPS
        total = sum(entry.counted for group in groups for entry in group)
        loss = 0.0
        for group in groups:
            batch = self._pool.batch(group, steps_ahead(self._learner.head), self.target.device)
            counted = sum(entry.counted for entry in group)
            chance = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + standing.visits)
            loss += self._learner.learn(self._embedding(), batch, counted / total, passes, chance)
            standing.visits += counted
        warm = min(1.0, (standing.steps + 1) / WARM_UP) * (GOING_ON_RATE if self.plan.head else 1.0)
        self._learner.step(warm * min(1.0, max(0.0, 1 - self.done()) / FALL))
        self._at += len(groups)
        standing.steps += 1
        standing.loss = loss if standing.loss is None else standing.loss + 0.05 * (loss - standing.loss)

    def _ordered(self) -> list[list[Entry]]:
        """The batches of an epoch: texts of like length together, in an order that the seed and the epoch decide."""
        entries = self._pool.training(self._epoch_texts)
        chance = random.Random(self.plan.seed * 1_000_003 + self._epoch)
        chance.shuffle(entries)
        batches = []
        for at in range(0, len(entries), SORTED_TOGETHER):
            some = sorted(entries[at : at + SORTED_TOGETHER], key=lambda entry: entry.rows)
            batches += [[some[i] for i in group] for group in grouped([entry.rows for entry in some], ROWS_AT_ONCE)]
        chance.shuffle(batches)
        return batches

    def _looking(self, overlap: bool = False) -> Iterator[bool]:
        """A look at the held-out texts of the lowest temperature, where the text is what the target would choose, or
        nearly; and, for `overlap`, at those written at temperature 1. Yields after every batch, True at the end; the
        head that is looked at is that of the beginning."""
        head, seen = copy.deepcopy(self.head), copy.deepcopy(self.standing)
        every = self._pool.held_out()
        coolest = min((entry.dialogue.temperature for entry in every), default=0.0)
        soon = bool(self.plan.seconds) and self.plan.seconds <= FIRST_MINUTES
        most = HELD_OUT_SOON if soon else HELD_OUT_SHOWN
        for seen.agreement, _ in self._agreement(head, every, coolest, most):
            yield False
        self.standing.agreement = seen.agreement
        if overlap:
            for _, seen.overlap in self._agreement(head, every, 1.0, most):
                yield False
            self.standing.overlap = seen.overlap
        if not self.history or self.history[-1].visits < seen.visits:
            self.history.append(seen)
            with self._progress_file.open("a", encoding="utf-8") as file:
                file.write(as_line(seen))
        yield True

    def _agreement(
        self, head: Network, every: list[Entry], temperature: float, most: int
    ) -> Iterator[tuple[list[float], float]]:
        held = [entry for entry in every if entry.dialogue.temperature == temperature][:most]
        held = sorted(held, key=lambda entry: entry.rows)
        groups = grouped([entry.rows for entry in held], ROWS_AT_ONCE)
        batches = (self._pool.batch([held[i] for i in g], steps_ahead(head), self.target.device) for g in groups)
        return agreements(head, self._embedding(), batches)

    def _embedding(self) -> Tensor:
        network: Any = self.target.network
        weight = network.get_input_embeddings().weight.detach()
        return weight.float() if weight.dtype == torch.float16 else weight  # gradients would underflow

    def _trained(self, folder: Path) -> Network:
        """The head of a folder, in float32. Raises UserError where it is none for this target."""
        found = describe_head(folder, str(folder))
        config = found.config(check_target(found, str(folder), self.target)[0])
        if isinstance(config, HeadConfig) and found.in_blocks:
            raise UserError(f"{folder} guesses in parallel (P-EAGLE), which is not trained here; choose another head.")
        if isinstance(config, DFlashConfig) and (not config.own_head or config.softcap):
            raise UserError(f"{folder} has no plain output layer of its own to be trained; choose another head.")
        return load_weights(folder, str(folder), config, torch.float32, self.target.device)

    def untrained(self) -> Network:
        """The head as it was before its first step."""
        if self.plan.head:
            return self._trained(self.plan.head).train().requires_grad_(True)
        return new_head(self.target, self.config, self._draft_ids(), self.plan.seed)

    def held_out(self) -> Entry | None:
        """The answer by which one can see how far the head is: the first that is long, or the longest of all."""
        every = self._pool.held_out()
        long = (entry for entry in every if entry.dialogue.answer >= ENOUGH_TO_SEE)
        return next(long, max(every, key=lambda entry: entry.dialogue.answer, default=None))
