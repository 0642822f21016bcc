"""What the tab shows before a first sweep: its three questions, answered in small, greyed and labelled, from the race
that comes with the page for the pair of the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.parts import SKETCH, line_sketch, sketch, sketches_html
from core.costs import CostTable
from core.costs.rounds import RoundCosts, expected_tokens

LENGTHS = range(1, 9)


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
        ("How many tokens should the draft propose?", f"{best}: {gain:.1f}× plain, as predicted", line_sketch(gains)),
        ("What does it cost to check them?", f"{last:.0f} tokens: {cost:.1f}× the time of one", line_sketch(passes)),
        ("Where does agreement break?", f"the first guess stands in {reached[0]:.0%} of rounds", _bars(reached)),
    )
    return sketches_html(f"An example, from one race recorded {where}; yours comes here.", pictures)


def _rounds(target: CostTable, drafter: Mapping[str, Any]) -> RoundCosts:
    """By the costs that a document holds of a draft model, or of a trained head, which reads and goes on."""
    if "read" not in drafter:
        return RoundCosts(target, CostTable.from_dict(drafter))
    return RoundCosts(target, CostTable.from_dict(drafter["read"]), CostTable.from_dict(drafter["draft"])(1))


def _bars(shares: Sequence[float]) -> str:
    width, height, margin = SKETCH
    step = (width - 2 * margin) / len(shares)
    return sketch(
        "".join(
            f'<rect x="{margin + step * at:.1f}" y="{height - margin - (height - 2 * margin) * share:.1f}" '
            f'width="{0.7 * step:.1f}" height="{(height - 2 * margin) * share:.1f}"/>'
            for at, share in enumerate(shares)
        )
    )
