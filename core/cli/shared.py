"""What the commands share: groups of arguments, the settings they make, reading and writing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from core.errors import UserError
from core.records import METHODS, PRECISIONS, Settings

Commands = Any
"""What `ArgumentParser.add_subparsers` gives: argparse keeps the type to itself."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    default = Settings()
    group = command.add_argument_group("models")
    group.add_argument("--target", metavar="ID_OR_DIR", help="Hub id or folder; without it, the bundled pair")
    group.add_argument("--draft", metavar="ID_OR_DIR")
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default=default.device)
    group.add_argument("--precision", default=default.precision, metavar="|".join(PRECISIONS))
    group.add_argument("--draft-precision", default=default.draft_precision, metavar="P")
    group.add_argument("--revision", metavar="R", help="of the target on the Hub")


def add_decoding_arguments(command: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    default = Settings(max_new_tokens=max_new_tokens)
    group = command.add_argument_group("decoding")
    group.add_argument("--method", choices=METHODS, default=None, help="default: draft, or ngram without a draft model")
    group.add_argument("--draft-length", type=draft_length, default=default.draft_length, metavar="N|auto")
    group.add_argument("--tree", metavar="SPEC", help="children by depth, such as 4x2x1")
    group.add_argument("--exit-layer", type=int, metavar="L")
    group.add_argument("--temperature", type=float, default=default.temperature, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, default=default.top_p, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, default=default.min_p, metavar="M", help="0 is off")
    group.add_argument("--seed", type=int, default=default.seed, metavar="S")
    group.add_argument("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    group.add_argument("--chat", choices=("auto", "off"), default=default.chat)
    group.add_argument("--system", metavar="TEXT")


def draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, not {text!r}") from None


def settings_of(arguments: argparse.Namespace) -> Settings:
    known = Settings.__dataclass_fields__
    given = {k: v for k, v in vars(arguments).items() if k in known and v is not None}
    given.setdefault("method", "ngram" if arguments.target and not arguments.draft else "draft")
    return Settings(**given)


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
