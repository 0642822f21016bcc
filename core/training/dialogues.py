"""Data without a data set: the target writes prompts, and answers them at several temperatures.

A chat model's own prompts are sampled where its template puts the user's words; a base model begins a text and goes on
with it. What a head learns is then what it will be asked for: the target's own distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from core.errors import Cancelled, UserError
from core.loading.model import Model
from core.loading.pair import special_ids
from core.progress import Stop, duration, never
from core.settings import Settings
from core.text import encode_prompt, fill_template

BLOCK = 64
"""Dialogues written at a time."""
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
    """Token ids [n] of prompt and answer; the answer begins at `start`."""

    ids: list[int]
    start: int
    temperature: float


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
    `enough` answers end where they are, LEAST_ANSWER tokens on at the earliest.
    """
    generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + index)
    size = BLOCK
    first = index * size
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
    turns = len(prompts) if prompts else 1
    choice = TEMPERATURES if getattr(target.tokenizer, "chat_template", None) else TEXT_TEMPERATURES
    temperatures = [choice[(i % turns + i // turns) % len(choice)] for i in range(first, first + size)]
    answers = sample(target, opened, temperatures, room, target.stop_ids, generator, stop, 1.0, count, enough)
    return [
        Dialogue(prompt + answer, len(prompt), temperature)
        for prompt, answer, temperature in zip(opened, answers, temperatures)
    ]


def own_prompts(
    target: Model, size: int, generator: torch.Generator, stop: Stop, count: Count = uncounted, enough: Stop = never
) -> list[list[int]]:
    """Prompts [size] that the target writes itself, ready for its answer; after `enough` those there are, by turns."""
    if not getattr(target.tokenizer, "chat_template", None):
        opening = [first_token(target)]
        heat = [1.0] * size
        begun = sample(target, [opening] * size, heat, OPENING_TOKENS, frozenset(), generator, stop, NUCLEUS, count)
        return [opening + ids for ids in begun]
    before, after = user_turn(target)
    ends = target.stop_ids | {after[0]}
    special = special_ids(target.tokenizer)
    found: list[list[int]] = []
    for _ in range(ATTEMPTS):
        heat = [1.0] * size
        for ids in sample(target, [before] * size, heat, PROMPT_TOKENS, ends, generator, stop, NUCLEUS, count):
            if len(ids) > 1 and ids[-1] in ends and special.isdisjoint(ids[:-1]):
                found.append([*before, *ids[:-1], *after])
        if len(found) >= size or (found and enough()):
            return [found[i % len(found)] for i in range(size)]
    raise UserError(f"{target.name} writes hardly any prompts that end; give it prompts to answer.")


@torch.inference_mode()
def block_seconds(target: Model, written: bool) -> float:
    """How long a block takes here, by passes measured now; `written`: with prompts that the target writes itself."""
    network: Any = target.network
    ids = torch.full((BLOCK, 1), first_token(target), device=target.device)
    cache, times = DynamicCache(), []
    for _ in range(4):
        began = time.perf_counter()
        network(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1, 0].item()
        times.append(time.perf_counter() - began)
    return median(times[1:]) * (PROMPT_TOKENS * written + ANSWER_TOKENS)


def require_time(seconds: float, target: Model, written: bool, block: float) -> None:
    """Raise UserError where `seconds` are too short for a head: for texts whose answers are cut as short as they may
    be, where a whole `block` takes so long, and for learning from them."""
    texts = block * (PROMPT_TOKENS * written + LEAST_ANSWER) / (PROMPT_TOKENS * written + ANSWER_TOKENS)
    if seconds < texts / WRITING:
        raise UserError(
            f"In {duration(seconds)} there would be no head: even short texts to learn from take {target.name} about "
            f"{duration(texts)} here. Train for {duration(60 * math.ceil(texts / WRITING / 60))} or longer."
        )


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
    network: Any = target.network
    device, width = target.device, max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    heat = torch.tensor(temperatures, device=device)
    live = list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in prompts]
    cache = DynamicCache()
    for at in range(longest):
        if stop():
            raise Cancelled
        if at >= LEAST_ANSWER and enough():
            break
        out = network(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        drawn = draw(out.logits[:, -1, : target.vocab_size].float(), heat, nucleus, generator)
        count(len(live))
        for row, token in zip(live, drawn.tolist()):
            if not written[row] or written[row][-1] not in ends:
                written[row].append(token)
        going = [i for i, row in enumerate(live) if written[row][-1] not in ends]
        if not going:
            break
        ids, positions = drawn[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        if len(going) <= 0.75 * len(live):  # rows that have ended leave the batch, now and then
            index = torch.tensor(going, device=device)
            cache.batch_select_indices(index)
            ids, positions, mask, heat = ids[index], positions[index], mask[index], heat[index]
            live = [live[i] for i in going]
    return written


def draw(logits: Tensor, heat: Tensor, nucleus: float, generator: torch.Generator) -> Tensor:
    """One token a row: the likeliest where heat is 0, else drawn at that temperature. logits [B, vocab], heat [B]."""
    values, ids = logits.topk(min(LIKELIEST, logits.shape[-1]))
    probs = (values / heat.clamp(min=1e-6)[:, None]).softmax(-1)
    probs[probs.cumsum(-1) - probs >= nucleus] = 0
    picked = torch.multinomial(probs, 1, generator=generator)
    picked[heat == 0] = 0
    return ids.gather(1, picked)[:, 0]
