"""Prompts to start from and to measure on: assets/prompts/prompts.toml, or a file of one's own."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import UserError

PROMPTS = Path(__file__).parent.parent / "assets" / "prompts" / "prompts.toml"


@dataclass(frozen=True)
class Prompt:
    """`kind` groups prompts by what they show (function, repetitive, high entropy …); `note` says it in a sentence."""

    name: str
    text: str
    kind: str = ""
    note: str = ""


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """The bundled prompts, those of another such .toml, or one prompt per line of any other text file."""
    file = Path(path or PROMPTS)
    try:
        content = file.read_text(encoding="utf-8")
        if file.suffix != ".toml":
            return [Prompt(line[:24], line) for line in content.splitlines() if line.strip()]
        entries = tomllib.loads(content)["prompt"]
        return [Prompt(**{k: v for k, v in e.items() if k in Prompt.__dataclass_fields__}) for e in entries]
    except OSError as error:
        raise UserError(f"The prompts file {file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a file of prompts ([[prompt]] with name and text): {error}.") from None


def one_of_each_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every kind, in order: few, and unlike each other."""
    return list({prompt.kind: prompt for prompt in reversed(prompts)}.values())[::-1]
