"""Which drafters a pair supports, and the drafter that settings ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from core.costs.rounds import RoundCosts, Seconds
from core.drafting import Drafter
from core.drafting.head import BEAMS, DEEPEST, AdaptiveDepth, HeadDrafter, HeadTreeDrafter
from core.drafting.length import Adaptive, AdaptiveSource, Controller, Fixed, Recorded
from core.drafting.model import EarlyExitDrafter, InTargetWidth, ModelDrafter, exit_layer
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.translate import TranslateDrafter
from core.drafting.tree import AdaptiveShape, TreeDrafter, parse_shape
from core.errors import UserError
from core.heads.block import FusedHead
from core.heads.runner import HeadCosts, HeadRunner, runner_of
from core.loading.model import AnyRunner
from core.loading.pair import Pair
from core.records import Round
from core.runners import Runner
from core.sampling import Sampling
from core.settings import MTP, NEEDS_HEAD, NO_TREE, SPECS, Method, Settings


def available(pair: Pair) -> dict[Method, str | None]:
    """Every method with None where the pair supports it, else the reason why not."""
    no_head = None if pair.head else "no trained head of the target is loaded"
    no_tree = NO_TREE if pair.head and pair.head.kind == MTP else no_head
    no_draft = None if pair.draft else "no draft model is loaded"
    if no_draft and pair.head:
        no_draft = "the draft is a trained head, whose method is head"
    shallow = None if pair.target.layers >= 2 else "the target has a single layer"
    return {
        "plain": None,
        "draft": no_draft,
        "ngram": None,
        "ngram+draft": no_draft,
        "early-exit": shallow,
        "tree": no_draft or ("a tree needs a draft with the target's own tokens" if pair.translation else None),
        "head": no_head,
        "head-tree": no_tree,
    }


def settle_method(pair: Pair, settings: Settings) -> Settings:
    """`draft` means the draft of the pair: of a trained head, the method `head`."""
    if settings.method == "draft" and pair.head and pair.draft is None:
        return replace(settings, method="head")
    return settings


def build_drafter(
    pair: Pair, target: AnyRunner, settings: Settings, resources: ExitStack, room: int = 0
) -> tuple[Drafter, Controller]:
    """The drafter of settings.method and what decides its length; runners go back when `resources` closes. `room`: how
    many tokens of the target the text may come to."""
    method = SPECS["method"].read(settings.method)
    if reason := available(pair)[method]:
        raise UserError(f"The method {method} is off: {reason}.")
    sampling = Sampling.of(settings)
    costs = round_costs(pair, settings)
    if method == "ngram":
        return NgramDrafter(target.device), _controller(settings, costs)
    if method == "early-exit":
        layers = exit_layer(pair.target, settings.exit_layer)
        agreed = pair.target.exit_agreement if settings.exit_layer is None else None
        return EarlyExitDrafter(target.view(layers), sampling), _controller(settings, costs, agreed)
    if method == "head":
        assert pair.head is not None
        drafter = HeadDrafter(runner_of(pair.head.fused), target.watch(pair.head.layers), sampling)
        return drafter, _controller(settings, costs)
    if method == "head-tree":
        assert pair.head is not None and isinstance(pair.head.fused, FusedHead)
        tree = HeadTreeDrafter(HeadRunner(pair.head.fused), target.watch(pair.head.layers), sampling, costs)
        deep = AdaptiveDepth(costs, DEEPEST) if settings.draft_length == "auto" else Fixed(settings.draft_length)
        return tree, deep
    assert pair.draft is not None
    limit = pair.draft.context_length
    runner: Runner = resources.enter_context(pair.draft.lease(room))
    if not pair.translation and pair.draft.vocab_size != pair.target.vocab_size:
        runner = InTargetWidth(runner, pair.draft.vocab_size, pair.target.vocab_size)
    if method == "tree":
        if settings.tree in (None, "auto"):
            adaptive = AdaptiveShape(costs)
            return TreeDrafter(runner, sampling, adaptive, limit), adaptive
        shape = parse_shape(settings.tree)
        return TreeDrafter(runner, sampling, lambda: shape, limit), Fixed(len(shape))
    if pair.translation:
        model = TranslateDrafter(runner, sampling, pair.translation, limit)
    else:
        model = ModelDrafter(runner, sampling, limit)
    if method == "draft":
        return model, _controller(settings, costs)
    ngram = NgramDrafter(target.device)
    if settings.draft_length != "auto":
        return CombinedDrafter(ngram, model), Fixed(settings.draft_length)
    chosen = AdaptiveSource(ngram.find, Adaptive(RoundCosts(costs.target)), Adaptive(costs))
    return CombinedDrafter(ngram, model, chosen.source), chosen


def round_costs(pair: Pair, settings: Settings) -> RoundCosts:
    """What a round of this method costs, as measured; of `ngram+draft`, a round that the model drafts."""
    target, draft = pair.measure_costs()
    if settings.method == "early-exit":
        return pair.target.measure_exit(exit_layer(pair.target, settings.exit_layer))
    if settings.method in NEEDS_HEAD and pair.head:
        return head_costs(target, pair.head.measure_costs(pair.target), BEAMS if settings.method == "head-tree" else 1)
    if settings.method in ("plain", "ngram") or draft is None:
        return RoundCosts(target)
    return RoundCosts(target, draft, draft.following)


def known_costs(pair: Pair) -> RoundCosts | None:
    """What a round that the pair's own draft drafts costs, where that has been measured already."""
    drafting = pair.head or pair.draft
    if drafting is None or drafting.costs is None or pair.target.costs is None:
        return None
    return round_costs(pair, Settings(method="head" if pair.head else "draft"))


def head_costs(target: Seconds, head: HeadCosts, beams: int = 1) -> RoundCosts:
    """Of rounds that a trained head drafts, from `beams` of its own outputs at a time."""
    return RoundCosts(target, head.read, head.draft(beams))


def as_recorded(drafter: Drafter, rounds: Sequence[Round]) -> Controller:
    """Make a drafter draft once more what it drafted in these rounds: what decides its length, a tree's shape,
    and who drafts where an n-gram and a model take turns."""
    recorded = Recorded(rounds)
    if isinstance(drafter, TreeDrafter):
        drafter.shape = recorded.shape
    if isinstance(drafter, HeadTreeDrafter):
        drafter.nodes = recorded.nodes
    if isinstance(drafter, CombinedDrafter):
        drafter.source = recorded.source
    return recorded


def _controller(settings: Settings, costs: RoundCosts, prior: float | None = None) -> Controller:
    if settings.draft_length != "auto":
        return Fixed(settings.draft_length)
    return Adaptive(costs) if prior is None else Adaptive(costs, prior=prior)
