"""Which drafters a pair supports, and the drafter that settings ask for."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from core.costs import CostTable
from core.drafting import Drafter
from core.drafting.head import HeadDrafter
from core.drafting.length import Adaptive, Controller, Fixed, Seconds
from core.drafting.model import EarlyExitDrafter, ModelDrafter, exit_layer
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.translate import TranslateDrafter
from core.drafting.tree import AdaptiveShape, TreeDrafter, parse_shape
from core.errors import UserError
from core.heads.runner import HeadRunner
from core.loading.model import AnyRunner
from core.loading.pair import Pair
from core.sampling import Sampling
from core.settings import SPECS, Method, Settings


def available(pair: Pair) -> dict[Method, str | None]:
    """Every method with None where the pair supports it, else the reason why not."""
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
        "head": None if pair.head else "no trained head of the target is loaded",
    }


def settle_method(pair: Pair, settings: Settings) -> Settings:
    """`draft` means the draft of the pair: of a trained head, the method `head`."""
    if settings.method == "draft" and pair.head and pair.draft is None:
        return replace(settings, method="head")
    return settings


def build_drafter(
    pair: Pair, target: AnyRunner, settings: Settings, resources: ExitStack
) -> tuple[Drafter, Controller]:
    """The drafter of settings.method and what decides its length; runners go back when `resources` closes."""
    method = SPECS["method"].read(settings.method)
    if reason := available(pair)[method]:
        raise UserError(f"The method {method} is off: {reason}.")
    sampling = Sampling.of(settings)
    costs, draft_costs = pair.measure_costs()
    if method == "ngram":
        return NgramDrafter(target.device), _controller(settings, costs, lambda n: 0.0)
    if method == "early-exit":
        layers = exit_layer(pair.target, settings.exit_layer)
        share = layers / pair.target.layers
        return EarlyExitDrafter(target.view(layers), sampling), _controller(settings, costs, lambda n: share * costs(n))
    if method == "head":
        return _build_head(pair, target, settings, sampling, costs)
    assert pair.draft is not None and draft_costs is not None
    runner = resources.enter_context(pair.draft.lease())
    if method == "tree":
        return _build_tree(runner, sampling, settings.tree, pair.draft.context_length, costs, draft_costs)
    if pair.translation:
        model = TranslateDrafter(runner, sampling, pair.translation, pair.draft.context_length)
    else:
        model = ModelDrafter(runner, sampling, pair.draft.context_length)
    drafter = CombinedDrafter(NgramDrafter(target.device), model) if method == "ngram+draft" else model
    return drafter, _controller(settings, costs, draft_costs, draft_costs.following)


def _controller(settings: Settings, target: Seconds, draft: Seconds, step: float | None = None) -> Controller:
    return Adaptive(target, draft, step) if settings.draft_length == "auto" else Fixed(settings.draft_length)


def _build_head(
    pair: Pair, target: AnyRunner, settings: Settings, sampling: Sampling, costs: CostTable
) -> tuple[Drafter, Controller]:
    head = pair.head
    assert head is not None
    passes = head.measure_costs(pair.target)
    drafter = HeadDrafter(HeadRunner(head.fused), target.watch(head.layers), sampling)
    return drafter, _controller(settings, costs, passes.read, passes.draft(1))


def _build_tree(
    runner: AnyRunner, sampling: Sampling, spec: str | None, limit: int, target: Seconds, draft: CostTable
) -> tuple[Drafter, Controller]:
    if spec in (None, "auto"):
        adaptive = AdaptiveShape(target, draft, draft.following)
        return TreeDrafter(runner, sampling, adaptive, limit), adaptive
    shape = parse_shape(spec)
    return TreeDrafter(runner, sampling, lambda: shape, limit), Fixed(len(shape))
