"""A bench document for a person to read."""

from __future__ import annotations

from typing import Any

from core.measuring.curve import describe_costs

COLUMNS = {
    "tokens/s": 10,
    "(min-max)": 16,
    "x plain": 9,
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

    `honest`: the speed-up that measured costs and acceptance allow; `of it`: how much of that was reached.
    """
    lines = [f"{'method':<22}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())]
    lines += [_row(row) for row in (*document["methods"], *document["peers"])]
    costs = {int(n): seconds for n, seconds in document["costs"]["target"].items()}
    lines += ["", f"Verification cost: {describe_costs(costs)}", _curve(costs)]
    if found := document["bandwidth"]:
        lines.append(
            f"A pass reads {found['achieved'] / 1e9:,.0f} GB/s, {found['share']:.0%} of what a copy moves here "
            f"({found['copy'] / 1e9:,.0f} GB/s)."
        )
    if growth := document.get("growth"):
        lines += ["", _growth(growth)]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    speed, honest, reached = row["tokens_per_second"], row["honest_ratio"], row["of_honest"]
    cells = (
        f"{speed['median']:.1f}",
        f"{speed['min']:.0f}-{speed['max']:.0f}",
        f"{row['ratio_to_plain']['median']:.2f}",
        number(honest and honest["median"]),
        share(reached and reached["median"]),
        share(row["acceptance_rate"]),
        number(row["tokens_per_round"]),
        number(row["draft_ms"]),
        number(row["verify_ms"]),
        number(row["other_ms"], 3),
        share(row["efficiency"], 1),
    )
    return f"{row['name']:<22}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))


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
