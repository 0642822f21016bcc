"""What the commands share: groups of arguments, the settings they make, reading and writing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from core.errors import UserError
from core.settings import SPECS, Settings, flag

Commands = Any
"""What `ArgumentParser.add_subparsers` gives: argparse keeps the type to itself."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_settings(command: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """A flag for each of the named settings; all but those of `defaults` are left to the settings' own defaults."""
    for name in names:
        spec = SPECS[name]
        if spec.kind is bool:
            command.add_argument(flag(name), action="store_true", default=None, help=spec.help)
            continue
        default = "draft, or ngram without a draft" if name == "method" else defaults.get(name, spec.default)
        metavar, words = ("|".join(spec.choices), spec.help) if spec.choices else (spec.metavar, spec.words())
        words += "" if default is None else f" (default: {default})"
        command.add_argument(flag(name), default=defaults.get(name), metavar=metavar, help=words.replace("%", "%%"))


def add_model_settings(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("models")
    add_settings(group, *(name for name, spec in SPECS.items() if spec.of_models))  # type: ignore[arg-type]


def add_decoding_settings(command: argparse.ArgumentParser, **defaults: Any) -> None:
    group = command.add_argument_group("decoding")
    names = [name for name, spec in SPECS.items() if not spec.of_models]
    add_settings(group, *names, **defaults)  # type: ignore[arg-type]


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags say. Raises UserError for the first that cannot be."""
    from core.loading.pair import choose_method, choose_target

    given = {name: value for name, value in vars(arguments).items() if name in SPECS and value is not None}
    given["target"] = choose_target(given.get("target"))
    given.setdefault("method", choose_method(given["target"], given.get("draft")))
    return Settings(**{name: SPECS[name].read(value) for name, value in given.items()})


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
