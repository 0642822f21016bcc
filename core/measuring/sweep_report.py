"""A sweep document for a person to read: a table, and sentences that say what it shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from core.measuring.bench_report import number, share
from core.measuring.curve import describe_costs

DOUBTFUL = 0.2
"""Measured and predicted speed-up should be nearer than this share of each other."""


def report(document: dict[str, Any]) -> str:
    """Tables by temperature with predictions beside what was measured, the best setting, the cost curve in words."""
    parts = [_table(document, row) for row in document["temperatures"]]
    if not parts:
        return "Stopped before anything was measured."
    if document["stopped"]:
        parts.append("Stopped early: only what was measured until then is shown.")
    parts.append(f"Verification cost: {describe_document_costs(document)}")
    return "\n\n".join(parts)


def describe_document_costs(document: dict[str, Any]) -> str:
    return describe_costs({int(n): seconds for n, seconds in document["costs"].items()})


def _table(document: dict[str, Any], row: dict[str, Any]) -> str:
    temperature = row["temperature"]
    lines = [
        f"Temperature {temperature:g}, plain {row['plain']['median']:.1f} tokens/s",
        f"{'draft length':<13}{'tokens/s':>9}{'(min-max)':>14}{'x plain':>9}{'predicted':>11}{'Leviathan':>11}"
        f"{'rule':>7}{'accepted':>10}{'tok/pass':>10}",
    ]
    for point in points_at(document, temperature):
        speed, predicted = point["tokens_per_second"], point["predicted"] or {}
        span = f"{speed['min']:.0f}-{speed['max']:.0f}"
        lines.append(
            f"{point['draft_length']:<13}{speed['median']:>9.1f}{span:>14}{point['ratio_to_plain']['median']:>9.2f}"
            f"{number(predicted.get('honest')):>11}{number(predicted.get('leviathan')):>11}"
            f"{number(predicted.get('rule_of_thumb')):>7}{share(point['acceptance_rate']):>10}"
            f"{point['tokens_per_round']:>10.2f}"
        )
    return "\n".join([*lines, describe_best(document, temperature), describe_prediction(document, temperature)])


def points_at(document: dict[str, Any], temperature: float) -> list[dict[str, Any]]:
    """The points of one temperature, fixed lengths in order, then auto."""
    return [point for point in document["points"] if point["temperature"] == temperature]


def basis_at(document: dict[str, Any], temperature: float) -> dict[str, Any]:
    """What was measured at one temperature over all lengths."""
    return next(row for row in document["temperatures"] if row["temperature"] == temperature)


def describe_best(document: dict[str, Any], temperature: float) -> str:
    """What to set at this temperature, and why; where speculation loses, that."""
    best = best_at(document, temperature)
    recommended = best["recommended"]
    if recommended == "plain":
        return describe_alternative(document, temperature)
    if recommended == "auto":
        head = f"draft length auto, {best['auto_ratio_to_plain']:.2f}× plain"
    else:
        head = f"{_drafted(recommended)}, {best['ratio_to_plain']:.2f}× plain"
    return f"Best: {head}. {describe_alternative(document, temperature)}".rstrip()


def describe_alternative(document: dict[str, Any], temperature: float) -> str:
    """How the recommended setting compares with the other one, fixed or auto; or why plain decoding wins."""
    best = best_at(document, temperature)
    fixed, auto = best["ratio_to_plain"], best["auto_ratio_to_plain"]
    if best["recommended"] == "plain":
        return _why_plain(document, best)
    if fixed is None or auto is None:
        return ""
    if best["recommended"] != "auto":
        return f"Auto, which chooses a length before each round, reaches {auto:.2f}×."
    return f"It chooses a length before each round; the best fixed one is {best['draft_length']}, with {fixed:.2f}×."


def best_at(document: dict[str, Any], temperature: float) -> dict[str, Any]:
    """The best settings found at one temperature."""
    return next(best for best in document["best"] if best["temperature"] == temperature)


def _why_plain(document: dict[str, Any], best: dict[str, Any]) -> str:
    """The one cost that stands most in the way, in the terms of the honest formula."""
    length = best["draft_length"] or 1
    point = next(
        p for p in points_at(document, best["temperature"]) if p["draft_length"] in (best["draft_length"], "auto")
    )
    step = document["costs"]["1"]
    verify = _cost(document, length + 1) / step
    draft = length * basis_at(document, best["temperature"])["draft_seconds"] / step
    gained = point["tokens_per_round"]
    ratio = max(best["ratio_to_plain"] or 0.0, best["auto_ratio_to_plain"] or 0.0)
    losses = {
        f"proposing {_drafted(length)} takes {draft:.1f} plain steps": draft,
        f"checking {_drafted(length)} takes {verify:.1f} times a plain step": verify - 1,
        f"a round yields only {gained:.1f} tokens": length + 1 - gained,
    }
    return (
        f"Plain decoding is faster here (at best {ratio:.2f}×), mostly because {max(losses, key=lambda k: losses[k])}."
    )


def describe_prediction(document: dict[str, Any], temperature: float) -> str:
    """How near the formulas come to what was measured, at the best fixed length."""
    length = best_at(document, temperature)["draft_length"]
    point = next((p for p in points_at(document, temperature) if p["draft_length"] == length), None)
    if not point or not point["predicted"]:
        return "Nothing was judged, so nothing can be predicted."
    predicted, measured = point["predicted"], point["ratio_to_plain"]["median"]
    free = predicted["leviathan"] / predicted["honest"] - 1
    leviathan = f"Leviathan's formula says {predicted['leviathan']:.2f}×"
    if basis_at(document, temperature)["drafting"] < 0.9 and free > 0:
        leviathan += ", because it takes every round to propose a whole draft"
    elif abs(free) < 0.05:
        leviathan += ", as checking costs little more than one token here"
    elif free > 0:
        leviathan += ", because it takes checking to cost no more than one token"
    doubt = ""
    if abs(measured / predicted["honest"] - 1) > DOUBTFUL:
        doubt = " They are far apart: the machine was busy with something else, or more repeats are needed."
    return (
        f"At draft length {point['draft_length']}, measured costs and acceptance predict {predicted['honest']:.2f}× "
        f"and {measured:.2f}× was measured; {leviathan}.{doubt}"
    )


def describe_positions(document: dict[str, Any], temperature: float) -> str:
    """Where in the draft agreement breaks, over all fixed lengths."""
    reached = basis_at(document, temperature)["accepted_by_position"]
    if not reached:
        return "Nothing was drafted at this temperature."
    chances = [reached[0], *(b / a for a, b in pairwise(reached) if a)]
    sentence = f"The first drafted token is accepted in {reached[0]:.0%} of the rounds"
    if len(reached) > 1:
        sentence += f", the whole draft of {len(reached)} in {reached[-1]:.0%}"
    half = next((i + 1 for i, share in enumerate(reached) if share < 0.5), None)
    if half and half > 1:
        sentence += f"; from token {half} on it stands in fewer than half of them"
    if len(chances) < 3:
        return sentence + "."
    later = sum(chances[1:]) / len(chances[1:])
    if later > chances[0] + 0.05:
        return f"{sentence}. A draft that starts well goes on well: later tokens stand more often than the first."
    if later < chances[0] - 0.05:
        return f"{sentence}. The further it guesses, the less each token stands."
    return f"{sentence}. Each token stands about as often as the one before."


def _drafted(length: int) -> str:
    return f"{length} drafted token{'s' if length > 1 else ''}"


def _cost(document: dict[str, Any], n: int) -> float:
    """Seconds of a pass over n tokens: the nearest that was measured."""
    nearest = min((int(known) for known in document["costs"]), key=lambda known: (abs(known - n), known))
    return document["costs"][str(nearest)]
