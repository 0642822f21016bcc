"""Many texts at once: what speculation is worth as they become more, measured here, beside what the costs of passes
predict.

Plain decoding of many texts already shares the reading of weights, so a draft's rows come to cost arithmetic of their
own: from some number of texts on they cost more than they bring.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from statistics import fmean
from typing import Any

from core.costs.rounds import promise
from core.drafting.build import available, settle_method, shares_passes, whole_costs
from core.drafting.methods import METHODS
from core.errors import UserError
from core.explaining.traffic import batch_limit
from core.lanes import decode_together, describe_environment
from core.loading.memory import cache_bytes, free_memory
from core.loading.pair import Pair
from core.measuring.deciding import Step
from core.progress import Stop, in_bytes, never
from core.records import SCHEMA, Round, Spread
from core.runners.clock import engine_time
from core.sampling import MOST_DRAFTED
from core.settings import Settings
from core.text import Prompt, encode_prompt

SIZES = (1, 2, 4, 8, 16)
MOST = 64
"""Texts at once; more than a machine with one reader's memory is asked for."""
TOKENS = 32
"""Of each text, so that every number of texts meets the same mix of them."""
MOST_PROMPTS = 16
PATIENCE = 8
"""Of many texts that end one by one few passes are left that count: a look ends when so many times what it wants to
count has been written."""
PLAIN = "plain"


@dataclass(frozen=True)
class Look:
    """So many texts decoded at once for a while: tokens a second of all, and the rounds that were counted."""

    tokens_per_second: float
    rounds: list[Round]


def batches(
    pair: Pair,
    prompts: Sequence[Prompt],
    variants: Mapping[str, Settings],
    sizes: Iterable[int] = SIZES,
    repeats: int = 2,
    stop: Stop = never,
) -> Generator[Step, None, dict[str, Any]]:
    """Measure each variant (name -> settings) and plain decoding with so many texts at once; yields after every look,
    returns a document. At each size all are measured in turn, and again `repeats` times, so that a slow moment hits
    all alike; a method `loses_from` where every look was slower than plain decoding's. Stopped early, the document
    holds what was measured until then.

    Raises UserError for sizes and methods that cannot be measured.
    """
    sizes, prompts = sorted(set(sizes)), prompts[:MOST_PROMPTS]
    check_batches(pair, variants.values(), sizes)
    base = next(iter(variants.values()))
    check_room(pair, prompts, base, sizes[-1])
    asked = {PLAIN: replace(base, method="plain")}
    asked |= {name: settle_method(pair, each) for name, each in variants.items() if each.method != "plain"}
    looks: dict[tuple[int, str], list[Look]] = {(size, name): [] for size in sizes for name in asked}
    schedule = [key for size in sizes for _ in range(repeats) for key in looks if key[0] == size]
    yield Step(0, len(schedule), "what passes over the rows of many texts cost")
    for settings in asked.values():
        whole_costs(pair, settings, sizes[-1])
    pass_over = pair.target.measure_costs()
    worked, begun = 0.0, time.perf_counter()
    for done, (size, name) in enumerate(schedule):
        if found := look(pair, prompts, asked[name], size, stop):
            looks[size, name].append(found)
        if stop():
            break
        worked += pass_over(size)
        left = sum(pass_over(each) for each, _ in schedule[done + 1 :]) * (time.perf_counter() - begun) / worked
        yield Step(done + 1, len(schedule), f"{size} at once, {name}", left)
    return _document(pair, prompts, asked, looks, stop())


def check_batches(pair: Pair, variants: Iterable[Settings], sizes: Sequence[int]) -> None:
    """One sentence for what cannot be measured."""
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST:
        raise UserError(f"Texts at once are numbers between 1 and {MOST}, such as 1,2,4,8,16.")
    missing = available(pair)
    for settings in variants:
        if reason := missing[settle_method(pair, settings).method]:
            raise UserError(f"The method {settings.method} is off: {reason}.")


def check_room(pair: Pair, prompts: Sequence[Prompt], settings: Settings, texts: int) -> None:
    """One sentence where the caches of so many texts do not fit in what is free now."""
    longest = max((len(encode_prompt(pair.target, prompt.text, settings)) for prompt in prompts), default=0)
    room, needed = longest + TOKENS + MOST_DRAFTED, 0
    for model in filter(None, (pair.target, pair.draft)):
        needed += texts * cache_bytes(model.config, room, model.network.dtype)  # type: ignore[arg-type]
    free = free_memory(pair.target.device).free
    if free is not None and needed > free:
        raise UserError(
            f"{texts} texts at once keep about {in_bytes(needed)} of keys and values, and {in_bytes(free)} are free; "
            "ask for fewer at once."
        )


def look(pair: Pair, prompts: Sequence[Prompt], settings: Settings, size: int, stop: Stop = never) -> Look | None:
    """Decode TOKENS of one prompt after the other, `size` at a time, until as much is counted as all prompts, or as
    `size` of them come to; None after `stop`.

    What counts are the passes by which so many texts are written: not those that read the next one's prompt, nor a
    first round, before which the drafter reads it, nor what is captured once for many runs.
    """
    shared = pair.target.shares and size > 1
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, TOKENS))
    texts = ((prompt.text, short) for prompt in cycle(prompts))
    enough = max(size, len(prompts)) * short.max_new_tokens
    rounds: list[Round] = []
    told: list[Round] = []
    turn, whole, tokens, written = 0, False, 0, 0
    seconds, last = 0.0, engine_time()
    begun = last
    with closing(decode_together(pair, texts, size, stop)) as events:
        for count, (_, _, round_, common) in enumerate(events):
            now = common if shared else count
            if now != turn:
                if whole and len(told) == (size if shared else 1):
                    rounds += told
                    seconds += last - begun
                    tokens += sum(len(each.kept) for each in told)
                if tokens >= enough or written >= PATIENCE * enough:
                    if not tokens:
                        raise UserError("So short texts end before a pass over them counts; ask for more new tokens.")
                    return Look(tokens / seconds, rounds)
                whole = now == turn + 1  # else one in between read a prompt, and nobody had anything to tell
                turn, told, begun = now, [], last
            if round_.index:
                told.append(round_)
            written += len(round_.kept)
            last = engine_time()
    return None


def _document(
    pair: Pair,
    prompts: Sequence[Prompt],
    asked: Mapping[str, Settings],
    looks: Mapping[tuple[int, str], Sequence[Look]],
    stopped: bool,
) -> dict[str, Any]:
    measured = {key: found for key, found in looks.items() if found and looks[key[0], PLAIN]}
    alone = {name: [r for each in measured.get((1, name), ()) for r in each.rounds] for name in asked}
    rows: list[dict[str, Any]] = [
        _row(size, name, found, looks[size, PLAIN])
        | {"predicted": _predict(pair, asked[name], alone[name], alone[PLAIN], size) if name != PLAIN else None}
        for (size, name), found in measured.items()
    ]
    return {
        "schema": SCHEMA,
        "kind": "batches",
        "environment": describe_environment(pair.target, pair.draft, pair.head),
        "settings": {name: settings.to_dict() for name, settings in asked.items()},
        "prompts": [{"name": prompt.name, "kind": prompt.kind} for prompt in prompts],
        "tokens": TOKENS,
        "shared": pair.target.shares,
        "apart": [name for name, each in asked.items() if pair.target.shares and not shares_passes(pair, each)],
        "stopped": stopped,
        "rows": rows,
        "loses_from": {
            name: batch_limit([(row["texts"], row["ratio_to_plain"]["max"]) for row in rows if row["name"] == name])
            for name in asked
            if name != PLAIN
        },
    }


def _row(size: int, name: str, found: Sequence[Look], plain: Sequence[Look]) -> dict[str, Any]:
    rounds = [round_ for look in found for round_ in look.rounds]
    outcomes = [token.outcome for round_ in rounds for token in round_.drafted]
    judged = outcomes.count("accepted") + outcomes.count("rejected")
    speeds = [look.tokens_per_second for look in found]
    return {
        "texts": size,
        "name": name,
        "tokens_per_second": asdict(Spread.of(speeds)),
        "of_each": Spread.of(speeds).median / size,
        "ratio_to_plain": asdict(Spread.of([a / b.tokens_per_second for a, b in zip(speeds, plain)])),
        "acceptance_rate": outcomes.count("accepted") / judged if judged else None,
        "tokens_per_round": sum(len(round_.kept) for round_ in rounds) / len(rounds),
        "mean_drafted": len(outcomes) / len(rounds),
        "drafting": sum(bool(round_.drafted) for round_ in rounds) / len(rounds),
    }


def _predict(pair: Pair, settings: Settings, alone: list[Round], plain: list[Round], size: int) -> float | None:
    """The speed-up over plain decoding that costs of passes predict for so many texts at once: of the very drafts that
    were made for a text alone, with what a plain round of one takes beside its pass; where `auto` could as well leave
    them, no less than 1. None where a method's passes cannot be told from its rounds."""
    if METHODS[settings.method].tree or not alone or not plain:
        return None
    beside = fmean(round_.other_seconds for round_ in plain)
    found = promise(alone, whole_costs(pair, settings, size)).ratio(size * beside)
    return max(1.0, found) if settings.draft_length == "auto" else found


COLUMNS = {"tokens/s": 10, "of each": 9, "x plain": 9, "predicted": 10, "drafted": 9, "accepted": 10, "tok/pass": 10}


def batch_table(document: Mapping[str, Any]) -> str:
    """A row for each number of texts and method, and from where on it loses."""
    names = max(len(row["name"]) for row in document["rows"]) + 2
    lines = [f"{'texts':<7}{'method':<{names}}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())]
    for row in document["rows"]:
        cells = (
            f"{row['tokens_per_second']['median']:.0f}",
            f"{row['of_each']:.0f}",
            f"{row['ratio_to_plain']['median']:.2f}",
            "" if row["predicted"] is None else f"{row['predicted']:.2f}",
            f"{row['mean_drafted']:.2f}",
            "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
            f"{row['tokens_per_round']:.2f}",
        )
        row_cells = "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))
        lines.append(f"{row['texts']:<7}{row['name']:<{names}}{row_cells}")
    return "\n".join([*lines, "", *(describe(document, name) for name in document["loses_from"])])


def measured_of(document: Mapping[str, Any], environment: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a document is of the target and the method that these are of."""
    target, other = document["environment"]["target"], environment.get("target") or {}
    methods = {each["method"] for name, each in document["settings"].items() if name != PLAIN}
    return all(target[key] == other.get(key) for key in ("name", "precision")) and methods == {settings["method"]}


def describe_all(document: Mapping[str, Any]) -> str:
    """What was measured of each, in a sentence a method."""
    said = " ".join(describe(document, name) for name in document["loses_from"])
    return f"Many texts at once, measured here: {said}"


NOTHING = 0.1
"""Tokens drafted a round below which a method has as good as given up drafting."""


def describe(document: Mapping[str, Any], name: str) -> str:
    """In a sentence: up to how many texts at once a method is worth its drafts, measured and predicted."""
    rows = [row for row in document["rows"] if row["name"] == name]
    lost, most = document["loses_from"][name], rows[-1]["texts"]
    gave_up = next((row["texts"] for row in rows if row["mean_drafted"] < NOTHING), None)
    said = [f"{name}: {rows[0]['ratio_to_plain']['median']:.2f}× plain with {_texts(rows[0]['texts'])}"]
    if len(rows) > 1:
        said.append(f"{rows[-1]['ratio_to_plain']['median']:.2f}× with {most} at once")
    if gave_up:
        said.append(f"from {gave_up} at once on it drafts next to nothing, since that would not pay")
    elif lost:
        said.append(f"from {lost} at once on it loses")
    elif all(row["ratio_to_plain"]["median"] >= 1 for row in rows):
        said.append(f"it wins up to {most} at once")
    else:
        said.append(f"up to {most} at once noise leaves open where it loses")
    predicted = batch_limit([(row["texts"], row["predicted"]) for row in rows if row["predicted"] is not None])
    known = any(row["predicted"] is not None for row in rows)
    if known and not gave_up:
        said.append(f"the costs of passes predict {f'a loss from {predicted} on' if predicted else 'none'}")
    sentence = "; ".join(said) + "."
    if not document["shared"]:
        sentence += " Passes of this target are not shared: its texts take turns."
    if name in document.get("apart", ()):
        sentence += " Its drafts are made for one text after the other; only the target's passes are shared."
    return sentence


def _texts(count: int) -> str:
    return "one text" if count == 1 else f"{count} texts at once"
