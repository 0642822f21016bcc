"""Part of Compare: one or two running servers, from one reader to many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from app.compare.figures import entitle
from app.compare.servers import ServerContender
from app.insides import html_block
from app.parts import progress_line, run_and_stop, selectors, status_line, stoppable, ticks
from app.serving.device import Device
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, guarded, with_device
from app.serving.visit import Visit
from app.tokens.charts import SERIES, Chart, Style, add_line, figure
from core.errors import UserError
from core.servers import connect, describe_gains, gains, load, load_document, load_from_document
from core.servers.load import Load
from core.servers.report import describe_same, label, notes, same_texts
from core.text import Prompt

READERS = (1, 2, 4, 8, 16, 32)
STARTING_READERS = (1, 2, 4, 8)
MOST_SERVERS = 2
PURPOSE = "running servers are being measured (tab Compare)"
NO_SERVER = "Choose \u201ca running server\u2026\u201d as the pair of one lane above, or of two, and give its address."
IDLE = (
    "Every number of readers is measured in turn: so many ask at once, each again as soon as its answer is there. Of "
    "two servers never both are asked at a time."
)
PLOTS = 3
SAVE = "Save the measurement as JSON: the document of python -m core bench --server, to be opened again in History"
Asked = Callable[..., list[ServerContender]]
"""The servers that the lanes name, from the values of Compare's controls."""


class ManyReaders:
    """The foldable part and the functions behind its buttons."""

    def __init__(self, device: Device, prompts: Sequence[Prompt], asked: Asked) -> None:
        self.device = device
        self.prompts = prompts
        self.asked = asked
        self.stops = Stops()

    def build(self, visit: gr.State, kind: gr.Dropdown, values: Sequence[Any]) -> list[Any]:
        """Lay out the part; `kind` chooses among the prompts, `values` are what `asked` takes. Where `again` shows a
        measurement."""
        with gr.Accordion("Many readers at once", open=False, elem_id="many-readers") as part:
            with selectors("load-row"):
                readers = ticks(
                    "Readers at once",
                    "How many texts the server writes at a time. One shows what speculation buys a single reader, many "
                    "what is left of it where a batch fills the machine.",
                    [(str(n), n) for n in READERS],
                    STARTING_READERS,
                    elem_id="load-readers",
                )
                run, stop = run_and_stop("load", "Start", interactive=False)
            status = html_block(status_line("idle", IDLE), elem_id="load-status")
            with gr.Row(elem_id="load-plots"):
                plots = [gr.Plot(visible=False, show_label=False, elem_classes="compare-plot") for _ in range(PLOTS)]
        stoppable(run, stop, self.run, [readers, kind, visit, *values], [status, *plots], self.stop)
        return [part, status, *plots]

    @staticmethod
    def again(document: dict[str, Any], number: int) -> list[Any]:
        """A measurement out of the visit, as it looked when it ended."""
        found = load_from_document(document)
        return [gr.update(open=True), _result(found, number), *_shown(found)]

    def run(
        self, readers: Any, kind: str, visit: Visit, request: gr.Request, *values: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Measure; yields the status and the charts, which grow with every level."""
        kept = [gr.skip()] * PLOTS
        found: Load | None = None
        with self.stops.watch(request) as stop:
            for event in guarded(self._events(readers, kind, values, stop)):
                if event["e"] == "step":
                    found = measured = event["load"]
                    yield _progress(event), *_shown(measured)
                elif event["e"] == "error":
                    yield status_line("error", event["text"]), *kept
                    return
                elif event["e"] == "status":
                    yield status_line(event["kind"], event["text"]), *kept
        if found is not None and any(found.runs):
            yield _result(found, visit.add_load(load_document(found)).number), *_shown(found)

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's measurement; whole levels are kept."""
        self.stops.stop(request)

    def _events(self, readers: Any, kind: str, values: tuple[Any, ...], stop: Stop) -> Iterator[Event]:
        servers = list({(each.address, each.model): each for each in self.asked(*values)}.values())
        if not servers:
            raise UserError(NO_SERVER)
        if len(servers) > MOST_SERVERS:
            raise UserError(f"At most {MOST_SERVERS} servers are measured together; more lanes than that name one.")
        if not isinstance(readers, list) or not readers:
            raise UserError("Choose at least one number of readers.")
        prompts = [each.text for each in self.prompts if kind == each.kind] or [each.text for each in self.prompts]
        yield {"e": "status", "kind": "running", "text": "Connecting\u2026"}
        found = [connect(each.address, each.model, stop) for each in servers]

        def work() -> Iterator[Event]:
            for step in load(found, prompts, servers[0].settings, readers, stop):
                yield {"e": "step", "done": step.done, "total": step.total, "text": step.label, "load": step.load}

        yield from with_device(self.device, stop, work, PURPOSE)


def _progress(event: Event) -> str:
    done, total = event["done"], event["total"]
    return progress_line(done, total, "Levels measured", f"{done} of {total}", event["text"])


def _result(found: Load, number: int) -> str:
    """What the figures say, the crossing first; `number`: as which entry the visit keeps it."""
    first = describe_gains(found) or "One server alone: name its plain counterpart in another lane to compare."
    said = [*(describe_same(each, found) for each in same_texts(found)), *notes(found)]
    if found.stopped:
        said.insert(0, "Stopped early: only what was measured until then is shown.")
    save = f'<button type="button" class="tool" data-save="{number}" title="{SAVE}">JSON</button>'
    return status_line("finished", first, *said) + save


# Charts


def _shown(found: Load) -> list[Any]:
    figures = (speed_by_readers(found), gain_by_readers(found), acceptance_by_readers(found))
    return [gr.update(value=each, visible=each is not None) for each in figures]


def speed_by_readers(found: Load) -> Chart | None:
    """Tokens per second in all and per reader, of each server; None before the first level."""
    if not found.levels:
        return None
    chart = _chart("tokens per second", "How much is written in all, and for each reader?", "load", found)
    for server, style in zip(range(len(found.servers)), SERIES):
        levels = [each for each in found.of(server) if each.tokens_per_second]
        name = label(found, server)
        readers = [each.readers for each in levels]
        if levels:
            add_line(
                chart, f"{name}: in all", readers, [each.tokens_per_second or 0 for each in levels], style, digits=1
            )
        own = [each for each in levels if each.per_reader]
        if own:
            spread = [(each.per_reader.min, each.per_reader.max) for each in own if each.per_reader]
            middle = [each.per_reader.median for each in own if each.per_reader]
            thin = Style(style.colour, f"{style.symbol}-open", "dot")
            add_line(chart, f"{name}: per reader", [each.readers for each in own], middle, thin, spread, digits=1)
    return chart


def gain_by_readers(found: Load) -> Chart | None:
    """The speed-up of the speculative server over the plain one; None unless there are two."""
    ratios = gains(found)
    if not ratios:
        return None
    chart = _chart("times the plain server's tokens/s", "What does speculation buy at so many readers?", "gain", found)
    add_line(
        chart, "speed-up", [each.readers for each in ratios], [each.ratio for each in ratios], SERIES[0], unit="\u00d7"
    )
    chart.add_hline(y=1, line={"color": "#7a7a76", "width": 1, "dash": "dash"})
    chart.update_layout(showlegend=False)
    return chart


def acceptance_by_readers(found: Load) -> Chart | None:
    """Accepted \u00f7 drafted of each server that drafts; None where none says."""
    drawn = [
        (
            server,
            [each for each in found.of(server) if each.speculation and each.speculation.acceptance_rate is not None],
        )
        for server in range(len(found.servers))
    ]
    if not any(levels for _, levels in drawn):
        return None
    chart = _chart("accepted \u00f7 drafted", "Are drafts still accepted when many read?", "acceptance", found)
    for server, levels in drawn:
        rates = [each.speculation.acceptance_rate or 0 for each in levels if each.speculation]
        if levels:
            add_line(chart, label(found, server), [each.readers for each in levels], rates, SERIES[server])
    chart.update_yaxes(range=[0, 1.04], tickformat=".0%")
    chart.update_layout(showlegend=True)
    return chart


def _chart(y: str, title: str, name: str, found: Load) -> Chart:
    """An empty chart over the numbers of readers, each as far from the next as it is a doubling."""
    chart = figure("readers at once", y, name)
    entitle(chart, title)
    chart.update_xaxes(type="log", tickvals=found.readers, ticktext=[str(n) for n in found.readers])
    chart.update_layout(showlegend=True)
    return chart
