"""How much of what a pair drafts is accepted: as it was measured, and where; else what is usual, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Accepted ÷ judged drafts, and `where` that was measured, as it goes on after "measured"."""

    rate: float
    where: str


def shipped(facts: Mapping[str, Any]) -> Acceptance | None:
    """What the files of a head, or of the bundled pair, say was measured of it."""
    found = facts.get(MEASURED)
    if not isinstance(found, Mapping):
        return None
    rate = found.get("acceptance_rate")
    if not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        return None
    return Acceptance(float(rate), str(found.get("where", "by whoever made it"))[:200])


def shipped_with_pocket() -> Acceptance | None:
    """The same of the bundled pair's draft."""
    return shipped(pocket_facts())
