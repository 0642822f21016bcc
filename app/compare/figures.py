"""Figures of a comparison: its table in, plotly figures out; None where a figure would say no more than the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from app.tokens.charts import COLOURS, FEWEST_ROUNDS, SERIES, Chart, Style, add_line, figure

Row = dict[str, Any]
"""A line of the table (`core.measuring.comparison.Row` as a dictionary, with the lane's name)."""


def speed_by_lane(rows: Sequence[Row]) -> Chart | None:
    """Tokens per second of each lane, from slowest to fastest prompt; None where no lane ran more than one."""
    shown = [row for row in rows if row["tokens_per_second"]]
    if not any(row["prompts"] > 1 for row in shown):
        return None
    chart = _by_lane("tokens per second", "How fast, and how steady?", "speed", shown)
    fastest = max(row["tokens_per_second"]["max"] for row in shown)
    chart.update_xaxes(range=[0, 1.08 * fastest])
    for row in shown:
        speed, ratio = row["tokens_per_second"], row["ratio_to_plain"]
        style = _style_of(row)
        gain = f"  {ratio['median']:.2f}× plain" if ratio and row["faster"] is not None else ""
        chart.add_scatter(
            x=[speed["median"]],
            y=[_lane_name(row)],
            mode="markers+text",
            text=[f"{speed['median']:.0f}{gain}"],
            textposition="top right" if 2 * speed["median"] < fastest else "top left",
            textfont={"size": 11.5},
            cliponaxis=False,
            marker={"color": style.colour, "size": 10, "symbol": style.symbol},
            error_x={
                "symmetric": False,
                "array": [speed["max"] - speed["median"]],
                "arrayminus": [speed["median"] - speed["min"]],
                "thickness": 2,
                "width": 5,
                "color": style.colour,
            },
            hovertemplate=f"median %{{x:.1f}}, {speed['min']:.1f} to {speed['max']:.1f} over {row['prompts']} prompts"
            "<extra></extra>",
            showlegend=False,
        )
    return chart


def acceptance_by_position(rows: Sequence[Row]) -> Chart | None:
    """How often at least so many drafted tokens were accepted, a line a lane; None where too little was drafted to say.
    Positions that fewer than FEWEST_ROUNDS rounds came to are left out."""
    reached = {
        row["lane"]: [
            share
            for share, count in zip(row["accepted_by_position"], row["drafts_by_position"])
            if count >= FEWEST_ROUNDS
        ]
        for row in rows
    }
    shown = [row for row in rows if reached[row["lane"]]]
    if not shown:
        return None
    chart = figure("position in the draft", "share of rounds accepted so far or further", "acceptance", height=340)
    entitle(chart, "Where in the draft does agreement break?")
    chart.update_yaxes(range=[0, 1.04], tickformat=".0%")
    longest = max(len(shares) for shares in reached.values())
    chart.update_xaxes(dtick=1 if longest <= 8 else 2, tick0=1, tickangle=0, range=[0.6, longest + 0.4])
    for row in shown:
        shares = reached[row["lane"]]
        add_line(chart, f"{row['lane']} {row['name']}", range(1, len(shares) + 1), shares, _style_of(row))
        chart.data[-1].update(
            customdata=row["drafts_by_position"],
            hovertemplate="%{y:.0%} of the %{customdata} rounds that drafted so far accepted %{x} or more"
            "<extra>%{fullData.name}</extra>",
        )
    chart.update_layout(hovermode="closest", showlegend=True)
    return chart


def _by_lane(x: str, title: str, name: str, rows: Sequence[Row]) -> Chart:
    """An empty chart with a line for each lane, the first on top."""
    chart = figure(x, "", name, height=150 + 46 * len(rows))
    entitle(chart, title)
    chart.update_layout(hovermode="closest")
    chart.update_xaxes(showgrid=True, rangemode="tozero")
    names = [_lane_name(row) for row in rows]
    chart.update_yaxes(
        showgrid=False, rangemode="normal", categoryorder="array", categoryarray=names, range=[len(names) - 0.5, -0.7]
    )
    return chart


def entitle(chart: Chart, title: str) -> None:
    """The question that the chart answers, above it."""
    chart.update_layout(
        title={"text": f"<b>{title}</b>", "font": {"size": 13}, "x": 0.015, "xref": "container", "y": 0.97},
        title_yanchor="top",
        margin_t=58,
    )


def _lane_name(row: Row) -> str:
    """Number and method, and below them what else sets the lane apart."""
    return escape(f"{row['lane']} {row['name']}").replace(", ", "<br>", 1)


def _style_of(row: Row) -> Style:
    """Lanes keep their style from chart to chart; one that was added is drawn as plain decoding is."""
    return Style(COLOURS["plain"], "x") if row["added"] else SERIES[row["lane"] - 1]
