"""Figures of the page: measured records in, plotly figures out; no gradio here.

One figure serves both themes: what it draws is readable on light and on dark, and its words take the page's own
colours (assets/page/plotly.css). Every axis names its unit, and no series is told apart by colour alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import plotly.graph_objects as go

COLOURS = {
    "accepted": "#009e73",
    "rejected": "#d55e00",
    "ignored": "#7a7a76",
    "corrected": "#b97f00",
    "bonus": "#0072b2",
    "plain": "#7a7a76",
    "accent": "#7560d8",
}
"""What a token became, and what is ours: those of assets/tokens/race.css, at least 3 : 1 on both surfaces."""

FEWEST_ROUNDS = 5
"""Of a position in the draft: a share of fewer rounds says nothing."""


class Style(NamedTuple):
    """How a series looks: colour, and two marks that need none."""

    colour: str
    symbol: str = "circle"
    dash: str = "solid"


SERIES = (
    Style(COLOURS["accent"]),
    Style("#0f8a8a", "diamond", "dash"),
    Style("#c2528b", "square", "dot"),
    Style("#8a7a2a", "triangle-up", "dashdot"),
)
"""Styles for up to four series of equal standing, such as lanes."""

FONT = '"IBM Plex Sans", system-ui, sans-serif'
INK, SOFT, LINE, PAPER = "#1a1a19", "#545450", "#e5e5e3", "#ffffff"
"""Of the downloaded picture; on the page assets/page/plotly.css has the last word."""


class Chart(go.Figure):
    """A figure with its tools: a picture to download, nothing else."""

    def to_json(self, *args: Any, **kwargs: Any) -> str:
        """The figure as plotly.js takes it, tools included: that is how a page learns of them."""
        document = json.loads(super().to_json(*args, **kwargs) or "{}")
        name = self.layout.meta["name"]  # type: ignore[attr-defined,index]
        return json.dumps(document | {"config": tools(name)})


def tools(name: str) -> dict[str, Any]:
    """plotly.js configuration: one button, which saves `name`.png."""
    return {
        "displayModeBar": True,  # a finger cannot hover
        "displaylogo": False,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": {"format": "png", "filename": name, "scale": 2},
    }


def figure(x: str, y: str, name: str, height: int = 300) -> Chart:
    """An empty chart; `x` and `y` are the axes' titles with their units, `name` names the downloaded file.

    The y title stands level above the axis, so that a phone keeps its width for the data.
    """
    axis = {
        "gridcolor": LINE,
        "linecolor": LINE,
        "zeroline": False,
        "fixedrange": True,  # a finger on a chart scrolls the page
        "automargin": True,
        "tickfont": {"size": 11.5, "color": SOFT},
    }
    title = {
        "text": y,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 8,
        "showarrow": False,
        "font": {"size": 12, "color": SOFT},
    }
    layout = {
        "template": "none",
        "meta": {"name": name},
        "height": height,
        "margin": {"l": 8, "r": 14, "t": 30, "b": 8},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": INK},
        "dragmode": False,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#262624", "bordercolor": "#545450", "font": {"color": "#fafaf9", "size": 12}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.26, "yanchor": "top", "font": {"size": 12}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": COLOURS["plain"], "activecolor": COLOURS["accent"]},
        "xaxis": {
            **axis,
            "showgrid": False,
            "showspikes": False,
            "title": {"text": x, "font": {"size": 12, "color": SOFT}, "standoff": 8},
        },
        "yaxis": {**axis, "rangemode": "tozero"},
        "annotations": [title],
    }
    return Chart(layout=layout)  # whole: to update an empty one takes plotly ten times as long


def add_line(
    chart: Chart,
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    style: Style,
    spread: Sequence[tuple[float, float]] | None = None,
    unit: str = "",
    digits: int = 2,
) -> None:
    """A line through points; `spread` is the (least, greatest) measured at each, drawn as bars."""
    ends = spread or []
    name = escape(name, quote=False)
    hover = f"{name}: %{{y:.{digits}f}}{unit}" + ("%{customdata}" if ends else "") + "<extra></extra>"
    chart.add_scatter(
        name=name,
        x=list(x),
        y=list(y),
        mode="lines+markers",
        line={"color": style.colour, "width": 2, "dash": style.dash},
        marker={"color": style.colour, "size": 7, "symbol": style.symbol},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - at for (_, high), at in zip(ends, y)],
            "arrayminus": [at - low for (low, _), at in zip(ends, y)],
            "thickness": 1,
            "width": 3,
            "color": style.colour,
            "visible": bool(ends),
        },
        customdata=[f" ({low:.{digits}f} to {high:.{digits}f})" for low, high in ends] or None,
        hovertemplate=hover,
    )


def add_bars(chart: Chart, name: str, x: Sequence[Any], y: Sequence[float], style: Style, text: Sequence[str]) -> None:
    """Bars; `text` says each value to who points at it."""
    name = escape(name, quote=False)
    chart.add_bar(
        name=name,
        x=list(x),
        y=list(y),
        text=list(text),
        textposition="none",
        marker={"color": style.colour},
        hovertemplate=f"{name}: %{{text}}<extra></extra>",
    )
