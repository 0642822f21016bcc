"""A server's answer in a document that somebody opens, or a measurement of servers with many readers: typed and bounded
as everything in `run_file`, and in agreement with itself. Figures are computed anew from chunks and levels."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, create_model, model_validator

from app.history.parts import MOST_IDS, AtRest, Count, Id, Listed, LongText, Name, Part, Seconds, Text, setting_type
from core.servers.connection import read_address
from core.servers.dialects import MOST_MODELS
from core.servers.load import MOST_READERS
from core.servers.records import ASKED, ENGINES
from core.settings import SPECS

Outcomes = Literal["accepted", "corrected", "bonus", "plain"]
MOST_ANSWERS = 1024
Rate = Annotated[float, Field(ge=0, le=1e6), AtRest]

_asked: Any = {name: (setting_type(SPECS[name]), ...) for name in ASKED}
AskedFile = create_model("AskedFile", __base__=Part, **_asked)
"""The settings that reach a server."""


class ServerFile(Part):
    address: Name
    engine: Literal[ENGINES]  # type: ignore[valid-type]
    version: Name | None
    model: Name
    models: Annotated[Listed[Name], Field(max_length=MOST_MODELS)]
    drafter: Name | None
    metrics: bool

    @model_validator(mode="after")
    def address_is_one(self) -> Self:
        if read_address(self.address) != self.address:
            raise ValueError("the server's address is not one of ours")
        return self


class ChunkFile(Part):
    text: LongText
    seconds: Seconds
    tokens: Annotated[int, Field(ge=0, le=MOST_IDS)] | None
    ids: Annotated[Listed[Id], Field(max_length=MOST_IDS)] | None
    outcomes: Annotated[Listed[Outcomes], Field(max_length=MOST_IDS)] | None

    @model_validator(mode="after")
    def tokens_agree(self) -> Self:
        for told in (self.ids, self.outcomes):
            if told is not None and len(told) != self.tokens:
                raise ValueError("a chunk has more or fewer tokens than ids or outcomes")
        return self


class TimingsFile(Part):
    prompt_seconds: Seconds | None
    tokens: Count | None
    seconds: Seconds | None


class SpeculationFile(Part):
    source: Name
    passes: Count | None
    drafted: Count | None
    accepted: Count | None
    acceptance_rate: Rate | None
    tokens_per_pass: Rate | None
    by_position: Annotated[Listed[Count], Field(max_length=4096)] | None
    shared: bool


class ServerRunFile(Part):
    schema_: Literal[1] = Field(alias="schema")
    server: ServerFile
    settings: AskedFile  # type: ignore[valid-type]
    prompt: LongText
    text: LongText
    stop_reason: Literal["eos", "length", "cancelled"]
    seconds: Seconds
    prompt_tokens: Count | None
    new_tokens: Count | None
    chunks: Annotated[Listed[ChunkFile], Field(max_length=MOST_IDS)]
    timings: TimingsFile | None
    speculation: SpeculationFile | None
    missing: Annotated[Listed[Text], Field(max_length=32)]
    metrics: dict[str, Any]

    @model_validator(mode="after")
    def parts_agree(self) -> Self:
        if "".join(chunk.text for chunk in self.chunks) != self.text:
            raise ValueError("a server's text is not that of its chunks")
        times = [chunk.seconds for chunk in self.chunks]
        if times != sorted(times):
            raise ValueError("a server's chunks arrived before those that come first")
        return self


class SpreadFile(Part):
    median: Rate
    min: Rate
    max: Rate


Readers = Annotated[int, Field(ge=1, le=MOST_READERS)]


class LevelFile(Part):
    server: Count
    readers: Readers
    answers: Count
    counted: Literal["tokens", "chunks"]
    seconds: Seconds
    tokens_per_second: Rate | None
    per_reader: SpreadFile | None
    first_token_seconds: Seconds | None
    first_token_p95: Seconds | None
    speculation: SpeculationFile | None
    cut: bool
    failed: Count
    errors: Annotated[Listed[Text], Field(max_length=32)]

    @model_validator(mode="after")
    def failures_have_reasons(self) -> Self:
        if bool(self.failed) != bool(self.errors):
            raise ValueError("a level has failed answers and names no error, or the other way round")
        return self


class LoadFile(Part):
    """A measurement with many readers; what is computed of it is computed anew."""

    schema_: Literal[1] = Field(alias="schema")
    servers: Annotated[Listed[ServerFile], Field(min_length=1, max_length=16)]
    settings: AskedFile  # type: ignore[valid-type]
    prompts: Annotated[int, Field(ge=1, le=MOST_ANSWERS)]
    readers: Annotated[Listed[Readers], Field(max_length=MOST_READERS)]
    answers_per_reader: Count
    levels: Annotated[Listed[LevelFile], Field(min_length=1, max_length=MOST_ANSWERS)]
    stopped: bool
    server_runs: Annotated[Listed[ServerRunFile], Field(min_length=1, max_length=MOST_ANSWERS)]
    rows: Listed[Any]
    gains: Listed[Any]
    crossing: Any
    same_text: Listed[Any]
    notes: Listed[Any]

    @model_validator(mode="after")
    def levels_are_of_servers(self) -> Self:
        if any(level.server >= len(self.servers) for level in self.levels):
            raise ValueError("a level is of a server that is not named")
        return self
