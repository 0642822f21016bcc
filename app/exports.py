"""What a person takes home: the run document as JSON, its tokens as CSV, or a page that replays it.

Each is a text that the browser saves: nothing is written on the server, so a full disk does not matter and nothing
of a visitor stays behind.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

from app.replay import replay_page
from app.visit import Entry
from core.command import command
from core.errors import UserError
from core.metrics import depths
from core.records import Run, Token

COLUMNS = (
    "run", "method", "round", "position", "id", "text", "outcome", "p", "q", "draw", "draft_seconds",
    "verify_seconds", "other_seconds",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")
"""Cells that begin so are taken for formulas by spreadsheets."""


@dataclass(frozen=True)
class Export:
    """A file for the browser to save."""

    name: str
    type: str
    text: str


def export(entry: Entry, form: Any) -> Export:
    """One of the visit's entries in the form "json", "csv" or "html"."""
    name = f"speculative-{entry.kind}-{entry.number}"
    if form == "json":
        return Export(f"{name}.json", "application/json", as_json(entry.document()))
    if form == "csv":
        return Export(f"{name}.csv", "text/csv", as_csv(entry.runs))
    if form == "html":
        return Export(f"{name}.html", "text/html", replay_page(entry.document()))
    raise UserError("There is no such form; choose JSON, CSV or a replay page.")


def as_json(document: dict[str, Any]) -> str:
    """The document as design and command line have it; what History opens again."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def as_csv(runs: list[Run]) -> str:
    """One row per drafted or emitted token. `position` counts from 0 in the output: where the token stands, or would
    have stood. The seconds are those of its whole round."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for number, run in enumerate(runs, 1):
        for row in _rows(run):
            writer.writerow([number, run.settings.method, *row])
    return file.getvalue()


def _rows(run: Run) -> Iterator[list[Any]]:
    written = 0
    for round_ in run.rounds:
        times = [round_.draft_seconds, round_.verify_seconds, round_.other_seconds]
        for token, depth in zip(round_.drafted, depths(round_)):
            yield [round_.index, written + depth, *_cells(token), *times]
        written += len(round_.kept)
        if round_.emitted:
            yield [round_.index, written - 1, *_cells(round_.emitted), *times]


def _cells(token: Token) -> list[Any]:
    return [token.id, harmless(token.text), token.outcome, token.p, token.q, token.draw]


def harmless(text: str) -> str:
    """Model text that a spreadsheet will not run: an apostrophe before what it would take for a formula.

    Spreadsheets drop leading spaces and quotes when they decide, so these do not hide one.
    """
    return f"'{text}" if text.startswith(FORMULA) or text.lstrip(" \"'").startswith(FORMULA) else text


def command_of(entry: Entry) -> str:
    """The line that repeats the speculative run of an entry, or its first run where none speculates."""
    runs = entry.runs
    run = next((run for run in runs if run.settings.method != "plain"), runs[0])
    return command(run.settings, run.prompt)
