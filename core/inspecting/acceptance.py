"""How much of what a pair drafts is accepted: as it was measured, and where; else what is usual, and who says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core.heads.checkpoint import MEASURED
from core.loading.precision import pocket_facts

USUAL = (0.6, 0.7, 0.8)
EXPECTED = 0.7
"""What decides where nothing was measured."""
USUAL_RANGE = "a usual range for a draft of the same family (Leviathan et al. 2023, tables 2 and 3: about 0.5 to 0.9)"


@dataclass(frozen=True)
class Acceptance:
    """Accepted ÷ judged drafts, and `where` that was measured, as it goes on after "measured"; `between` are the lowest
    and the highest of single texts, where several were measured."""

    rate: float
    where: str
    between: tuple[float, float] | None = None


def shipped(facts: Mapping[str, Any]) -> Acceptance | None:
    """What the files of a head, or of the bundled pair, say was measured of it."""
    found = facts.get(MEASURED)
    if not isinstance(found, Mapping):
        return None
    rate = found.get("acceptance_rate")
    if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        return None
    return Acceptance(
        float(rate), str(found.get("where", "by whoever made it"))[:200], _range(found.get("between"), rate)
    )


def _range(found: Any, rate: float) -> tuple[float, float] | None:
    """A range that a file states, where it is one."""
    if not isinstance(found, (list, tuple)) or len(found) != 2:
        return None
    low, high = found
    numbers = all(isinstance(end, (int, float)) for end in found)
    return (float(low), float(high)) if numbers and 0 <= low <= rate <= high <= 1 else None


LEAST_JUDGED, LEAST_OF_A_TEXT = 32, 12
"""Drafted tokens; a share of fewer says little of a pair, or of one text."""


def of_runs(runs: Iterable[Mapping[str, Any]], where: str) -> Acceptance | None:
    """Over run documents, of what a model or head drafted; None where little of it was judged."""
    counts = []
    for run in runs:
        rounds = [round_ for round_ in run["rounds"] if round_.get("source") != "ngram"]
        outcomes = [token["outcome"] for round_ in rounds for token in round_["drafted"]]
        counts.append((outcomes.count("accepted"), outcomes.count("accepted") + outcomes.count("rejected")))
    accepted, judged = map(sum, zip(*counts)) if counts else (0, 0)
    if judged < LEAST_JUDGED:
        return None
    rates = [stood / of for stood, of in counts if of >= LEAST_OF_A_TEXT]
    return Acceptance(accepted / judged, where, (min(rates), max(rates)) if len(rates) > 1 else None)


def shipped_with_pocket() -> Acceptance | None:
    """The same of the bundled pair's draft."""
    return shipped(pocket_facts())
