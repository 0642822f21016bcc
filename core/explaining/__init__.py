"""What a run can tell about itself: its tensors, the bytes it read, when it would not pay, whether it is lossless.

Here the tensor trace: what one round really computed, with the shapes it had. Plain data from a run document.

A round feeds the newest token and the k drafted ones behind L cached tokens. Without a cache the same pass would feed
all L + k + 1: `RoundTrace.uncached` has those shapes beside the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from core.drafting.methods import METHODS
from core.errors import UserError
from core.loading.geometry import Geometry
from core.records import CacheLengths, Round, Run, branches, depths
from core.runners.widths import capacity_for, reach_for, width_for

Stage = Literal["in", "layer", "out"]


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """`stage`: before, inside (every layer alike) or after the layers. `stored` is False where the kernel computes the
    tensor piece by piece and never holds it whole, or does without it."""

    stage: Stage
    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str
    stored: bool = True


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """A row of the round's logits [k+1, vocab]: the target's law after drafted token `after` (None: after the newest
    token), which judges the drafted tokens `judges`; where it judges none, it gives the bonus token if it is reached.
    `visible`: the fed tokens it attends to beside the whole cache, as columns of the mask (0: the newest token)."""

    row: int
    after: int | None
    judges: tuple[int, ...]
    visible: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round: `committed` tokens of text before it, of which the target's cache holds all but the newest.
    `draft_cache` is None where the drafter has none of its own or its length is not known."""

    index: int
    committed: int
    fed: int
    rows: tuple[LogitsRow, ...]
    target_cache: CacheLengths
    draft_cache: CacheLengths | None
    tensors: tuple[TracedTensor, ...]
    uncached: tuple[TracedTensor, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def trace_round(run: Run, index: int) -> RoundTrace:
    """Trace round `index` of a run. Raises UserError where there is no such round."""
    if not 0 <= index < len(run.rounds):
        raise UserError(f"This run has {len(run.rounds):,} rounds, counted from 0; there is no round {index}.")
    if not run.prompt_ids:
        raise UserError("This run's document has no prompt tokens, so its passes cannot be traced.")
    round_ = run.rounds[index]
    target, draft = round_.target_cache, round_.draft_cache
    if target is None:
        target, draft = replayed_target_cache(run, index), replayed_draft_cache(run, index)
    fed = target.fullest - target.before
    return RoundTrace(
        index=index,
        committed=target.before + 1,
        fed=fed,
        rows=logits_rows([token.parent for token in round_.drafted]),
        target_cache=target,
        draft_cache=draft,
        tensors=_tensors(run, target.before, fed, branches(round_)),
        uncached=_tensors(run, 0, target.fullest, branches(round_)),
    )


def _tensors(run: Run, cached: int, fed: int, tree: bool) -> tuple[TracedTensor, ...]:
    """A pass of the run's target, with the padding of its vocabulary cut off; nothing where the document does not
    tell how the target is built."""
    target = _target(run)
    geometry = Geometry.of(target.get("geometry"))
    if geometry is None:
        return ()
    real = target.get("vocab_size")
    vocabulary = real if isinstance(real, int) else geometry.vocabulary
    surplus = geometry.vocabulary - vocabulary
    cut = f"without {surplus:,} rows of padding" if surplus else "nothing of it is padding"
    *passed, logits = trace_pass(geometry, cached, fed, tree)
    return (*passed, logits, TracedTensor("out", "rows to judge by", (fed, vocabulary), logits.dtype, cut))


def logits_rows(parents: Sequence[int | None]) -> tuple[LogitsRow, ...]:
    """Which row judges which drafted token: the row after a token's parent. Row 0 stands after the newest token."""
    rows = [LogitsRow(0, None, _children(parents, None), (0,))]
    for i, parent in enumerate(parents):
        above = rows[0 if parent is None else parent + 1].visible
        rows.append(LogitsRow(i + 1, i, _children(parents, i), (*above, i + 1)))
    return tuple(rows)


def _children(parents: Sequence[int | None], node: int | None) -> tuple[int, ...]:
    return tuple(i for i, parent in enumerate(parents) if parent == node)


FIXED = "; the cache is read up to a fixed reach, past the text masked"
SURPLUS = "; captured passes have few widths, so {} surplus rows go along that nobody reads"


def trace_pass(geometry: Geometry, cached: int, fed: int, tree: bool = False) -> Iterator[TracedTensor]:
    """The tensors of a target pass over `fed` tokens behind `cached` ones, in the order they are made."""
    if geometry.runner == "native":
        return _native_pass(geometry, cached, fed)
    if geometry.runner.startswith("fused"):
        return _fused_pass(geometry, cached, fed)
    return _pass(geometry, cached, fed, tree)


def _pass(g: Geometry, cached: int, fed: int, tree: bool) -> Iterator[TracedTensor]:
    """transformers' own forward: a batch dimension of 1 first. On captured passes the cache has a fixed reach."""
    n, total, d = fed, cached + fed, g.dtype
    static = g.runner == "graph"
    if static:
        n, total = width_for(fed), reach(total, g.longest)
    yield TracedTensor("in", "token ids", (1, n), "int64", "the tokens that are fed" + _surplus(n - fed))
    yield TracedTensor("in", "embedding", (1, n, g.width), d, "a row of the embedding table for each")
    if g.position_table:
        yield TracedTensor("in", "positions", (1, n, g.width), d, "a row of the position table, added to it")
    for p in _of(g, "in"):
        yield TracedTensor("layer", p.name, (1, n, p.out), d, _projected(p.name))
    yield TracedTensor("layer", "queries", (1, g.heads, n, g.head_size), d, _split(g))
    yield from _cache(g, total, FIXED if static else "")
    yield TracedTensor(
        "layer",
        "scores",
        (1, g.heads, n, total),
        d,
        "each fed token against every key" + _group(g),
        stored=g.attention == "eager",
    )
    # One new token sees everything, and a pass with nothing cached is causal by itself: no mask is made for those.
    plain = g.attention == "sdpa" and not tree and not static
    needless = plain and not g.window and (n == 1 or not cached)
    dtype = "bool" if plain else d
    yield TracedTensor("layer", "mask", (1, 1, n, total), dtype, "who may see whom, alike for all heads", not needless)
    yield TracedTensor("layer", "attention", (1, n, g.heads * g.head_size), d, "the heads' answers side by side")
    for p in _of(g, "out"):
        yield TracedTensor("layer", p.name, (1, n, p.out), d, "mixed back to the model's width")
    if g.experts:
        yield TracedTensor("layer", "router", (n, g.experts), d, f"picks {g.active_experts} experts for each token")
    for p in _of(g, "mlp"):
        yield TracedTensor("layer", p.name, (1, n, p.out), d, "feed-forward")
    yield TracedTensor("out", "final norm", (1, n, g.width), d, "what the layers made of each token")
    yield TracedTensor("out", "logits", (1, n, g.vocabulary), d, "a score for every token that could come next")


def _fused_pass(g: Geometry, cached: int, fed: int) -> Iterator[TracedTensor]:
    """core.runners.static_layers: queries that share a key head are rows of one matrix, beside a mask. On captured
    passes the cache has a fixed reach."""
    n, total = width_for(fed), reach(cached + fed, g.longest)
    group = g.heads // g.kv_heads
    rows = group * n
    shared = f"; {group} query heads share a key head and lie below each other" if group > 1 else ""
    attending = (
        TracedTensor("layer", "queries", (1, g.kv_heads, rows, g.head_size), g.dtype, _split(g) + shared),
        *_cache(g, total, FIXED),
        TracedTensor(
            "layer", "scores", (1, g.kv_heads, rows, total), g.dtype, "each fed token against every key", stored=False
        ),
        TracedTensor("layer", "mask", (rows, total), g.dtype, "who may see whom, once for every query head of a group"),
    )
    return _stacked_pass(g, n, g.dtype, n - fed, attending)


def _native_pass(g: Geometry, cached: int, fed: int) -> Iterator[TracedTensor]:
    """core.runners.native: no mask, for every row says how far it sees; what lies between two products is in
    float32."""
    n, total, d = fed, cached + fed, "float32"
    attending = (
        TracedTensor("layer", "queries", (n, g.heads, g.head_size), d, _split(g) + _group(g)),
        *_cache(g, total),
        TracedTensor(
            "layer", "scores", (n, g.heads, total), d, "each fed token against the keys it may see", stored=False
        ),
    )
    return _stacked_pass(g, n, d, 0, attending)


def _stacked_pass(
    g: Geometry, n: int, d: str, surplus: int, attending: Iterable[TracedTensor]
) -> Iterator[TracedTensor]:
    """A pass over `n` rows, `surplus` of them to no purpose, without a batch dimension: q, k and v are one product,
    gate and up another. `attending`: from the queries to the scores."""
    inner = [p.out for p in _of(g, "mlp")]
    entering = (g.heads + 2 * g.kv_heads) * g.head_size
    yield TracedTensor("in", "token ids", (n,), "int64", "the tokens that are fed" + _surplus(surplus))
    yield TracedTensor("in", "embedding", (n, g.width), d, "a row of the embedding table for each")
    yield TracedTensor("layer", "qkv", (n, entering), d, "queries, keys and values from one product")
    yield from attending
    yield TracedTensor("layer", "attention", (n, g.heads * g.head_size), d, "the heads' answers side by side")
    yield TracedTensor("layer", "o_proj", (n, g.width), d, "mixed back to the model's width")
    both = "both halves of the feed-forward in one product"
    yield TracedTensor("layer", "gate_up", (n, inner[0] + inner[1]), d, both)
    yield TracedTensor("layer", "down_proj", (n, g.width), d, "and back to the model's width")
    yield TracedTensor("out", "final norm", (n, g.width), d, "what the layers made of each token")
    yield TracedTensor("out", "logits", (n, g.vocabulary), d, "a score for every token that could come next")


def reach(total: int, longest: int) -> int:
    """Positions of a static cache that a pass ending at `total` tokens reads, of a model whose context is `longest`."""
    return min(reach_for(total), capacity_for(total, longest))


def _cache(g: Geometry, total: int, more: str = "") -> Iterator[TracedTensor]:
    shape = (1, g.kv_heads, total, g.head_size)
    for name in ("keys", "values"):
        meaning = f"{name} of the cached and the fed tokens, {g.kv_heads} heads{more}"
        yield TracedTensor("layer", name, shape, g.dtype, meaning)


def _surplus(rows: int) -> str:
    return SURPLUS.format(rows) if rows else ""


def _of(g: Geometry, place: str) -> list[Any]:
    return [p for p in g.projections if p.place == place]


def _projected(name: str) -> str:
    kinds = {"q": "queries", "k": "keys", "v": "values"}
    return kinds.get(name.split("_")[0], "queries, keys and values in one")


def _split(g: Geometry) -> str:
    return f"split over {g.heads} heads"


def _group(g: Geometry) -> str:
    shared = g.heads // g.kv_heads
    return f"; {shared} query heads share each key head" if shared > 1 else ""


def replayed_target_cache(run: Run, index: int) -> CacheLengths:
    """The target's cache in round `index`, for documents whose rounds do not say: it holds all but the newest token."""
    committed = len(run.prompt_ids) + sum(len(r.kept) for r in run.rounds[:index])
    drafted = run.rounds[index].drafted
    accepted = sum(token.outcome == "accepted" for token in drafted)
    return CacheLengths(committed - 1, committed + len(drafted), committed + accepted)


def replayed_draft_cache(run: Run, index: int) -> CacheLengths | None:
    """The draft model's cache in round `index`, for documents whose rounds do not say: from the outcomes up to it.

    None where there is none (n-gram; early exit writes into the target's), where the draft counts in tokens of its
    own, or where the document does not tell which rounds the draft model drafted.
    """
    draft = run.environment.get("draft")
    if METHODS[run.settings.method].network != "draft" or not isinstance(draft, dict):
        return None
    if (run.environment.get("drafter") or {}).get("translated"):
        return None
    limit = draft.get("context_length") or len(run.prompt_ids)
    committed = len(run.prompt_ids)
    held = min(committed - 1, limit)
    lengths = CacheLengths(held, held, held)
    for round_ in run.rounds[: index + 1]:
        by_model = drafted_by_model(run, round_)
        if by_model is None:
            return None
        accepted = sum(token.outcome == "accepted" for token in round_.drafted)
        fullest = after = held
        if by_model:
            depth_of = depths(round_)
            # The last level is not fed, unless the draft was ended by what would have followed it.
            fullest = committed + sum(round_.refused is not None or d < max(depth_of) for d in depth_of)
            stands = committed + (0 if METHODS[run.settings.method].tree else accepted)
            after = min(fullest, stands)
        lengths = CacheLengths(held, fullest, after)
        held = after
        committed += len(round_.kept)
    return lengths


def drafted_by_model(run: Run, round_: Round) -> bool | None:
    """Whether a network drafted this round (a draft model, a head, the target's first layers), rather than an n-gram;
    None: unknown."""
    method = METHODS[run.settings.method]
    if method.network is None or not (round_.drafted or round_.refused is not None):
        return False
    if not method.ngram:
        return True
    if round_.source is not None:
        return round_.source == "model"
    first = round_.drafted[0]
    return None if first.top_target is None else first.top_draft is not None


def _target(run: Run) -> dict[str, Any]:
    found = run.environment.get("target")
    return found if isinstance(found, dict) else {}
