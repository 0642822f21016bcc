"""Memory traffic: how many bytes a run had to read, and what that says about its speed. Computed from a run document.

A pass reads every weight once, however many tokens it is fed, and every cached key and value once. That is why a pass
over several tokens costs little more than a pass over one where reading is what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from core.explaining.trace import drafted_by_model
from core.geometry import Geometry
from core.metrics import depths
from core.records import Round, Run


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read by `passes` passes of target and draft while `tokens` tokens were written in `seconds`.

    Weights are counted as stored, an embedding table by the rows looked up (nothing), experts by those a pass asks at
    most. Activations, a few kilobytes a token, are left out, and what a cache of the processor saves is not known.
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
    early = run.settings.method == "early-exit"
    geometry = _geometry(run, "target" if early else "draft")
    layers = (run.environment.get("drafter") or {}).get("exit_layer") if early else None
    if geometry is None or (early and not isinstance(layers, int)):
        return None
    share = (layers or geometry.layers) / geometry.layers
    passes = list(_passes(round_))
    weights = sum(weights_read(geometry, n, layers) for n, _ in passes)
    return weights, round(sum((committed + before) * geometry.cached_bytes * share for _, before in passes))


def _passes(round_: Round) -> Iterator[tuple[int, int]]:
    """(tokens fed, drafted tokens among what is attended to) of each pass of a draft model: one for every level."""
    depth_of = depths(round_)
    for level in range(max(depth_of) + 1):
        above = sum(d < level for d in depth_of)
        yield max(1, above), above


def _geometry(run: Run, role: str) -> Geometry | None:
    model = run.environment.get(role)
    return Geometry.of(model.get("geometry")) if isinstance(model, dict) else None
