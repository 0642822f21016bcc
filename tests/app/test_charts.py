"""Figures of the page: the data they draw, their units, and that one figure is readable in both themes."""

import copy
import json
import re

import pytest
from fake_sweep import fake_sweep
from fakes import ENVIRONMENT

from app.tokens import charts
from app.tokens.charts import COLOURS, SERIES, add_line, figure
from app.tune.results import PREDICTED, acceptance_by_depth, cost_by_rows, speedup_by_length
from core.measuring.report import points_at
from core.measuring.sweep import finish
from core.records import Settings
from core.text import Prompt

LENGTHS = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def document():
    plan = ([Prompt("one", "x")], Settings(), LENGTHS, [0.0, 1.0], 1, lambda: False)
    return finish(fake_sweep(ENVIRONMENT, 0.8, 0.0, *plan))


def drawn(chart):
    """What plotly.js receives."""
    return json.loads(chart.to_json())


def series(chart, name):
    return next(trace for trace in drawn(chart)["data"] if trace["name"] == name)


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted({*COLOURS.values(), *(style.colour for style in SERIES)}))
def test_one_figure_serves_both_themes(colour):
    """WCAG asks 3 : 1 for what is drawn; surfaces are those of the theme (app/assets.py)."""
    for surface in ("#fafaf9", "#ffffff", "#121211", "#1a1a19"):
        light, dark = sorted((luminance(colour), luminance(surface)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, (colour, surface)


def test_series_differ_in_more_than_colour():
    assert len({style.symbol for style in SERIES}) == len({style.dash for style in SERIES}) == len(SERIES)
    marks = [(style.symbol, style.dash) for _, style in PREDICTED.values()]
    assert len(set(marks)) == len(marks)


def test_a_figure_brings_its_tools_and_no_other_hosts():
    """One button, which saves a picture; no logo; no plotly template with its own colours."""
    chart = figure("length (tokens)", "speed (tokens/s)", "speed")
    document = drawn(chart)
    assert document["config"] == charts.tools("speed")
    assert document["config"]["modeBarButtons"] == [["toImage"]]
    assert document["config"]["displaylogo"] is False
    assert "colorway" not in json.dumps(document)
    assert not re.findall(r"https?:", json.dumps(document))


def test_axes_name_their_units():
    layout = drawn(figure("length (tokens)", "speed (tokens/s)", "speed"))["layout"]
    assert layout["xaxis"]["title"]["text"] == "length (tokens)"
    assert layout["annotations"][0]["text"] == "speed (tokens/s)"


def test_spread_reaches_from_least_to_greatest():
    chart = figure("x", "y", "name")
    add_line(chart, "a", [1], [5.0], SERIES[0], spread=[(4.0, 8.0)])
    bars = series(chart, "a")["error_y"]
    assert (bars["arrayminus"], bars["array"]) == ([1.0], [3.0])


def test_names_stay_text():
    """plotly.js reads a little HTML in names; a model's name must not become any."""
    chart = figure("x", "y", "name")
    add_line(chart, "<b>model</b>", [1], [1.0], SERIES[0])
    assert drawn(chart)["data"][0]["name"] == "&lt;b&gt;model&lt;/b&gt;"


def test_measured_and_predicted_speed_ups_in_one_chart(document):
    chart = speedup_by_length(document, 0.0)
    fixed = [point for point in points_at(document, 0.0) if point["draft_length"] != "auto"]
    measured = series(chart, "measured")
    assert measured["x"] == LENGTHS
    assert measured["y"] == [point["ratio_to_plain"]["median"] for point in fixed]
    for key, (name, _) in PREDICTED.items():
        assert series(chart, name)["y"] == [point["predicted"][key] for point in fixed]
    auto = points_at(document, 0.0)[-1]["ratio_to_plain"]["median"]
    assert set(series(chart, "auto")["y"]) == {auto}
    assert set(series(chart, "plain")["y"]) == {1.0}


def test_the_cost_curve_starts_at_one_and_reaches_a_batch(document):
    curve = series(cost_by_rows(document), "measured")
    assert (curve["x"][0], curve["y"][0], curve["x"][-1]) == (1, 1.0, 64)
    assert curve["y"][-1] == pytest.approx(document["costs"]["64"] / document["costs"]["1"])


def test_acceptance_by_position_is_in_percent(document):
    chart = acceptance_by_depth(document, 1.0)
    bars = series(chart, "measured")
    assert bars["y"] == pytest.approx([100 * 0.75**i for i in range(1, 9)])
    assert bars["text"][0] == "75%"


def test_one_disturbed_run_does_not_flatten_the_chart(document):
    disturbed = copy.deepcopy(document)
    disturbed["points"][0]["ratio_to_plain"]["max"] = 40.0
    low, high = drawn(speedup_by_length(disturbed, 0.0))["layout"]["yaxis"]["range"]
    highest = max(max(series(speedup_by_length(document, 0.0), name)["y"]) for name, _ in PREDICTED.values())
    assert low == 0 and highest < high < 2 * highest
