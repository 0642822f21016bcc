"""Data without a data set: the target writes prompts, and answers them at several temperatures.

A chat model's own prompts are sampled where its template puts the user's words; a base model begins a text and goes on
with it. What a head learns is then what it will be asked for: the target's own distribution.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from core.errors import Cancelled, UserError
from core.loading.model import Model
from core.loading.pair import special_ids
from core.progress import Stop, never
from core.runners import prefill
from core.runners.native import feed_each
from core.settings import Settings
from core.text import encode_prompt, fill_template

BLOCK, FIRST_BLOCK, FIRST_BLOCKS = 64, 16, 4
"""Dialogues written at a time; and at first, so that a head soon begins to learn."""
PROMPT_TOKENS, ANSWER_TOKENS = 64, 224
LEAST_ANSWER = 16
"""Tokens of an answer that is cut for want of time."""
OPENING_TOKENS = 48
"""Of a text that a base model begins itself."""
TEMPERATURES, TEXT_TEMPERATURES = (0.0, 0.0, 0.6, 1.0), (0.6, 1.0)
"""Of the answers, by turns; none of a base model's is greedy, since it would soon repeat itself for good."""
WRITING = 0.4
"""The share of a limited time that may go into the first texts: from there on answers are cut."""
LIKELIEST = 64
"""Answers are drawn among so many tokens, prompts from the likeliest that hold NUCLEUS of the probability."""
NUCLEUS = 0.95
ATTEMPTS = 20
"""At as many prompts as a block needs, before a target is taken for one that cannot write them."""
MARKER = "\ue000"
Count = Callable[[int], None]
"""Told how many tokens were just drawn."""


def uncounted(tokens: int) -> None:
    pass


@dataclass(frozen=True)
class Dialogue:
    """Token ids [n] of prompt and answer; the answer begins at `start`. What is `held_out` is never learnt from."""

    ids: list[int]
    start: int
    temperature: float
    held_out: bool = False

    @property
    def rows(self) -> int:
        return len(self.ids) - 1

    @property
    def answer(self) -> int:
        """Tokens of it."""
        return len(self.ids) - self.start


HELD_OUT, HELD_OUT_AT_FIRST = 25, 5
"""Of the dialogues every so many-th is held out; of the first ones more, so that there is enough to look at."""


def is_held_out(index: int) -> bool:
    return index % (HELD_OUT_AT_FIRST if index < BLOCK else HELD_OUT) == 0


def as_line(dialogue: Dialogue) -> str:
    return json.dumps(asdict(dialogue), separators=(",", ":")) + "\n"


def read_dialogues(file: Path, target: Model) -> list[Dialogue]:
    """Those of a file, which may be gzipped: a JSON object a line with `ids` (token ids of prompt and answer), `start`
    (or `p`, where the answer begins), `temperature` (or `t`, its answer's; 0 where there is none) and `held_out`; where
    no line says which are, every HELD_OUT-th is. Raises UserError where they cannot be this target's."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = [
            Dialogue(
                [int(token) for token in line["ids"]],
                int(line["start"] if "start" in line else line["p"]),
                float(line.get("temperature", line.get("t", 0.0))),
                bool(line.get("held_out")),
            )
            for line in lines
        ]
    except OSError as error:
        raise UserError(f"The dialogues {file} cannot be read: {error.strerror or error}.") from None
    except (EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f'{file} is not a file of dialogues (a line each: {{"ids": [1, 2, 3], "start": 2}}).') from None
    for number, dialogue in enumerate(found, 1):
        known = all(0 <= token < target.vocab_size for token in dialogue.ids)
        if not known or not 0 < dialogue.start < len(dialogue.ids) <= target.context_length:
            raise UserError(f"Dialogue {number} of {file} cannot be one of {target.name}: its ids do not fit.")
    if sum(usable(dialogue) for dialogue in found) < 2:
        raise UserError(f"{file} holds no dialogues to learn from.")
    if not any(dialogue.held_out for dialogue in found):
        found = [Dialogue(d.ids, d.start, d.temperature, i % HELD_OUT == 0) for i, d in enumerate(found)]
    return found


def usable(dialogue: Dialogue) -> bool:
    """Whether an answer is long enough for a row of it to be predicted."""
    return dialogue.answer >= 3


def block_size(index: int) -> int:
    return FIRST_BLOCK if index < FIRST_BLOCKS else BLOCK


def block_start(index: int) -> int:
    """How many dialogues the blocks before this one have."""
    return sum(block_size(i) for i in range(index))


def write_block(
    target: Model,
    index: int,
    seed: int,
    prompts: Sequence[str] | None,
    stop: Stop,
    count: Count = uncounted,
    enough: Stop = never,
) -> list[Dialogue]:
    """The block of dialogues with this index: the same for the same seed, whatever was written before.

    `prompts`: a person's own, taken by turns; None: the target writes them. Raises Cancelled after `stop`. After
    `enough` prompts and answers end where they are, answers LEAST_ANSWER tokens on at the earliest.
    """
    generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + index)
    first, size = block_start(index), block_size(index)
    if prompts is None:
        opened = own_prompts(target, size, generator, stop, count, enough)
    else:
        texts = [prompts[(first + i) % len(prompts)] for i in range(size)]
        opened = [encode_prompt(target, text, Settings()) for text in texts]
    longest = max(len(ids) for ids in opened)
    if longest + 2 > target.context_length:
        raise UserError(
            f"A prompt of {longest} tokens leaves no room for an answer: {target.name} reads "
            f"{target.context_length} tokens."
        )
    room = min(ANSWER_TOKENS, target.context_length - longest)
    turns, places = len(prompts) if prompts else 1, range(first, first + size)
    choice = TEMPERATURES if getattr(target.tokenizer, "chat_template", None) else TEXT_TEMPERATURES
    temperatures = [choice[(i % turns + i // turns) % len(choice)] for i in places]
    answers = sample(target, opened, temperatures, room, target.stop_ids, generator, stop, 1.0, count, enough)
    # What answers one prompt is held out together, or not: greedy answers to it are the same text. (Of a single prompt
    # some are, for want of another.)
    askings = [i % turns for i in places] if turns > 1 else places
    if not prompts:
        askings = [first + opened.index(prompt) for prompt in opened]
    return [
        Dialogue(prompt + answer, len(prompt), temperature, is_held_out(asking))
        for asking, prompt, answer, temperature in zip(askings, opened, answers, temperatures)
    ]


def own_prompts(
    target: Model, size: int, generator: torch.Generator, stop: Stop, count: Count = uncounted, enough: Stop = never
) -> list[list[int]]:
    """Prompts [size] that the target writes itself, ready for its answer; after `enough` those there are, by turns."""
    if not getattr(target.tokenizer, "chat_template", None):
        opening = [first_token(target)]
        heat = [1.0] * size
        begun = sample(
            target, [opening] * size, heat, OPENING_TOKENS, frozenset(), generator, stop, NUCLEUS, count, enough
        )
        return [opening + ids for ids in begun]
    before, after = user_turn(target)
    ends = target.stop_ids | {after[0]}
    special = special_ids(target.tokenizer)
    found: list[list[int]] = []
    for _ in range(ATTEMPTS):
        heat = [1.0] * size
        written = sample(target, [before] * size, heat, PROMPT_TOKENS, ends, generator, stop, NUCLEUS, count, enough)
        for ids in written:
            if len(ids) > 1 and ids[-1] in ends and special.isdisjoint(ids[:-1]):
                found.append([*before, *ids[:-1], *after])
        if not found and enough():  # better the beginning of a prompt than none
            begun = [
                ids[: next((i for i, token in enumerate(ids) if token in special | ends), None)] for ids in written
            ]
            found = [[*before, *ids, *after] for ids in begun if ids]
        if len(found) >= size or (found and enough()):
            return [found[i % len(found)] for i in range(size)]
    raise UserError(f"{target.name} writes hardly any prompts that end; give it prompts to answer.")


@torch.inference_mode()
def block_seconds(target: Model, written: bool) -> float:
    """How long a block takes here, by passes measured now; `written`: with prompts that the target writes itself."""
    begun = torch.full((FIRST_BLOCK,), first_token(target), device=target.device)
    times = []
    with ExitStack() as resources:
        texts = _begin(target, begun[:, None].tolist(), resources, never)
        for _ in range(4):
            began = time.perf_counter()
            texts.feed(begun)[0, 0].item()
            times.append(time.perf_counter() - began)
    return median(times[1:]) * (PROMPT_TOKENS * written + ANSWER_TOKENS)


def user_turn(target: Model) -> tuple[list[int], list[int]]:
    """Ids of the chat template before the user's words, and after them up to the answer."""
    tokenizer = target.tokenizer
    before, found, after = fill_template(tokenizer, target.name, MARKER).partition(MARKER)
    if not found or not after:
        raise UserError(
            f"The chat template of {target.name} shows no end of the user's words; give it prompts to answer."
        )
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(after, add_special_tokens=False),
    )


def first_token(target: Model) -> int:
    """What a text of a base model begins with."""
    tokenizer = target.tokenizer
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    return min(target.stop_ids) if target.stop_ids else 0


@torch.inference_mode()
def sample(
    target: Model,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    longest: int,
    ends: frozenset[int] | set[int],
    generator: torch.Generator,
    stop: Stop,
    nucleus: float = 1.0,
    count: Count = uncounted,
    enough: Stop = never,
) -> list[list[int]]:
    """Continue all prompts at once, each at its temperature, up to an id of `ends` (kept) or `longest` tokens; after
    `enough` up to LEAST_ANSWER."""
    heat = torch.tensor(temperatures, device=target.device, dtype=torch.float32)
    live = list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in prompts]
    drawn = None
    with ExitStack() as resources:
        texts = _begin(target, prompts, resources, stop)
        for at in range(longest):
            if stop():
                raise Cancelled
            if at >= LEAST_ANSWER and enough():
                break
            drawn = draw(texts.feed(drawn).float(), heat, nucleus, generator)
            count(len(live))
            for row, token in zip(live, drawn.tolist()):
                if not written[row] or written[row][-1] not in ends:
                    written[row].append(token)
            going = [i for i, row in enumerate(live) if written[row][-1] not in ends]
            if not going:
                break
            if len(going) <= texts.leaves * len(live):  # those that have ended leave, now and then
                texts.keep(going)
                drawn, heat, live = drawn[going], heat[going], [live[i] for i in going]
    return written


def _begin(target: Model, prompts: Sequence[list[int]], resources: ExitStack, stop: Stop) -> _Slots | _Padded:
    return _Slots(target, prompts, resources, stop) if target.exact_rows else _Padded(target, prompts)


class _Slots:
    """Texts with a cache each, and passes over the newest token of all."""

    leaves = 0.99
    """The share that is left when those that have ended are dropped."""

    def __init__(self, target: Model, prompts: Sequence[list[int]], resources: ExitStack, stop: Stop) -> None:
        self._runners: list[Any] = []
        for ids in prompts:
            self._runners.append(resources.enter_context(target.lease(len(ids))))
            prefill(self._runners[-1], ids[:-1], stop)
        self._newest = torch.tensor([ids[-1] for ids in prompts])

    def feed(self, drawn: Tensor | None) -> Tensor:
        """The logits [texts, vocab] after the tokens `drawn` [texts]; at first after the prompts."""
        tokens = self._newest if drawn is None else drawn
        return feed_each(self._runners, tokens.split(1))

    def keep(self, going: list[int]) -> None:
        self._runners = [self._runners[i] for i in going]


class _Padded:
    """The same in one cache of transformers', prompts filled up in front to one length."""

    leaves = 0.75

    def __init__(self, target: Model, prompts: Sequence[list[int]]) -> None:
        device, width = target.device, max(map(len, prompts))
        self._network: Any = target.network
        self._vocabulary = target.vocab_size
        self._ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._cache = DynamicCache()

    def feed(self, drawn: Tensor | None) -> Tensor:
        if drawn is not None:
            self._ids, self._positions = drawn[:, None], self._positions[:, -1:] + 1
            self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], 1)
        out = self._network(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            logits_to_keep=1,
        )
        return out.logits[:, -1, : self._vocabulary]

    def keep(self, going: list[int]) -> None:
        index = torch.tensor(going, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self._positions, self._mask = self._positions[index], self._mask[index]


def draw(logits: Tensor, heat: Tensor, nucleus: float, generator: torch.Generator) -> Tensor:
    """One token a row: the likeliest where heat is 0, else drawn at that temperature. logits [B, vocab], heat [B]."""
    values, ids = logits.topk(min(LIKELIEST, logits.shape[-1]))
    probs = (values / heat.clamp(min=1e-6)[:, None]).softmax(-1)
    probs[probs.cumsum(-1) - probs >= nucleus] = 0
    picked = torch.multinomial(probs, 1, generator=generator)
    picked[heat == 0] = 0
    return ids.gather(1, picked)[:, 0]
