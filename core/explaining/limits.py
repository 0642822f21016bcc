"""When speculation does not pay, decided from what was measured in a run: four conditions, each with its break-even."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from core.costs import CostTable
from core.metrics import depths, summarise
from core.records import Run
from core.theory import expected_tokens, honest

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured of a run: `plain` and `speculative`, seconds of a token without and with drafts; and of the
    rounds that drafted the means: seconds in all and of drafting and verifying, `gamma` the depth of the draft,
    `tokens` what they yielded. `plain_measured`: by a plain run beside it, else plain is what the cost table says."""

    plain: float
    plain_measured: bool
    speculative: float
    round: float
    draft: float
    verify: float
    gamma: float
    tokens: float

    @property
    def gain(self) -> float:
        """Seconds saved by every token, negative where speculation lost."""
        return self.plain - self.speculative

    @property
    def speed_up(self) -> float:
        return self.plain / self.speculative


def measure(run: Run, plain: Run | None) -> Costs | None:
    """None where a run has drafted nothing, or there is nothing to compare it with."""
    drafted = [r for r in run.rounds if r.drafted]
    metrics = summarise(run)
    table = cost_table(run, "target")
    if not drafted or not metrics.new_tokens or not metrics.seconds:
        return None
    known = summarise(plain) if plain else None
    if known and known.new_tokens and known.seconds:
        step = known.seconds / known.new_tokens
    elif table:
        step = table(1)
    else:
        return None
    return Costs(
        plain=step,
        plain_measured=bool(known and known.seconds),
        speculative=metrics.seconds / metrics.new_tokens,
        round=fmean(r.seconds for r in drafted),
        draft=fmean(r.draft_seconds for r in drafted),
        verify=fmean(r.verify_seconds for r in drafted),
        gamma=fmean(1 + max(depths(r)) for r in drafted),
        tokens=fmean(len(r.kept) for r in drafted),
    )


def cost_table(run: Run, role: str) -> CostTable | None:
    """The measured cost table of the target or the draft that a run document holds."""
    model = run.environment.get(role)
    costs = model.get("costs") if isinstance(model, dict) else None
    if not isinstance(costs, dict) or len(costs) < 2:
        return None
    table = CostTable.from_dict(costs)
    return table if min(table.seconds) > 0 and min(table.seconds.values()) > 0 else None


def break_even_length(run: Run, costs: Costs) -> int | None:
    """New tokens after which the draft's own reading of the prompt has paid for itself; None: never."""
    return max(1, math.ceil(run.draft_prefill_seconds / costs.gain)) if costs.gain > 0 else None


def break_even_acceptance(costs: Costs) -> float | None:
    """The acceptance at which a round of this length and cost yields what plain steps do in the same time; None where
    even certain acceptance would not do. Independent acceptance is assumed (core.theory.expected_tokens)."""
    needed = costs.round / costs.plain

    def expected(alpha: float) -> float:
        # The mean length lies between two whole ones.
        low = math.floor(costs.gamma)
        share = costs.gamma - low
        return (1 - share) * expected_tokens(alpha, low) + share * expected_tokens(alpha, low + 1)

    if expected(1.0) < needed:
        return None
    return _bisect(lambda alpha: expected(alpha) - needed)


def expected_by_formula(run: Run, alpha: float) -> float:
    """Mean of (1 - α^(γ+1)) / (1 - α) over the rounds of a run, each with the depth γ it drafted."""
    lengths = [1 + max(depths(r), default=-1) for r in run.rounds]
    return sum(expected_tokens(alpha, gamma) for gamma in lengths) / len(lengths)


def batch_speed_ups(run: Run, costs: Costs) -> list[tuple[int, float]]:
    """Predicted speed-up for B texts at once: a pass over B·(γ+1) rows against one over B, from the cost tables
    continued. Attention to separate texts is taken as free."""
    table = cost_table(run, "target")
    if table is None:
        return []
    gamma = max(1, round(costs.gamma))
    proposing = cost_table(run, "draft" if run.settings.method in ("draft", "tree") else "target")
    one = costs.draft / costs.gamma * table(1) / costs.plain  # the run and the table may have met another load

    def speed_up(batch: int) -> float:
        drafting = one * (continued(proposing, batch) / proposing(1) if proposing else batch)
        return honest(costs.tokens, gamma, lambda n: continued(table, batch * n), drafting)

    return [(batch, speed_up(batch)) for batch in BATCHES]


def continued(table: CostTable, n: int) -> float:
    """Seconds of a pass over n tokens; past the last measured length in the straight line through first and last."""
    last = max(table.seconds)
    return table(n) if n <= last else table.seconds[last] + (n - last) * _slope(table)


def fixed_share(table: CostTable) -> float:
    """Of a pass over one token, the part that a pass over more tokens does not pay again: 1 - slope / t(1)."""
    return min(1.0, max(0.0, 1 - _slope(table) / table(1)))


def _slope(table: CostTable) -> float:
    """Seconds for one more token, between the first and the last measured length; never negative."""
    first, last = min(table.seconds), max(table.seconds)
    return max(0.0, (table.seconds[last] - table.seconds[first]) / (last - first))


def _bisect(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    return high
