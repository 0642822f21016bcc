"""The controls of the lanes: a row each, where a lane takes its text from, and what it sets for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.compare.lanes import ADDRESS, MOST, SAME, SERVER, SIDEBAR, needed, short_precision
from app.insides import QUIET, html_block
from app.parts import chooser, selectors
from app.sidebar import control
from app.sidebar.picker import Choice
from core.drafting.methods import METHODS
from core.settings import PRECISIONS, SPECS, Settings

MARKS = "●◆■▲"
"""Of each lane, here, in its pane and in the charts."""
_MARK = '<p class="lane-mark" data-lane="{number}"><i aria-hidden="true">{mark}</i> <b>Lane {number}</b></p>'
_HEADS = (
    '<p aria-hidden="true"><span>Models</span><span>Precision</span><span>Method</span><span>Draft length</span></p>'
)


def lane_controls(
    choices: Mapping[str, Choice], methods: Sequence[str], shown: int, servers: bool
) -> tuple[list[tuple[Any, ...]], list[gr.Row]]:
    """The controls of every lane, in the order of `app.compare.lanes.LANE`, and the rows that they stand in, of which
    `shown` are to be seen. `choices` are the picker's, by value; `methods` those that the lanes start with; with
    `servers` a lane may be a running one."""
    pairs = [(choice.label, value) for value, choice in choices.items()] + ([(SERVER, SERVER)] if servers else [])
    lanes, rows = [], []
    with gr.Column(elem_id="compare-lanes"):
        html_block(_HEADS, elem_id="lane-heads")
        for number in range(1, MOST + 1):
            with selectors(None, "compare-lane", visible=number <= shown) as row:
                html_block(_MARK.format(number=number, mark=MARKS[number - 1]), elem_classes="lane-name")
                lanes.append(_of_lane(number, pairs, methods[(number - 1) % len(methods)]))
            rows.append(row)
    return lanes, rows


def _of_lane(number: int, pairs: Sequence[tuple[str, str]], method: str) -> tuple[Any, ...]:
    """A lane's controls; where a lane takes its text from comes first and decides which of the others it needs."""
    usual = [(SIDEBAR, SIDEBAR)] if number == 1 else [(SAME, SAME), (SIDEBAR, SIDEBAR)]
    lengths = range(1, (SPECS["draft_length"].most_on_page or 0) + 1)

    def choice(name: str, label: str, info: str, choices: list[Any], value: str, **how: Any) -> gr.Dropdown:
        return chooser(f"Lane {number}: {label}", info, choices, value, elem_classes=f"lane-{name}", **how)

    pair = choice(
        "pair",
        "pair",
        "The models of this lane. Lanes of one target race at once; other targets are loaded in turn.",
        [*usual, *pairs],
        usual[0][1],
    )
    server, model = (
        gr.Textbox(
            label=f"{label} of lane {number}",
            info=info,
            placeholder=example,
            max_lines=1,
            visible=False,
            elem_classes=f"lane-{name}",
        )
        for name, label, info, example in ADDRESS
    )
    target, draft = (
        control(
            name,
            Settings(),
            label=f"{SPECS[name].label} of lane {number}",
            visible=False,
            elem_id=None,
            elem_classes=f"lane-{name}",
        )
        for name in ("target", "draft")
    )
    precision = choice(
        "precision",
        "precision",
        "How many bits a weight takes in this lane. Another precision is another target: it runs in turn.",
        [*usual, *((short_precision(p), p) for p in PRECISIONS)],
        usual[0][1],
    )
    chosen = choice(
        "method",
        "method",
        "Who guesses the next tokens in this lane.",
        [(method.label, name) for name, method in METHODS.items()],
        method,
    )
    length = choice(
        "length",
        "draft length",
        "How many tokens this lane proposes before the target checks them.",
        [*usual, ("auto", "auto"), *((str(n), n) for n in lengths)],
        usual[0][1],
        visible=METHODS[method].heeds("draft_length"),
    )
    shown = lambda pair, method: [gr.update(visible=each) for each in needed(pair, method)]  # noqa: E731
    pair.change(shown, [pair, chosen], [target, draft, server, model, precision, chosen, length], **QUIET)
    chosen.change(lambda method: gr.update(visible=METHODS[method].heeds("draft_length")), chosen, length, **QUIET)
    return pair, target, draft, precision, chosen, length, server, model
