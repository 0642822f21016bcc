"""A run document somebody opens: nothing in it is trusted. Every part has a type and bounds, the parts agree with each
other, and whatever does not fit is one sentence. Figures are computed anew from the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import from_json

from app.history.parts import MOST_IDS, Chance, Count, Id, Listed, LongText, Name, Part, Seconds, Text, setting_type
from app.history.server_file import LoadFile, ServerRunFile
from core.drafting.methods import HEAD
from core.errors import UserError
from core.records import SCHEMA, Ended, Run, run_from_dict
from core.servers.load import Load
from core.servers.records import ServerRun, server_run_from_dict
from core.servers.report import load_from_document
from core.settings import SPECS

LONGEST_FILE = 16_000_000
"""Characters; a race of two lanes with 4,096 tokens each takes about six million."""
MOST_RUNS = 256
MOST_ROUNDS = 20_000
MOST_DRAFTED = 1024
MOST_FAULTS = 1000
BOM = b"\xef\xbb\xbf"

DraftedOutcome = Literal["accepted", "rejected", "ignored"]
EmittedOutcome = Literal["corrected", "bonus", "plain"]


class CandidateFile(Part):
    id: Id
    text: Text
    p: Chance


Tops = Annotated[Listed[CandidateFile], Field(max_length=64)]


class EmittedFile(Part):
    id: Id
    text: Text
    outcome: EmittedOutcome
    p: Chance | None
    top_target: Tops | None = None
    top_draft: Tops | None = None


class DraftedFile(Part):
    id: Id
    text: Text
    outcome: DraftedOutcome
    p: Chance | None
    q: Chance | None
    parent: Annotated[int, Field(ge=0, le=MOST_DRAFTED)] | None
    draw: Annotated[float, Field(ge=0, le=1)] | None
    top_target: Tops | None = None
    top_draft: Tops | None = None
    confidence: Chance | None = None


class CacheFile(Part):
    before: Count
    fullest: Count
    after: Count

    @model_validator(mode="after")
    def fullest_is_fullest(self) -> Self:
        if max(self.before, self.after) > self.fullest:
            raise ValueError("a cache held more before or after a round than at its fullest")
        return self


class RoundFile(Part):
    index: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    drafted: Annotated[Listed[DraftedFile], Field(max_length=MOST_DRAFTED)]
    emitted: EmittedFile | None
    draft_seconds: Seconds
    verify_seconds: Seconds
    other_seconds: Seconds
    target_cache: CacheFile | None = None
    draft_cache: CacheFile | None = None
    draft_length: Annotated[int, Field(ge=0, le=MOST_DRAFTED)] | None = None
    tree: Annotated[str, Field(max_length=100)] | None = None
    source: Literal["ngram", "model"] | None = None
    ended: Ended | None = None
    refused: Chance | None = None

    @model_validator(mode="after")
    def parents_come_first(self) -> Self:
        for place, token in enumerate(self.drafted):
            if token.parent is not None and token.parent >= place:
                raise ValueError(f"a drafted token of round {self.index} continues one that comes after it")
        return self

    def caches_fit(self, written: int) -> None:
        """A cache holds the text written by then, and at its fullest what was drafted on top; the target's is fed the
        newest token and the draft. ValueError where one holds more."""
        target, draft = self.target_cache, self.draft_cache
        if target and not target.before < target.fullest <= written + len(self.drafted):
            raise ValueError(f"the target's cache in round {self.index} is not that of its text and its draft")
        if draft and draft.fullest > written + MOST_DRAFTED:
            raise ValueError(f"the draft's cache in round {self.index} holds more than its text and its draft")

    def kept(self) -> list[DraftedFile | EmittedFile]:
        accepted = [token for token in self.drafted if token.outcome == "accepted"]
        return [*accepted, self.emitted] if self.emitted else [*accepted]


_settings: Any = {name: (setting_type(spec), ...) for name, spec in SPECS.items()}
SettingsFile = create_model("SettingsFile", __base__=Part, **_settings)
"""The fields of `core.settings.Settings`, within what the engine can do."""


class ProjectionFile(Part):
    name: Name
    place: Name
    out: Count


class GeometryFile(BaseModel):
    """The fields of `core.loading.geometry.Geometry`."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    width: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    vocabulary: Count
    dtype: Name
    runner: Name
    attention: Name
    projections: Annotated[Listed[ProjectionFile], Field(max_length=64)]
    position_table: bool
    window: Count
    sliding_layers: Count
    longest: Count
    experts: Count
    active_experts: Count
    read_bytes: Count
    head_bytes: Count
    expert_bytes: Count
    cached_bytes: Count


class DrafterFile(Part):
    """What `core.lanes.describe_drafter` tells."""

    exit_layer: Annotated[int, Field(ge=1, le=MOST_DRAFTED)] | None
    translated: bool


class ModelFile(BaseModel):
    """What the page reads of a model's description; what a newer version adds to it is left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    name: Name
    architecture: Name | None = None
    precision: Name
    runner: Name | None = None
    exact_rows: bool = False
    layers: Count | None = None
    parameters: Count
    weight_bytes: Count
    vocab_size: Count | None = None
    context_length: Count | None = None
    costs: (
        Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], Seconds], Field(max_length=64, fail_fast=True)]
        | None
    ) = None
    following: Seconds | None = None
    notes: Annotated[Listed[Text], Field(max_length=32)] = []
    origin: Name | None = None
    chat: bool = False
    geometry: GeometryFile | None = None


Costs = Annotated[dict[Name, Seconds], Field(fail_fast=True)]


class HeadFile(BaseModel):
    """What the page reads of a trained head's description."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    name: Name
    kind: Name = HEAD
    algorithm: Name | None = None
    precision: Name
    layers: Annotated[Listed[Count], Field(max_length=16)]
    parameters: Count
    weight_bytes: Count
    draft_vocab_size: Count | None = None
    costs: Annotated[dict[Name, Costs], Field(max_length=4, fail_fast=True)] | None = None
    notes: Annotated[Listed[Text], Field(max_length=32)] = []


class EnvironmentFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    device: Name
    device_name: Name
    threads: Count | None = None
    bandwidth: Annotated[float, Field(ge=1, le=1e18)] | None = None
    versions: Annotated[dict[Name, Name], Field(max_length=32, fail_fast=True)] = {}
    python: Name | None = None
    target: ModelFile
    draft: ModelFile | None = None
    head: HeadFile | None = None
    drafter: DrafterFile | None = None


class MetricsFile(BaseModel):
    """Only what cannot be computed from the rounds."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    prefill_seconds: Seconds
    draft_prefill_seconds: Seconds


class RunFile(Part):
    schema_: Literal[1] = Field(alias="schema")
    settings: SettingsFile  # type: ignore[valid-type]
    environment: EnvironmentFile
    prompt: LongText
    prompt_ids: Annotated[Listed[Id], Field(max_length=MOST_IDS)]
    token_ids: Annotated[Listed[Id], Field(max_length=MOST_IDS)]
    text: LongText
    stop_reason: Literal["eos", "length", "cancelled"]
    rounds: Annotated[Listed[RoundFile], Field(max_length=MOST_ROUNDS)]
    metrics: MetricsFile

    @model_validator(mode="after")
    def parts_agree(self) -> Self:
        kept = [token for round_ in self.rounds for token in round_.kept()]
        if [token.id for token in kept] != self.token_ids:
            raise ValueError("its token_ids are not the accepted and emitted tokens of its rounds")
        if [round_.index for round_ in self.rounds] != list(range(len(self.rounds))):
            raise ValueError("its rounds are not numbered 0, 1, 2 …")
        if kept and not sum(each.draft_seconds + each.verify_seconds + each.other_seconds for each in self.rounds):
            raise ValueError("its rounds took no time at all")
        written = len(self.prompt_ids)
        for round_ in self.rounds:
            round_.caches_fit(written)
            written += len(round_.kept())
        if not _made_of(self.text, [token.text for token in kept]):
            raise ValueError("its text is not that of its tokens")
        return self


class RaceFile(Part):
    schema_: Literal[1] = Field(alias="schema")
    runs: Annotated[Listed[RunFile], Field(default_factory=list, max_length=MOST_RUNS)]
    server_runs: Annotated[Listed[ServerRunFile], Field(default_factory=list, max_length=MOST_RUNS)]

    @model_validator(mode="after")
    def holds_something(self) -> Self:
        if not self.runs and not self.server_runs:
            raise ValueError("it should hold at least 1 run")
        return self


@dataclass(frozen=True)
class Opened:
    """What a document holds: runs of this engine and answers of running servers, or a measurement of servers."""

    runs: list[Run]
    server_runs: list[ServerRun]
    load: Load | None = None


def read_run_file(text: str) -> list[Run]:
    """The runs of a run document or of a race or comparison; UserError says what is wrong with it, or that there are
    only answers of servers in it."""
    runs = open_file(text).runs
    if not runs:
        raise UserError("The file holds answers of running servers alone, which are not shown here.")
    return runs


def open_file(text: str) -> Opened:
    """Everything in a run document, in that of a race or comparison, or of servers measured with many readers;
    UserError says what is wrong with it."""
    if len(text) > LONGEST_FILE:
        raise UserError(f"The file is too large: more than {LONGEST_FILE // 1_000_000} million characters.")
    try:
        found = from_json(text.encode(errors="surrogatepass").removeprefix(BOM), allow_inf_nan=False)
    except ValueError as error:
        raise UserError(f"The file cannot be read as JSON: {error}.") from None
    _refuse_others(found)
    try:
        if isinstance(found.get("servers"), dict):
            measured = LoadFile.model_validate(found["servers"])
            return Opened([], [], load_from_document(measured.model_dump(by_alias=True)))
        race = _race(found)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None
    return Opened(
        [run_from_dict(run.model_dump(by_alias=True, exclude_unset=True)) for run in race.runs],
        [server_run_from_dict(run.model_dump(by_alias=True)) for run in race.server_runs],
    )


def _race(found: dict[str, Any]) -> RaceFile:
    """A document as that of a race, which a single run is too."""
    if "runs" in found or "server_runs" in found:
        return RaceFile.model_validate(found)
    if "server" in found:
        return RaceFile.model_construct(runs=[], server_runs=[ServerRunFile.model_validate(found)])
    return RaceFile.model_construct(runs=[RunFile.model_validate(found)], server_runs=[])


def _refuse_others(found: Any) -> None:
    """Anything that is not a document with runs, each kind by its name."""
    if not isinstance(found, dict):
        raise UserError("The file is JSON, but not a run: it must be an object.")
    if "schema" not in found:
        raise UserError("The file is JSON, but not a run: it names no schema.")
    if found["schema"] != SCHEMA or isinstance(found["schema"], bool):
        raise UserError(f"The file is of another schema; this version opens runs of schema {SCHEMA}.")
    if isinstance(found.get("servers"), dict):
        return
    if "methods" in found or "peers" in found or "servers" in found:
        raise UserError("The file is a benchmark's table, which holds no runs to show; open a run or a race.")
    if not {"runs", "rounds", "server_runs", "server"} & found.keys():
        raise UserError("The file holds no runs; open what History or `python -m core generate --json` wrote.")


def _made_of(text: str, pieces: list[str]) -> bool:
    """Whether `text` is these pieces in order, but for those that are not text (special tokens)."""
    at = 0
    for piece in pieces:
        if text.startswith(piece, at):
            at += len(piece)
    return at == len(text)


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    if error.error_count() > MOST_FAULTS:  # of keys that are unknown, each would come with its place and words
        return f"The file is not a run of this version: {error.error_count():,} things in it are unknown or wrong."
    first = error.errors(include_url=False, include_input=False)[0]
    kind, message = first["type"], first["msg"].split(" or instance of ")[0]
    place = _place(first["loc"])
    if kind == "value_error":
        return f"The run does not agree with itself: {message.removeprefix('Value error, ')}."
    if kind == "extra_forbidden":
        return f"The file is not a run of this version: {place} is unknown."
    if kind == "missing":
        return f"The file is not a whole run: {place} is missing."
    return f"The file is not a run: {place}: {message[0].lower()}{message[1:]}."


def _place(parts: tuple[int | str, ...]) -> str:
    """Where in the document, such as runs[0].rounds[3].drafted[1].p; keys of the file's own are cut short."""
    found = ""
    for part in parts:
        if isinstance(part, int):
            found += f"[{part}]"
        else:
            found += "." + (part if part.isidentifier() else repr(part))[:60]
    return found.removeprefix(".") or "the document"
