"""The vocabulary of the whole project: plain data, serialisable, without torch.

A run document is one JSON object: settings + environment + prompt + rounds + totals. What the page shows, what is
exported and what is replayed are the same object.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

SCHEMA = 1

Outcome = Literal["accepted", "rejected", "ignored", "corrected", "bonus", "plain"]
"""What became of a token. `ignored`: drafted but never judged (after a rejection, an untried sibling, past the stop).
`corrected`: drawn from the residual after a rejection. `bonus`: the free token after a draft accepted whole."""

StopReason = Literal["eos", "length", "cancelled"]
Method = Literal["plain", "draft", "ngram", "ngram+draft", "early-exit", "tree"]

METHODS: tuple[Method, ...] = ("plain", "draft", "ngram", "ngram+draft", "early-exit", "tree")
PRECISIONS = ("auto", "nf4", "bf16", "fp16", "fp32")
POCKET_NAME = "pocket"
"""The name of the bundled pair, whose settings name no target."""


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
    while a multi-byte character is incomplete; the token that completes the character carries it.
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

    def to_dict(self) -> dict[str, Any]:
        """Every field, but for the top lists where none were asked for."""
        return {k: v for k, v in asdict(self).items() if v is not None or not k.startswith("top_")}


@dataclass(slots=True)
class Round:
    """One draft and the target pass that judged it; times in seconds of engine time."""

    index: int
    drafted: list[Token] = field(default_factory=list)
    emitted: Token | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

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
        return {
            "index": self.index,
            "drafted": [t.to_dict() for t in self.drafted],
            "emitted": emitted,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
        }


@dataclass(slots=True)
class Settings:
    """Everything that decides a run, as the command line names it. `target=None` means the bundled pair."""

    target: str | None = None
    draft: str | None = None
    method: Method = "draft"
    draft_length: int | Literal["auto"] = "auto"
    tree: str | None = None
    exit_layer: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    ignore_eos: bool = False
    chat: Literal["auto", "off"] = "auto"
    system: str | None = None
    device: str = "auto"
    precision: str = "auto"
    draft_precision: str = "auto"
    revision: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        from core.metrics import summarise

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


def run_from_dict(document: dict[str, Any]) -> Run:
    """Rebuild a run from its document; the inverse of `Run.to_dict` (metrics are computed anew).

    Raises ValueError where the document is of another schema or misses a part.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"not a run document of schema {SCHEMA}")
    try:
        known = {f.name for f in fields(Settings)}
        metrics = document["metrics"]
        return Run(
            settings=Settings(**{k: v for k, v in document["settings"].items() if k in known}),
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
    )


def _token(data: dict[str, Any]) -> Token:
    tops = {k: [Candidate(**c) for c in data[k]] for k in ("top_target", "top_draft") if data.get(k) is not None}
    return Token(**{**data, **tops})
