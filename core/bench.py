"""Measured comparisons: methods against plain decoding and against transformers, interleaved in one process.

Every repeat runs every method on every prompt before the next repeat, in an order that rotates, so that a slow moment
of the machine hits all alike; ratios are taken pair by pair (same prompt, same repeat) before the median.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from core.decoding import open_lane, race
from core.environment import describe_environment
from core.metrics import summarise
from core.pairs import Pair
from core.peers import PEERS, run_peer
from core.records import SCHEMA, Run, Settings

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One run of one method; `efficiency` is the share of engine time spent in forward passes."""

    tokens_per_second: float
    acceptance_rate: float | None = None
    tokens_per_round: float | None = None
    efficiency: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def bench(
    pair: Pair,
    prompts: Sequence[str],
    variants: dict[str, Settings],
    repeats: int = 3,
    peers: bool = False,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """Measure each variant (name -> settings) on each prompt; `plain` is always measured. A bench document."""
    base = next(iter(variants.values()))
    runners: dict[str, Callable[[str], Sample]] = {"plain": _ours(pair, replace(base, method="plain"))}
    runners |= {name: _ours(pair, settings) for name, settings in variants.items() if settings.method != "plain"}
    if peers:
        runners |= {name: _peer(pair, name, base) for name in PEERS}
    samples: dict[str, dict[tuple[int, int], Sample]] = {name: {} for name in runners}
    for repeat in range(-1, repeats):
        for at, prompt in enumerate(prompts):
            progress(f"repeat {repeat + 1} of {repeats}, prompt {at + 1} of {len(prompts)}")
            for name in _rotated(list(runners), repeat + at):
                sample = runners[name](prompt)
                if repeat >= 0:  # the first pass is warm-up, for all alike
                    samples[name][repeat, at] = sample
    rows = {name: _summarise(name, found, samples["plain"]) for name, found in samples.items()}
    return {
        "schema": SCHEMA,
        "environment": describe_environment(pair.target, pair.draft),
        "prompts": len(prompts),
        "repeats": repeats,
        "max_new_tokens": base.max_new_tokens,
        "temperature": base.temperature,
        "methods": [row for name, row in rows.items() if name not in PEERS],
        "peers": [row for name, row in rows.items() if name in PEERS],
    }


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _ours(pair: Pair, settings: Settings) -> Callable[[str], Sample]:
    def run(prompt: str) -> Sample:
        lane = open_lane(pair, prompt, settings)
        for _ in race([lane]):
            pass
        return _sample(lane.run)

    return run


def _sample(run: Run) -> Sample:
    metrics = summarise(run)
    verify = sum(r.verify_seconds for r in run.rounds)
    draft = sum(r.draft_seconds for r in run.rounds)
    return Sample(
        tokens_per_second=metrics.tokens_per_second,
        acceptance_rate=metrics.acceptance_rate,
        tokens_per_round=metrics.tokens_per_round,
        efficiency=(verify + draft) / metrics.seconds,
        draft_share=draft / metrics.seconds,
        verify_share=verify / metrics.seconds,
    )


def _peer(pair: Pair, name: str, settings: Settings) -> Callable[[str], Sample]:
    def run(prompt: str) -> Sample:
        return Sample(run_peer(pair, name, prompt, settings))

    return run


def _summarise(name: str, found: dict[tuple[int, int], Sample], plain: dict[tuple[int, int], Sample]) -> dict[str, Any]:
    ratios = [sample.tokens_per_second / plain[key].tokens_per_second for key, sample in found.items()]
    row: dict[str, Any] = {
        "name": name,
        "tokens_per_second": asdict(Spread.of([s.tokens_per_second for s in found.values()])),
        "ratio_to_plain": asdict(Spread.of(ratios)),
    }
    for measure in ("acceptance_rate", "tokens_per_round", "efficiency", "draft_share", "verify_share"):
        values = [v for s in found.values() if (v := getattr(s, measure)) is not None]
        row[measure] = sum(values) / len(values) if values else None
    return row


def table(document: dict[str, Any]) -> str:
    """The bench document for a person to read."""
    heads = f"{'x plain':>9}{'accepted':>10}{'tok/pass':>10}{'in passes':>11}"
    lines = [f"{'method':<28}{'tokens/s':>10}{'(min-max)':>16}{heads}"]
    for row in (*document["methods"], *document["peers"]):
        speed = row["tokens_per_second"]
        span = f"{speed['min']:.0f}-{speed['max']:.0f}"
        lines.append(
            f"{row['name']:<28}{speed['median']:>10.1f}{span:>16}{row['ratio_to_plain']['median']:>9.2f}"
            f"{_share(row['acceptance_rate']):>10}{_number(row['tokens_per_round']):>10}{_share(row['efficiency']):>11}"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
