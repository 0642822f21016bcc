"""Memory traffic: how many bytes a run had to read, and what that says about its speed. Computed from a run document.

A pass reads every weight once, however many tokens it is fed, and every cached key and value once. That is why a pass
over several tokens costs little more than a pass over one where reading is what takes the time.

When speculation does not pay, decided from what was measured in a run: four conditions, each with its break-even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from core.costs import CostTable
from core.costs.rounds import RoundCosts, expected_tokens
from core.drafting.methods import BLOCK, METHODS
from core.explaining import drafted_by_model
from core.loading.geometry import Geometry
from core.records import Round, Run, depths, summarise


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read by `passes` passes of target and draft while `tokens` tokens were written in `seconds`.

    Weights are counted as stored, an embedding table by the rows looked up (nothing), experts by those a pass asks at
    most. Activations, a few kilobytes a token, and the one layer's cache of a trained head are left out, and what a
    cache of the processor saves is not known.
    """

    target_weights: int
    draft_weights: int
    cache: int
    tokens: int
    seconds: float

    @property
    def total(self) -> int:
        return self.target_weights + self.draft_weights + self.cache

    @property
    def per_token(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the measured time implies."""
        return self.total / self.seconds if self.seconds else 0.0

    @property
    def weight_share(self) -> float:
        return (self.target_weights + self.draft_weights) / self.total if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("total", "per_token", "bandwidth", "weight_share")}
        return asdict(self) | derived


LITTLE, MOSTLY = 0.4, 0.6
"""Of what the memory delivers: a run that asks for less than the first is not waiting for it, for more than the second
mostly is."""


def describe_bandwidth(run: Run, traffic: Traffic) -> str:
    """Whether reading is what a run's time went into, by what its machine reads at most; empty where that is not
    known."""
    most = run.environment.get("bandwidth")
    if not isinstance(most, float | int) or most <= 0:
        return ""
    reached, share = traffic.bandwidth / 1e9, traffic.bandwidth / most
    said = f"{reached:.1f} GB/s of the {most / 1e9:.1f} that this machine reads from memory: "
    if share > 1:
        return f"{said}more than memory delivers, so the processor's own cache holds part of the weights."
    if share < LITTLE:
        return (
            f"{said}reading takes at most {share:.0%} of the time. The rest is overhead, that is starting each "
            "operation, and arithmetic: it is not reading weights that sets the speed here."
        )
    if share < MOSTLY:
        shares = f"reading takes {share:.0%} of the time, arithmetic and overhead the rest"
        return f"{said}{shares}, so neither alone sets the speed."
    return f"{said}reading is {share:.0%} of the time, so it sets the speed here."


def weights_read(geometry: Geometry, tokens: int, layers: int | None = None) -> int:
    """Bytes of weights a pass over `tokens` tokens reads, through the first `layers` layers and the head."""
    experts = geometry.expert_bytes
    if geometry.experts:
        asked = min(geometry.experts, tokens * (geometry.active_experts or geometry.experts))
        experts = experts * asked // geometry.experts
    read = geometry.read_bytes + experts
    if layers is None:
        return read
    return geometry.head_bytes + (read - geometry.head_bytes) * layers // geometry.layers


def run_traffic(run: Run) -> Traffic | None:
    """The traffic of all rounds of a run, prompts apart; None where the document does not tell enough."""
    target = _geometry(run, "target")
    if target is None:
        return None
    weights = cache = draft_weights = 0
    committed = len(run.prompt_ids)
    for round_ in run.rounds:
        fed = 1 + len(round_.drafted)
        weights += weights_read(target, fed)
        cache += (committed - 1 + fed) * target.cached_bytes
        drafting = _drafting(run, round_, committed)
        if drafting is None:
            return None
        draft_weights += drafting[0]
        cache += drafting[1]
        committed += len(round_.kept)
    return Traffic(weights, draft_weights, cache, len(run.token_ids), sum(r.seconds for r in run.rounds))


def _drafting(run: Run, round_: Round, committed: int) -> tuple[int, int] | None:
    """Bytes of weights and of cache that proposing a round's draft read; None: not known."""
    by_model = drafted_by_model(run, round_)
    if not by_model:
        return None if by_model is None else (0, 0)
    network = METHODS[run.settings.method].network
    if network == "head":
        return _head_read(run, round_)
    early = network == "target"
    geometry = _geometry(run, "target" if early else "draft")
    layers = (run.environment.get("drafter") or {}).get("exit_layer") if early else None
    if geometry is None or (early and not isinstance(layers, int)):
        return None
    share = (layers or geometry.layers) / geometry.layers
    passes = list(_passes(round_))
    weights = sum(weights_read(geometry, n, layers) for n, _ in passes)
    return weights, round(sum((committed + before) * geometry.cached_bytes * share for _, before in passes))


def _head_read(run: Run, round_: Round) -> tuple[int, int] | None:
    """The same of a trained head, which drafts token by token or a block in one pass. Its keys and values are those of
    few layers, a small part of its weights: left out."""
    weights = (run.environment.get("head") or {}).get("weight_bytes")
    passes = 1 if BLOCK in METHODS[run.settings.method].heads else sum(1 for _ in _passes(round_))
    return (weights * passes, 0) if isinstance(weights, int) else None


def _passes(round_: Round) -> Iterator[tuple[int, int]]:
    """(tokens fed, drafted tokens among what is attended to) of each pass of a draft model: one for every level."""
    depth_of = depths(round_)
    for level in range(max(depth_of, default=-1) + 1 + (round_.refused is not None)):
        above = sum(d < level for d in depth_of)
        yield max(1, above), above


def _geometry(run: Run, role: str) -> Geometry | None:
    model = run.environment.get(role)
    return Geometry.of(model.get("geometry")) if isinstance(model, dict) else None


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
    even certain acceptance would not do. Independent acceptance is assumed (core.costs.rounds.expected_tokens)."""
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
    proposing = cost_table(run, "draft" if METHODS[run.settings.method].network == "draft" else "target")
    one = costs.draft / costs.gamma * table(1) / costs.plain  # the run and the table may have met another load
    return in_batches(table, proposing, one, costs.tokens, gamma)


def in_batches(
    table: CostTable, proposing: CostTable | None, one: float, tokens: float, gamma: int
) -> list[tuple[int, float]]:
    """Predicted speed-up for B texts at once, of rounds that draft `gamma` tokens, each in `one` second for one text,
    and yield `tokens`; `proposing` are the passes of what drafts, None where texts are drafted one after the other."""

    def speed_up(batch: int) -> float:
        drafting = one * (proposing(batch) / proposing(1) if proposing else batch)
        return RoundCosts(lambda n: table(batch * n), lambda n: drafting).speed_up(tokens, gamma)

    return [(batch, speed_up(batch)) for batch in BATCHES]


def batch_limit(speed_ups: Sequence[tuple[int, float]]) -> int | None:
    """From how many texts at once on speculation loses for good; None where it wins as far as was looked."""
    winning = max((batch for batch, speed_up in speed_ups if speed_up > 1), default=0)
    return next((batch for batch, _ in speed_ups if batch > winning), None)


def fixed_share(table: CostTable) -> float:
    """Of a pass over one token, the part that a pass over more tokens does not pay again: 1 - slope / t(1), the slope
    being that between the first and the last measured length."""
    first, last = min(table.seconds), max(table.seconds)
    slope = (table.seconds[last] - table.seconds[first]) / (last - first)
    return min(1.0, max(0.0, 1 - slope / table(1)))


def _bisect(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= 0 else (middle, high)
    return high
