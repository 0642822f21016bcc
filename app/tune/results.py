"""What a sweep shows: the recommended setting, three charts with their readings, commands for other engines.

The three charts of a sweep document (`core.measuring.sweep`), each for one question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr
from gradio.events import Dependency

from app.insides import NEWEST, PRIVATE, QUIET, html_block
from app.serving.visit import Visit
from app.tokens.charts import COLOURS, SERIES, Chart, Style, add_bars, add_line, figure
from app.tune.fastest import Fastest, describe_fastest, fastest
from app.tune.production import VERSIONS, Deployment, Recipe, placeholders, recipes
from core.drafting.methods import MTP
from core.measuring.batches import describe_all, measured_of
from core.measuring.report import (
    always_faster,
    basis_at,
    between,
    describe_alternative,
    describe_batches,
    describe_document_costs,
    describe_intervals,
    describe_latency,
    describe_positions,
    describe_prediction,
    points_at,
)
from core.records import Settings

ENGINES = ("vLLM", "SGLang", "llama.cpp", "transformers")
Document = dict[str, Any]


class Results:
    """The components, hidden until there is something to show."""

    def __init__(self) -> None:
        with gr.Column(visible=False, elem_id="tune-results") as self.column:
            with gr.Row(elem_id="tune-best"):
                self.recommendation = html_block(elem_id="tune-recommendation")
                with gr.Column(elem_id="tune-use", scale=0, min_width=230):
                    self.temperature = gr.Radio(
                        [],
                        label="At temperature",
                        info="Which of the measured temperatures is shown, and used.",
                        elem_id="tune-shown",
                    )
                    with gr.Row():
                        self.use = gr.Button("Use it", variant="primary", elem_id="tune-use-it", min_width=80)
                        self.download = gr.Button("Download JSON", elem_id="tune-download", min_width=120)
                    self.switch = gr.Button("Switch", visible=False, elem_id="tune-switch", min_width=120)
            with gr.Row(elem_id="tune-charts"):
                self.plots, self.readings = zip(*(_chart(at, question) for at, question in enumerate(QUESTIONS)))
            self.hint = html_block(elem_id="tune-hint")
            with gr.Tabs(elem_id="tune-engines"):
                self.commands = [_engine(name) for name in ENGINES]

    @property
    def outputs(self) -> list[Any]:
        """What `show` fills, after the empty state."""
        return [self.column, self.temperature, *self._details()]

    def _details(self) -> list[Any]:
        return [self.recommendation, self.switch, self.use, *self.plots, *self.readings, self.hint, *self.commands]

    def show(self, document: Document | None, measured: list[Fastest], visit: Visit) -> list[Any]:
        """Put the results in place of the empty state; without any, all stays as it is. `measured` is what this visit
        measured before, in whatever precision."""
        if not document or not document["points"]:
            return [gr.skip()] * (1 + len(self.outputs))
        temperatures = [row["temperature"] for row in document["temperatures"]]
        chosen = document["settings"]["temperature"]
        chosen = chosen if chosen in temperatures else temperatures[0]
        choices = gr.update(choices=[(f"{t:g}", t) for t in temperatures], value=chosen)
        return [gr.update(visible=False), gr.update(visible=True), choices, *details(document, chosen, measured, visit)]

    def connect(self, document: gr.JSON, measured: gr.State, visit: gr.State, many: Dependency) -> None:
        """Choosing a temperature, downloading the document, copying a command; `many`: when they were measured."""
        inputs = [document, self.temperature, measured, visit]
        many.then(details, inputs, self._details(), **PRIVATE)
        self.temperature.input(details, inputs, self._details(), **NEWEST)
        self.download.click(None, document, None, js=_DOWNLOAD, **QUIET)


def _chart(at: int, question: str) -> tuple[gr.Plot, gr.HTML]:
    with gr.Column(elem_classes="tune-chart", min_width=320):
        html_block(f"<h2>{escape(question)}</h2>", elem_id=f"tune-question-{at}")
        return gr.Plot(show_label=False, elem_id=f"tune-plot-{at}"), html_block(elem_id=f"tune-reading-{at}")


def _engine(engine: str) -> gr.HTML:
    name = engine.replace(".", "-").lower()
    with gr.Tab(engine, id=f"engine-{name}"):
        return command(f"recipe-{name}")


def command(elem_id: str) -> gr.HTML:
    """A place for what `command_html` makes, and the button that copies the command."""
    place = html_block(elem_id=elem_id, elem_classes="command")
    copy = gr.Button("Copy", size="sm", elem_id=f"copy-{elem_id}", elem_classes="copy-command", min_width=80)
    copy.click(None, None, None, js=_COPY % f"#{elem_id} code", **QUIET)
    return place


def details(
    document: Document | None,
    temperature: float | None,
    measured: Sequence[Fastest] = (),
    visit: Visit | None = None,
) -> list[Any]:
    """Recommendation, charts, readings and commands at one temperature."""
    if not document or temperature is None:
        return [gr.skip()] * (4 + 2 * len(QUESTIONS) + len(ENGINES))
    best = fastest(document, temperature, measured)
    other = best is not None and best.asked != document["settings"]["precision"]
    deployment = _deployment(document, temperature)
    made = recipes(deployment) if deployment else []
    many = _measured_together(document, visit)
    return [
        _recommendation(document, temperature, describe_fastest(document, best, measured), many),
        gr.update(visible=other, value=f"Switch to {best.precision}" if best else ""),
        gr.update(interactive=(_best(document, temperature) or {}).get("recommended") is not None),
        speedup_by_length(document, temperature),
        cost_by_rows(document),
        acceptance_by_depth(document, temperature),
        _paragraph(
            f"{describe_intervals(document, temperature)} {describe_prediction(document, temperature)} "
            "Press a faint name of the legend to draw it too."
        ),
        _paragraph(describe_document_costs(document)),
        _paragraph(describe_positions(document, temperature)),
        _hint(document, temperature, deployment, many),
        *(command_html(recipe) for recipe in made or [Recipe(engine, "") for engine in ENGINES]),
    ]


def best_settings(document: Document | None, temperature: float | None) -> list[Any]:
    """The recommended method, draft length and temperature for the sidebar, and the Playground to try them in."""
    best = _best(document, temperature) if document else None
    if not document or best is None or best["recommended"] is None:
        return [gr.skip()] * 4
    playground = gr.Tabs(selected="playground")
    if best["recommended"] == "plain":
        return ["plain", gr.skip(), temperature, playground]
    return [document["settings"]["method"], best["recommended"], temperature, playground]


def _best(document: Document, temperature: float | None) -> dict[str, Any] | None:
    return next((best for best in document["best"] if best["temperature"] == temperature), None)


def _deployment(document: Document, temperature: float) -> Deployment | None:
    """What other engines are to run; None where no fixed length was measured."""
    best = _best(document, temperature)
    if best is None or best["draft_length"] is None:
        return None
    environment = document["environment"]
    draft, head = environment.get("draft"), environment.get("head") or {}
    known = {name: value for name, value in document["settings"].items() if name in Settings.__dataclass_fields__}
    return Deployment(
        settings=replace(Settings(**known), temperature=temperature),
        length=best["draft_length"],
        precision=environment["target"]["precision"],
        draft_precision=draft["precision"] if draft else None,
        same_tokens=document["same_tokens"],
        exit_layer=document["exit_layer"],
        head=head.get("name"),
        mtp=head.get("kind") == MTP,
        algorithm=head.get("algorithm"),
    )


def fastest_settings(document: Document | None, temperature: float | None, measured: Sequence[Fastest]) -> list[Any]:
    """Precision, method, draft length and temperature of the fastest that this visit measured, for the sidebar."""
    best = fastest(document, temperature, measured) if document and temperature is not None else None
    if best is None:
        return [gr.skip()] * 5
    length = gr.skip() if best.method == "plain" else best.setting
    return [best.asked, best.method, length, temperature, gr.Tabs(selected="playground")]


def _measured_together(document: Document, visit: Visit | None) -> str:
    """What many texts at once were measured to gain, of the same target and method; empty where they were not."""
    found = visit.many if visit else None
    return describe_all(found) if found and measured_of(found, document["environment"], document["settings"]) else ""


def _recommendation(document: Document, temperature: float, of_all: str, many: str) -> str:
    """The verdict: tokens per second first, then what that is of plain decoding, and where it holds; with `many` texts
    at once as measured, else as predicted."""
    best = _best(document, temperature)
    if best is None:
        return ""
    recommended = best["recommended"]
    plain = basis_at(document, temperature)["plain"]["median"]
    point = next((p for p in points_at(document, temperature) if p["draft_length"] == recommended), None)
    if recommended == "plain":
        title, head, gain = "Recommended", f"Plain decoding, {plain:.0f} tokens/s", ""
    elif point is None:
        title, head, gain = "Measured", _undecided(document, best), ""
    else:
        title = "Recommended"
        head = f"Draft length {recommended}, {point['tokens_per_second']['median']:.0f} tokens/s"
        gain = f"{point['ratio_to_plain']['median']:.2f}× plain ({between(point)})"
    said = [
        describe_alternative(document, temperature),
        many or describe_batches(document, temperature),
        describe_latency(document, temperature),
        of_all,
    ]
    return (
        f"<p>{title} at temperature {temperature:g}, on these prompts and this machine</p>"
        f"<p class='tune-head'>{head}{f' <small>{gain}</small>' if gain else ''}</p>"
        + "".join(map(_paragraph, filter(None, said)))
    )


def _undecided(document: Document, best: dict[str, Any]) -> str:
    """What is known though no setting can be recommended."""
    if best["pays"]:
        return "Speculation pays; which length is best is open"
    always = always_faster(document, best["temperature"])
    return "Faster in every run; too few of them to be sure" if always else "Not decided"


def _hint(document: Document, temperature: float, deployment: Deployment | None, many: str) -> str:
    """What the commands below are: the setting that is recommended, or one that is not, and then why not."""
    if deployment is None:
        return f"{TAKE_ALONG}{_paragraph('No fixed draft length was measured, so there is none to take along.')}"
    recommended = (_best(document, temperature) or {})["recommended"]
    title, why = {
        None: (ANYWAY, "Which setting is fastest here is not decided, so none is recommended."),
        "plain": (ANYWAY, "Plain decoding is recommended here, for which an engine needs no options."),
    }.get(recommended, (TAKE_ALONG, ""))
    length = f"Draft length {deployment.length}, the best fixed one here, in each engine."
    parts = (why, length, placeholders(deployment), "Sampling settings go with each request.", many)
    return f"{title}{_paragraph(' '.join(filter(None, parts)))}"


def command_html(recipe: Recipe) -> str:
    """An engine's command, what it was checked against, and notes; of a recipe without a command the notes alone."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in recipe.notes)
    if not recipe.command:
        return f"<ul>{notes}</ul>"
    checked = f"<li>Checked against {escape(VERSIONS[recipe.engine])}.</li>"
    region = f"tabindex='0' role='region' aria-label='Command for {recipe.engine}'"
    return f"<pre {region}><code>{escape(recipe.command)}</code></pre><ul>{checked}{notes}</ul>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


TAKE_ALONG, ANYWAY = "<h2>Take it to production</h2>", "<h2>If you try one anyway</h2>"

_COPY = """() => {
  const code = document.querySelector("%s");
  const detail = { copy: code?.textContent, say: "The command is copied." };
  if (code) document.dispatchEvent(new CustomEvent("take-away", { detail }));
}"""

_DOWNLOAD = """(sweep) => {
  const file = { name: "sweep.json", type: "application/json", text: JSON.stringify(sweep) };
  const detail = { ...file, say: "sweep.json is saved." };
  document.dispatchEvent(new CustomEvent("take-away", { detail }));
}"""

QUESTIONS = (
    "How many tokens should the draft propose here?",
    "What does it cost to verify n tokens?",
    "Where in the draft does agreement break?",
)
MEASURED = SERIES[0]
PREDICTED = {
    "honest": ("predicted", SERIES[1]),
    "leviathan": ("Leviathan", SERIES[2]),
    "rule_of_thumb": ("rule of thumb", SERIES[3]),
}
ON_REQUEST = ("Leviathan", "rule of thumb", "auto")
"""Series of the first chart that are shown when their names are pressed: three answer its question."""
ROWS = (1, 2, 4, 8, 16, 32, 64)


def speedup_by_length(document: dict[str, Any], temperature: float) -> Chart:
    """Measured speed-up with its interval at every fixed length, and what three formulas predict."""
    points = points_at(document, temperature)
    fixed = [point for point in points if point["draft_length"] != "auto"]
    lengths = [point["draft_length"] for point in fixed]
    chart = figure("draft length (tokens)", "speed-up over plain decoding (×)", f"draft-length-t{temperature:g}", 340)
    ratios = [point["ratio_to_plain"] for point in fixed]
    add_line(
        chart,
        "measured",
        lengths,
        [ratio["median"] for ratio in ratios],
        MEASURED,
        [(point["interval"]["low"], point["interval"]["high"]) for point in fixed],
        "×",
    )
    chart.update_traces(line_width=3, marker_size=9, selector={"name": "measured"})
    for key, (name, style) in PREDICTED.items():
        known = [point for point in fixed if point["predicted"]]
        x = [point["draft_length"] for point in known]
        add_line(chart, name, x, [point["predicted"][key] for point in known], style, unit="×")
    if auto := next((point for point in points if point["draft_length"] == "auto"), None):
        _add_level(chart, "auto", lengths, auto["ratio_to_plain"]["median"], Style(COLOURS["accent"], dash="longdash"))
    _add_level(chart, "plain", lengths, 1.0, Style(COLOURS["plain"], dash="dot"))
    for name in ON_REQUEST:
        chart.update_traces(visible="legendonly", selector={"name": name})
    chart.update_xaxes(tickmode="array", tickvals=lengths)
    chart.update_yaxes(range=[0, _top(fixed)])
    return chart


def _top(points: list[dict[str, Any]]) -> float:
    """Where the axis ends: one run that was disturbed must not flatten all others; pointing at it tells its value."""
    ratios = [point["ratio_to_plain"] for point in points]
    middle = [ratio["median"] for ratio in ratios]
    middle += [value for point in points for value in (point["predicted"] or {}).values()]
    return 1.05 * max(1.0, min(max(ratio["max"] for ratio in ratios), 1.5 * max(middle)), *middle)


def cost_by_rows(document: dict[str, Any]) -> Chart:
    """The verification cost curve between what would be free and what would gain nothing; both axes by doublings."""
    costs = {int(n): seconds for n, seconds in document["costs"].items()}
    rows = sorted(costs)
    ticks = [n for n in ROWS if n <= rows[-1]]
    chart = figure("tokens in one pass", "time of the pass (× one token)", "verification-cost", 340)
    add_line(chart, "measured", rows, [costs[n] / costs[1] for n in rows], MEASURED, unit="×")
    add_line(chart, "one by one", ticks, ticks, Style(COLOURS["plain"], dash="dot"), unit="×", digits=0)
    chart.update_traces(mode="lines", selector={"name": "one by one"})
    _add_level(chart, "free", ticks, 1.0, Style(COLOURS["accepted"], dash="dash"))
    chart.data[0].customdata = [costs[n] * 1000 for n in rows]  # type: ignore[index]
    chart.data[0].hovertemplate = "measured: %{y:.2f}×, %{customdata:.2f} ms<extra></extra>"  # type: ignore[index]
    scale = {"type": "log", "dtick": None, "tickmode": "array", "tickvals": ticks, "ticktext": [str(n) for n in ticks]}
    chart.update_xaxes(**scale)
    chart.update_yaxes(**scale, rangemode="normal")
    return chart


def acceptance_by_depth(document: dict[str, Any], temperature: float) -> Chart:
    """How often a draft stands up to each position, and what equally good tokens would give."""
    basis = basis_at(document, temperature)
    reached, alpha = basis["accepted_by_position"], basis["acceptance_rate"]
    positions = list(range(1, len(reached) + 1))
    chart = figure(
        "position in the draft", "rounds in which the draft stands so far (%)", f"positions-t{temperature:g}", 340
    )
    labels = [f"{share:.0%}" for share in reached]
    add_bars(chart, "measured", positions, [100 * a for a in reached], Style(COLOURS["accepted"]), labels)
    if alpha is not None:
        equal = [100 * alpha**i for i in positions]
        style = Style(COLOURS["accent"], "diamond", "dash")
        add_line(chart, f"if every token stood in {alpha:.0%}", positions, equal, style, unit="%", digits=0)
    chart.update_layout(bargap=0.35)
    chart.update_xaxes(dtick=1)
    chart.update_yaxes(range=[0, 108], tickvals=[0, 25, 50, 75, 100])
    return chart


def _add_level(chart: Chart, name: str, x: list[int], y: float, style: Style) -> None:
    """A horizontal line that the series are read against."""
    add_line(chart, name, x, [y] * len(x), style, unit="×")
    chart.update_traces(mode="lines", line_width=1.5, selector={"name": name})
