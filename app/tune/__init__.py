"""Tab: which draft length suits this pair on this machine, why, and how to take it to production."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr
from gradio.events import api

from app.api import takes_settings
from app.insides import PRIVATE, QUIET, html_block
from app.parts import progress_line, prompts_uploaded, run_and_stop, selectors, status_line, stoppable, ticks
from app.playground import starting_prompts
from app.serving import Engine
from app.serving.device import Device
from app.serving.limits import cost_in_tokens
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, as_events, guarded, with_pair
from app.settings import CONTROLS, MOST_NEW_TOKENS, settings_from
from app.sidebar import fitted
from app.sidebar.picker import SENT, Choice, sent
from app.tune.example import example_html
from app.tune.fastest import keep
from app.tune.many_texts import ManyTexts
from app.tune.results import Results, best_settings, fastest_settings
from core.drafting.methods import METHODS
from core.errors import UserError
from core.measuring.deciding import promised
from core.progress import duration
from core.settings import Settings
from core.text import Prompt, one_of_each_kind

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
STARTING_LENGTHS, STARTING_TEMPERATURES = (1, 2, 3, 4, 6, 8), (0.0, 1.0)
STARTING_TOKENS, STARTING_REPEATS = 48, 3
SEPARATOR = "\n---\n"
"""Between prompts of one's own."""
MOST_OWN = 50
PURPOSE = "draft lengths are being measured (tab Tune)"
SWEPT = ("draft_length", "temperature", "tree", "max_new_tokens")
"""Settings that a sweep tries values of, or has no use for, or a number of its own."""
MOST_REPEATS = 10
PUBLIC_BUDGET = 20_000
"""What a stranger's sweep may cost in all, in tokens written (app.serving.limits)."""
TELLS_PER_SECOND = 4


class Tune:
    """The tab and the functions behind its buttons. On a `public` page a sweep has a budget of tokens."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        most_new_tokens: int = MOST_NEW_TOKENS,
        public: bool = False,
        choices: Mapping[str, Choice] | None = None,
    ) -> None:
        self.engine = engine
        self.choices = choices or {}
        self.device = device
        self.most_new_tokens = most_new_tokens
        self.budget = PUBLIC_BUDGET if public else math.inf
        self.stops = Stops()
        self.prompts = one_of_each_kind(starting_prompts(engine.chat))

    @takes_settings([name for name in CONTROLS if name not in SWEPT])
    def sweep(
        self,
        draft_lengths: list[int] | None = None,
        temperatures: list[float] | None = None,
        kinds: list[str] | None = None,
        max_new_tokens: int = STARTING_TOKENS,
        repeats: int = 1,
        prompts: list[str] | None = None,
        *,
        controls: dict[str, Any],
        request: gr.Request | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Find the draft length that suits this pair and machine, by measuring.

        Args:
            draft_lengths: Numbers of tokens to draft, each 1 to 64; 1, 2, 3, 4, 6 and 8 if left out. Draft length auto
                and plain decoding are measured beside them.
            temperatures: Each 0 to 5, 0 is greedy; 0 and 1 if left out.
            kinds: Kinds of bundled prompts, such as "function"; one prompt of each kind if left out.
            max_new_tokens: Of each run.
            repeats: How often each setting meets each prompt at most, 1 to 10: no more once the best is decided.
            prompts: Your own, in place of the bundled ones.

        Returns:
            Objects {"status", "document"}, the last with the sweep document: "temperatures" and "points" (measured
            "ratio_to_plain" and "tokens_per_second" with their spread, "acceptance_rate", "accepted_by_position" and
            what three formulas "predicted"), "best" by temperature, "costs" (seconds of a pass by its tokens).
        """
        if not isinstance(prompts, list | None) or not all(isinstance(prompt, str) for prompt in prompts or []):
            raise gr.Error("prompts is a list of texts.", print_exception=False)
        controls = {**{name: getattr(self.engine.settings, name) for name in CONTROLS}, **controls}
        plan = (
            list(STARTING_LENGTHS) if draft_lengths is None else draft_lengths,
            list(STARTING_TEMPERATURES) if temperatures is None else temperatures,
            ([] if prompts else [prompt.kind for prompt in self.prompts]) if kinds is None else kinds,
            max_new_tokens,
            repeats,
            SEPARATOR.join(prompts or []),
        )
        with self.stops.watch(request) as stop:
            for event in guarded(self._events(*plan, controls, stop)):
                if event["e"] == "error":
                    raise gr.Error(event["text"], print_exception=False)
                if event["e"] in ("status", "progress"):
                    yield {"status": event["text"], "document": None}
                if event["e"] == "document":
                    yield {"status": "done", "document": event["document"]}

    def run(
        self,
        lengths: Any,
        temperatures: Any,
        kinds: Any,
        tokens: Any,
        repeats: Any,
        own: str,
        request: gr.Request,
        *values: Any,
    ) -> Iterator[tuple[str, Any]]:
        """The page's own way: `values` are the sidebar's. Yields the status and, last, the document."""
        document, told = None, 0.0
        with self.stops.watch(request) as stop:
            plan = (lengths, temperatures, kinds, tokens, repeats, own)
            for event in guarded(self._events(*plan, sent(self.choices, values), stop, fitting=True)):
                if event["e"] == "document":
                    document = event["document"]
                elif event["e"] == "progress" and time.monotonic() - told < 1 / TELLS_PER_SECOND:
                    continue
                elif event["e"] != "done":
                    told = time.monotonic()
                    yield _status(event), gr.skip()
                if event["e"] == "error":
                    return
        if document is not None:
            yield _status(_finished(document)), document

    def _events(
        self,
        lengths: Any,
        temperatures: Any,
        kinds: Any,
        tokens: Any,
        repeats: Any,
        own: Any,
        controls: dict[str, Any],
        stop: Stop,
        fitting: bool = False,
    ) -> Iterator[Event]:
        """Statuses, progress and at last the document of a sweep; `fitting`: see `app.sidebar.fitted`."""
        settings, prompts = self._planned(kinds, tokens, own, controls)
        lengths = [int(n) for n in _numbers("A draft length", lengths, whole=True)]
        temperatures = _numbers("A temperature", temperatures)
        (repeats,) = _numbers("Repeats", [repeats], whole=True)
        if not 1 <= repeats <= MOST_REPEATS:
            raise UserError(f"Repeats must be between 1 and {MOST_REPEATS}.")
        each = _runs(lengths, temperatures, [""], repeats)
        total = cost_in_tokens([prompt.text for prompt in prompts], each, settings.max_new_tokens)
        if total > self.budget:
            raise UserError(
                f"This sweep costs as much as writing {total:,} tokens, past the {self.budget:,} of this public page; "
                "choose fewer lengths, temperatures or tokens, or fewer or shorter prompts."
            )

        def work(pair: Any) -> Iterator[Event]:
            own = fitted(self.engine.methods(pair), settings) if fitting else settings
            return as_events(self.engine.sweep(pair, prompts, own, lengths, temperatures, int(repeats), stop))

        yield from with_pair(self.device, self.engine, settings, stop, work, PURPOSE)

    def _planned(self, kinds: Any, tokens: Any, own: Any, controls: dict[str, Any]) -> tuple[Settings, list[Prompt]]:
        """What is measured, and on which prompts."""
        controls = controls | {"max_new_tokens": tokens}
        settings = settings_from(self.engine.settings, most_new_tokens=self.most_new_tokens, **controls)
        self.engine.admit(settings)
        return settings, self._chosen(kinds, own)

    def _of_many(self, kinds: Any, tokens: Any, own: Any, *values: Any) -> tuple[Settings, list[Prompt]]:
        """The same by the page's values."""
        return self._planned(kinds, tokens, own, sent(self.choices, values))

    def _chosen(self, kinds: Any, own: Any) -> list[Prompt]:
        """The bundled prompts of these kinds, and a person's own."""
        known = [prompt.kind for prompt in self.prompts]
        written = own_prompts(own)
        if not isinstance(kinds, list) or not (kinds or written):
            raise UserError("A sweep needs prompts; choose at least one kind, or write your own.")
        if unknown := [kind for kind in kinds if kind not in known]:
            raise UserError(f"There are no prompts of the kind {unknown[0]!r}; choose from {', '.join(known)}.")
        return [prompt for prompt in self.prompts if prompt.kind in kinds] + written

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's sweep; what is measured is kept."""
        self.stops.stop(request)

    def forecast(
        self, lengths: Any, temperatures: Any, kinds: Any, tokens: Any, repeats: Any, own: Any, *values: Any
    ) -> str:
        """What a sweep with these choices will do and how long it takes; the status before it is run."""
        controls = sent(self.choices, values) | {"max_new_tokens": tokens}
        try:
            settings = settings_from(self.engine.settings, most_new_tokens=self.most_new_tokens, **controls)
            (repeats,) = _numbers("Repeats", [repeats], whole=True)
            chosen = [prompt for prompt in self.prompts if prompt.kind in kinds]
            prompts = [prompt.text for prompt in [*chosen, *own_prompts(own)]]
        except UserError as error:
            return status_line("idle", str(error))
        runs = int(_runs(lengths, temperatures, prompts, 1))
        if not runs:
            return status_line("idle", "Choose at least one of each to run a sweep.")
        text = f"{METHODS[settings.method].label}: {runs} runs of {settings.max_new_tokens} tokens"
        most = ""
        if costs := self._costs(settings):
            seconds = promised(costs, prompts, runs // len(prompts), settings.max_new_tokens)
            text += f", about {duration(seconds)} on this machine"
            most = f" (about {duration(repeats * seconds)})"
        if repeats > 1:
            text += f"; again, {int(repeats)} times at most{most}, until the best is told from noise"
        return status_line("idle", f"{text}.")

    def _costs(self, settings: Settings) -> dict[str, float] | None:
        """What passes cost by their tokens, where that is known without loading anything."""
        if (pair := self.engine.loaded(settings)) is None:
            return None
        return self.engine.environment(pair)["target"].get("costs")

    def build(self, controls: dict[str, Any], tabs: gr.Tabs, visit: gr.State) -> None:
        """Lay out the tab and wire its buttons; `tabs` lead to the Playground."""
        sidebar = [controls[name] for name in SENT]
        plan, run, stop = self._choices()
        status = html_block(
            self.forecast(
                list(STARTING_LENGTHS),
                list(STARTING_TEMPERATURES),
                [prompt.kind for prompt in self.prompts],
                STARTING_TOKENS,
                STARTING_REPEATS,
                "",
                *(control.value for control in sidebar),
            ),
            elem_id="tune-status",
        )
        example = example_html(self.engine.example())
        empty = html_block(
            f'<div class="tune-empty">{_FIRST}{example or _QUESTIONS}{_LAST}</div>', elem_id="tune-empty"
        )
        document = gr.JSON(label="Sweep document", visible=False)
        measured = gr.State([])
        results = Results()
        _, _, kinds, tokens, _, own = plan
        many = ManyTexts(self.engine, self.device, self._of_many, self.budget).build(
            visit, [kinds, tokens, own, *sidebar]
        )
        ended = stoppable(run, stop, self.run, [*plan, *sidebar], [status, document], self.stop)
        kept = ended.then(keep, [measured, document], measured, **PRIVATE)
        kept.then(results.show, [document, measured, visit], [empty, *results.outputs], **PRIVATE)
        changes = [control.change for control in (*plan, controls["method"], controls["precision"])]
        gr.on(changes, self.forecast, [*plan, *sidebar], status, **QUIET)
        results.connect(document, measured, visit, many)
        results.switch.click(
            fastest_settings,
            [document, results.temperature, measured],
            [controls["precision"], controls["method"], controls["draft_length"], controls["temperature"], tabs],
            **QUIET,
        )
        results.use.click(
            best_settings,
            [document, results.temperature],
            [controls["method"], controls["draft_length"], controls["temperature"], tabs],
            **QUIET,
        )
        api(self.sweep, api_name="sweep", concurrency_limit=None)

    def _choices(self) -> tuple[list[Any], gr.Button, gr.Button]:
        kinds = [prompt.kind for prompt in self.prompts]
        with selectors("tune-row"):
            lengths = ticks(
                "Draft lengths",
                "Tokens proposed before a pass checks them. Auto and plain are measured too.",
                [(str(n), n) for n in LENGTHS],
                STARTING_LENGTHS,
                "tune-lengths",
                min_width=300,
                scale=4,
            )
            temperatures = ticks(
                "Temperatures",
                "0 is greedy.",
                [(f"{t:g}", t) for t in TEMPERATURES],
                STARTING_TEMPERATURES,
                "tune-temperatures",
                min_width=170,
                scale=2,
            )
            prompts = ticks(
                "Prompts",
                "A bundled one of each kind.",
                [(kind or "prompt", kind) for kind in kinds],
                kinds,
                "tune-kinds",
                min_width=220,
                scale=4,
            )
            with gr.Column(elem_id="tune-amount", min_width=200, scale=2), gr.Row():
                tokens = gr.Number(STARTING_TOKENS, label="New tokens", info="Of each run.", step=16, min_width=80)
                repeats = gr.Number(
                    STARTING_REPEATS,
                    label="Repeats",
                    info="Of each setting, at most: it ends once the best setting is told from the noise.",
                    step=1,
                    min_width=80,
                )
            run, stop = run_and_stop("tune", "Run sweep", interactive=False)
        with gr.Accordion("Your own prompts", open=False, elem_id="tune-own"):
            own = gr.Textbox(
                "",
                label="Your prompts, of any number of lines: a line of --- ends one and begins the next",
                info="Measured beside the bundled ones that are ticked.",
                placeholder="What you would ask of it.\n---\nAnd the next.",
                lines=4,
                max_lines=10,
                elem_id="tune-own-text",
            )
            file = gr.UploadButton("Open a file…", file_types=["text", ".toml"], size="sm", elem_id="tune-own-file")
            file.upload(_read_file, file, own, **QUIET)
        return [lengths, temperatures, prompts, tokens, repeats, own], run, stop


def _status(event: Event) -> str:
    """A line of words, with a bar where it is known how far it is."""
    if event["e"] == "progress":
        done, total = event["done"], event["total"]
        count = f"{done} of {total} runs" if total > 1 else "Measuring"
        return progress_line(done, total, "Progress of the sweep", count, event["text"])
    return status_line("error" if event["e"] == "error" else event["kind"], event["text"])


def _finished(document: dict[str, Any]) -> Event:
    if not document["points"]:
        return {"e": "status", "kind": "stopped", "text": "Stopped before anything was measured."}
    if document["stopped"]:
        return {"e": "status", "kind": "stopped", "text": "Stopped. What was measured until then is shown."}
    speeds = ", ".join(
        f"{row['plain']['median']:.0f} tokens/s at temperature {row['temperature']:g}"
        for row in document["temperatures"]
    )
    return {"e": "status", "kind": "finished", "text": f"Done. Plain decoding on the same prompts: {speeds}."}


def own_prompts(text: Any) -> list[Prompt]:
    """A person's prompts, with a line of --- between them. UserError for more than a sweep takes."""
    written = [part.strip("\n") for part in re.split(r"(?m)^---[ \t]*$", text if isinstance(text, str) else "")]
    found = [part for part in written if part.strip()]
    if len(found) > MOST_OWN:
        raise UserError(f"A sweep takes {MOST_OWN} prompts of your own, not {len(found)}.")
    return [Prompt(f"your prompt {number}", part, "your own") for number, part in enumerate(found, 1)]


def _read_file(path: str) -> str:
    """The prompts of a file (`core.text.read_prompts`), as they are written in the text area."""
    return SEPARATOR.join(prompt.text for prompt in prompts_uploaded(path))


def _runs(lengths: Any, temperatures: Any, prompts: Any, repeats: float) -> float:
    """Runs of a sweep, warm-up apart: each length, auto and plain."""
    return (len(lengths) + 2) * len(temperatures) * len(prompts) * repeats if lengths else 0


def _numbers(name: str, values: Any, whole: bool = False) -> list[float]:
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} must be a number.") from None
    if any(not math.isfinite(n) or (whole and n != int(n)) for n in found):
        raise UserError(f"{name} must be a {'whole ' if whole else ''}number.")
    return found


_FIRST = (
    "<p>A sweep measures each draft length against plain decoding of the same target, on this machine, prompt by "
    "prompt.</p>"
)
_QUESTIONS = """<dl>
<dt>How many tokens should the draft propose?</dt><dd>measured, beside what three formulas predict</dd>
<dt>What does it cost to check them?</dt><dd>the time of a pass over 1 to 64 tokens</dd>
<dt>Where does agreement break?</dt><dd>how often a draft stands up to each position</dd>
</dl>"""
_LAST = (
    "<p>Then it recommends a setting, and writes the commands that use it in vLLM, SGLang, llama.cpp and "
    "transformers.</p>"
)
