"""Settings and prompt -> the line that repeats a run: `python -m core generate …`."""

from __future__ import annotations

import shlex
from dataclasses import fields

from core.errors import UserError
from core.records import Settings

LONGEST_PROMPT = 100_000
"""Bytes of a prompt that every system takes as one argument; Linux ends at 128 KiB."""


def command(settings: Settings, prompt: str) -> str:
    """The line, quoted for a POSIX shell; options that stand at their default are left out.

    Raises UserError where a command line cannot carry the prompt.
    """
    return shlex.join(["python", "-m", "core", "generate", *arguments(settings, prompt)])


def arguments(settings: Settings, prompt: str) -> list[str]:
    """What follows `generate`: the parser of core.cli makes the same settings of it."""
    default = Settings()
    words: list[str] = []
    for field in fields(Settings):
        value = getattr(settings, field.name)
        # The default method depends on whether there is a draft, so it is always named.
        if value == getattr(default, field.name) and field.name != "method":
            continue
        option = "--" + field.name.replace("_", "-")
        words += [option] if value is True else _option(option, str(value))
    return words + _option("--prompt", _carried(prompt))


def _option(name: str, value: str) -> list[str]:
    """A value that begins with a dash would be read as an option of its own."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def _carried(prompt: str) -> str:
    try:
        size = len(prompt.encode())
    except UnicodeEncodeError:
        size = 0
    if not size or "\0" in prompt:
        raise UserError("A command line cannot carry this prompt; save it in a file and use --prompt-file.")
    if size > LONGEST_PROMPT:
        raise UserError(f"The prompt is too long for a command line ({size:,} bytes); use --prompt-file.")
    return prompt
