"""Rows of selectors as every tab lays them out: what to choose from left to right, then Run and Stop.

Their looks are in assets/page/selectors.css, their `info` in the help strip (assets/page/page.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr


def selectors(elem_id: str | None = None, *classes: str, **how: Any) -> gr.Row:
    """A row for selectors; `classes` are its own beside the one that all such rows have."""
    return gr.Row(elem_id=elem_id, elem_classes=["selectors", *classes], **how)


def chooser(label: str, info: str, choices: Sequence[Any], value: Any, **how: Any) -> gr.Dropdown:
    """A list to choose one of: values, or (label, value)."""
    return gr.Dropdown(list(choices), value=value, label=label, info=info, filterable=False, min_width=80, **how)


def ticks(label: str, info: str, choices: Sequence[Any], value: Sequence[Any], elem_id: str, **how: Any) -> Any:
    """Some of a few, all in sight."""
    return gr.CheckboxGroup(list(choices), value=list(value), label=label, info=info, elem_id=elem_id, **how)


def run_and_stop(tab: str, run: str, **stop: Any) -> tuple[gr.Button, gr.Button]:
    """The two buttons at the end of a tab's row, `TAB-run` and `TAB-stop`; `stop`: options of the second."""
    with gr.Column(elem_id=f"{tab}-buttons", elem_classes="run-and-stop", scale=0, min_width=104):
        return (
            gr.Button(run, variant="primary", elem_id=f"{tab}-run"),
            gr.Button("Stop", elem_id=f"{tab}-stop", **stop),
        )
