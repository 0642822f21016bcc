"""Tab: a round of the visitor's last run in six steps, what it cost, when it would not pay, and the lossless check.

Everything but the check is computed from run documents: opening the tab asks nothing of the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.events import api

from app.explain.check import Texts, greedy_html, law_html
from app.explain.costs import costs_html
from app.explain.html import html
from app.explain.steps import interesting_round, walk
from app.history.run_file import read_run_file
from app.insides import NEWEST, calling, html_block, on_load, sent_by
from app.parts import stoppable
from app.playground import starting_prompts
from app.serving import Engine
from app.serving.device import Device
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, guarded, sentence, with_pair
from app.serving.visit import Entry, Visit, alone
from app.settings import CONTROLS, prompt_text, settings_from
from core.drafting.methods import METHODS
from core.errors import UserError
from core.explaining import trace_round
from core.explaining.lossless import Progress
from core.explaining.traffic import run_traffic
from core.measuring.deciding import baseline_of
from core.records import Run, Settings

KINDS = {
    "law": "Sampling: the same law",
    "greedy": "Greedy: the same text",
    "broken": "Sampling, rule broken",
}
CONTINUATIONS = (300, 600, 2_000)
FEWEST, MOST, MOST_IN_PUBLIC = 50, 20_000, 2_000
GREEDY_TEXTS, GREEDY_TOKENS = 8, 64
"""Texts of a greedy check, the visitor's own first, and the most new tokens of each."""
STARTING_TEMPERATURE = 1.0
"""Of a sampling check after a greedy run."""
LOOKS_PER_SECOND = 8.0
LONGEST_LABEL = 44
PURPOSE = "it is being checked that nothing is lost (tab Explain)"
SCRIPT = "explain/explain.js"


class Explain:
    """The tab and the functions behind its controls."""

    def __init__(self, engine: Engine, device: Device, public: bool = False) -> None:
        self.engine = engine
        self.device = device
        self.most = MOST_IN_PUBLIC if public else MOST
        self.servers = not public
        self.stops = Stops()

    def build(self, visit: gr.State, tab: gr.Tab) -> None:
        """Lay out the tab; it looks for newer runs each time it is opened."""
        seen = gr.State(0)
        with gr.Column(elem_id="explain-empty") as empty:
            waiting = html_block(html.empty(), on_load(SCRIPT, "refresh"))
            run = gr.Button("Run the Playground's prompt", variant="primary", elem_id="explain-run", scale=0)
        with gr.Column(elem_id="explain", visible=False) as content:
            with gr.Row(elem_id="explain-choice"):
                chosen = gr.Dropdown(
                    [],
                    label="Run",
                    info="Which run of this visit to explain; the newest one at first.",
                    filterable=False,
                    elem_id="explain-which",
                )
                number = gr.Slider(
                    1,
                    2,
                    value=1,
                    step=1,
                    label="Round",
                    info="Which of its rounds to walk through; at first one in which a draft was refused.",
                    elem_id="explain-round",
                )
            steps = html_block(js_on_load=on_load(SCRIPT, "refresh"), elem_id="explain-walk")
            costs = html_block(js_on_load=on_load(SCRIPT), elem_id="explain-costs")
            html_block(html.check())
            kind, continuations, check, stop = self._check_controls()
            result = html_block(elem_id="explain-result")
        run.click(None, None, None, js=calling(SCRIPT, "runPrompt"), api_visibility="private")
        shown = [empty, content, chosen, number, steps, costs, kind, seen]
        # One listener: the answers of two may overtake one another.
        opened = [tab.select, sent_by(waiting, "refresh"), sent_by(steps, "refresh")]
        gr.on(opened, self.open, [visit, chosen, seen], shown, **NEWEST)
        chosen.input(self.choose, [visit, chosen], [number, steps, costs, kind], **NEWEST)
        number.input(self.step, [visit, chosen, number], steps, **NEWEST)
        stoppable(check, stop, self.check, [kind, continuations, visit, chosen], result, self.stop)
        api(self.trace, api_name="trace", queue=False)
        api(self.lossless, api_name="lossless", concurrency_limit=None)

    @staticmethod
    def _check_controls() -> tuple[gr.Radio, gr.Dropdown, gr.Button, gr.Button]:
        with gr.Row(elem_id="explain-check"):
            kind = gr.Radio(
                [(name, value) for value, name in KINDS.items()],
                value="law",
                label="Check",
                info="The same law: many short continuations against the target's own probabilities. The same text: "
                "several prompts decoded with and without drafts. Broken on purpose: drafts are taken unjudged, to see "
                "that the check would notice.",
                elem_id="explain-kind",
            )
            continuations = gr.Dropdown(
                [(f"{n:,}", n) for n in CONTINUATIONS],
                value=CONTINUATIONS[1],
                label="Continuations",
                info="How many are sampled. More of them see smaller differences, and take longer.",
                filterable=False,
                elem_id="explain-continuations",
                min_width=110,
            )
            check = gr.Button("Check", variant="primary", elem_id="explain-start", scale=0, min_width=104)
            stop = gr.Button("Stop", interactive=False, elem_id="explain-stop", scale=0, min_width=104)
        return kind, continuations, check, stop

    @alone
    def open(self, visit: Visit, chosen: str | None, seen: int) -> tuple[Any, ...]:
        """What the tab shows when it is opened: the newest run if there is a newer one, else what was shown."""
        last, choices = visit.last, _choices(visit)
        if last is None or not choices:
            return gr.update(visible=True), gr.update(visible=False), *[gr.skip()] * 5, 0
        known = {value for _, value in choices}
        value = chosen if last.number == seen and chosen in known else choices[0][1]
        kept = value == chosen and seen
        shown = (gr.skip(), gr.skip(), self._costs(visit, value), gr.skip()) if kept else self.choose(visit, value)
        picked = gr.update(choices=choices, value=value)
        return gr.update(visible=False), gr.update(visible=True), picked, *shown, last.number

    def _costs(self, visit: Visit, chosen: str | None) -> Any:
        """The costs of the run that stays: servers may have been measured since."""
        if visit.load is None:
            return gr.skip()
        try:
            return html.frame(costs_html(*_find(visit, chosen), visit.load, self.servers, visit.many))
        except UserError as error:
            return html.frame(html.sentence(str(error)))

    @alone
    def choose(self, visit: Visit, chosen: str | None) -> tuple[Any, str, str, Any]:
        """Another run: its most telling round, its costs, and the check that suits it."""
        try:
            run, plain = _find(visit, chosen)
            index = interesting_round(run)
            count = len(run.rounds)
            slider = gr.update(value=index + 1, maximum=max(2, count), visible=count > 1)
            kind = "greedy" if run.settings.temperature == 0 else "law"
            return (
                slider,
                html.frame(walk(run, index)),
                html.frame(costs_html(run, plain, visit.load, self.servers, visit.many)),
                kind,
            )
        except Exception as error:
            return gr.update(visible=False), html.frame(html.sentence(sentence(error))), "", gr.skip()

    @alone
    def step(self, visit: Visit, chosen: str | None, number: Any) -> str:
        """Another round of the same run."""
        try:
            run, _ = _find(visit, chosen)
            index = int(number) - 1 if isinstance(number, (int, float)) else 0
            return html.frame(walk(run, min(max(index, 0), len(run.rounds) - 1)))
        except Exception as error:
            return html.frame(html.sentence(sentence(error)))

    def check(
        self, kind: str, continuations: Any, visit: Visit, chosen: str | None, request: gr.Request
    ) -> Iterator[str]:
        """Check the chosen run's pair and settings; what comes is HTML."""
        with self.stops.watch(request) as stop:
            yield html.frame(html.progress("Waiting for the device…"))
            shown = False
            for event in guarded(self._of_a_run(kind, continuations, visit, chosen, stop)):
                if event["e"] == "progress":
                    yield html.frame(html.progress(event["text"], event["done"], event["total"]))
                elif event["e"] in ("status", "error"):
                    kind_shown = "error" if event["e"] == "error" else event["kind"]
                    yield html.frame(html.sentence(event["text"], kind_shown))
                    shown = event["e"] == "error" or event["kind"] == "idle"
                elif event["e"] == "result":
                    yield html.frame(event["html"])
                    shown = True
            if not shown:
                yield html.frame(html.sentence("Stopped before anything could be compared.", "idle"))

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's checks; what was sampled so far is compared."""
        self.stops.stop(request)

    def _of_a_run(self, kind: str, continuations: Any, visit: Visit, chosen: str | None, stop: Stop) -> Iterator[Event]:
        run = replace(_find(visit, chosen)[0], rounds=[])  # of no use to a check, which may wait long for the device
        if not self.engine.is_loaded(run.settings):
            raise UserError(
                "The models of this run are not in memory here; choose their pair, run it in the Playground, and check "
                "that run."
            )
        yield from self._events(kind, continuations, run.prompt, run.settings, run, stop)

    def _events(
        self, kind: str, continuations: Any, prompt: str, settings: Settings, run: Run | None, stop: Stop
    ) -> Iterator[Event]:
        """`progress` and, last, `result` with the check as `found` and as `html`."""
        if not isinstance(kind, str) or kind not in KINDS:
            raise UserError(f"There is no check {str(kind)[:40]!r}; choose one of {', '.join(KINDS)}.")
        if not isinstance(continuations, (int, float)) or not FEWEST <= continuations <= self.most:
            raise UserError(f"Continuations must be a number between {FEWEST} and {self.most:,}.")
        n = int(continuations)
        if kind == "greedy":
            prompts = _greedy_prompts(prompt, self.engine.chat)
            short = replace(settings, max_new_tokens=min(settings.max_new_tokens, GREEDY_TOKENS))
            yield from with_pair(
                self.device,
                self.engine,
                settings,
                stop,
                lambda pair: _told(
                    self.engine.check_greedy(pair, prompts, short, stop),
                    "texts decoded both ways",
                    lambda found: greedy_html(found, prompts),
                ),
                PURPOSE,
            )
            return
        broken = kind == "broken"
        sampled = settings if settings.temperature > 0 else replace(settings, temperature=STARTING_TEMPERATURE)

        def work(pair: Any) -> Iterator[Event]:
            texts: Texts = lambda ids: self.engine.token_texts(pair, ids)  # noqa: E731
            items = self.engine.check_law(pair, run, prompt, sampled, n, stop, broken)
            temperature = f" at temperature {sampled.temperature:g}" if settings.temperature == 0 else ""
            yield from _told(items, f"continuations sampled{temperature}", lambda found: law_html(found, texts, broken))

        yield from with_pair(self.device, self.engine, sampled, stop, work, PURPOSE)

    @alone
    def trace(self, document: dict[str, Any], round: int = -1) -> dict[str, Any]:
        """The tensors, the logits rows and the caches of one round of a run.

        Args:
            document: A run document, as `run` returns it or `python -m core generate --json` writes it; of a race or a
                comparison, its first run that drafted.
            round: Which round, from 0; -1 for one in which a draft was refused.

        Returns:
            "tokens" (the round as in the document), "committed" and "fed" tokens, "rows" (each row of the logits with
            the drafted tokens it judges and the fed tokens it sees), "target_cache" and "draft_cache" lengths, every
            tensor's shape as it ran ("tensors") and without a cache ("uncached"), and the run's memory "traffic".
        """
        try:
            run = _run_of(document)
            index = interesting_round(run) if round == -1 and run.rounds else round
            found = trace_round(run, index).to_dict()
            traffic = run_traffic(run)
            return {"tokens": run.rounds[index].to_dict(), **found, "traffic": traffic and traffic.to_dict()}
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None

    def lossless(
        self,
        prompt: str,
        settings: dict[str, Any] | None = None,
        kind: str = "law",
        continuations: int = 600,
        request: gr.Request | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Check that speculation changes nothing, by measuring.

        Args:
            prompt: The text to continue.
            settings: Fields of a run document's settings that differ from the page's own, such as {"method": "tree",
                "temperature": 0.8}. A temperature of 0 is taken as 1 where something is to be sampled.
            kind: "law" (short continuations against the target's own probabilities), "greedy" (the same text with and
                without drafts) or "broken" (as "law", with drafts taken unjudged: a check that must fail).
            continuations: How many are sampled, from 50.

        Returns:
            Objects {"status", "result"}, the last with the result: for a law "p_value", "g", "freedom" and the "cells"
            that were counted; for greedy decoding the "texts", how many were "identical", and the "divergences".
        """
        given = settings or {}

        def events(stop: Stop) -> Iterator[Event]:
            base = self.engine.settings
            if not isinstance(given, dict):
                raise UserError("The settings must be an object with fields of a run document's settings.")
            if unknown := [name for name in given if name not in CONTROLS]:
                raise UserError(f"There is no setting {unknown[0]!r}; known are {', '.join(CONTROLS)}.")
            controls = {name: given.get(name, getattr(base, name)) for name in CONTROLS}
            asked = settings_from(base, **controls)
            yield from self._events(kind, continuations, prompt_text(prompt), asked, None, stop)

        with self.stops.watch(request) as stop:
            for event in guarded(events(stop)):
                if event["e"] == "error":
                    raise gr.Error(event["text"], print_exception=False)
                if event["e"] in ("status", "progress"):
                    yield {"status": event["text"], "result": None}
                if event["e"] == "result":
                    yield {"status": "done", "result": event["found"].to_dict()}


def _told(items: Iterator[Any], what: str, html: Callable[[Any], str]) -> Iterator[Event]:
    """A check's progress, at most LOOKS_PER_SECOND times a second, and its result."""
    shown = 0.0
    for item in items:
        if not isinstance(item, Progress):
            yield {"e": "result", "found": item, "html": html(item)}
        elif time.monotonic() - shown >= 1 / LOOKS_PER_SECOND:
            shown = time.monotonic()
            text = f"{item.done:,} of {item.total:,} {what}"
            yield {"e": "progress", "done": item.done, "total": item.total, "text": text}


def _greedy_prompts(own: str, chat: bool) -> list[str]:
    others = [each.text for each in starting_prompts(chat) if each.text != own]
    return [own, *others][:GREEDY_TEXTS]


def _choices(visit: Visit) -> list[tuple[str, str]]:
    """(label, value) of every run of the visit that drafts, newest first; of entries without, the first."""
    found = []
    for entry in reversed(visit.entries):
        drafting = [i for i, head in enumerate(entry.heads) if head["settings"]["method"] != "plain"]
        found += [(_label(entry, i), f"{entry.number}:{i}") for i in drafting or range(min(1, len(entry.heads)))]
    return found


def _label(entry: Entry, lane: int) -> str:
    head = entry.heads[lane]
    settings = head["settings"]
    words = " ".join(str(head["prompt"]).split())
    short = words if len(words) <= LONGEST_LABEL else words[: LONGEST_LABEL - 1] + "…"
    heat = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']:g}"
    return f"{entry.number} · {METHODS[settings['method']].label} · {heat} · {short}"


@alone
def _find(visit: Visit, chosen: str | None) -> tuple[Run, Run | None]:
    """The chosen run, and a plain run of the same target and prompt beside it."""
    number, _, lane = (chosen or "").partition(":")
    if not number.isdecimal() or not lane.isdecimal():
        raise UserError("Choose a run first.")
    runs = visit.find(int(number)).runs
    if int(lane) >= len(runs):
        raise UserError("There is no such run in that entry.")
    run = runs[int(lane)]
    if not run.rounds:
        raise UserError("This run was stopped before its first round; there is nothing to explain. Choose another.")
    return run, baseline_of(run, runs)


def _run_of(document: Any) -> Run:
    found = read_run_file(json.dumps(document))
    return next((run for run in found if any(r.drafted for r in run.rounds)), found[0])
