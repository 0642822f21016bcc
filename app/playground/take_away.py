"""The bar beside the tabs: copy a link or a command, download what is shown; and settings that stay in the address.

It is also the one way by which a text goes from here into a file or the clipboard of a person: other parts of the page
ask it with a `take-away` event (assets/playground/take_away.js).

What a person takes home: the run document as JSON, its tokens as CSV, or a page that replays it.

Each is a text that the browser saves: nothing is written on the server, so a full disk does not matter and nothing
of a visitor stays behind.

Settings in the address of the page: what a link says, checked as if a person had typed it.
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import gradio as gr
from gradio.events import Dependency

from app.assets import ASSETS, asset
from app.insides import PRIVATE, calling, give, scripted, sent_with
from app.serving.turns import sentence
from app.serving.visit import Entry, Visit, alone
from app.settings import CONTROLS, prompt_text
from app.tokens.markup import json_text
from app.tokens.replay import replay_page
from core.cli import command
from core.errors import UserError
from core.records import SCHEMA, Candidate, Run, Settings, Token, depths

SCRIPT = "playground/take_away.js"
NAMES = ("prompt", *CONTROLS)
TELL_SETTINGS = (
    f"(...values) => {{ const detail = Object.fromEntries({json.dumps(NAMES)}.map((name, i) => [name, values[i]])); "
    "document.dispatchEvent(new CustomEvent('settings-changed', { detail })); }"
)
ADDRESS_READ = "() => { document.dispatchEvent(new Event('address-read')); }"


COPIED = (
    "The command is copied: pasted into a terminal it runs this prompt with these settings. Where the draft length is "
    "auto, it follows what is measured then; python -m core generate --repeat FILE repeats a downloaded run exactly."
)


def answer(**parts: Any) -> str:
    """A value for the bar: `say` (and `error`), `copy` a text, or save a file `name`, `type`, `text`."""
    return json_text({"id": uuid4().hex, **parts})


def answered(work: Callable[[], dict[str, Any]]) -> str:
    """The answer that `work` makes, or the sentence of what went wrong."""
    try:
        return answer(**work())
    except Exception as error:
        return answer(say=sentence(error), error=True)


class TakeAway:
    """The bar and the functions behind it."""

    def __init__(self, check: Check, public: bool = False) -> None:
        self.check = check
        self.public = public

    def build(self) -> None:
        """Lay out the bar; `connect` wires it once the rest of the page is there."""
        html = asset("playground/take_away.html")
        self.bar = scripted(html, SCRIPT, "take", elem_id="take-away", names=list(NAMES), start=[])

    def connect(self, page: gr.Blocks, prompt: gr.Textbox, controls: dict[str, Any], visit: gr.State) -> Dependency:
        """Follow the controls, read the address when the page opens, answer the buttons. The event that ends once the
        controls are as the address has them; `linked` then holds the target and the draft, which on the server are
        known before the fields have them."""
        self.controls = controls
        self.prompt = prompt
        self.linked = gr.State(self._models({}))
        inputs = [prompt, *(controls[name] for name in CONTROLS)]  # as NAMES has them
        give(self.bar, start=[each.value for each in inputs])
        gr.on([each.change for each in inputs], None, inputs, None, js=TELL_SETTINGS, show_progress="hidden")
        opened = page.load(
            self.read_address,
            self.bar,
            [*inputs, self.linked, self.bar],
            js=calling(SCRIPT, "settingsInAddress", list(NAMES)),
            **PRIVATE,
        )
        opened.then(None, inputs, None, js=TELL_SETTINGS, show_progress="hidden")
        self.bar.take(self.take, [visit, *inputs], self.bar, concurrency_limit=2, **PRIVATE)
        return opened

    def read_address(self, query: str) -> dict[Any, Any]:
        """What the page's address says, into the controls; what it cannot mean, into a sentence each."""
        values, refused = read_link(query or "", self.controls, self.check)
        shown = {self.prompt if name == "prompt" else self.controls[name]: value for name, value in values.items()}
        say = answer(say=" ".join(refused), error=bool(refused))
        return {**shown, self.linked: self._models(values), self.bar: say}

    def _models(self, values: dict[str, Any]) -> tuple[str, str]:
        """Target and draft of a link's values; what it does not name is as the page began."""
        target, draft = (values.get(name, self.controls[name].value) for name in ("target", "draft"))
        return target, draft

    @alone
    def take(self, visit: Visit, event: gr.EventData, prompt: str = "", *values: Any) -> str:
        """One entry of the visit as a file or as a command; without a number, the command of what is set now."""
        wanted = sent_with(event)
        if wanted.get("form") == "command" and wanted.get("number") is None:
            return answered(lambda: self._command_now(prompt, dict(zip(CONTROLS, values))))
        return answered(lambda: self._taken(self._entry(visit, wanted.get("number")), wanted.get("form")))

    def _taken(self, entry: Entry, form: Any) -> dict[str, Any]:
        return self._copied(command_of(entry)) if form == "command" else taken(entry, form)

    def _command_now(self, prompt: str, controls: dict[str, Any]) -> dict[str, Any]:
        return self._copied(command(self.check(**controls), prompt_text(prompt)))

    def _copied(self, line: str) -> dict[str, Any]:
        """A line for any terminal of this machine: from this folder, by this interpreter. Of a public page, where
        these mean nothing to who reads it, the line alone."""
        if not self.public:
            here, python = shlex.quote(str(ASSETS.parent)), shlex.quote(sys.executable)
            line = f"cd {here} && {python} {line.removeprefix('python ')}"
        return {"copy": line, "say": COPIED}

    @staticmethod
    def _entry(visit: Visit, number: Any) -> Entry:
        if number is None and not visit.shown:
            raise UserError("There is nothing to take away yet: press Run first.")
        return visit.find(visit.shown if number is None else number)


def taken(entry: Entry, form: Any) -> dict[str, Any]:
    """An entry as a file, with what is to be said of it."""
    file = export(entry, form)
    left_out = entry.server_heads and form in ("csv", "html")
    without = f" The answers of running servers are not in it: {NO_ROUNDS}." if left_out else ""
    return {"name": file.name, "type": file.type, "text": file.text, "say": f"{file.name} is saved.{without}"}


NO_ROUNDS = "a server never tells what it drafted in vain, so there are no rounds to replay"


COLUMNS = (
    "run", "method", "round", "position", "id", "text", "outcome", "p", "q", "draw", "model_p", "model_q",
    "draft_seconds", "verify_seconds", "other_seconds",
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
        document = entry.document()
        if entry.kind == "load":
            document = {"schema": SCHEMA, "servers": document}  # as `python -m core bench --server` writes it
        return Export(f"{name}.json", "application/json", as_json(document))
    if not entry.heads and form in ("csv", "html"):
        raise UserError(f"These are answers of running servers alone: {NO_ROUNDS}, so save them as JSON.")
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
    have stood. `p` and `q` are those of the test, which greedy decoding makes 0 or 1; `model_p` and `model_q` are then
    what the models themselves gave, as far as it was recorded. The seconds are those of its whole round."""
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
        greedy = run.settings.temperature == 0
        for token, depth in zip(round_.drafted, depths(round_)):
            yield [round_.index, written + depth, *_cells(token, greedy), *times]
        written += len(round_.kept)
        if round_.emitted:
            yield [round_.index, written - 1, *_cells(round_.emitted, greedy), *times]


def _cells(token: Token, greedy: bool) -> list[Any]:
    own = [_recorded(top, token.id) if greedy else None for top in (token.top_target, token.top_draft)]
    return [token.id, harmless(token.text), token.outcome, token.p, token.q, token.draw, *own]


def _recorded(top: list[Candidate] | None, token_id: int) -> float | None:
    return next((each.p for each in top or () if each.id == token_id), None)


def harmless(text: str) -> str:
    """Model text that a spreadsheet will not run: an apostrophe before what it would take for a formula.

    Spreadsheets drop leading spaces and quotes when they decide, so these do not hide one.
    """
    return f"'{text}" if text.startswith(FORMULA) or text.lstrip(" \"'").startswith(FORMULA) else text


def command_of(entry: Entry) -> str:
    """The line that repeats the speculative run of an entry, or its first run where none speculates."""
    runs = entry.runs
    if not runs:
        raise UserError("These are answers of running servers alone; python -m core bench --server asks anew.")
    run = next((run for run in runs if run.settings.method != "plain"), runs[0])
    return command(run.settings, run.prompt)


LONGEST_QUERY = 20_000
LONGEST_PROMPT = 4_000
"""Characters of a prompt that a link may carry. The page itself writes shorter ones (playground/take_away.js)."""

Check = Callable[..., Settings]
"""Every control's value by name -> settings, or UserError: `app.settings.settings_from` over a base."""


def read_link(query: str, controls: dict[str, Any], check: Check) -> tuple[dict[str, Any], list[str]]:
    """Values by name ("prompt" and the controls) that a query string asks for, and a sentence for each it cannot have.

    Whatever is not ours is left alone; each value is checked by itself, with every other control at its start.
    """
    try:
        if len(query) > LONGEST_QUERY:
            raise ValueError
        found = parse_qs(query.removeprefix("?"), keep_blank_values=True, max_num_fields=64)
    except ValueError:
        return {}, ["The link is too long to be one of this page's; its settings were left out."]
    values: dict[str, Any] = {}
    refused: list[str] = []
    start = {name: controls[name].value for name in CONTROLS}
    for name in ("prompt", *CONTROLS):
        if name not in found:
            continue
        try:
            text = found[name][-1]
            values[name] = _prompt(text) if name == "prompt" else _value(name, text, controls[name], start, check)
        except UserError as error:
            refused.append(f"The link's {name.replace('_', ' ')} was left out: {error}")
    return values, refused


def _prompt(text: str) -> str:
    if len(text) > LONGEST_PROMPT:
        raise UserError(f"it has more than {LONGEST_PROMPT:,} characters.")
    return text


def _value(name: str, text: str, control: Any, start: dict[str, Any], check: Check) -> Any:
    """What the control itself could hold, and then what the settings allow."""
    value: Any = text
    if (choices := getattr(control, "choices", None)) is not None:
        value = next((value for _, value in choices if str(value) == text), None)
        if value is None and not getattr(control, "allow_custom_value", False):
            raise UserError(f"{text[:40]!r} is not one of the choices here.")
        value = text if value is None else value
    elif isinstance(start[name], (int, float)):
        value = _number(text, control)
    check(**{**start, name: value})
    return value


def _number(text: str, control: Any) -> float | int:
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{text[:40]!r} is not a number.") from None
    low, high = getattr(control, "minimum", None), getattr(control, "maximum", None)
    if (low is not None and number < low) or (high is not None and number > high):
        raise UserError(
            f"it must lie between {low:,} and {high:,}." if None not in (low, high) else "it is out of range."
        )
    return int(number) if number.is_integer() else number
