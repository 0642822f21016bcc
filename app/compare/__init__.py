"""Tab: two to four lanes, each a pair, a precision, a method and a draft length, or a running server, on the same
prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.events import api

from app.api import takes_settings
from app.assets import asset
from app.compare.again import again, again_events
from app.compare.controls import MARKS, lane_controls
from app.compare.events import Comparison, compare, fastest, fetch_all, level_with, plan_event
from app.compare.figures import acceptance_by_position, speed_by_lane
from app.compare.lanes import (
    FEWEST,
    KEYS,
    MOST,
    SERVER,
    SIDEBAR,
    chosen_lanes,
    lanes_from,
)
from app.compare.many_readers import ManyReaders
from app.compare.servers import ServerContender
from app.insides import PRIVATE, QUIET, UNCHECKED, html_block, scripted
from app.parts import chooser, run_and_stop, selectors, tell_over
from app.playground import starting_prompts
from app.serving import Engine
from app.serving.device import Device
from app.serving.limits import cost_in_tokens
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, guarded, with_device
from app.serving.visit import Entry, Visit
from app.settings import CONTROLS, MOST_NEW_TOKENS, prompt_text
from app.sidebar.picker import OTHER, SENT, Choice, sent
from app.tokens import Window, encode, stream
from core.drafting.methods import METHODS
from core.errors import UserError
from core.records import SCHEMA
from core.servers import refuse_public
from core.settings import Settings
from core.text import Prompt

ONE_PROMPT, ALL = "this prompt", "all"
PURPOSE = "lanes are being compared (tab Compare)"
PUBLIC_TOTAL = 16_384
"""What a stranger's comparison may cost, all lanes and prompts together, in tokens written (app.serving.limits)."""
PLOTS = ("speed", "positions")
TAKEN = ("target", "draft", "precision", "method", "draft_length")
"""What the sidebar takes from the fastest lane."""
Values = tuple[Any, ...]


class Compare:
    """The tab and the functions behind its buttons; `choices` are the picker's, by value."""

    def __init__(
        self, engine: Engine, device: Device, choices: dict[str, Choice], most_new_tokens: int = MOST_NEW_TOKENS
    ) -> None:
        self.engine = engine
        self.device = device
        self.choices = choices
        self.most_new_tokens = most_new_tokens
        self.stops = Stops()
        self.places: list[Any] = []
        self.prompts = starting_prompts(engine.chat)
        self.many_readers = ManyReaders(device, self.prompts, self._servers)

    @takes_settings([name for name in CONTROLS if name not in KEYS])
    def compare(
        self,
        lanes: list[dict[str, Any]],
        prompt: str = "",
        prompts: str = "",
        *,
        controls: dict[str, Any],
        request: gr.Request | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Compare two to four ways to decode the same prompts.

        Args:
            lanes: A list of two to four objects, each with any of "target" and "draft" (Hub id or folder, "pocket" for
                the bundled pair), "revision", "precision", "draft_precision", "method", "draft_length", "tree" and
                "exit_layer", as for `generate`. What is left out is as the page was started with. Or a running server:
                "server", its address, and "model" where it has several; it answers alone, after the others.
            prompt: The text to continue, in every lane.
            prompts: Instead of a prompt, a kind of bundled prompts, such as "function" or "repetitive", or "all".

        Returns:
            Objects {"status", "rows", "document"}, the last with the table and the runs: a row a lane with "name",
            "pair", "tokens_per_second" and "ratio_to_plain" {"median", "min", "max"} over the prompts, "faster" (than
            plain decoding; null where that cannot be told from noise), "drafted", "acceptance_rate",
            "tokens_per_round", "accepted_by_position", "weight_bytes", "identical" {"same", "compared", "first"} and
            "error"; {"schema": 1, "runs": [...]} lane by lane. A lane with "added": true is plain decoding of a target
            that no lane decodes plainly: the baseline of "ratio_to_plain". Of a server's lane "server" has what only
            servers tell, "acceptance_rate" is accepted ÷ drafted, and its answers are
            the document's "server_runs".
        """
        controls = {**{name: getattr(self.engine.settings, name) for name in CONTROLS}, **controls}
        comparisons: list[Comparison] = []
        with self.stops.watch(request) as stop:
            for event in guarded(self._events(lanes, prompt, prompts, controls, stop, comparisons)):
                if event["e"] == "error":
                    raise gr.Error(event["text"], print_exception=False)
                if event["e"] in ("status", "result"):
                    yield {"status": event["text"], "rows": None, "document": None}
        if comparisons:
            runs = [run.to_dict() for run in comparisons[0].runs()]
            rows = comparisons[0].rows()
            answers = [run.to_dict() for run in comparisons[0].server_runs()]
            document = {"schema": SCHEMA, "runs": runs} | ({"server_runs": answers} if answers else {})
            yield {"status": "done", "rows": rows, "document": document}

    def run(
        self, prompt: str, kind: str, count: int, visit: Visit, request: gr.Request, *values: Any
    ) -> Iterator[Values]:
        """The page's own way: `values` are those of the sidebar's controls, then each lane's."""
        controls, lanes = self._read(count, values)
        comparisons: list[Comparison] = []
        kind = "" if kind == ONE_PROMPT else kind
        with self.stops.watch(request) as stop:
            unchanged = [gr.skip()] * (len(PLOTS) + 2)
            value = ""
            for value in stream(guarded(self._events(lanes, prompt, kind, controls, stop, comparisons))):
                yield value, *unchanged
        if comparisons and (comparisons[0].runs() or comparisons[0].server_runs()):
            visit.add("comparison", comparisons[0].runs(), servers=comparisons[0].server_runs())
            yield value, *_plots(comparisons[0].rows()), *self._offer(comparisons[0])

    def _offer(self, comparison: Comparison) -> tuple[Any, dict[str, Any]]:
        """The button that takes the fastest lane's setting along, and what it sets of the sidebar."""
        best = fastest(comparison.rows())
        if best is None:
            return gr.update(visible=False), {}
        own = next(each.settings for each in comparison.contenders if each.number == best["lane"])
        started = (own.target, own.draft) == (self.engine.settings.target, self.engine.settings.draft)
        models = {"target": "", "draft": ""} if started else {"target": own.target or "", "draft": own.draft or ""}
        found = {**models, **{name: getattr(own, name) for name in TAKEN if name not in models}}
        leads = best["faster"] is not False and not level_with(comparison, best)
        label = f"Use lane {best['lane']}" + (", the fastest" if leads else "")
        return gr.update(visible=True, value=label), found

    def _events(
        self,
        lanes: Any,
        prompt: str,
        kind: str,
        controls: dict[str, Any],
        stop: Stop,
        comparisons: list[Comparison],
    ) -> Iterator[Event]:
        """The events of a comparison, which is appended to `comparisons` once its settings are found to be possible."""
        asked = lanes_from(self.engine.settings, controls, lanes, self.most_new_tokens)
        comparison = Comparison.of(asked, self._chosen(prompt, kind))
        if comparison.servers:
            refuse_public(self.engine.public)
        self._admit(comparison, max(_settings_of(each).max_new_tokens for each in asked))
        comparisons.append(comparison)
        yield plan_event(comparison)
        yield from fetch_all(self.engine, comparison, stop)
        run = partial(compare, self.device, self.engine, comparison, stop)
        yield from with_device(self.device, stop, run, PURPOSE)

    def _admit(self, comparison: Comparison, new_tokens: int) -> None:
        """On a public page nobody holds the device for long."""
        lanes = len(comparison.contenders) + len(comparison.servers)
        total = cost_in_tokens([prompt.text for prompt in comparison.prompts], lanes, new_tokens)
        if self.engine.public and total > PUBLIC_TOTAL:
            raise UserError(
                f"This comparison costs as much as writing {total:,} tokens, more than the {PUBLIC_TOTAL:,} of a "
                "public page; choose fewer or shorter prompts, fewer lanes or new tokens."
            )

    def _chosen(self, prompt: str, kind: str) -> list[Prompt]:
        """The prompts of a kind, or the one that was written."""
        if not kind:
            return [Prompt("your prompt", prompt_text(prompt))]
        if found := [each for each in self.prompts if kind in (ALL, each.kind)]:
            return found
        raise UserError(f"There are no prompts of the kind {kind!r}; choose one of {', '.join([*self._kinds(), ALL])}.")

    def _kinds(self) -> list[str]:
        return [kind for kind in dict.fromkeys(each.kind for each in self.prompts) if kind]

    def _read(self, count: int, values: Values) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The sidebar's controls by name, and the lanes as those of the API, from the values that `run` takes."""
        lanes = [self._lane(chosen) for chosen in chosen_lanes(values[len(SENT) :])]
        return sent(self.choices, values), lanes[:count]

    def _lane(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """What the controls of a lane say, as a lane of the API."""
        lane = {name: chosen[name] for name in ("precision", "method", "draft_length") if chosen[name] != SIDEBAR}
        if chosen["pair"] == SIDEBAR:
            return lane
        if chosen["pair"] == SERVER:
            return {"server": chosen["server"], "model": chosen["model"]}
        models = {"target": chosen["target"], "draft": chosen["draft"]}
        if chosen["pair"] != OTHER:
            choice = self.choices[chosen["pair"]]
            models = {"target": choice.target, "draft": choice.draft}
        return lane | models

    def _servers(self, count: int, *values: Any) -> list[ServerContender]:
        """The lanes that are running servers, of the number of lanes and the values that `run` takes."""
        controls, lanes = self._read(count, values)
        found = lanes_from(self.engine.settings, controls, lanes, self.most_new_tokens)
        return [each for each in found if isinstance(each, ServerContender)]

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's comparison; what is finished is kept."""
        self.stops.stop(request)

    def again(self, entry: Entry) -> list[Any]:
        """An entry with running servers as it looked when it ended, for the components of `places`."""
        document = entry.document()
        comparison = again(document)
        shown = Window().add(encode(event) for event in again_events(comparison))
        found = [shown, *_plots(comparison.rows()), gr.update(visible=False)]
        if self.engine.public:
            return found
        if entry.kind == "load":
            return [*found, *self.many_readers.again(document, entry.number)]
        return [*found, *[gr.skip()] * (len(self.places) - len(found))]

    def build(self, controls: dict[str, Any], visit: gr.State, tabs: gr.Tabs) -> None:
        """Lay out the tab and wire its buttons."""
        methods = self._starting_methods()
        shown = min(max(len(methods), FEWEST), MOST)
        with selectors("compare-row"):
            prompt = gr.Textbox(
                self.prompts[0].text,
                label="Prompt",
                info="What every lane continues.",
                lines=4,
                max_lines=4,
                elem_id="compare-prompt",
                scale=1,
                placeholder="Write something for the lanes to continue…",
            )
            chosen = html_block(visible=False, elem_id="compare-prompts")
            with gr.Column(elem_id="compare-what", scale=0, min_width=190):
                kind = chooser(
                    "Prompts",
                    "One prompt shows the lanes at work. A set of bundled prompts of a kind shows how much the "
                    "figures vary from text to text.",
                    self._sets(),
                    ONE_PROMPT,
                    elem_id="compare-kind",
                )
                count = gr.Radio(
                    list(range(FEWEST, MOST + 1)),
                    value=shown,
                    label="Lanes",
                    info="How many ways to decode are put side by side.",
                    elem_id="compare-count",
                )
            run, stop = run_and_stop("compare", "Compare")
        lanes, rows = lane_controls(self.choices, methods, shown, not self.engine.public)
        comparison = component(shown)
        winner = gr.State({})
        use = gr.Button("Use the fastest", visible=False, elem_id="compare-use", min_width=180)
        with gr.Row(elem_id="compare-plots"):
            plots = [gr.Plot(visible=False, show_label=False, elem_classes="compare-plot") for _ in PLOTS]
        chosen_values = [*(controls[name] for name in SENT), *(c for lane in lanes for c in lane)]
        self.places = [comparison, *plots, use]
        if not self.engine.public:
            self.places += self.many_readers.build(visit, kind, [count, *chosen_values])
        _follow(count, rows)
        kind.change(self._show_prompts, kind, [prompt, chosen], **QUIET)
        ended = run.click(
            self.run,
            [prompt, kind, count, visit, *chosen_values],
            [comparison, *plots, use, winner],
            concurrency_limit=None,  # turns are taken in `Device`, which can say who is ahead
            trigger_mode="multiple",
            **PRIVATE,
            **UNCHECKED,
        )
        tell_over(ended, "comparison")
        stop.click(self.stop, None, None, **QUIET)
        use.click(
            lambda found: [*(found[name] for name in TAKEN), gr.Tabs(selected="playground")],
            winner,
            [*(controls[name] for name in TAKEN), tabs],
            **QUIET,
        )
        api(self.compare, api_name="compare", concurrency_limit=None)

    def _sets(self) -> list[tuple[str, str]]:
        counts = {kind: sum(each.kind == kind for each in self.prompts) for kind in self._kinds()}
        sets = [(f"{kind} ({n})", kind) for kind, n in counts.items()]
        return [(ONE_PROMPT, ONE_PROMPT), *sets, *([(f"all ({len(self.prompts)})", ALL)] if sets else [])]

    def _show_prompts(self, kind: str) -> tuple[Any, Any]:
        """In place of the prompt, the names of those that were chosen."""
        if kind == ONE_PROMPT:
            return gr.update(visible=True), gr.update(visible=False)
        items = "".join(f"<li><b>{escape(p.name)}</b> {escape(p.note)}</li>" for p in self._chosen("", kind))
        return gr.update(visible=False), gr.update(visible=True, value=f'<ul class="prompt-set">{items}</ul>')

    def _starting_methods(self) -> list[str]:
        reasons = self.engine.methods(self.engine.load(self.engine.settings))
        usable = [method for name, method in METHODS.items() if reasons.get(name, "") is None]
        return [method.name for method in sorted(usable, key=lambda each: (not each.simple, not each.drafts))]


def _settings_of(lane: Settings | ServerContender) -> Settings:
    return lane.settings if isinstance(lane, ServerContender) else lane


def component(lanes: int) -> gr.HTML:
    """So many lanes at work, and the table; its value is what `stream` makes of a comparison's events."""
    html = asset("compare/compare.html").replace("<div ", f'<div data-count="{lanes}" data-marks="{MARKS}" ', 1)
    return scripted(html, "compare/compare.js", elem_id="comparison")


def _follow(count: gr.Radio, rows: list[gr.Row]) -> None:
    """As many rows of controls, and panes, as there are lanes."""
    count.change(
        lambda n: [gr.update(visible=number <= n) for number in range(1, MOST + 1)],
        count,
        rows,
        js="n => { document.dispatchEvent(new CustomEvent('lane-count', { detail: n })); return n; }",
        **QUIET,
    )


def _plots(rows: list[dict[str, Any]]) -> list[Any]:
    """The charts that say more than the table; the others stay hidden."""
    figures = (speed_by_lane(rows), acceptance_by_position(rows))
    return [gr.update(value=figure, visible=figure is not None) for figure in figures]
