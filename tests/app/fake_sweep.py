"""A sweep without models: steps and a document of the shape that `core.measuring.sweep` gives, from an acceptance
and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from core.costs import CURVE
from core.costs.rounds import RoundCosts, expected_tokens, leviathan, rule_of_thumb
from core.errors import UserError
from core.measuring.deciding import Step
from core.records import SCHEMA, Settings
from core.text import Prompt

STEP = 0.008
"""Seconds of a plain step of the pretended machine."""


def costs(n: int) -> float:
    return STEP * (1 + 0.08 * (n - 1) + 0.3 * (n > 4))


def fake_sweep(
    environment: dict[str, Any],
    acceptance: float,
    pace: float,
    prompts: Sequence[Prompt],
    settings: Settings,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    repeats: int,
    stop: Callable[[], bool],
    halts_at: float = 1.0,
) -> Generator[Any, None, dict[str, Any]]:
    if not lengths or not temperatures:
        raise UserError("A sweep needs at least one draft length and one temperature.")
    total = (len(lengths) + 2) * len(temperatures) * len(prompts) * repeats
    done = 0
    while done < total and not stop():
        halted = done >= halts_at * total
        time.sleep(0.02 if halted else 0.02 * pace)
        done += not halted
        label = f"{prompts[done % len(prompts)].name}, draft length 3"
        yield Step(done, total, label, (total - done) * STEP, repeats, repeats)
    share = temperatures if done == total else temperatures[: int(len(temperatures) * done / total)]
    points = [_point(t, n, acceptance - 0.05 * t) for t in share for n in (*lengths, "auto")]
    return {
        "schema": SCHEMA,
        "kind": "sweep",
        "environment": environment,
        "settings": settings.to_dict(),
        "exit_layer": 2 if settings.method == "early-exit" else None,
        "same_tokens": True,
        "prompts": [{"name": prompt.name, "kind": prompt.kind} for prompt in prompts],
        "repeats": repeats,
        "stopped": done < total,
        "costs": {str(n): costs(n) for n in CURVE},
        "temperatures": [_basis(t, max(lengths), acceptance - 0.05 * t) for t in share],
        "points": points,
        "best": [_best(t, points) for t in share],
    }


def _basis(temperature: float, longest: int, alpha: float) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "plain": {"median": 1 / STEP, "min": 0.95 / STEP, "max": 1.05 / STEP},
        "acceptance_rate": alpha,
        "accepted_by_position": [alpha**i for i in range(1, longest + 1)],
        "latency": {"median": STEP, "p95": STEP, "longest": 1.1 * STEP},
        "drafting": 1.0,
        "draft_seconds": 0.1 * STEP,
        "other_seconds": 0.0,
    }


def _point(temperature: float, length: Any, alpha: float) -> dict[str, Any]:
    gamma = 3 if length == "auto" else length
    expected = expected_tokens(alpha, gamma)
    ratio = RoundCosts(costs, lambda n: 0.1 * STEP).speed_up(expected, gamma)
    predicted = {
        "honest": ratio,
        "leviathan": leviathan(alpha, gamma, 0.1),
        "rule_of_thumb": rule_of_thumb(alpha, gamma),
    }
    measured = 0.97 * ratio
    return {
        "temperature": temperature,
        "draft_length": length,
        "tokens_per_second": {"median": measured / STEP, "min": 0.9 * measured / STEP, "max": 1.2 * measured / STEP},
        "ratio_to_plain": {"median": measured, "min": 0.9 * measured, "max": 1.2 * measured},
        "interval": {"low": 0.95 * measured, "high": 1.1 * measured, "count": 5, "confidence": 0.9375},
        "latency": {"median": STEP / measured, "p95": STEP, "longest": 2 * STEP},
        "acceptance_rate": alpha,
        "accepted_by_position": [alpha**i for i in range(1, gamma + 1)],
        "tokens_per_round": expected,
        "mean_drafted": gamma,
        "predicted": None if length == "auto" else predicted,
    }


def _best(temperature: float, points: list[dict[str, Any]]) -> dict[str, Any]:
    here = [p for p in points if p["temperature"] == temperature]
    fixed = max(here[:-1], key=lambda p: p["ratio_to_plain"]["median"])
    ratio = fixed["ratio_to_plain"]["median"]
    return {
        "temperature": temperature,
        "draft_length": fixed["draft_length"],
        "ratio_to_plain": ratio,
        "auto_ratio_to_plain": here[-1]["ratio_to_plain"]["median"],
        "recommended": fixed["draft_length"] if ratio > 1 else "plain",
        "pays": ratio > 1,
        "batch_limit": 8,
        "batches": [{"texts": n, "speed_up": 2 - n / 5} for n in (1, 2, 4, 8, 16)],
    }


def fake_batches(
    environment: dict[str, Any], variants: dict[str, Settings], sizes: Sequence[int], stop: Callable[[], bool]
) -> Generator[Any, None, dict[str, Any]]:
    """Many texts at once: `auto` gives up drafting from eight on, where drafts of a fixed length lose from four on."""
    rows = []
    for done, size in enumerate(sizes):
        if stop():
            break
        yield Step(done + 1, len(sizes), f"{size} at once", 1.0)
        for name in variants:
            ratio = max(1.5 / size**0.5, 0.98 if name == "auto" else 0.0)
            rows.append(
                {
                    "texts": size,
                    "name": name,
                    "ratio_to_plain": {"median": ratio, "min": ratio - 0.05, "max": ratio + 0.05},
                    "predicted": ratio + 0.02,
                    "mean_drafted": 0.0 if name == "auto" and size > 4 else 3.0,
                }
            )
    lost = {name: None if name == "auto" else 4 for name in variants} if rows else {}
    settings = {name: each.to_dict() for name, each in variants.items()}
    return {
        "kind": "batches",
        "environment": environment,
        "settings": settings,
        "shared": True,
        "stopped": len(rows) < len(sizes) * len(variants),
        "rows": rows,
        "loses_from": lost,
    }
