"""What the tab shows before a first sweep: its three questions, answered in small, greyed and labelled, from the race
that comes with the page for the pair of the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from core.costs import CostTable
from core.costs.rounds import RoundCosts, expected_tokens

LENGTHS = range(1, 9)
WIDTH, HEIGHT, MARGIN = 300, 110, 6
Point = tuple[float, float]


def example_html(found: tuple[Mapping[str, Any], str] | None) -> str:
    """Three pictures of an example (`app.playground.example`); nothing where it does not tell what passes cost."""
    if found is None:
        return ""
    document, where = found
    run = next(run for run in document["runs"] if run["settings"]["method"] != "plain")
    models = run["environment"]
    drafter, metrics = models.get("head") or models.get("draft") or {}, run["metrics"]
    if not models["target"].get("costs") or not drafter.get("costs") or metrics["acceptance_rate"] is None:
        return ""
    target = CostTable.from_dict(models["target"]["costs"])
    rounds = _rounds(target, drafter["costs"])
    gains = [(n, rounds.speed_up(expected_tokens(metrics["acceptance_rate"], n), n)) for n in LENGTHS]
    best, gain = max(gains, key=lambda point: point[1])
    passes = [(n, seconds / target(1)) for n, seconds in sorted(target.seconds.items())]
    last, cost = passes[-1]
    reached = metrics["accepted_by_position"]
    pictures = (
        ("How many tokens should the draft propose?", f"{best}: {gain:.1f}× plain, as predicted", _line(gains)),
        ("What does it cost to check them?", f"{last:.0f} tokens: {cost:.1f}× the time of one", _line(passes)),
        ("Where does agreement break?", f"the first guess stands in {reached[0]:.0%} of rounds", _bars(reached)),
    )
    figures = "".join(
        f"<figure><figcaption><b>{title}</b><span>{answer}</span></figcaption>{drawing}</figure>"
        for title, answer, drawing in pictures
    )
    return (
        f'<div class="tune-example"><p>An example, from one race recorded {escape(where)}; yours comes here.</p>'
        f"<div>{figures}</div></div>"
    )


def _rounds(target: CostTable, drafter: Mapping[str, Any]) -> RoundCosts:
    """By the costs that a document holds of a draft model, or of a trained head, which reads and goes on."""
    if "read" not in drafter:
        return RoundCosts(target, CostTable.from_dict(drafter))
    return RoundCosts(target, CostTable.from_dict(drafter["read"]), CostTable.from_dict(drafter["draft"])(1))


def _svg(body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{body}</svg>'


def _line(points: Sequence[Point]) -> str:
    """A line through points, its axis from 0."""
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points)
    placed = [
        (MARGIN + (WIDTH - 2 * MARGIN) * x / most_x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / most_y)
        for x, y in points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed)
    return _svg(f'<polyline points="{path}"/>{dots}')


def _bars(shares: Sequence[float]) -> str:
    step = (WIDTH - 2 * MARGIN) / len(shares)
    return _svg(
        "".join(
            f'<rect x="{MARGIN + step * at:.1f}" y="{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share:.1f}" '
            f'width="{0.7 * step:.1f}" height="{(HEIGHT - 2 * MARGIN) * share:.1f}"/>'
            for at, share in enumerate(shares)
        )
    )
