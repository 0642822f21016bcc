"""Tab: one prompt, plain and speculative decoding racing side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import gradio as gr
from gradio.events import api

from app.api import takes_settings
from app.insides import PRIVATE, QUIET, UNCHECKED, html_block
from app.parts import tell_over
from app.playground.race import queued_race
from app.serving import Engine
from app.serving.device import Device
from app.serving.stops import Stops
from app.serving.turns import Event, guarded
from app.serving.visit import Visit
from app.settings import CONTROLS, MOST_NEW_TOKENS, PAIR_CONTROLS, pair_from, prompt_text, settings_from
from app.sidebar import fitted
from app.sidebar.picker import SENT, Choice, as_chosen, sent
from app.tokens import stream, token_stream
from app.tokens.markup import json_text
from app.tokens.replay import replay_value
from core.drafting.methods import METHODS
from core.errors import UserError
from core.records import SCHEMA, Run
from core.settings import POCKET_NAME, Settings
from core.text import Prompt, read_prompts

FALLBACK = Prompt("merge sort", 'def merge_sort(items):\n    """Return the items in ascending order."""\n')


QUESTION = Prompt("Explain", "Explain in three sentences why the sky is blue.")


def starting_prompts(chat: bool = False) -> list[Prompt]:
    """The bundled prompts, messages for a `chat` model, or one to begin with where they cannot be read."""
    fallback = QUESTION if chat else FALLBACK
    try:
        return read_prompts(chat=chat)
    except UserError:
        return [fallback]


def chip_prompts(chat: bool = False) -> list[Prompt]:
    """Those whose answers read well."""
    return [prompt for prompt in starting_prompts(chat) if prompt.chip]


def note_html() -> str:
    """Where the caption of a prompt stands, with what each of ours shows (assets/page/chips.js)."""
    told = [
        {"name": each.name, "text": each.text, "note": each.note}
        for chat in (True, False)
        for each in chip_prompts(chat)
    ]
    return f'<p data-prompts="{escape(json_text(told))}"></p>'


class Playground:
    """The tab and the two functions behind its buttons."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        most_new_tokens: int = MOST_NEW_TOKENS,
        choices: Mapping[str, Choice] | None = None,
    ) -> None:
        self.engine = engine
        self.device = device
        self.stops = Stops()
        self.most_new_tokens = most_new_tokens
        self.choices = choices or {}
        self.lent: tuple[gr.Row, gr.HTML, gr.Button]
        """Where another tab says what it chose in the sidebar for a race, and the way back."""

    def run(self, prompt: str, visit: Visit, request: gr.Request, *values: Any) -> Iterator[str]:
        """The page's own way: `values` are those of the sidebar's controls."""
        runs: list[Run] = []
        controls = sent(self.choices, values)
        with self.stops.watch(request) as stop:
            yield from stream(guarded(self._events(prompt, controls, stop, runs, fitting=True)))
            if any(run.rounds for run in runs):
                visit.shown = visit.add("race", runs).number

    def race(
        self, prompt: str, controls: dict[str, Any], request: gr.Request | None = None
    ) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Race speculative against plain decoding of the same target.

        `target` and `draft` are Hub ids or folders of the server; without a target, the pair the app was started with;
        "pocket" is the bundled one.

        Streams the race as JSON lines, one event per line: a head {"e": "begin", "id", "from"}, where `from` is the
        number of the next line in the whole stream, then the newest lines. The last value comes with the race's run
        documents: {"schema": 1, "runs": [speculative, plain]}.
        """
        runs: list[Run] = []
        with self.stops.watch(request) as stop:
            value = ""
            for value in stream(guarded(self._events(prompt, controls, stop, runs))):
                yield value, None
            if runs:
                yield value, {"schema": SCHEMA, "runs": [run.to_dict() for run in runs]}

    def _events(
        self,
        prompt: str,
        controls: dict[str, Any],
        stop: Any,
        runs: list[Run],
        fitting: bool = False,
    ) -> Iterator[Event]:
        """Of a race; `fitting`: by another method where the pair, once it is loaded, cannot use the one chosen."""
        asked = {name: controls.get(name) for name in ("method", *PAIR_CONTROLS)}
        settings = settings_from(self.engine.settings, most_new_tokens=self.most_new_tokens, **controls)

        def settle(pair: Any, settings: Settings) -> Settings:
            settings = fitted(self.engine.methods(pair), settings) if fitting else settings
            asked["method"] = settings.method
            return settings

        told = False
        for event in queued_race(self.device, self.engine, prompt_text(prompt), settings, stop, runs, settle):
            if event["e"] == "open" and not told:
                told = True
                yield {"e": "asked", "controls": asked}
            yield event

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's runs; what was written so far is kept."""
        self.stops.stop(request)

    def build(self, controls: dict[str, Any], visit: gr.State) -> tuple[gr.Textbox, gr.HTML]:
        """Lay out the tab and wire its buttons to the controls of the sidebar; its prompt and its race."""
        prompts = chip_prompts(self.engine.chat)
        with gr.Row(elem_id="prompt-row"):
            prompt = gr.Textbox(
                prompts[0].text,
                label="Prompt",
                lines=2,
                max_lines=2,  # as many: our sheet lets it grow
                elem_id="prompt",
                scale=1,
                placeholder="Write something for the target to continue…",
            )
            with gr.Column(elem_id="buttons", scale=0, min_width=150):
                run = gr.Button("Run", variant="primary", elem_id="run")
                gr.Button("Watch slowly", elem_id="watch")  # pressed in the browser alone
                stop = gr.Button("Stop", elem_id="stop")
        with gr.Row(elem_id="chips"):
            self._rows = {
                chat: self._chips(chip_prompts(chat), chat == self.engine.chat, prompt, controls["temperature"])
                for chat in (self.engine.chat, not self.engine.chat)
            }
            html_block(note_html(), elem_id="prompt-note")
        with gr.Row(visible=False, elem_id="lent") as row:
            self.lent = row, html_block(), gr.Button("Back to my settings", size="sm", scale=0, min_width=160)
        drafters = {name: {"guesser": each.guesser, "tree": each.tree} for name, each in METHODS.items() if each.drafts}
        method = self.engine.settings.method
        race = token_stream(elem_id="race", label="Events", method=method, drafters=drafters, **self._example())
        start = {name: controls[name].value for name in CONTROLS}
        api(takes_settings(CONTROLS, start)(self.race), api_name="run", concurrency_limit=None)
        self.finished = run.click(
            self.run,
            [prompt, visit, *(controls[name] for name in SENT)],
            race,
            concurrency_limit=None,  # turns are taken in `Device`, which can say who is ahead
            trigger_mode="multiple",  # "once" would swallow a press that comes while the last value is on its way
            **PRIVATE,
            **UNCHECKED,
        )
        tell_over(self.finished, "race")
        stop.click(self.stop, None, None, api_name="stop", queue=False, show_progress="hidden")
        return prompt, race

    def follow(self, controls: dict[str, Any]) -> None:
        """Show the chips that suit the pair: messages for a chat model, code to go on with for others."""
        named = [controls[name] for name in ("pair", *PAIR_CONTROLS)]

        def show(chosen: str, *values: Any) -> list[Any]:
            chat = self.answers(chosen, dict(zip(PAIR_CONTROLS, values)))
            return [gr.skip() if chat is None else gr.update(visible=chat == each) for each in self._rows]

        options: dict[str, Any] = {"fn": show, "inputs": named, "outputs": list(self._rows.values()), **QUIET}
        gr.on([controls["pair"].change, controls["target"].change], **options)
        self.finished.then(**options)

    def answers(self, chosen: str, named: dict[str, Any]) -> bool | None:
        """Whether the target chosen answers messages; None where that is not known before it is loaded. The entry of
        the list goes before the models that are `named`, unless these are to be typed."""
        named = as_chosen(self.choices, chosen, named)
        choice = self.choices.get(chosen)
        try:
            settings = pair_from(self.engine.settings, **named)
        except UserError:  # the run will say it
            return None
        if settings.target == self.engine.settings.target:
            return self.engine.chat
        if settings.target == POCKET_NAME:
            return False
        if (pair := self.engine.loaded(settings)) is not None:
            return bool(self.engine.environment(pair)["target"].get("chat"))
        return True if choice is not None and choice.target else None

    def _example(self) -> dict[str, Any]:
        """The race that the panes show before the first run, as the component's value; nothing where there is none."""
        found = self.engine.example()
        return {"value": replay_value(*found)} if found else {}

    @staticmethod
    def _chips(prompts: list[Prompt], visible: bool, prompt: gr.Textbox, temperature: gr.Component) -> gr.Row:
        """One button a prompt; filled in by the browser itself, with the temperature the prompt is meant for."""
        with gr.Row(elem_classes="prompt-chips", visible=visible) as row:
            for each in prompts:
                chip = gr.Button(each.name, size="sm", elem_classes="chip")
                filled: list[Any] = [each.text]
                outputs: list[Any] = [prompt]
                if each.temperature is not None:
                    filled.append(each.temperature)
                    outputs.append(temperature)
                chip.click(None, None, outputs, js=f"() => {json.dumps(filled)}", show_progress="hidden")
        return row
