"""Measured comparisons: methods against plain decoding and against transformers, interleaved in one process.

Every repeat runs every method on every prompt before the next repeat, in an order that rotates, so that a slow moment
of the machine hits all alike; ratios are taken pair by pair (same prompt, same repeat) before the median. What a pass
costs is measured anew beside every prompt, so that what the formula promises is promised of the machine as it was then.

What a round costs behind contexts of several lengths: only attention may grow with the text.

How near a pass comes to what the memory can deliver: at batch 1 a pass is little but reading the weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from core.costs import CONTEXT, median_table
from core.costs.rounds import PassCosts, Promise, RoundCosts, exit_costs, promise
from core.drafting.build import way_of
from core.drafting.methods import METHODS
from core.drafting.model import exit_layer
from core.errors import UserError
from core.lanes import describe_environment, open_lane
from core.loading.geometry import describe_geometry
from core.loading.model import Model
from core.loading.pair import Pair
from core.measuring.peers import Peer
from core.progress import Progress, silent
from core.records import SCHEMA, Run, Settings, Spread, repeats_itself, summarise
from core.runners.clock import PassTimer, timed
from core.text import encode_prompt, read_prompts

LENGTHS = (*range(1, 10), 12, 13, 16, 17)
"""Passes whose cost is measured: every length around 4, 8, 12 and 16, where kernels take their steps."""


@dataclass(frozen=True)
class Sample:
    """One run of one method. `efficiency`: time of its bare forward passes ÷ engine time, prefill and first round
    apart. Milliseconds are means per round: proposing, the target's pass, and everything else. `promise` is what
    measured costs and the measured acceptance allow, where a method's passes can be told from its rounds;
    `repeats`: whether its text repeats itself (unknown of a peer)."""

    tokens_per_second: float
    acceptance_rate: float | None = None
    tokens_per_round: float | None = None
    efficiency: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    other_ms: float | None = None
    promise: Promise | None = None
    repeats: bool | None = None


TABLES = ("target", "verify", "draft")
MEASURES = (
    *("acceptance_rate", "tokens_per_round", "efficiency", "draft_share", "verify_share"),
    *("draft_ms", "verify_ms", "other_ms"),
)
Runner = Callable[[str, PassCosts], Sample]


def bench(
    pair: Pair,
    prompts: Sequence[str],
    variants: dict[str, Settings],
    repeats: int = 3,
    peers: Mapping[str, Peer] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure each variant (name -> settings) on each prompt; `plain` is always measured. A bench document."""
    base = next(iter(variants.values()))
    runners: dict[str, Runner] = {"plain": _ours(pair, replace(base, method="plain"))}
    runners |= {name: _ours(pair, settings) for name, settings in variants.items() if settings.method != "plain"}
    peers = peers or {}
    runners |= {name: _peer(peer, base) for name, peer in peers.items()}
    samples: dict[str, dict[tuple[int, int], Sample]] = {name: {} for name in runners}
    measured: list[PassCosts] = []
    exits = {
        exit_layer(pair.target, settings.exit_layer)
        for settings in variants.values()
        if METHODS[settings.method].network == "target"
    }
    for repeat in range(-1, repeats):
        for at, prompt in enumerate(prompts):
            progress(f"repeat {repeat + 1} of {repeats}, prompt {at + 1} of {len(prompts)}")
            measured.append(costs := measure_costs(pair, exits))
            for name in _rotated(list(runners), repeat + at):
                sample = runners[name](prompt, costs)
                if repeat >= 0:  # the first pass is warm-up, for all alike
                    samples[name][repeat, at] = sample
    costs = _pooled(measured)
    rows = {name: _summarise(name, found, samples["plain"]) for name, found in samples.items()}
    return {
        "schema": SCHEMA,
        "environment": describe_environment(pair.target, pair.draft, pair.head),
        "prompts": len(prompts),
        "repeats": repeats,
        "max_new_tokens": base.max_new_tokens,
        "temperature": base.temperature,
        "costs": {name: table.to_dict() for name in TABLES if (table := getattr(costs, name))},
        "bandwidth": describe_bandwidth(pair.target, costs.target(1), CONTEXT),
        "methods": [row for name, row in rows.items() if name not in peers],
        "peers": [row for name, row in rows.items() if name in peers],
    }


def measure_costs(pair: Pair, exits: Iterable[int] = (), repeats: int = 3) -> PassCosts:
    """Time the passes of both models, and those of early exits, as they are now."""
    target = pair.target.time_passes(repeats, LENGTHS)
    tables: dict[int | None, RoundCosts] = {
        layers: exit_costs(*pair.target.time_exit(layers, repeats, LENGTHS)) for layers in exits
    }
    head = pair.head.time_passes(pair.target, repeats) if pair.head else None
    return PassCosts(target, *(pair.time_rounds(repeats, LENGTHS) if pair.draft else (None, None)), tables, head)


def _pooled(measured: Sequence[PassCosts]) -> PassCosts:
    """The medians of several measurements."""
    verify = [costs.verify for costs in measured if costs.verify]
    draft = [costs.draft for costs in measured if costs.draft]
    return PassCosts(
        median_table([costs.target for costs in measured]),
        median_table(verify) if verify else None,
        median_table(draft) if draft else None,
    )


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _ours(pair: Pair, settings: Settings) -> Runner:
    def run(prompt: str, costs: PassCosts) -> Sample:
        finished, efficiency = run_timed(pair, prompt, settings)
        return _sample(finished, efficiency, costs, pair.translation is not None)

    return run


def run_timed(pair: Pair, prompt: str, settings: Settings) -> tuple[Run, float | None]:
    """A finished run, and the share of its engine time that its bare forward passes took (None for a single round)."""
    with open_lane(pair, prompt, settings) as lane:
        next(lane, None)  # the prefill and one round
        with PassTimer(pair.target.device) as passes:
            for _ in lane:
                pass
        bare, engine = passes.seconds(), sum(round_.seconds for round_ in lane.run.rounds[1:])
    return lane.run, bare / engine if engine else None


def _sample(run: Run, efficiency: float | None, costs: PassCosts, translated: bool) -> Sample:
    metrics = summarise(run)
    rounds = len(run.rounds)
    known = costs_of_rounds(run, costs, translated)
    draft, verify, other = (sum(getattr(r, f"{stage}_seconds") for r in run.rounds) for stage in STAGES)
    return Sample(
        tokens_per_second=metrics.tokens_per_second,
        acceptance_rate=metrics.acceptance_rate,
        tokens_per_round=metrics.tokens_per_round,
        efficiency=efficiency,
        draft_share=draft / metrics.seconds,
        verify_share=verify / metrics.seconds,
        draft_ms=1000 * draft / rounds,
        verify_ms=1000 * verify / rounds,
        other_ms=1000 * other / rounds,
        promise=known and promise(run.rounds, known),
        repeats=repeats_itself(run.token_ids),
    )


def costs_of_rounds(run: Run, passes: PassCosts, translated: bool) -> RoundCosts | None:
    """What the rounds of a run cost; None where they do not tell its passes."""
    method = METHODS[run.settings.method]
    if not method.drafts or method.tree or (translated and method.network == "draft"):
        return None
    layer = (run.environment.get("drafter") or {}).get("exit_layer")
    return way_of(method.name).costs(passes, replace(run.settings, exit_layer=layer))


STAGES = ("draft", "verify", "other")


def _peer(peer: Peer, settings: Settings) -> Runner:
    def run(prompt: str, costs: PassCosts) -> Sample:
        return Sample(peer(prompt, settings))

    return run


def _summarise(name: str, found: dict[tuple[int, int], Sample], plain: dict[tuple[int, int], Sample]) -> dict[str, Any]:
    ratios = [sample.tokens_per_second / plain[key].tokens_per_second for key, sample in found.items()]
    row: dict[str, Any] = {
        "name": name,
        "tokens_per_second": asdict(Spread.of([s.tokens_per_second for s in found.values()])),
        "ratio_to_plain": asdict(Spread.of(ratios)),
    }
    known = [sample.repeats for sample in found.values() if sample.repeats is not None]
    row["repeating"] = sum(known) / len(known) if known else None
    others = [ratio for sample, ratio in zip(found.values(), ratios) if sample.repeats is False]
    row["ratio_without_repeats"] = asdict(Spread.of(others)) if others else None
    for measure in MEASURES:
        values = [v for s in found.values() if (v := getattr(s, measure)) is not None]
        row[measure] = sum(values) / len(values) if values else None
    promised = {
        key: sample.promise.ratio((plain[key].other_ms or 0.0) / 1000)
        for key, sample in found.items()
        if sample.promise
    }
    reached = [ratio / promised[key] for key, ratio in zip(found, ratios) if key in promised]
    row["honest_ratio"] = asdict(Spread.of(list(promised.values()))) if promised else None
    row["by_prompt"] = _by_prompt(found, ratios)
    row["of_honest"] = asdict(Spread.of(reached)) if reached else None
    return row


def _by_prompt(found: dict[tuple[int, int], Sample], ratios: Sequence[float]) -> list[dict[str, float | None]]:
    """Over the repeats of each prompt: the median ratio to plain, and the means of what its drafts came to."""
    rows: list[dict[str, float | None]] = []
    for prompt in sorted({at for _, at in found}):
        here = [(sample, ratio) for ((_, at), sample), ratio in zip(found.items(), ratios) if at == prompt]
        row: dict[str, float | None] = {"ratio_to_plain": median(ratio for _, ratio in here)}
        for measure in ("acceptance_rate", "tokens_per_round"):
            values = [v for sample, _ in here if (v := getattr(sample, measure)) is not None]
            row[measure] = sum(values) / len(values) if values else None
        rows.append(row)
    return rows


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
    progress: Progress = silent,
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


COPIED = 1 << 30


def describe_bandwidth(target: Model, seconds: float, context: int) -> dict[str, float] | None:
    """Bytes per second a pass over one token achieves (weights, and keys and values of `context` tokens, over its
    measured seconds), those of a large copy on the same device, and their ratio. None off CUDA, where caches of the
    processor blur what is read from memory."""
    if target.device.type != "cuda":
        return None
    achieved = bytes_read(target, context) / seconds
    copied = copy_bandwidth(target.device)
    return {"achieved": achieved, "copy": copied, "share": achieved / copied}


def bytes_read(model: Model, context: int) -> int:
    """What a pass over one token has to read: every weight but the rows of embeddings it does not look up, and the
    cached keys and values."""
    geometry = describe_geometry(model)
    return geometry.read_bytes + geometry.cached_bytes * context if geometry else model.weight_bytes()


def copy_bandwidth(device: torch.device, size: int = COPIED, repeats: int = 10) -> float:
    """Bytes read plus bytes written per second while copying `size` random bytes on the device; median of repeats."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(device, lambda: target.copy_(source))[1] for _ in range(repeats + 2)]
    return 2 * size / median(seconds[2:])
