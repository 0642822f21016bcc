"""The drafter that settings ask for, and what its rounds cost: by the table of methods, each of whose modules says how
(`WAYS`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module

from core.costs import GROWN, MEASURED_LENGTHS
from core.costs.rounds import PassCosts, RoundCosts
from core.costs.sampling import SamplingCosts, time_sampling
from core.drafting import Drafter
from core.drafting.chain import Ending
from core.drafting.length import Acceptance, Adaptive, Confident, Controller, Fixed, Growing
from core.drafting.methods import HEAD, METHODS, Means, method_of
from core.errors import UserError
from core.heads.mtp import MtpHead
from core.loading.model import AnyRunner
from core.loading.pair import WITH_ITS_HEAD, Pair
from core.sampling import Sampling
from core.settings import SPECS, Settings

ROWS_OF_A_TEXT = 5
"""Of a pass over several texts, as many of each are measured."""
WORTH_WAITING = 0.05
"""How much of a drafter's pass the host may wait to know how sure it is."""


@dataclass
class Parts:
    """What a drafter is built from. Runners leased for it go back when `resources` closes; `room`: how many tokens of
    the target the text may come to."""

    pair: Pair
    target: AnyRunner
    settings: Settings
    costs: RoundCosts
    resources: ExitStack
    room: int = 0

    waiting: float = 0.0
    """Seconds for which the host would wait for a number of the drafter's."""

    @property
    def sampling(self) -> Sampling:
        return Sampling.of(self.settings)

    def length(self) -> Controller:
        """What decides the length of chains that say nothing of how sure they are."""
        return Adaptive(self.costs) if self.settings.draft_length == "auto" else Fixed(self.settings.draft_length)

    def chain(self, prior: float | None = None) -> tuple[Controller, Ending | None]:
        """What decides the length of a network's chains, and where each ends; `prior`: the acceptance to expect at
        first. Where the host would wait long for how sure the drafter is, only the length is decided, round by round.
        """
        if self.settings.draft_length != "auto":
            return Fixed(self.settings.draft_length), None
        expected = Acceptance.PRIOR if prior is None else prior
        if self.waiting > WORTH_WAITING * self.costs.step:
            return Adaptive(self.costs, prior=expected), None
        self.costs = replace(self.costs, drawing=self.costs.drawing + self.waiting)
        confident = Confident(self.costs, prior=expected)
        return confident, confident


Built = tuple[Drafter, Controller]


@dataclass(frozen=True)
class Way:
    """How a method is carried out: its drafter and what decides its length, from their parts; what its rounds cost,
    from measured passes (None: they are not known); and over how many `rows` its widest passes are."""

    build: Callable[[Parts], Built]
    costs: Callable[[PassCosts, Settings], RoundCosts | None]
    rows: int = MEASURED_LENGTHS[-1]


def way_of(method: str) -> Way:
    """That of the table's `module`, whose `WAYS` are by method."""
    return import_module(f"core.drafting.{METHODS[method].module}").WAYS[method]


def means_of(pair: Pair) -> Means:
    """What a loaded pair has to draft with."""
    no_draft = None if pair.draft else "no draft model is loaded"
    if no_draft and pair.head:
        no_draft = f"the draft is a trained head, whose method is {method_of(pair.head.kind).name}"
    no_head = None if pair.head else "no trained head of the target is loaded"
    kind = pair.head.kind if pair.head else HEAD
    return Means(no_draft, no_head, kind, pair.target.layers, pair.translation is None)


def available(pair: Pair) -> dict[str, str | None]:
    """Every method with None where the pair supports it, else the reason why not."""
    return means_of(pair).reasons()


def settle_method(pair: Pair, settings: Settings) -> Settings:
    """`draft` means what the pair drafts with: of a trained head that is named its method, of one that comes with the
    target what such a pair begins with."""
    if settings.method != "draft" or pair.draft or not pair.head:
        return settings
    return replace(settings, method=method_of(pair.head.kind).name if settings.draft else WITH_ITS_HEAD)


def build_drafter(
    pair: Pair, target: AnyRunner, settings: Settings, resources: ExitStack, room: int = 0, at_once: int = 1
) -> tuple[Drafter, Controller]:
    """The drafter of settings.method and what decides its length, for one of so many texts decoded `at_once`; see
    `Parts`."""
    method = SPECS["method"].read(settings.method)
    if reason := METHODS[method].missing(means_of(pair)):
        raise UserError(f"The method {method} is off: {reason}.")
    sampled = sampling_costs(pair, settings)
    costs = whole_costs(pair, settings, at_once)
    parts = Parts(pair, target, settings, costs, resources, room, sampled.waiting)
    drafter, length = way_of(method).build(parts)
    refit = [part.refit for part in (length, drafter) if hasattr(part, "refit")]  # type: ignore[attr-defined]
    if at_once > 1 or not hasattr(length, "refit"):  # what is measured beside other texts, or fixed, stays as it is
        return drafter, length
    share = layers_of(pair, drafter, method) / pair.target.layers
    limit = pair.target.context_length - max(GROWN)
    return drafter, Growing(length, refit, lambda: parts.costs.grown(*pair.target.measure_grown(target), share), limit)


def layers_of(pair: Pair, drafter: Drafter, method: str) -> int:
    """How many layers a pass of a drafter has."""
    network = METHODS[method].network
    if network == "draft" and pair.draft:
        return pair.draft.layers
    return getattr(drafter, "exit_layer", 0) if network == "target" else int(network == "head")


def sampling_costs(pair: Pair, settings: Settings) -> SamplingCosts:
    """What sampling as these settings say costs beside the passes; measured once."""
    sampling, network = Sampling.of(settings), METHODS[settings.method].network
    own = pair.head.fused.draft_vocab_size if pair.head and network == "head" else pair.target.vocab_size
    key = sampling, own
    if key not in pair.sampling:
        target = pair.target
        pair.sampling[key] = time_sampling(sampling, target.vocab_size, own, target.device, target.exact_rows)
    return pair.sampling[key]


def whole_costs(pair: Pair, settings: Settings, at_once: int = 1) -> RoundCosts:
    """What a round of this method costs with all that is around its passes, in step with those of other texts."""
    sampled = sampling_costs(pair, settings)
    costs = replace(
        round_costs(pair, settings, at_once),
        overhead=sampled.plain,
        drawing=sampled.drawing if METHODS[settings.method].network else 0.0,  # an n-gram looks its tokens up
        judging=sampled.judging,
    )
    return costs if at_once == 1 else costs.at_once(at_once, shares_passes(pair, settings), pair.target.shares)


def shares_passes(pair: Pair, settings: Settings) -> bool:
    """Whether passes of this method's drafter are over the rows of all texts that are decoded at once."""
    network = METHODS[settings.method].network
    if network == "head":
        return pair.head is not None and not isinstance(pair.head.fused, MtpHead) and bool(pair.head.fused.native)
    drafting = pair.draft if network == "draft" else pair.target
    return drafting is not None and drafting.shares


def round_costs(pair: Pair, settings: Settings, at_once: int = 1) -> RoundCosts:
    """What a round of this method costs, as measured once; of two drafters that take turns, a round that the network
    drafts. Measured up to passes as wide as those of so many texts `at_once`."""
    method = METHODS[settings.method]
    passes = measured_passes(pair, settings, at_once)
    found = way_of(method.name).costs(passes, settings) if method.drafts else None
    return found or RoundCosts(passes.target)


def measured_passes(pair: Pair, settings: Settings, at_once: int = 1) -> PassCosts:
    """The passes that rounds of this method are made of; measured once."""
    network = METHODS[settings.method].network
    widest = way_of(settings.method).rows if METHODS[settings.method].drafts else 1
    rows = at_once * ROWS_OF_A_TEXT if at_once > 1 and pair.target.exact_rows else 1
    target, draft = pair.measure_costs(max(widest, rows))
    head = pair.head.measure_costs(pair.target) if pair.head and network == "head" else None
    exits = {}
    if network == "target":
        from core.drafting.model import exit_layer

        layers = exit_layer(pair.target, settings.exit_layer)
        exits = {settings.exit_layer: pair.target.measure_exit(layers)}
    if at_once > 1 and pair.target.in_slots:  # where a pass is not one over as many rows of a text alone
        target |= pair.target.measure_at_once(at_once)
        exits = {layers: replace(costs, target=target) for layers, costs in exits.items()}
    if at_once > 1 and draft and pair.draft and pair.draft.in_slots:
        draft |= pair.draft.measure_at_once(at_once)
    return PassCosts(target, target if draft else None, draft, exits, head)


def known_costs(pair: Pair) -> RoundCosts | None:
    """What a round that the pair's own draft drafts costs, where that has been measured already."""
    drafting = pair.head or pair.draft
    if drafting is None or drafting.costs is None or pair.target.costs is None:
        return None
    return round_costs(pair, Settings(method=method_of(pair.head.kind).name if pair.head else "draft"))
