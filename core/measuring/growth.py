"""What a round costs behind contexts of several lengths: only attention may grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core.bench import run_timed
from core.errors import UserError
from core.pairs import Pair
from core.prompting import encode_prompt
from core.prompts import read_prompts
from core.records import Run, Settings

NEW_TOKENS = 48
MARGIN = 8
"""Text cut to a number of tokens may come out a little longer when it is read again."""


def contexts_of(text: str, most: int) -> list[int]:
    """ "128,512,max" -> lengths in tokens, ascending; those the target has no room for are left out."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [name for name in names if name != "max" and not (name.isdecimal() and int(name) > NEW_TOKENS)]:
        raise UserError(f"A context is a number of tokens above {NEW_TOKENS}, or max; {wrong[0]!r} is not.")
    return sorted({most if name == "max" else int(name) for name in names} & {*range(most + 1)})


def growth(
    pair: Pair,
    variants: dict[str, Settings],
    contexts: Sequence[int],
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """For each context, each variant's mean milliseconds of a round while the text reaches that length: all of it, its
    bare forward passes, and what is neither drafting nor verifying. Run twice, the first as warm-up."""
    base = next(iter(variants.values()))
    plain = {"plain": replace(base, method="plain")}
    rows = []
    for context in contexts:
        prompt = padded_prompt(pair, context - NEW_TOKENS, base)
        methods = []
        for name, settings in (plain | variants).items():
            progress(f"context {context:,}: {name}")
            settings = replace(settings, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            run, efficiency = [run_timed(pair, prompt, settings) for _ in range(2)][-1]
            methods.append({"name": name, **_round_costs(run, efficiency)})
        rows.append({"context": context, "prompt_tokens": len(run.prompt_ids), "methods": methods})
    return rows


def padded_prompt(pair: Pair, length: int, settings: Settings) -> str:
    """The bundled prompts one after the other, as often as needed, cut to at most `length` tokens of the target."""
    tokenizer = pair.target.tokenizer
    text = "\n\n".join(prompt.text for prompt in read_prompts())
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = (ids * (length // len(ids) + 1))[:length]
    while True:
        prompt = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        surplus = len(encode_prompt(pair.target, prompt, settings)) - length
        if surplus <= 0 or len(ids) <= MARGIN:
            return prompt
        ids = ids[: -max(surplus, MARGIN)]


def _round_costs(run: Run, efficiency: float | None) -> dict[str, float | None]:
    rounds = run.rounds[1:] or run.rounds
    whole = 1000 * sum(round_.seconds for round_ in rounds) / len(rounds)
    return {
        "round_ms": whole,
        "passes_ms": None if efficiency is None else efficiency * whole,
        "other_ms": 1000 * sum(round_.other_seconds for round_ in rounds) / len(rounds),
    }
