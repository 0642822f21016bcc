"""What is known of a running server and of one of its answers: plain data, serialisable, without HTTP.

Seconds are the reader's clock, from the moment the request was sent, unless a field says that they are the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from core.records import SCHEMA, Outcome, StopReason, percentile
from core.settings import Settings

Engine = Literal["vLLM", "SGLang", "llama.cpp", "OpenAI-compatible"]
ENGINES: tuple[Engine, ...] = ("vLLM", "SGLang", "llama.cpp", "OpenAI-compatible")
ASKED = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("max_new_tokens", "ignore_eos", "chat", "system"),
)
"""The settings that reach a server; the others are of models that are loaded here."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered: its address without key or path, and what it says of itself.

    `engine` and `version` as the server reports them; `drafter` is what it says it drafts with (None: it does not
    say), `metrics` whether its counters can be read.
    """

    address: str
    engine: Engine
    version: str | None
    model: str
    models: tuple[str, ...]
    drafter: str | None = None
    metrics: bool = False

    @property
    def name(self) -> str:
        """Engine and version, as a table or a lane is headed."""
        return f"{self.engine} {self.version}" if self.version else self.engine

    @property
    def title(self) -> str:
        """The name, with what it drafts with where it says so."""
        return f"{self.name}, {self.drafter}" if self.drafter else self.name

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "models": list(self.models)}


@dataclass(slots=True)
class ServerChunk:
    """A piece of text as it arrived. `tokens` is how many tokens it holds and `ids` which, None where the server does
    not say. `outcomes` has one entry a token: accepted, or what the target added itself (corrected, bonus, plain);
    None where the server does not tell what became of this chunk's tokens."""

    text: str
    seconds: float
    tokens: int | None = None
    ids: list[int] | None = None
    outcomes: list[Outcome] | None = None

    @property
    def outcome(self) -> Outcome | None:
        """What the whole chunk is coloured as: what all its tokens are; None where they differ or are unknown."""
        return self.outcomes[0] if self.outcomes and len(set(self.outcomes)) == 1 else None

    def split(self, tokens: int, characters: int) -> list[ServerChunk]:
        """Its first `tokens`, which are so many characters of text, and the others; each is known."""
        assert self.tokens is not None and self.ids is not None and self.outcomes is not None
        return [
            replace(self, text=text, tokens=len(ids), ids=ids, outcomes=outcomes)
            for text, ids, outcomes in (
                (self.text[:characters], self.ids[:tokens], self.outcomes[:tokens]),
                (self.text[characters:], self.ids[tokens:], self.outcomes[tokens:]),
            )
        ]


@dataclass(frozen=True, slots=True)
class Timings:
    """The server's own clock: reading the prompt, and `tokens` new ones in `seconds`."""

    prompt_seconds: float | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the server counted: `drafted` and `accepted` tokens, and the verifying `passes`.

    `passes` counts those that had a draft to verify. `acceptance_rate` is accepted ÷ drafted: what our own lanes call
    the draft's utilisation. `tokens_per_pass` is over all passes of the target, after the prompt's own: each adds one
    token that is not the draft's. `by_position[i]` is how many passes accepted at least i + 1 tokens. `source` says
    where it was read; `shared`: counted over everything that the server did meanwhile.
    """

    source: str
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance_rate: float | None = None
    tokens_per_pass: float | None = None
    by_position: tuple[int, ...] | None = None
    shared: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_position": None if self.by_position is None else list(self.by_position)}


def speculation(
    source: str,
    passes: int | None = None,
    drafted: int | None = None,
    accepted: int | None = None,
    by_position: Sequence[int] | None = None,
    rate: float | None = None,
    per_pass: float | None = None,
    shared: bool = False,
) -> Speculation:
    """With the rate that the counts allow, where the server does not give it itself."""
    if rate is None and drafted and accepted is not None:
        rate = accepted / drafted
    positions = None if by_position is None else tuple(by_position)
    return Speculation(source, passes, drafted, accepted, rate, per_pass, positions, shared)


def speculation_from_dict(document: dict[str, Any]) -> Speculation:
    """The inverse of `Speculation.to_dict`."""
    positions = document["by_position"]
    return Speculation(**{**document, "by_position": None if positions is None else tuple(positions)})


def per_pass(found: Speculation, tokens: int | None, answers: int = 1) -> Speculation:
    """With its tokens per pass, from `tokens` new ones of so many answers, whose first each came out of the prompt's
    pass: every other pass added one token that was not drafted."""
    if tokens is None or found.accepted is None or (own := tokens - answers - found.accepted) <= 0:
        return found
    return replace(found, tokens_per_pass=(tokens - answers) / own)


def pooled(found: Sequence[Speculation]) -> Speculation | None:
    """Several answers' counts as one; a count that one of them lacks is lacking in all."""
    if not found:
        return None

    def total(name: str) -> int | None:
        values = [getattr(each, name) for each in found]
        return None if None in values else sum(values)

    positions = [each.by_position for each in found]
    by_position = None
    if all(each is not None for each in positions):
        longest = max(len(each or ()) for each in positions)
        by_position = [sum(each[i] for each in positions if each and i < len(each)) for i in range(longest)]
    return speculation(found[0].source, total("passes"), total("drafted"), total("accepted"), by_position)


@dataclass(slots=True)
class ServerRun:
    """One answer of a server, from settings to totals. `stop_reason` is None while it is going on.

    `prompt_tokens` and `new_tokens` are the server's counts; `missing` names what it does not give.
    """

    server: Server
    settings: Settings
    prompt: str
    chunks: list[ServerChunk] = field(default_factory=list)
    stop_reason: StopReason | None = None
    seconds: float = 0.0
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    timings: Timings | None = None
    speculation: Speculation | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int] | None:
        """Every new token's id, or None where a chunk came without."""
        if any(chunk.ids is None for chunk in self.chunks):
            return None
        return [id for chunk in self.chunks for id in chunk.ids or ()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "server": self.server.to_dict(),
            "settings": {name: getattr(self.settings, name) for name in ASKED},
            "prompt": self.prompt,
            "text": self.text,
            "stop_reason": self.stop_reason,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "timings": asdict(self.timings) if self.timings else None,
            "speculation": self.speculation.to_dict() if self.speculation else None,
            "missing": list(self.missing),
            "metrics": measure_run(self).to_dict(),
        }


def server_run_from_dict(document: dict[str, Any]) -> ServerRun:
    """Rebuild a server's answer from its document; the inverse of `ServerRun.to_dict` (metrics are computed anew).

    Raises ValueError where the document is of another schema or misses a part.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "server" not in document:
        raise ValueError(f"not a server's run of schema {SCHEMA}")
    try:
        server, counted, timings = document["server"], document["speculation"], document["timings"]
        return ServerRun(
            server=Server(**{**server, "models": tuple(server["models"])}),
            settings=Settings(**{name: document["settings"][name] for name in ASKED}),
            prompt=document["prompt"],
            chunks=[ServerChunk(**chunk) for chunk in document["chunks"]],
            stop_reason=document["stop_reason"],
            seconds=document["seconds"],
            prompt_tokens=document["prompt_tokens"],
            new_tokens=document["new_tokens"],
            timings=Timings(**timings) if timings else None,
            speculation=speculation_from_dict(counted) if counted else None,
            missing=list(document["missing"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the server's run is incomplete: {error}") from error


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Totals of a server's answer.

    `tokens` were counted as `counted` says: tokens where the server gives their number, else chunks of text.
    `tokens_per_second` is decoding, the first token apart, by `clock`: the server's own timings where it gives them,
    else the reader's clock, whose figure `reader_tokens_per_second` always is. `first_token_seconds` is from the
    request to the first text; `token_seconds` and `token_seconds_p95` are median and 95th percentile of the time per
    token, where tokens that arrive together share the wait before them. None where there were too few.
    """

    tokens: int
    counted: Literal["tokens", "chunks"]
    clock: Literal["server", "reader"]
    tokens_per_second: float | None
    reader_tokens_per_second: float | None
    first_token_seconds: float | None
    token_seconds: float | None
    token_seconds_p95: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


TOGETHER = 0.001
"""Seconds within which chunks have arrived together: a pass's tokens, sent one by one."""


def measure_run(run: ServerRun) -> ServerMetrics:
    """Totals of a server's answer as far as it has come."""
    weights = _weights(run)
    counted = run.new_tokens is not None or all(chunk.tokens is not None for chunk in run.chunks)
    tokens = run.new_tokens if run.new_tokens is not None else sum(weights)
    reader = None
    if len(run.chunks) > 1 and (span := run.chunks[-1].seconds - run.chunks[0].seconds) > 0:
        reader = max(tokens - weights[0], 0) / span
    own = None
    if run.timings and run.timings.tokens and run.timings.seconds:
        own = run.timings.tokens / run.timings.seconds
    waits = _waits(run.chunks, weights)
    return ServerMetrics(
        tokens=tokens,
        counted="tokens" if counted else "chunks",
        clock="reader" if own is None else "server",
        tokens_per_second=reader if own is None else own,
        reader_tokens_per_second=reader,
        first_token_seconds=run.chunks[0].seconds if run.chunks else None,
        token_seconds=percentile(waits, 0.5),
        token_seconds_p95=percentile(waits, 0.95),
    )


def _weights(run: ServerRun) -> list[int]:
    """Tokens of each chunk; 1 where the server does not say."""
    return [1 if chunk.tokens is None else chunk.tokens for chunk in run.chunks]


def _waits(chunks: Sequence[ServerChunk], weights: Sequence[int]) -> list[tuple[float, int]]:
    """The time per token of each arrival after the first, and its tokens."""
    arrivals: list[tuple[float, int]] = []  # when, tokens
    for chunk, tokens in zip(chunks, weights):
        if arrivals and chunk.seconds - arrivals[-1][0] < TOGETHER:
            arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + tokens)
        else:
            arrivals.append((chunk.seconds, tokens))
    return [((now - before) / tokens, tokens) for (before, _), (now, tokens) in pairwise(arrivals) if tokens]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two greedy texts part: at `position` (from 0), a token where both servers give ids, else a character.
    `shared` is the end of the text they have in common, `first` and `second` how each goes on."""

    unit: Literal["token", "character"]
    position: int
    shared: str
    first: str
    second: str


CONTEXT = 40
"""Characters shown on each side of a parting."""


def first_parting(first: ServerRun, second: ServerRun) -> Parting | None:
    """Where two answers to the same prompt part, or None as far as both go. By token where both servers give every id
    (of the same tokenizer, that is: the same model), else by character."""
    one, other = first.token_ids, second.token_ids
    if one and other:
        at = _differing(one, other)
        return None if at is None else _parting("token", at, first, second, _offset(first, at), _offset(second, at))
    at = _differing(first.text, second.text)
    return None if at is None else _parting("character", at, first, second, at, at)


def _differing(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), None)


def _parting(
    unit: Literal["token", "character"], at: int, first: ServerRun, second: ServerRun, start: int, start_other: int
) -> Parting:
    """At this token or character, which begins in the two texts at `start` and `start_other`."""
    shared = first.text[max(0, start - CONTEXT) : start]
    goes_on = (run.text[begin : begin + CONTEXT] for run, begin in ((first, start), (second, start_other)))
    return Parting(unit, at, shared, *goes_on)


def _offset(run: ServerRun, position: int) -> int:
    """Characters before the chunk that holds the token at `position`."""
    seen = offset = 0
    for chunk in run.chunks:
        seen += len(chunk.ids or ())
        if seen > position:
            break
        offset += len(chunk.text)
    return offset
