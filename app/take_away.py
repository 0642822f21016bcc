"""The bar beside the tabs: copy a link or a command, download what is shown; and settings that stay in the address.

It is also the one way by which a text goes from here into a file or the clipboard of a person: other parts of the page
ask it with a `take-away` event (assets/take_away.js).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import gradio as gr

from app.exports import command_of, export
from app.links import Check, read_link
from app.markup import json_text
from app.settings import CONTROLS
from app.token_stream import asset
from app.turns import sentence
from app.visit import Entry, Visit
from app.wiring import PRIVATE
from core.errors import UserError

TELL_SETTINGS = "(...values) => { document.dispatchEvent(new CustomEvent('settings-changed', { detail: values })); }"
READ_ADDRESS = "() => window.settingsInAddress?.() ?? location.search"


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

    def __init__(self, check: Check) -> None:
        self.check = check

    def build(self) -> None:
        """Lay out the bar; `connect` wires it once the rest of the page is there."""
        self.bar = gr.HTML(
            value="",
            html_template=asset("take_away.html"),
            css_template="",
            js_on_load=asset("take_away.js"),
            apply_default_css=False,
            elem_id="take-away",
            names=["prompt", *CONTROLS],
            start=[],
        )

    def connect(self, page: gr.Blocks, prompt: gr.Textbox, controls: dict[str, Any], visit: gr.State) -> None:
        """Follow the controls, read the address when the page opens, answer the buttons."""
        self.controls = controls
        self.prompt = prompt
        inputs = [prompt, *(controls[name] for name in CONTROLS)]
        self.bar.props["start"] = [each.value for each in inputs]
        gr.on([each.change for each in inputs], None, inputs, None, js=TELL_SETTINGS, show_progress="hidden")
        page.load(
            self.read_address,
            self.bar,
            [*inputs, self.bar],
            js=READ_ADDRESS,
            **PRIVATE,
        ).then(None, inputs, None, js=TELL_SETTINGS, show_progress="hidden")
        self.bar.take(self.take, visit, self.bar, concurrency_limit=2, **PRIVATE)

    def read_address(self, query: str) -> dict[Any, Any]:
        """What the page's address says, into the controls; what it cannot mean, into a sentence each."""
        values, refused = read_link(query or "", self.controls, self.check)
        shown = {self.prompt if name == "prompt" else self.controls[name]: value for name, value in values.items()}
        return {**shown, self.bar: answer(say=" ".join(refused), error=bool(refused))}

    def take(self, visit: Visit, event: gr.EventData) -> str:
        """One entry of the visit as a file or as a command."""
        wanted = event._data if isinstance(event._data, dict) else {}
        return answered(lambda: _taken(self._entry(visit, wanted.get("number")), wanted.get("form")))

    @staticmethod
    def _entry(visit: Visit, number: Any) -> Entry:
        if number is None and not visit.shown:
            raise UserError("There is nothing to take away yet: press Run first.")
        return visit.find(visit.shown if number is None else number)


def _taken(entry: Entry, form: Any) -> dict[str, Any]:
    if form == "command":
        return {"copy": command_of(entry), "say": "The command is copied: it repeats this run on the command line."}
    file = export(entry, form)
    return {"name": file.name, "type": file.type, "text": file.text, "say": f"{file.name} is saved."}
