"""The vocabulary of the whole project: plain data, serialisable, without torch.

A run document is one JSON object: settings + environment + prompt + rounds + totals. What the page shows, what is
exported and what is replayed are the same object.

What is computed from a run; every definition in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from core.settings import POCKET_NAME, SPECS, Settings

SCHEMA = 1

Outcome = Literal["accepted", "rejected", "ignored", "corrected", "bonus", "plain"]
"""What became of a token. `ignored`: drafted but never judged (after a rejection, an untried sibling, past the stop).
`corrected`: drawn from the residual after a rejection. `bonus`: the free token after a draft accepted whole."""

StopReason = Literal["eos", "length", "cancelled"]
Source = Literal["ngram", "model"]
Ended = Literal["length", "unsure", "odds", "nothing"]
"""Why a draft ended: it was as long as asked; the drafter was too unsure of the next token; what it had was too
uncertain for another token to be worth its time; it had nothing more to propose."""


def flat(record: Any) -> dict[str, Any]:
    """A dataclass of plain values as a dictionary, in a tenth of the time that `asdict` takes to look into it."""
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(slots=True)
class Candidate:
    """One entry of a "what would the model rather have said" list."""

    id: int
    text: str
    p: float


@dataclass(slots=True)
class Token:
    """A drafted or an emitted token.

    `p` and `q` are the target's and the drafter's probability of it after the whole sampler chain; `q` is None for an
    emitted token. `parent` is the index in `Round.drafted` of the token it continues, None for a first token. `draw` is
    the uniform number of its acceptance test, None where nobody judged it. `text` is what it adds to the text: empty
    while a multi-byte character is incomplete; the token that completes the character carries it. `confidence` is the
    highest probability of the distribution a network drafted it from (at temperature 0, of its softmax), in a chain.
    """

    id: int
    text: str
    outcome: Outcome
    p: float | None = None
    q: float | None = None
    parent: int | None = None
    draw: float | None = None
    top_target: list[Candidate] | None = None
    top_draft: list[Candidate] | None = None
    confidence: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every field, but for those that not every token has."""
        whole = flat(self).items()
        found: dict[str, Any] = {name: value for name, value in whole if value is not None or name not in OPTIONAL}
        for top in TOPS & found.keys():
            found[top] = [flat(each) for each in found[top]]
        return found


TOPS = {"top_target", "top_draft"}
OPTIONAL = {*TOPS, "confidence"}
ASKED = ("draft_length", "tree", "source", "ended", "refused")
"""What a round says of how its draft came about."""


@dataclass(frozen=True, slots=True)
class CacheLengths:
    """Tokens a cache held before a round, at its fullest in it, and after the roll back."""

    before: int
    fullest: int
    after: int


@dataclass(slots=True)
class Round:
    """One draft and the target pass that judged it; times in seconds of engine time.

    `draft_length` is how deep a draft was asked for, `tree` its shape where it is a tree ("3x2x1": children by depth),
    `source` who drafted where an n-gram and a model take turns: with the seed, what repeats the round. `ended` says why
    the draft did; where the drafter was too unsure of the next token, `refused` is its highest probability there.
    `draft_cache` is None where the drafter has no cache of its own in the target's tokens; `target_cache` and
    `draft_length` are None in documents from before they were recorded.
    """

    index: int
    drafted: list[Token] = field(default_factory=list)
    emitted: Token | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    target_cache: CacheLengths | None = None
    draft_cache: CacheLengths | None = None
    draft_length: int | None = None
    tree: str | None = None
    source: Source | None = None
    ended: Ended | None = None
    refused: float | None = None

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def kept(self) -> list[Token]:
        """The tokens this round adds to the output, in order."""
        return [t for t in self.drafted if t.outcome == "accepted"] + ([self.emitted] if self.emitted else [])

    def to_dict(self) -> dict[str, Any]:
        emitted = None
        if self.emitted:
            drafted_only = ("q", "parent", "draw")
            emitted = {k: v for k, v in self.emitted.to_dict().items() if k not in drafted_only}
        asked = {name: getattr(self, name) for name in ASKED}
        caches = {"target_cache": self.target_cache, "draft_cache": self.draft_cache}
        return {
            "index": self.index,
            "drafted": [t.to_dict() for t in self.drafted],
            "emitted": emitted,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
            **{name: flat(lengths) for name, lengths in caches.items() if lengths},
            **{name: value for name, value in asked.items() if value is not None},
        }


@dataclass(slots=True)
class Run:
    """One generation, from settings to totals. `stop_reason` is None while it is going on."""

    settings: Settings
    environment: dict[str, Any]
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: StopReason | None = None
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0

    @property
    def engine_seconds(self) -> float:
        """Engine time so far, both prefills included: what the race is scheduled by."""
        return self.prefill_seconds + self.draft_prefill_seconds + sum(r.seconds for r in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "settings": self.settings.to_dict(),
            "environment": self.environment,
            "prompt": self.prompt,
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "stop_reason": self.stop_reason,
            "rounds": [r.to_dict() for r in self.rounds],
            "metrics": summarise(self).to_dict(),
        }


def _ran_bundled(environment: dict[str, Any]) -> bool:
    target = environment.get("target")
    return isinstance(target, dict) and str(target.get("name")).startswith(f"{POCKET_NAME} ")


def run_from_dict(document: dict[str, Any]) -> Run:
    """Rebuild a run from its document; the inverse of `Run.to_dict` (metrics are computed anew).

    Raises ValueError where the document is of another schema or misses a part, UserError for a setting that cannot be.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"not a run document of schema {SCHEMA}")
    try:
        metrics, settings = document["metrics"], {k: v for k, v in document["settings"].items() if k in SPECS}
        if not isinstance(document["prompt"], str) or not isinstance(document["environment"], dict):
            raise TypeError("its prompt is text and its environment an object")
        if settings.get("target") is None and _ran_bundled(document["environment"]):
            settings["target"] = POCKET_NAME  # in older documents no name was its name
        return Run(
            settings=Settings(**{name: SPECS[name].read(value) for name, value in settings.items()}),
            environment=document["environment"],
            prompt=document["prompt"],
            prompt_ids=list(document["prompt_ids"]),
            token_ids=list(document["token_ids"]),
            text=document["text"],
            stop_reason=document["stop_reason"],
            rounds=[_round(r) for r in document["rounds"]],
            prefill_seconds=metrics["prefill_seconds"],
            draft_prefill_seconds=metrics["draft_prefill_seconds"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the run document is incomplete: {error}") from error


def _round(data: dict[str, Any]) -> Round:
    emitted = data["emitted"]
    return Round(
        index=data["index"],
        drafted=[_token(t) for t in data["drafted"]],
        emitted=_token(emitted) if emitted else None,
        draft_seconds=data["draft_seconds"],
        verify_seconds=data["verify_seconds"],
        other_seconds=data["other_seconds"],
        **{name: CacheLengths(**data[name]) for name in ("target_cache", "draft_cache") if data.get(name)},
        **{name: data.get(name) for name in ASKED},
    )


def _token(data: dict[str, Any]) -> Token:
    tops = {k: [Candidate(**c) for c in data[k]] for k in ("top_target", "top_draft") if data.get(k) is not None}
    return Token(**{**data, **tops})


@dataclass(frozen=True, slots=True)
class Metrics:
    """Totals of a run.

    `seconds` and `tokens_per_second` are decoding, prefill apart. `acceptance_rate` is accepted ÷ judged (accepted +
    rejected): the estimate of α. `draft_utilisation` is accepted ÷ drafted. Both are None when nothing was judged.
    `accepted_by_position[i]` is the share of the rounds that drafted at least i+1 deep in which at least i+1 drafted
    tokens were accepted.
    """

    new_tokens: int
    seconds: float
    prefill_seconds: float
    draft_prefill_seconds: float
    tokens_per_second: float
    rounds: int
    tokens_per_round: float
    acceptance_rate: float | None
    draft_utilisation: float | None
    accepted_by_position: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def depths(round_: Round) -> list[int]:
    """Depth of each drafted token, first tokens at 0 (in a chain: its position)."""
    found: list[int] = []
    for token in round_.drafted:
        found.append(0 if token.parent is None else found[token.parent] + 1)
    return found


def branches(round_: Round) -> bool:
    """Whether the round drafted a tree that is not a chain."""
    return any(token.parent != (i - 1 if i else None) for i, token in enumerate(round_.drafted))


def accepted_by_position(rounds: list[Round]) -> list[float]:
    """Share of rounds with at least 1, 2, … accepted tokens, of those that drafted (and were not cut) that deep."""
    tried, accepted = count_by_position(rounds)
    return [a / t for a, t in zip(accepted, tried)]


def count_by_position(rounds: list[Round]) -> tuple[list[int], list[int]]:
    """How many rounds drafted (and were not cut) 1, 2, … deep, and in how many of them so many were accepted."""
    tried: list[int] = []
    accepted: list[int] = []
    for round_ in rounds:
        depth_of = depths(round_)
        if round_.emitted is None:  # cut by the end of the sequence, it says nothing of the positions past the cut
            depth_of = [d for d, t in zip(depth_of, round_.drafted) if t.outcome != "ignored"]
        deepest = max(depth_of, default=-1)
        count = sum(t.outcome == "accepted" for t in round_.drafted)
        while len(tried) <= deepest:
            tried.append(0)
            accepted.append(0)
        for depth in range(deepest + 1):
            tried[depth] += 1
            accepted[depth] += depth < count
    return tried, accepted


def summarise(run: Run) -> Metrics:
    """Totals of a run as far as it has come."""
    outcomes = [t.outcome for r in run.rounds for t in r.drafted]
    accepted, rejected = outcomes.count("accepted"), outcomes.count("rejected")
    seconds = sum(r.seconds for r in run.rounds)
    tokens = len(run.token_ids)
    return Metrics(
        new_tokens=tokens,
        seconds=seconds,
        prefill_seconds=run.prefill_seconds,
        draft_prefill_seconds=run.draft_prefill_seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        rounds=len(run.rounds),
        tokens_per_round=tokens / len(run.rounds) if run.rounds else 0.0,
        acceptance_rate=accepted / (accepted + rejected) if accepted + rejected else None,
        draft_utilisation=accepted / len(outcomes) if outcomes else None,
        accepted_by_position=accepted_by_position(run.rounds),
    )


REPEATED_WORDS, REPEATED_SHARE, SHORTEST_JUDGED = 8, 0.3, 32


def repeats_itself(token_ids: Sequence[int]) -> bool:
    """Whether at least 3 in 10 stretches of 8 tokens stood before in the same answer: such a text is easy to draft, and
    a speed-up on it says little of others. Loops reach a share of 0.4 to 0.9, texts that read well 0 to 0.25."""
    stretches = [tuple(token_ids[i : i + REPEATED_WORDS]) for i in range(len(token_ids) - REPEATED_WORDS + 1)]
    return len(token_ids) >= SHORTEST_JUDGED and len(set(stretches)) <= (1 - REPEATED_SHARE) * len(stretches)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same thing."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def median_of_known(values: Iterable[float | None]) -> float | None:
    """None where nothing is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def percentile(weighted: Sequence[tuple[float, int]], share: float) -> float | None:
    """The smallest of (value, how often it stands) that at least `share` of all do not exceed; None of nothing."""
    enough, seen = share * sum(often for _, often in weighted), 0
    for value, often in sorted(weighted):
        if (seen := seen + often) >= enough:
            return value
    return None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two outputs part: `logit_gap` is between the two likeliest tokens of the first run there (None unless the
    run recorded them): near zero, the two passes rounded a tie differently."""

    position: int
    first_text: str
    second_text: str
    logit_gap: float | None


def first_divergence(first: Run, second: Run) -> Divergence | None:
    """The first position at which the tokens of two runs differ, or None as far as both go."""
    for position, (a, b) in enumerate(zip(first.token_ids, second.token_ids)):
        if a != b:
            one, other = _kept_at(first, position), _kept_at(second, position)
            top = one.top_target or []
            # Both probabilities come from one softmax, so their log ratio is the difference of the logits.
            gap = math.log(top[0].p / top[1].p) if len(top) > 1 and top[1].p > 0 else None
            return Divergence(position, one.text, other.text, gap)
    return None


def _kept_at(run: Run, position: int) -> Token:
    for round_ in run.rounds:
        if position < len(round_.kept):
            return round_.kept[position]
        position -= len(round_.kept)
    raise IndexError(position)
