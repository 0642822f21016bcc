"""What every part of an opened document is made of: bounded types, and a strict base."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from core.servers.fields import at_rest
from core.settings import Spec

MOST_IDS = 200_000
MOST = 2**31 - 1
"""Of a setting that has no other limit."""

Id = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(max_length=500)]
Text = Annotated[str, Field(max_length=2_000)]
LongText = Annotated[str, Field(max_length=1_000_000)]
AtRest = AfterValidator(at_rest)
Chance = Annotated[float, Field(ge=0, le=1.001), AtRest]  # a sum in float32 may end a little past 1
Seconds = Annotated[float, Field(ge=0, le=1e7), AtRest]

T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""Read up to the first fault in it, as every list and dictionary is: one is told, and each takes a kilobyte."""


class Part(BaseModel):
    """Strict: no number from a text, no key we do not know, no NaN, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def setting_type(spec: Spec) -> Any:
    """What a file may hold for a setting, strictly."""
    kind: Any = spec.kind
    if spec.choices is not None:
        kind = Literal[tuple(spec.choices)]
    elif spec.kind is str:
        kind = Name if spec.of_models else LongText
    elif spec.kind is not bool:
        low: Any = {"gt" if spec.open else "ge": spec.low}
        kind = Annotated[spec.kind, Field(**low, le=MOST if spec.high is None else spec.high)]
    return kind | None if spec.default is None else kind | Literal["auto"] if spec.auto else kind
