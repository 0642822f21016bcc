"""Lanes put side by side: which of them race at once, and what their finished runs come to.

Lanes of the same target race at once, as the two of the playground do. Lanes that need different targets take turns
with the memory of the device. Each is held against plain decoding of its own target, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from core.drafting.methods import METHODS
from core.measuring.deciding import faster
from core.records import Metrics, Run, Settings, Spread, count_by_position, first_divergence, summarise


class Prompted(Protocol):
    """A run of ours, or an answer of a server."""

    @property
    def prompt(self) -> str: ...


R = TypeVar("R", bound=Prompted)


@dataclass
class Contender:
    """A lane of a comparison and what came of it: `runs` by the number of the prompt, `error` if it had to give up.

    `added`: nobody asked for it; it is the plain decoding that the lanes of its target are held against.
    """

    number: int
    settings: Settings
    added: bool = False
    runs: dict[int, Run] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Heat:
    """Lanes of one target, which race at once; `baseline`, one of them, decodes plainly."""

    contenders: list[Contender]
    baseline: Contender


def _target_of(settings: Settings) -> tuple[Any, ...]:
    return settings.target, settings.precision, settings.revision, settings.device


def same_target(one: Settings, other: Settings) -> bool:
    """Whether plain decoding by the one is what runs by the other are held against."""
    return _target_of(one) == _target_of(other)


def heats(lanes: Sequence[Settings]) -> list[Heat]:
    """Group lanes by target and precision, in the order in which they first need them; add a plain lane where a group
    has none. Lanes are numbered from 1, those added go on from the last."""
    groups: dict[tuple[Any, ...], list[Contender]] = {}
    for number, settings in enumerate(lanes, 1):
        groups.setdefault(_target_of(settings), []).append(Contender(number, settings))
    found = []
    number = len(lanes)
    for group in groups.values():
        baseline = next((each for each in group if each.settings.method == "plain"), None)
        if baseline is None:
            number += 1
            baseline = Contender(number, replace(group[0].settings, method="plain"), added=True)
            group.append(baseline)
        found.append(Heat(group, baseline))
    return found


@dataclass(frozen=True)
class Same:
    """Of `compared` texts, how many are the baseline's token for token; of the first one that is not, `first` is the
    first token (from 1) that differs and `logit_gap` what lay between the baseline's two best logits there."""

    same: int
    compared: int
    first: int | None = None
    logit_gap: float | None = None


@dataclass(frozen=True)
class Row:
    """What a lane's runs come to, over `prompts` of them.

    `tokens_per_second` and `ratio_to_plain` (the baseline's run of the same prompt is 1) are spreads over the prompts;
    `faster` than plain or not, None where that cannot be told from noise; `drafted` is how many tokens were.
    `acceptance_rate`, `tokens_per_round` and `accepted_by_position` pool the rounds of all of them; behind each
    position are `drafts_by_position` rounds. `weight_bytes` is what the lane's models take in memory. `identical` is
    None where tokens are drawn by chance and for the baseline.
    """

    lane: int
    method: str
    baseline: bool
    added: bool
    prompts: int
    tokens_per_second: Spread | None
    ratio_to_plain: Spread | None
    faster: bool | None
    drafted: int
    acceptance_rate: float | None
    tokens_per_round: float | None
    accepted_by_position: list[float]
    drafts_by_position: list[int]
    weight_bytes: dict[Literal["target", "draft"], int] | None
    identical: Same | None
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(contender: Contender, baseline: Contender) -> Row:
    """Sum up a contender. Runs that were stopped count only where none came to its end."""
    runs, plain = counted(contender), counted(baseline)
    speeds = [summarise(run).tokens_per_second for run in runs.values()]
    pooled = _pooled(list(runs.values()))
    return Row(
        lane=contender.number,
        method=contender.settings.method,
        baseline=contender is baseline,
        added=contender.added,
        prompts=len(runs),
        tokens_per_second=Spread.of(speeds) if speeds else None,
        ratio_to_plain=_ratios(runs, plain),
        faster=faster(runs, plain),
        drafted=sum(len(round_.drafted) for run in runs.values() for round_ in run.rounds),
        acceptance_rate=pooled.acceptance_rate if runs else None,
        tokens_per_round=pooled.tokens_per_round if runs else None,
        accepted_by_position=pooled.accepted_by_position,
        drafts_by_position=count_by_position([round_ for run in runs.values() for round_ in run.rounds])[0],
        weight_bytes=next((weight_bytes(run) for run in contender.runs.values()), None),
        identical=_same(runs, plain) if contender is not baseline else None,
        error=contender.error,
    )


def lanes_of(runs: Sequence[R], prompts: Sequence[str], about: Callable[[R], Any]) -> list[dict[int, R]]:
    """By the number of the prompt, the runs that say the same of themselves; of two on one prompt, each in a lane of
    its own."""
    found: list[tuple[Any, dict[int, R]]] = []
    for run in runs:
        at, told = prompts.index(run.prompt), about(run)
        lane = next((lane for other, lane in found if other == told and at not in lane), None)
        if lane is None:
            found.append((told, lane := {}))
        lane[at] = run
    return [lane for _, lane in found]


def models_and_settings(run: Run) -> Any:
    """What runs of one lane have in common."""
    models = [run.environment.get(role) for role in ("target", "draft")]
    return run.settings, [(model["name"], model["parameters"]) for model in models if model]


@dataclass(frozen=True)
class Lane:
    """What became of a lane: the places of its runs among all, its row, and the place among the lanes of the plain
    decoding that it is held against (None: there is none)."""

    places: list[int]
    row: Row
    plain: int | None


def summed_up(runs: Sequence[Run]) -> list[Lane]:
    """Runs that were made together, as a comparison has them."""
    places = {id(run): place for place, run in enumerate(runs)}
    lanes = lanes_of(runs, list(dict.fromkeys(run.prompt for run in runs)), models_and_settings)
    found = [Contender(number, next(iter(lane.values())).settings, runs=lane) for number, lane in enumerate(lanes, 1)]
    plain = [at for at, each in enumerate(found) if each.settings.method == "plain"]
    told = []
    for each in found:
        base = next((at for at in plain if same_target(found[at].settings, each.settings)), None)
        baseline = Contender(0, each.settings) if base is None else found[base]
        told.append(Lane([places[id(run)] for run in each.runs.values()], row(each, baseline), base))
    return told


def weight_bytes(run: Run) -> dict[Literal["target", "draft"], int]:
    """Bytes of weights that the run reads: the target's, and those of the draft or the trained head that its method
    asks for."""
    network = METHODS[run.settings.method].network
    draft = run.environment.get(network) if network in ("draft", "head") else None
    return {"target": run.environment["target"]["weight_bytes"], "draft": draft["weight_bytes"] if draft else 0}


def counted(contender: Contender) -> dict[int, Run]:
    """The runs that figures are made of: those that came to their end, or what there is where none did."""
    written = {at: run for at, run in contender.runs.items() if run.token_ids}
    return {at: run for at, run in written.items() if run.stop_reason in ("eos", "length")} or written


def _ratios(runs: dict[int, Run], plain: dict[int, Run]) -> Spread | None:
    ratios = [
        summarise(run).tokens_per_second / summarise(plain[at]).tokens_per_second
        for at, run in runs.items()
        if at in plain
    ]
    return Spread.of(ratios) if ratios else None


def _pooled(runs: Sequence[Run]) -> Metrics:
    """The metrics of all rounds together, as if one run had them."""
    ids = [id for run in runs for id in run.token_ids]
    rounds = [round_ for run in runs for round_ in run.rounds]
    return summarise(Run(Settings(), {}, "", [], token_ids=ids, rounds=rounds))


def _same(runs: dict[int, Run], plain: dict[int, Run]) -> Same | None:
    pairs = [(plain[at], run) for at, run in runs.items() if at in plain and run.settings.temperature == 0]
    if not pairs:
        return None
    partings = [found for one, other in pairs if (found := first_divergence(one, other))]
    same = len(pairs) - len(partings)
    if not partings:
        return Same(same, len(pairs))
    return Same(same, len(pairs), partings[0].position + 1, partings[0].logit_gap)
