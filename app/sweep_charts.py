"""The three charts of a sweep document (`core.sweep`), each for one question."""

from __future__ import annotations

from typing import Any

from app.charts import COLOURS, SERIES, Chart, Style, add_bars, add_line, figure
from core.measuring.sweep_report import basis_at, points_at

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
ROWS = (1, 2, 4, 8, 16, 32, 64)


def speedup_by_length(document: dict[str, Any], temperature: float) -> Chart:
    """Measured speed-up with its spread at every fixed length, and what three formulas predict."""
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
        [(ratio["min"], ratio["max"]) for ratio in ratios],
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
