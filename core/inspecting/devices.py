"""What speculation may bring a pair: on this device, by what a draft step costs of a target step; and on a GPU that is
not here: does the pair fit, how fast, and is speculation worth it?

Predictions only, and nothing of this is measured. Those of other GPUs come from data sheets and stated assumptions: a
pass is bound by the bytes it reads or by its arithmetic, whichever takes longer, and costs every layer its kernels
besides.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from core.costs.rounds import RoundCosts, best_length, expected_tokens, leviathan
from core.errors import UserError
from core.inspecting.acceptance import EXPECTED, USUAL, USUAL_RANGE, Acceptance, shipped_with_pocket
from core.inspecting.files import Preview, Sized, preview, size_up
from core.inspecting.likeness import HeadPreview, SizedHead, preview_bundled, preview_head, size_up_head
from core.inspecting.mtp import SizedMtp, drafts_for_itself, size_up_mtp
from core.loading.pair import choose_pair
from core.progress import in_bytes
from core.settings import POCKET_NAME

DEVICES = Path(__file__).parent.parent.parent / "assets" / "devices.toml"
Basis = Literal["bytes", "layers", "measured"]
PRECISIONS = ("int4", "nf4", "bf16")
LONGEST = 8
LONGEST_NAME = 200
"""Characters in which a card is named, or its figures written."""
REACHED = 0.7
"""Share of the data sheet's bandwidth, and half of that of its arithmetic, that small batches are assumed to reach."""
ARITHMETIC = REACHED / 2
LAYER_SECONDS = 15e-6
"""Assumed for the kernels of a layer in a captured CUDA graph, beside reading its weights."""
USABLE = 0.92
"""Share of a card's memory that the driver and a desktop leave."""
UNPACKING = (0.5625 + 2 + 2) / 0.5625
"""Bytes moved ÷ bytes of a packed weight where bitsandbytes unpacks a matrix before it multiplies: read in 4 bits with
its scales, written and read again in 16."""
WORTH_IT, NOT_WORTH_IT = 1.2, 1.05
SOURCES = {
    "memory, bandwidth, compute": "the vendor's data sheet",
    "share of the bandwidth reached": f"assumed: {REACHED:.0%}",
    "share of the arithmetic reached": f"assumed: {ARITHMETIC:.0%}",
    "kernels of a layer": f"assumed: {LAYER_SECONDS * 1e6:.0f} µs in a captured graph",
    "bytes of weights and caches": "counted from the models' configs, as loading would lay them out",
    "rows multiplied in nf4": "bitsandbytes 0.50's source; past them whole matrices are unpacked for every pass",
    "int4": "PyTorch's kernel, from Ampere on: it unpacks as it multiplies, however many rows",
    "tokens/s": "bound by what is named beside it: a pass takes as long as reading its bytes or as its arithmetic, "
    "whichever is longer, and its kernels besides",
    "acceptance": f"{USUAL[0]} to {USUAL[-1]} is {USUAL_RANGE}. Your text decides: measure it",
}


Drafter = Sized | SizedHead | SizedMtp


@dataclass(frozen=True)
class Forecast:
    """The draft length that is best at an acceptance rate, 0 where plain decoding is faster, and its speed-up."""

    acceptance: float
    draft_length: int
    speedup: float


@dataclass(frozen=True)
class Prediction:
    """Forecasts where a draft step costs `cost_ratio` of a target step: by bytes read, by layers launched, or measured.
    `measured` is the one at the acceptance that was measured of the pair, if it was; `between` at the lowest and the
    highest of single texts, where those are known."""

    basis: Basis
    cost_ratio: float
    holds: str
    forecasts: tuple[Forecast, ...]
    measured: Forecast | None = None
    between: tuple[Forecast, Forecast] | None = None

    @property
    def expected(self) -> Forecast:
        """The one to go by."""
        return self.measured or self.at(EXPECTED)

    def at(self, acceptance: float) -> Forecast:
        return next(f for f in self.forecasts if f.acceptance == acceptance)


def predict(
    target: Sized,
    draft: Drafter,
    device: torch.device,
    acceptance: Acceptance | None = None,
    costs: RoundCosts | None = None,
) -> tuple[Prediction, ...]:
    """What speculation may bring if a pass over several tokens costs what one over one token costs; before that, by
    `costs`, as they were measured here, if they were. `acceptance` as measured of the pair, if it was."""
    by_shape = _by_shape(target, draft, device, acceptance)
    return by_shape if costs is None else (_by_costs(costs, acceptance), *by_shape)


def _by_costs(costs: RoundCosts, acceptance: Acceptance | None) -> Prediction:
    holds = "by what passes were measured to cost here"
    return _prediction("measured", costs.step / costs.plain, holds, partial(_best, costs), acceptance)


def _best(costs: RoundCosts, alpha: float) -> Forecast:
    return Forecast(alpha, *costs.best_chain(partial(expected_tokens, alpha), range(LONGEST + 1)))


def _by_shape(
    target: Sized, draft: Drafter, device: torch.device, acceptance: Acceptance | None
) -> tuple[Prediction, ...]:
    by_bytes = draft.weights.read / target.weights.read
    by_layers = draft.layers / target.layers
    if device.type == "cpu":
        return (_predict("bytes", by_bytes, "on a CPU, where a step costs the bytes it reads", acceptance),)
    if device.type != "cuda":
        return (_predict("layers", by_layers, "here, where a step costs its layers' kernel launches", acceptance),)
    eager = "without CUDA graphs, where a step costs its layers' kernel launches"
    graphs = "with CUDA graphs, where a step costs the bytes it reads"
    return _predict("bytes", by_bytes, graphs, acceptance), _predict("layers", by_layers, eager, acceptance)


def _predict(basis: Basis, cost_ratio: float, holds: str, acceptance: Acceptance | None) -> Prediction:
    return _prediction(basis, cost_ratio, holds, partial(_forecast, cost_ratio=cost_ratio), acceptance)


def _prediction(
    basis: Basis, ratio: float, holds: str, forecast: Callable[[float], Forecast], acceptance: Acceptance | None
) -> Prediction:
    measured = between = None
    if acceptance:
        measured = forecast(acceptance.rate)
        between = acceptance.between and (forecast(acceptance.between[0]), forecast(acceptance.between[1]))
    return Prediction(basis, ratio, holds, tuple(map(forecast, USUAL)), measured, between)


def _forecast(alpha: float, cost_ratio: float) -> Forecast:
    length = best_length(alpha, cost_ratio)
    return Forecast(alpha, length, leviathan(alpha, length, cost_ratio))


@dataclass(frozen=True)
class Card:
    """A GPU as its data sheet has it: GB, GB/s, dense 16-bit TFLOPS; `nf4_rows` and `int4` as in
    `assets/devices.toml`."""

    name: str
    memory: float
    bandwidth: float
    compute: float
    nf4_rows: int
    int4: bool = True


@dataclass(frozen=True)
class Outlook:
    """A precision on a card. Bytes as loading would lay them out; `longest` is the longest context that fits, 0 where
    none does; `tokens_per_second` of plain decoding behind `context` tokens, and what most of that time is: bandwidth,
    arithmetic or kernels; `gains` are empty without a draft."""

    precision: str
    needed: int
    fits: bool
    longest: int
    tokens_per_second: float
    bound: str
    gains: tuple[Forecast, ...]


@dataclass(frozen=True)
class DevicePrediction:
    """A pair on a card, in every precision it can have there; `draft` is who is judged. `acceptance` is the one that
    was measured of that draft, if it was: then it decides. `go` is the decision, `sentence` says it with its reason,
    `best` the precision it is for (None: nothing fits), and `fastest` the tokens/s there, with drafts where they
    pay."""

    card: Card
    draft: str | None
    context: int
    acceptance: Acceptance | None
    outlooks: tuple[Outlook, ...]
    go: bool
    sentence: str
    best: str | None
    fastest: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": "prediction", "sources": self.sources}

    @property
    def sources(self) -> dict[str, str]:
        """Where every number comes from."""
        if self.acceptance is None:
            return SOURCES
        return {**SOURCES, f"{self.acceptance.rate:.0%} accepted": f"measured {self.acceptance.where}"}


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(DEVICES.read_text(encoding="utf-8"))


@cache
def cards() -> tuple[Card, ...]:
    """The cards of `assets/devices.toml`."""
    return tuple(Card(**{**_document()["defaults"], **entry}) for entry in _document()["devices"])


def find_card(text: str) -> Card:
    """A card by its name, or one of one's own: "12 GB, 504 GB/s, 58 TFLOPS". Raises UserError for what is neither."""
    known = {_plain(card.name): card for card in cards()}
    near: list[str] = []
    if len(text) <= LONGEST_NAME:  # what looks into it takes the square of its length
        if found := known.get(_plain(text)) or _own_card(text):
            return found
        near = difflib.get_close_matches(_plain(text), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(known[name].name for name in near)}? Else" if near else "for a card not listed"
    raise UserError(
        f"No card is known as {text[:60]!r}; {hint} write its figures, such as '12 GB, 504 GB/s, 58 TFLOPS'."
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|radeon|amd|tesla|sxm|pcie|[^a-z0-9]", "", name.lower())


def _own_card(text: str) -> Card | None:
    units = {"memory": r"gi?b(?!/|\w)", "bandwidth": r"gb/s", "compute": r"tflops?"}
    found = {key: re.search(rf"(\d[\d,]*(?:\.\d+)?)\s*{unit}", text, re.IGNORECASE) for key, unit in units.items()}
    figures: dict[str, Any] = {key: float(match[1].replace(",", "")) for key, match in found.items() if match}
    if len(figures) < len(units) or not all(0 < figure < 1e6 for figure in figures.values()):
        return None
    return Card("your card", **_document()["defaults"], **figures)


def predict_on(
    card: Card,
    target: str | None,
    draft: str | None,
    context: int = 2048,
    acceptance: Acceptance | None = None,
    revision: str | None = None,
) -> DevicePrediction:
    """A pair, by names as `inspect` takes them, on a card; `acceptance` as measured of it, if it was, else what its
    files say. Raises UserError where a model cannot be looked at."""
    target, draft = choose_pair(target, draft)
    ours = preview(target, "target", revision)
    if drafts_for_itself(ours, draft):
        theirs = ours
    else:
        theirs = (preview_head(draft) or preview(draft, "draft")) if draft else preview_bundled(ours)
    acceptance = acceptance or shipped_with(target, draft, theirs)
    alphas: list[float] = sorted({*USUAL, *([] if acceptance is None else [acceptance.rate])})
    found = [_outlook(card, ours, theirs, precision, context, alphas) for precision in PRECISIONS]
    outlooks = tuple(outlook for outlook in found if outlook)
    name = None if theirs is None else f"{ours.name}'s own MTP layer" if theirs is ours else theirs.name
    return DevicePrediction(card, name, context, acceptance, outlooks, *_decide(card, outlooks, acceptance, name))


def compare(one: DevicePrediction, other: DevicePrediction) -> str:
    """What a pair gains from one card to the other, each at its best, in a sentence."""
    slow, fast = sorted((one, other), key=lambda found: found.fastest)
    if fast.best is None:
        return f"It fits neither {one.card.name} nor {other.card.name}."
    if slow.best is None:
        return f"It fits {fast.card.name} and does not fit {slow.card.name}."
    ratio = fast.fastest / slow.fastest
    speeds = " and ".join(f"about {found.fastest:,.0f} tokens/s in {found.best}" for found in (fast, slow))
    if ratio < NOT_WORTH_IT:
        return f"{fast.card.name} and {slow.card.name} are about as fast: {speeds}."
    return f"{fast.card.name} writes {ratio:.1f}× as fast as {slow.card.name}: {speeds}."


def shipped_with(target: str, draft: str | None, theirs: Preview | HeadPreview | None) -> Acceptance | None:
    """What the files of a pair, by the names it was asked for and what its draft is, say was measured of it."""
    if isinstance(theirs, HeadPreview):
        return theirs.accepted
    return shipped_with_pocket() if (target, draft) == (POCKET_NAME, POCKET_NAME) else None


def _outlook(
    card: Card,
    ours: Preview,
    theirs: Preview | HeadPreview | None,
    precision: str,
    context: int,
    alphas: Sequence[float],
) -> Outlook | None:
    """None where the pair cannot be had in int4 on the card."""
    place = torch.device("cuda")
    draft: Drafter | None = None
    try:
        if precision == "int4" and not card.int4:
            return None
        target = size_up(ours, place, precision, here=False)
        if isinstance(theirs, HeadPreview):
            draft = size_up_head(theirs, place)
        elif theirs is ours:
            draft = size_up_mtp(target)
        elif theirs:
            draft = size_up(theirs, place, precision, here=False)
    except UserError:
        if precision != "int4":
            raise
        return None
    models = [target, *([draft] if draft else [])]
    room = USABLE * card.memory * 1e9
    reading, arithmetic, kernels = pass_parts(card, target, 1, context)
    bounds = {"bandwidth": reading, "arithmetic": arithmetic, "kernels": kernels}
    return Outlook(
        precision,
        needed=_needed(models, context),
        fits=_needed(models, context) <= room,
        longest=_longest(models, target.context_length, room),
        tokens_per_second=1 / (max(reading, arithmetic) + kernels),
        bound=max(bounds, key=lambda name: bounds[name]),
        gains=tuple(_gain(card, target, draft, alpha, context) for alpha in alphas) if draft else (),
    )


def _needed(models: Sequence[Drafter], context: int) -> int:
    """Bytes of weights, the caches and captured passes of one run and the wider workspace."""
    held = sum(model.weights.total + model.cache_bytes(context) + model.captured_bytes(context) for model in models)
    return held + max(model.workspace_bytes(context) for model in models)


def _longest(models: Sequence[Drafter], most: int, room: float) -> int:
    """The longest context up to `most` that fits into `room` bytes, to 256 tokens below it; 0 where none does."""
    if _needed(models, most) <= room:
        return most
    steps = bisect_right(range(1, most // 256 + 1), room, key=lambda step: _needed(models, 256 * step))
    return 256 * steps


def pass_seconds(card: Card, model: Drafter, rows: int, context: int) -> float:
    """Seconds of a pass over `rows` tokens behind `context` cached ones: the longer of reading and arithmetic, and the
    kernels."""
    reading, arithmetic, kernels = pass_parts(card, model, rows, context)
    return max(reading, arithmetic) + kernels


def pass_parts(card: Card, model: Drafter, rows: int, context: int) -> tuple[float, float, float]:
    """Seconds that reading, arithmetic and starting kernels take of such a pass; the first two at the same time."""
    weights = model.weights.read
    if model.precision == "nf4" and rows > card.nf4_rows:
        weights *= UNPACKING
    reading = (weights + model.cache_bytes(context)) / (REACHED * card.bandwidth * 1e9)
    arithmetic = 2 * model.weights.active_parameters * rows / (ARITHMETIC * card.compute * 1e12)
    return reading, arithmetic, model.layers * LAYER_SECONDS


def _gain(card: Card, target: Sized, draft: Drafter, alpha: float, context: int) -> Forecast:
    step = pass_seconds(card, draft, 1, context)
    return _best(RoundCosts(lambda rows: pass_seconds(card, target, rows, context), lambda rows: step), alpha)


def _decide(
    card: Card, outlooks: Sequence[Outlook], measured: Acceptance | None, draft: str | None
) -> tuple[bool, str, str | None, float]:
    """Go or no-go for `draft` at the acceptance that was measured of it, else at a usual one, in the precision that is
    fastest among those that fit; that precision, and its tokens/s."""
    acceptance = measured.rate if measured else EXPECTED
    fitting = [outlook for outlook in outlooks if outlook.fits]
    if not fitting:
        least = min(outlooks, key=lambda outlook: outlook.needed)
        sentence = (
            f"No-go: the smallest of it, {least.precision}, needs {in_bytes(least.needed)} with this context; "
            f"{card.name} leaves about {in_bytes(round(USABLE * card.memory * 1e9))}."
        )
        return False, sentence, None, 0.0
    if draft is None:
        best = max(fitting, key=lambda outlook: outlook.tokens_per_second)
        speed = best.tokens_per_second
        sentence = f"It fits; about {speed:,.0f} tokens/s plainly in {best.precision}. No draft to judge."
        return True, sentence, best.precision, speed
    best = max(fitting, key=lambda outlook: outlook.tokens_per_second * _at(outlook, acceptance).speedup)
    gain = _at(best, acceptance)
    speed = f"about {best.tokens_per_second:,.0f} tokens/s plainly in {best.precision}"
    basis = f"as measured {measured.where}" if measured else "which was not measured of it"
    share = f"{gain.acceptance:.0%} of what it guesses is accepted, {basis}"
    go = gain.speedup >= WORTH_IT
    if go:
        sentence = f"Go: {speed}; with {draft}, {gain.draft_length} guesses at a time, about {gain.speedup:.1f}× that"
        sentence += f" if {share}."
    elif gain.speedup > NOT_WORTH_IT:
        sentence = f"Hardly: {speed}; with {draft} only {gain.speedup:.2f}× that if {share}."
    else:
        sentence = f"No-go: {speed}; {draft} costs as much as it saves if {share}."
    return go, sentence, best.precision, best.tokens_per_second * gain.speedup


def _at(outlook: Outlook, acceptance: float) -> Forecast:
    return next(gain for gain in outlook.gains if gain.acceptance == acceptance)


def prediction_card(found: DevicePrediction) -> str:
    """For a terminal: the sentence, a line per precision, and where every number comes from."""
    card = found.card
    lines = [
        f"{card.name} ({card.memory:g} GB, {card.bandwidth:g} GB/s, {card.compute:g} TFLOPS): predicted, not measured.",
        f"  {found.sentence}",
    ]
    for outlook in found.outlooks:
        fits = f"fits (up to {outlook.longest:,})" if outlook.fits else "does not fit"
        gains = "; ".join(
            f"{g.acceptance:.0%} accepted: {g.speedup:.2f}× (draft {g.draft_length})" for g in outlook.gains
        )
        lines.append(
            f"  {outlook.precision:<5} {in_bytes(outlook.needed)} with {found.context:,} tokens, {fits}; plain "
            f"{outlook.tokens_per_second:.0f} tokens/s, bound by {outlook.bound}" + (f"; {gains}" if gains else "")
        )
    return "\n".join([*lines, *(f"  {what}: {source}." for what, source in found.sources.items())])
