"""Draft lengths × temperatures: what each brings on this machine, beside what the formulas promise.

Every prompt meets every setting and plain decoding in turn, in an order that rotates, as in `core.measuring.bench`;
ratios are taken pair by pair (same prompt, same repeat) before the median. It is repeated until the intervals of those
medians decide what to recommend, or as often as was allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from core.costs import CONTEXT, CURVE, CostTable, median_table
from core.costs.rounds import RoundCosts, Seconds, expected_tokens_by_position, leviathan, rule_of_thumb
from core.drafting.build import available
from core.drafting.methods import METHODS
from core.drafting.model import exit_layer
from core.errors import UserError
from core.explaining.traffic import batch_limit, in_batches
from core.lanes import describe_environment, open_lane
from core.loading.model import Model
from core.loading.pair import Pair
from core.measuring.deciding import (
    CURVE_SECONDS,
    WARM_UP_TOKENS,
    Decision,
    Pace,
    Step,
    decide,
    interval,
    latency,
    schedule_of,
    speeds,
)
from core.progress import Stop, never
from core.records import SCHEMA, Run, Spread, accepted_by_position, summarise
from core.settings import LONGEST_DRAFT, Settings
from core.text import Prompt

PASSES = 3
"""How often a pass is timed beside every prompt."""

DraftLength = int | Literal["auto"]
Measured = dict[tuple[int, int], Run]
"""Finished runs by repeat and prompt."""


def sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: Settings,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    repeats: int = 1,
    stop: Stop = never,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[Step, None, dict[str, Any]]:
    """Measure each draft length (and auto) at each temperature; yields after every run, returns a sweep document.

    Every prompt meets every setting at most `repeats` times: no more once every temperature is decided
    (`core.measuring.deciding`). Stopped early, the document holds what was measured until then. Raises UserError for
    what cannot be swept.
    """
    check_sweep(pair, settings, lengths, temperatures)
    lengths, temperatures = sorted(set(lengths)), sorted(set(temperatures))
    yield Step(0, 1, "what a pass over 1 to 64 tokens costs")
    curve = cost_curve(pair.target)
    variants = [
        replace(settings, method=method, draft_length=length, temperature=temperature)
        for temperature in temperatures
        for method, length in (("plain", "auto"), *((settings.method, n) for n in lengths), (settings.method, "auto"))
    ]
    runs: list[Measured] = [{} for _ in variants]
    costs: dict[tuple[int, int], CostTable] = {}
    pace = Pace(settings.max_new_tokens)
    schedule = schedule_of(len(variants), len(prompts), repeats)
    for done, (repeat, at, index) in enumerate(schedule):
        begun = clock()
        if stop() or (repeat > 0 and repeat != schedule[done - 1][0] and _decided(variants, runs)):
            break
        if (repeat, at) not in costs:
            costs[repeat, at] = _passes(pair, settings, lengths)
        variant = variants[index]
        warm_up = repeat < 0
        tokens = min(WARM_UP_TOKENS, variant.max_new_tokens) if warm_up else variant.max_new_tokens
        seed = settings.seed + max(0, repeat)
        run = _run(pair, prompts[at].text, replace(variant, max_new_tokens=tokens, seed=seed), stop)
        if run.stop_reason != "cancelled" and not warm_up:
            runs[index][repeat, at] = run
        pace.add(index, clock() - begun, tokens, warm_up)
        now = max(0, repeat)
        ahead = [each for each_repeat, _, each in schedule[done + 1 :] if each_repeat <= now]
        label = _label(variant, "warm-up" if warm_up else prompts[at].name)
        yield Step(done + 1, done + 1 + len(ahead), label, pace.left(ahead), now + 1, repeats)
    passes = median_table(list(costs.values())) if costs else curve
    return _document(pair, prompts, settings, repeats, curve, passes, list(zip(variants, runs)), stop())


def check_sweep(pair: Pair, settings: Settings, lengths: Iterable[int], temperatures: Iterable[float]) -> None:
    """One sentence for what cannot be swept."""
    if not METHODS[settings.method].swept:
        able = ", ".join(name for name, method in METHODS.items() if method.swept)
        raise UserError(f"The method {settings.method} has no draft length to sweep; choose one of {able}.")
    if reason := available(pair)[settings.method]:
        raise UserError(f"The method {settings.method} is off: {reason}.")
    if not (lengths := list(lengths)):
        raise UserError("A sweep needs at least one draft length.")
    if wrong := [n for n in lengths if not 1 <= n <= LONGEST_DRAFT]:
        raise UserError(f"A draft length must be between 1 and {LONGEST_DRAFT}; {wrong[0]} is not.")
    if not (temperatures := list(temperatures)):
        raise UserError("A sweep needs at least one temperature.")
    if wrong := [t for t in temperatures if not 0 <= t <= 5]:
        raise UserError(f"A temperature must be between 0 and 5; {wrong[0]:g} is not.")


def cost_curve(model: Model, budget: float = CURVE_SECONDS) -> CostTable:
    """Seconds of a pass over each number of tokens in `CURVE` that fits the model, behind a short context.

    Takes about `budget` seconds: medians of up to 15 repeats, on a slow machine of one.
    """
    room = max(1, model.context_length - CONTEXT)
    lengths = [n for n in CURVE if n <= room]
    known = model.measure_costs()
    repeats = max(1, min(15, round(budget / sum(known(n) for n in lengths))))
    model.use_threads()
    return model.time_passes(repeats, lengths)


def _passes(pair: Pair, settings: Settings, lengths: Sequence[int]) -> CostTable:
    """What the target's passes cost at this moment: plain steps and verifications, behind a draft's passes if any;
    behind an early exit, what is left of them."""
    network = METHODS[settings.method].network
    draft = pair.draft if network == "draft" else None
    room = min(model.context_length for model in (pair.target, draft) if model) // 2
    needed = sorted({1, 2, *(length + 1 for length in lengths if length < room)})
    if network == "target":
        return pair.target.time_exit(exit_layer(pair.target, settings.exit_layer), PASSES, needed)[0]
    return pair.time_rounds(PASSES, needed)[0] if draft else pair.target.time_passes(PASSES, needed)


def finish(steps: Generator[Step, None, dict[str, Any]], progress: Any = None) -> dict[str, Any]:
    """Run a sweep to its end, telling `progress` of every step; the document."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value
        if progress:
            progress(step)


def _decided(variants: Sequence[Settings], runs: Sequence[Measured]) -> bool:
    """Whether more repeats would change nothing at any temperature."""
    found = {t: _of_temperature(t, list(zip(variants, runs))) for t in {each.temperature for each in variants}}
    return all(_decision(drafting, plain).recommended is not None for drafting, plain in found.values())


def _of_temperature(
    temperature: float, measured: Sequence[tuple[Settings, Measured]]
) -> tuple[dict[DraftLength, Measured], Measured]:
    """What was measured at a temperature: drafting by length, and plain decoding."""
    here = [(variant, runs) for variant, runs in measured if variant.temperature == temperature and runs]
    plain = next((runs for variant, runs in here if variant.method == "plain"), {})
    drafting: dict[DraftLength, Measured] = {
        variant.draft_length: runs for variant, runs in here if variant.method != "plain" and plain.keys() & runs
    }
    return drafting, plain


def _decision(drafting: dict[DraftLength, Measured], plain: Measured) -> Decision:
    return decide(speeds(plain), {length: speeds(runs) for length, runs in drafting.items()})


def _run(pair: Pair, prompt: str, settings: Settings, stop: Stop) -> Run:
    with open_lane(pair, prompt, settings, stop) as lane:
        for _ in lane:
            pass
    return lane.run


def _label(settings: Settings, what: str) -> str:
    length = "plain" if settings.method == "plain" else f"draft length {settings.draft_length}"
    return f"{what}, {length}, temperature {settings.temperature:g}"


def _document(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: Settings,
    repeats: int,
    curve: CostTable,
    passes: CostTable,
    measured: list[tuple[Settings, Measured]],
    stopped: bool,
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for temperature in sorted({variant.temperature for variant, _ in measured}):
        drafting, plain = _of_temperature(temperature, measured)
        if not drafting:
            continue
        basis = _basis(drafting, plain)
        rows.append(
            {
                "temperature": temperature,
                "plain": asdict(_speeds(plain.values())),
                "latency": asdict(latency(plain.values())),
                **asdict(basis),
            }
        )
        bases = [_basis(_of_prompt(drafting, at), _only(plain, at)) for at in sorted({at for _, at in plain})]
        points += [
            _point(temperature, length, runs, plain)
            | {"predicted": _median(_predict(length, basis, passes) for basis in bases)}
            for length, runs in drafting.items()
        ]
        here = {point["draft_length"]: point for point in points if point["temperature"] == temperature}
        best.append(_best(temperature, here, _decision(drafting, plain), basis, curve, _proposing(pair, settings)))
    of_target = METHODS[settings.method].network == "target"
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "environment": describe_environment(pair.target, pair.draft, pair.head),
        "settings": settings.to_dict(),
        "exit_layer": exit_layer(pair.target, settings.exit_layer) if of_target else None,
        "same_tokens": pair.translation is None,
        "prompts": [{"name": prompt.name, "kind": prompt.kind} for prompt in prompts],
        "repeats": repeats,
        "stopped": stopped,
        "costs": curve.to_dict(),
        "temperatures": rows,
        "points": points,
        "best": best,
    }


def _speeds(runs: Iterable[Run]) -> Spread:
    return Spread.of([summarise(run).tokens_per_second for run in runs])


def _point(temperature: float, length: DraftLength, runs: Measured, plain: Measured) -> dict[str, Any]:
    pairs = [(runs[key], plain[key]) for key in runs if key in plain]
    ratios = [summarise(ours).tokens_per_second / summarise(theirs).tokens_per_second for ours, theirs in pairs]
    rounds = [round_ for run in runs.values() for round_ in run.rounds]
    drafted = [len(round_.drafted) for round_ in rounds]
    return {
        "temperature": temperature,
        "draft_length": length,
        "tokens_per_second": asdict(_speeds(runs.values())),
        "ratio_to_plain": asdict(Spread.of(ratios)),
        "interval": asdict(interval(ratios)),
        "latency": asdict(latency(runs.values())),
        "acceptance_rate": _acceptance(runs.values()),
        "accepted_by_position": accepted_by_position(rounds),
        "tokens_per_round": sum(len(run.token_ids) for run in runs.values()) / len(rounds),
        "mean_drafted": sum(drafted) / len(drafted),
    }


def _acceptance(runs: Iterable[Run]) -> float | None:
    """Accepted ÷ judged over all runs: the estimate of α."""
    outcomes = [token.outcome for run in runs for round_ in run.rounds for token in round_.drafted]
    judged = outcomes.count("accepted") + outcomes.count("rejected")
    return outcomes.count("accepted") / judged if judged else None


@dataclass(frozen=True)
class Basis:
    """What predictions rest on, measured and pooled over all fixed lengths.

    `acceptance_rate` is α (None where nothing was judged). `drafting` is the share of rounds that proposed anything: an
    n-gram finds nothing to repeat in many. `draft_seconds` is the time of a drafted token, `other_seconds` what a plain
    step takes beside its pass.
    """

    acceptance_rate: float | None
    accepted_by_position: list[float]
    drafting: float
    draft_seconds: float
    other_seconds: float


def _of_prompt(drafting: dict[DraftLength, Measured], prompt: int) -> dict[DraftLength, Measured]:
    return {length: _only(runs, prompt) for length, runs in drafting.items()}


def _only(runs: Measured, prompt: int) -> Measured:
    return {key: run for key, run in runs.items() if key[1] == prompt}


def _median(predictions: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    """Over the prompts, as what is measured; None where no prompt has a prediction."""
    found = [prediction for prediction in predictions if prediction]
    return {name: median(each[name] for each in found) for name in found[0]} if found else None


def _basis(drafting: dict[DraftLength, Measured], plain: Measured) -> Basis:
    fixed = [run for length, runs in drafting.items() if length != "auto" for run in runs.values()]
    # The last round of a run may have no room for a draft.
    rounds = [round_ for run in fixed for round_ in run.rounds[:-1]] or [r for run in fixed for r in run.rounds]
    drafted = sum(len(round_.drafted) for round_ in rounds)
    steps = [round_ for run in plain.values() for round_ in run.rounds]
    return Basis(
        acceptance_rate=_acceptance(fixed),
        accepted_by_position=accepted_by_position(rounds),
        drafting=sum(bool(round_.drafted) for round_ in rounds) / len(rounds) if rounds else 0.0,
        draft_seconds=sum(round_.draft_seconds for round_ in rounds) / drafted if drafted else 0.0,
        other_seconds=sum(round_.other_seconds for round_ in steps) / len(steps),
    )


def _predict(length: DraftLength, basis: Basis, passes: Seconds) -> dict[str, float] | None:
    """The three predicted speed-ups by name; None where the length is not fixed or nothing was judged that far. Where
    nothing was ever drafted all rounds are plain steps."""
    alpha, reached = basis.acceptance_rate, basis.accepted_by_position
    if length != "auto" and not basis.drafting:
        return {"leviathan": 1.0, "honest": 1.0, "rule_of_thumb": 1.0}
    if length == "auto" or alpha is None or length > len(reached):
        return None
    costs = RoundCosts(passes, lambda n: basis.draft_seconds, overhead=basis.other_seconds)
    return {
        "leviathan": leviathan(alpha, length, basis.draft_seconds / passes(1)),
        "honest": costs.speed_up(expected_tokens_by_position(reached, length), length, basis.drafting),
        "rule_of_thumb": rule_of_thumb(alpha, length),
    }


def _proposing(pair: Pair, settings: Settings) -> CostTable | None:
    """Passes of what drafts, where a pass of it drafts for many texts."""
    network = METHODS[settings.method].network
    if network in ("target", "head"):  # a head's passes cost what the target's do, by their number of rows
        return pair.target.measure_costs()
    return pair.draft.measure_costs() if pair.draft and network == "draft" else None


def _best(
    temperature: float,
    here: dict[DraftLength, dict[str, Any]],
    decision: Decision,
    basis: Basis,
    curve: CostTable,
    proposing: CostTable | None,
) -> dict[str, Any]:
    """The best fixed length at a temperature, what to set, and what that costs where many texts are decoded at once:
    that length, `auto`, `plain` where all lose, or None where the measurements do not decide."""
    fixed, auto = here.get(decision.fixed or 0), here.get("auto")
    chosen = decision.recommended
    shown = (None if chosen in (None, "plain") else here.get(chosen)) or fixed or auto
    batches = None
    if shown and shown["mean_drafted"]:
        gamma = max(1, round(shown["mean_drafted"]))
        batches = in_batches(curve, proposing, basis.draft_seconds, shown["tokens_per_round"], gamma)
    return {
        "temperature": temperature,
        "draft_length": decision.fixed,
        "ratio_to_plain": fixed and fixed["ratio_to_plain"]["median"],
        "auto_ratio_to_plain": auto and auto["ratio_to_plain"]["median"],
        "recommended": decision.recommended,
        "pays": decision.pays,
        "batch_limit": batch_limit(batches) if batches else None,
        "batches": [{"texts": texts, "speed_up": speed_up} for texts, speed_up in batches or []],
    }
