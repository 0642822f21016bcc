"""A bench document for a person to read.

A sweep document for a person to read: a table, and sentences that say what it shows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from core.costs import describe_costs, disturbed

COLUMNS = {
    "tokens/s": 10,
    "(min-max)": 16,
    "x plain": 9,
    "repeating": 11,
    "else x": 8,
    "honest": 8,
    "of it": 7,
    "accepted": 10,
    "tok/pass": 10,
    "draft ms": 10,
    "verify ms": 11,
    "rest ms": 9,
    "in passes": 11,
}


def table(document: dict[str, Any]) -> str:
    """A row per method and peer, what a pass over several tokens costs, and growth where it was measured.

    `repeating`: runs whose text repeats itself; `else x`: the ratio to plain of the others. `honest`: the
    speed-up that measured costs and acceptance allow; `of it`: how much of that was reached.
    """
    lines = [f"{'method':<{NAMES}}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())]
    lines += [_row(row) for row in (*document["methods"], *document["peers"])]
    costs = {int(n): seconds for n, seconds in document["costs"]["target"].items()}
    lines += ["", f"Verification cost: {describe_costs(costs)}", _curve(costs)]
    if found := document["bandwidth"]:
        lines.append(
            f"A pass reads {found['achieved'] / 1e9:,.0f} GB/s, {found['share']:.0%} of what a copy moves here "
            f"({found['copy'] / 1e9:,.0f} GB/s)."
        )
    if 1 < document["prompts"] <= MOST_PROMPTS:
        lines += ["", *_by_prompt(document)]
    if growth := document.get("growth"):
        lines += ["", _growth(growth)]
    return "\n".join(lines)


NAMES = len("llama.cpp Q4_0 ngram-map-k4v") + 1
MOST_PROMPTS = 12
"""Of which each has rows of its own."""


def _by_prompt(document: dict[str, Any]) -> list[str]:
    """A row per prompt and method that drafts."""
    names = document.get("prompt_names") or range(1, document["prompts"] + 1)
    lines = [f"{'prompt':<22}{'method':<22}{'x plain':>9}{'accepted':>10}{'tok/pass':>10}"]
    for at, name in enumerate(names):
        for method in document["methods"]:
            row = method["by_prompt"][at]
            if method["name"] != "plain":
                lines.append(
                    f"{str(name)[:21]:<22}{method['name']:<22}{number(row['ratio_to_plain']):>9}"
                    f"{share(row['acceptance_rate']):>10}{number(row['tokens_per_round']):>10}"
                )
    return lines


def _row(row: dict[str, Any]) -> str:
    speed, honest, reached = row["tokens_per_second"], row["honest_ratio"], row["of_honest"]
    others = row["ratio_without_repeats"]
    cells = (
        f"{speed['median']:.1f}",
        f"{speed['min']:.0f}-{speed['max']:.0f}",
        f"{row['ratio_to_plain']['median']:.2f}",
        share(row["repeating"]),
        number(others and others["median"]),
        number(honest and honest["median"]),
        share(reached and reached["median"]),
        share(row["acceptance_rate"]),
        number(row["tokens_per_round"]),
        number(row["draft_ms"]),
        number(row["verify_ms"]),
        number(row["other_ms"], 3),
        share(row["efficiency"], 1),
    )
    return f"{row['name']:<{NAMES}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))


def _curve(costs: dict[int, float]) -> str:
    """The measured points: tokens of a pass, milliseconds, times one."""
    points = [f"{n}: {1000 * s:.2f} ms ({s / costs[1]:.2f}x)" for n, s in sorted(costs.items())]
    return "\n".join("  " + "   ".join(points[i : i + 5]) for i in range(0, len(points), 5))


def _growth(growth: list[dict[str, Any]]) -> str:
    lines = [f"{'context':<10}{'method':<22}" + "".join(f"{n:>11}" for n in ("round ms", "passes ms", "rest ms"))]
    for at in growth:
        for row in at["methods"]:
            cells = (row["round_ms"], row["passes_ms"], row["other_ms"])
            lines.append(f"{at['context']:<10}{row['name']:<22}" + "".join(f"{number(c, 3):>11}" for c in cells))
    return "\n".join(lines)


def share(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


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
    return describe_costs(_costs_of(document))


def _costs_of(document: dict[str, Any]) -> dict[int, float]:
    return {int(n): seconds for n, seconds in document["costs"].items()}


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
    said = (describe_best, describe_latency, describe_intervals, describe_prediction)
    return "\n".join([*lines, *(describe(document, temperature) for describe in said)])


def points_at(document: dict[str, Any], temperature: float) -> list[dict[str, Any]]:
    """The points of one temperature, fixed lengths in order, then auto."""
    return [point for point in document["points"] if point["temperature"] == temperature]


def basis_at(document: dict[str, Any], temperature: float) -> dict[str, Any]:
    """What was measured at one temperature over all lengths."""
    return next(row for row in document["temperatures"] if row["temperature"] == temperature)


def describe_best(document: dict[str, Any], temperature: float) -> str:
    """What to set at this temperature, and why; where speculation loses, that; where nothing is decided, that."""
    best = best_at(document, temperature)
    recommended = best["recommended"]
    head = f"Best: {settled(document, temperature)}. " if recommended not in ("plain", None) else ""
    said = describe_alternative(document, temperature), describe_batches(document, temperature)
    return (head + " ".join(filter(None, said))).rstrip()


def settled(document: dict[str, Any], temperature: float) -> str:
    """The recommended setting with its gain and the interval of it."""
    recommended = best_at(document, temperature)["recommended"]
    point = next(p for p in points_at(document, temperature) if p["draft_length"] == recommended)
    name = "draft length auto" if recommended == "auto" else _drafted(recommended)
    return f"{name}, {point['ratio_to_plain']['median']:.2f}× plain ({between(point)})"


def between(point: dict[str, Any]) -> str:
    found = point["interval"]
    return f"{found['low']:.2f} to {found['high']:.2f}"


def describe_alternative(document: dict[str, Any], temperature: float) -> str:
    """How the recommended setting compares with the other one, fixed or auto; why plain decoding wins; or what the
    measurements leave open."""
    best = best_at(document, temperature)
    fixed, auto = best["ratio_to_plain"], best["auto_ratio_to_plain"]
    if best["recommended"] == "plain":
        return _why_plain(document, best)
    if best["recommended"] is None:
        return _what_is_open(document, best)
    if fixed is None or auto is None:
        return ""
    if best["recommended"] != "auto":
        return f"Auto, which chooses a length before each round, reaches {auto:.2f}×."
    return f"It chooses a length before each round; the best fixed one is {best['draft_length']}, with {fixed:.2f}×."


def _what_is_open(document: dict[str, Any], best: dict[str, Any]) -> str:
    named = {best["draft_length"]: f"draft length {best['draft_length']}", "auto": "auto"}
    shown = [p for p in points_at(document, best["temperature"]) if p["draft_length"] in named]
    figures = " and ".join(
        f"{named[p['draft_length']]} {p['ratio_to_plain']['median']:.2f}× ({between(p)})" for p in shown
    )
    count = max((p["interval"]["count"] for p in shown), default=0)
    runs = "one run" if count == 1 else f"{count} runs"
    if best["pays"]:
        return f"Speculation is faster; which length is best lies within the noise after {runs} of each: {figures}."
    if always_faster(document, best["temperature"]):
        return f"Every run with drafts was faster, but {runs} of each are too few to be sure: {figures}. Repeat it."
    return f"After {runs} of each the gain cannot be told from noise: {figures}. More repeats or prompts may decide it."


def always_faster(document: dict[str, Any], temperature: float) -> bool:
    """Whether no run of any draft length was as slow as plain decoding of its prompt."""
    points = points_at(document, temperature)
    return bool(points) and all(point["ratio_to_plain"]["min"] > 1 for point in points)


def describe_intervals(document: dict[str, Any], temperature: float) -> str:
    """What the error bars mean."""
    found = next((p["interval"] for p in points_at(document, temperature)), None)
    if found is None:
        return ""
    if found["count"] < 2:
        return "One run of each: there are no error bars, and nothing can be decided."
    return (
        f"Error bars: where the median of such runs lies with {found['confidence']:.0%} certainty, from "
        f"{found['count']} runs of each setting, each against plain decoding of its own prompt."
    )


def describe_batches(document: dict[str, Any], temperature: float) -> str:
    """From how many texts at once on the gain is gone, predicted from the cost curve."""
    best = best_at(document, temperature)
    limit, reached = best["batch_limit"], best["batches"]
    if not reached or best["recommended"] == "plain" or disturbed(_costs_of(document)):
        return ""
    if limit is None:
        return f"Up to {reached[-1]['texts']} texts at once the cost curve predicts a gain."
    if limit == 1:
        return ""
    return f"This holds for one text at a time: from about {limit} at once on, the cost curve predicts a loss."


def describe_latency(document: dict[str, Any], temperature: float) -> str:
    """Milliseconds a token of what is recommended, or of the best fixed length, beside plain decoding's."""
    best = best_at(document, temperature)
    plain = basis_at(document, temperature)["latency"]
    chosen = best["recommended"] if best["recommended"] not in ("plain", None) else best["draft_length"] or "auto"
    ours = next(p for p in points_at(document, temperature) if p["draft_length"] == chosen)["latency"]
    median, p95, longest = (
        f"{1000 * ours[word]:.1f} ms (plain {1000 * plain[word]:.1f})" for word in ("median", "p95", "longest")
    )
    return f"Time per token: median {median}, 95 % within {p95}; longest pause {longest}."


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
