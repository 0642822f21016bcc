"""What the commands share: flags that make settings, the command line that settings make, opening, reading, writing.

A file per group of commands, each with `add(commands)`: its arguments, and the function that runs them.
`core/__main__.py` puts them together.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core.errors import UserError
from core.progress import console
from core.settings import SPECS, Settings

if TYPE_CHECKING:
    from core.loading.pair import Pair

LONGEST_PROMPT = 100_000
"""Bytes of a prompt that every system takes as one argument; Linux ends at 128 KiB."""
Commands = Any
"""What `ArgumentParser.add_subparsers` gives: argparse keeps the type to itself."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_settings(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """A flag for each of the named settings; all but those of `defaults` are left to the settings' own defaults."""
    for name in names:
        spec = SPECS[name]
        if spec.kind is bool:
            parser.add_argument(flag(name), action="store_true", default=None, help=spec.help)
            continue
        default = "by the pair: draft, ngram+head or ngram" if name == "method" else defaults.get(name, spec.default)
        metavar, words = ("|".join(spec.choices), spec.help) if spec.choices else (spec.metavar, spec.words())
        words += "" if default is None else f" (default: {default})"
        parser.add_argument(flag(name), default=defaults.get(name), metavar=metavar, help=words.replace("%", "%%"))


def add_model_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    add_settings(group, *(name for name, spec in SPECS.items() if spec.of_models))  # type: ignore[arg-type]


def add_decoding_settings(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    group = parser.add_argument_group("decoding")
    names = [name for name, spec in SPECS.items() if not spec.of_models]
    add_settings(group, *names, **defaults)  # type: ignore[arg-type]


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", type=destination, metavar="F", help=f"write the {what} to F; - for standard output")


def destination(path: str) -> str:
    """Where a document is to go: what cannot be written is told before the work and not behind it."""
    file = Path(path)
    if path != "-" and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise UserError(f"{path} cannot be written; is its folder there?")
    return path


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags say. Raises UserError for the first that cannot be."""
    from core.loading.pair import choose_method, choose_target

    given = {name: value for name, value in vars(arguments).items() if name in SPECS and value is not None}
    given["target"] = choose_target(given.get("target"))
    given.setdefault("method", choose_method(given["target"], given.get("draft")))
    return Settings(**{name: SPECS[name].read(value) for name, value in given.items()})


def command(settings: Settings, prompt: str) -> str:
    """The line `python -m core generate …` that makes these settings and this prompt, quoted for a POSIX shell;
    options that stand at their default are left out.

    Raises UserError where a command line cannot carry the prompt.
    """
    return shlex.join(["python", "-m", "core", "generate", *arguments_of(settings, prompt)])


def arguments_of(settings: Settings, prompt: str) -> list[str]:
    """What follows `generate`: `settings_of` makes the same settings of it."""
    from core.loading.pair import choose_target

    words: list[str] = []
    for name, spec in SPECS.items():
        value = getattr(settings, name)
        if name == "target" and value is None:
            value = choose_target(None)  # a line means the same pair on any machine
        # The default method depends on whether there is a draft, so it is always named.
        if value == spec.default and name != "method":
            continue
        words += [flag(name)] if value is True else _option(flag(name), str(value))
    return words + _option("--prompt", _carried(prompt))


def flag(name: str) -> str:
    """A setting's option on the command line."""
    return "--" + name.replace("_", "-")


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


def open_pair(settings: Settings) -> Pair:
    """The pair of the settings, loaded; how far that is goes to stderr."""
    from core.loading import load_pair

    return load_pair(settings, console())


def numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    """A list such as 1,2,4."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{name} must be numbers with commas between, not {text!r}.") from None


def positive(number: int, name: str) -> int:
    if number < 1:
        raise UserError(f"{name} must be at least 1, not {number}.")
    return number


def read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The prompt file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The prompt file {path} is not UTF-8 text.") from None


def read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The run document {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UserError(f"{path} is not a JSON document.") from None


def tell(words: str, document: dict[str, Any], path: str | None) -> None:
    """Print what a command found, and write its document where --json says; standard output takes one of the two."""
    if path != "-":
        print(words)
    if path:
        write_json(path, document)


def write_json(path: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
