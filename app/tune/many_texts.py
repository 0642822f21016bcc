"""Part of Tune: many texts at once, and from how many on drafting no longer pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.events import Dependency

from app.insides import html_block
from app.parts import progress_line, run_and_stop, selectors, status_line, stoppable, ticks
from app.serving import Engine
from app.serving.device import Device
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, as_events, guarded, with_pair
from app.serving.visit import Visit
from app.sidebar import fitted
from app.tokens.charts import COLOURS, SERIES, Chart, Style, add_line, figure
from core.drafting.methods import METHODS
from core.errors import UserError
from core.measuring.batches import SIZES, TOKENS, describe
from core.settings import Settings
from core.text import Prompt

OFFERED = (1, 2, 4, 8, 16, 32)
REPEATS = 2
PURPOSE = "many texts at once are being measured (tab Tune)"
FIXED = 3
"""The draft length that is held fixed beside `auto`, where the sidebar says none."""
IDLE = (
    "A server writes many texts at once, and its passes are wide before anything is drafted. Each number of texts is "
    "measured with drafts as long as pays there (auto), with drafts of a fixed length, and plainly."
)
Planned = Callable[..., tuple[Settings, list[Prompt]]]
"""Settings and prompts by the values of Tune's controls and the sidebar's."""


class ManyTexts:
    """The foldable part and the functions behind its buttons. A measurement may cost `budget` tokens."""

    def __init__(self, engine: Engine, device: Device, planned: Planned, budget: float) -> None:
        self.engine, self.device = engine, device
        self.planned, self.budget = planned, budget
        self.stops = Stops()

    def build(self, visit: gr.State, values: Sequence[Any]) -> Dependency:
        """Lay out the part; `values` are what `planned` takes. What happens when a measurement has ended."""
        with gr.Accordion("How many at once", open=False, elem_id="many-texts"):
            with selectors("many-row"):
                sizes = ticks(
                    "Texts at once",
                    "Decoded side by side on this machine, in passes that they share.",
                    [(str(n), n) for n in OFFERED],
                    SIZES,
                    elem_id="many-sizes",
                )
                run, stop = run_and_stop("many", "Measure", interactive=False)
            status = html_block(status_line("idle", IDLE), elem_id="many-status")
            plot = gr.Plot(visible=False, show_label=False, elem_id="many-plot")
        return stoppable(run, stop, self.run, [sizes, visit, *values], [status, plot], self.stop)

    def run(self, sizes: Any, visit: Visit, request: gr.Request, *values: Any) -> Iterator[tuple[Any, Any]]:
        """Measure; yields the status, and last the chart."""
        document = None
        with self.stops.watch(request) as stop:
            for event in guarded(self._events(sizes, values, stop)):
                if event["e"] == "document":
                    document = event["document"]
                elif event["e"] == "progress":
                    count = f"{event['done']} of {event['total']}"
                    line = progress_line(event["done"], event["total"], "Measured", count, event["text"])
                    yield line, gr.skip()
                elif event["e"] != "done":
                    yield status_line("error" if event["e"] == "error" else event["kind"], event["text"]), gr.skip()
                if event["e"] == "error":
                    return
        if document is None or not document["loses_from"] or not document["rows"]:
            yield status_line("stopped", "Stopped before anything was measured."), gr.skip()
            return
        visit.many = document
        said = [describe(document, name) for name in document["loses_from"]]
        if document["stopped"]:
            said.insert(0, "Stopped early: only what was measured until then is shown.")
        yield status_line("finished", *said), gr.update(value=gain_by_texts(document), visible=True)

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's measurement; what is measured is kept."""
        self.stops.stop(request)

    def _events(self, sizes: Any, values: Sequence[Any], stop: Stop) -> Iterator[Event]:
        settings, prompts = self.planned(*values)
        if not METHODS[settings.method].drafts:
            raise UserError("Plain decoding drafts nothing; choose a method in the sidebar to measure it beside plain.")
        if not isinstance(sizes, list) or not sizes:
            raise UserError("Choose at least one number of texts.")
        variants = variants_of(settings)
        total = REPEATS * (len(variants) + 1) * TOKENS * sum(max(int(size), len(prompts)) for size in sizes)
        if total > self.budget:
            raise UserError(
                f"This costs as much as writing {total:,} tokens, past the {self.budget:,} of this public page; choose "
                "smaller numbers of texts."
            )

        def work(pair: Any) -> Iterator[Event]:
            own = variants_of(fitted(self.engine.methods(pair), settings))
            return as_events(self.engine.batches(pair, prompts, own, sizes, REPEATS, stop))

        yield from with_pair(self.device, self.engine, settings, stop, work, PURPOSE)


def variants_of(settings: Settings) -> dict[str, Settings]:
    """What is measured of a method: drafts as long as pays, and as long as they are set; of a tree its shape."""
    if not METHODS[settings.method].swept:
        return {METHODS[settings.method].label: settings}
    fixed = FIXED if settings.draft_length == "auto" else settings.draft_length
    return {"auto": replace(settings, draft_length="auto"), f"always {fixed}": replace(settings, draft_length=fixed)}


def gain_by_texts(document: dict[str, Any]) -> Chart:
    """The speed-up over plain decoding of as many texts, measured and predicted, plain decoding being the line at 1."""
    sizes = sorted({row["texts"] for row in document["rows"]})
    chart = figure("texts at once", "speed-up over plain decoding of as many (×)", "many-texts", 340)
    for name, style in zip(document["loses_from"], SERIES):
        rows = [row for row in document["rows"] if row["name"] == name]
        ratios = [row["ratio_to_plain"] for row in rows]
        spread = [(ratio["min"], ratio["max"]) for ratio in ratios]
        x = [row["texts"] for row in rows]
        add_line(chart, name, x, [ratio["median"] for ratio in ratios], style, spread, "×")
        known = [row for row in rows if row["predicted"] is not None]
        if known and name != "auto":
            thin = Style(style.colour, f"{style.symbol}-open", "dot")
            y = [row["predicted"] for row in known]
            add_line(chart, f"{name}, predicted", [row["texts"] for row in known], y, thin, unit="×")
        if name != "auto" and (
            lost := next((row for row in rows if row["texts"] == document["loses_from"][name]), None)
        ):
            mark = Style(COLOURS["rejected"], "x")
            add_line(chart, f"loses from {lost['texts']}", [lost["texts"]], [lost["ratio_to_plain"]["median"]], mark)
    chart.add_hline(y=1, line={"color": "#7a7a76", "width": 1, "dash": "dash"})
    chart.update_xaxes(type="log", tickvals=sizes, ticktext=[str(n) for n in sizes])
    chart.update_layout(showlegend=True)
    return chart
