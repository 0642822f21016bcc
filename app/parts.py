"""What several tabs lay out alike: rows of selectors, with Run and Stop at their end, and a line on how far it is.

Their looks are in assets/page/parts.css, the `info` of selectors in the help strip (assets/page/page.js).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import gradio as gr
from gradio.events import Dependency

from app.insides import PRIVATE, QUIET, UNCHECKED, forget_upload
from core.errors import UserError
from core.text import Prompt, read_prompts


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


def stoppable(
    run: gr.Button, stop: gr.Button, work: Callable[..., Any], inputs: Any, outputs: Any, ask: Callable[..., None]
) -> Dependency:
    """Pressing `run` does the work, and from then to its end `stop` can be pressed, which asks it to stop."""
    run.click(lambda: gr.update(interactive=True), None, stop, **QUIET)
    # Turns are taken in `Device`, which can say who is ahead.
    ended = run.click(work, inputs, outputs, concurrency_limit=None, **PRIVATE, **UNCHECKED)
    ended.then(lambda: gr.update(interactive=False), None, stop, **QUIET)
    stop.click(ask, None, None, **QUIET)
    return ended


def tell_over(ended: Dependency, name: str) -> None:
    """Tell the page's scripts that what a press began has ended, whatever became of it (assets/page/runs.js)."""
    ended.then(None, js=f"() => {{ document.dispatchEvent(new Event('{name}-over')); }}")


def prompts_uploaded(path: str) -> list[Prompt]:
    """The prompts of a file somebody uploaded. It is deleted then: nothing that a visitor brings stays on the disk."""
    try:
        return read_prompts(path)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None
    finally:
        forget_upload(path)


def status_line(kind: str, *sentences: str) -> str:
    """How something stands, in words."""
    role = "alert" if kind == "error" else "status"
    said = "".join(f"<p>{escape(each)}</p>" for each in sentences)
    return f"<div class='status-line' data-kind='{kind}'><div role='{role}'>{said}</div></div>"


def progress_line(done: int, total: int, of: str, count: str, text: str) -> str:
    """How far something is: a bar, which is `of` something, the `count` in words, and what is done just now."""
    bar = f"<progress max='{total}' value='{done}' aria-label='{escape(of)}'></progress>"
    said = f"<p><b>{escape(count)}</b> {escape(text)}</p>"
    return f"<div class='status-line' data-kind='running'><div>{said}</div>{bar}</div>"


SKETCH = (300, 110, 6)
"""Width, height and margin of a sketch."""


def sketches_html(label: str, pictures: Sequence[tuple[str, str, str]]) -> str:
    """What a tab will show, in small and greyed, before it was used: titles, answers and drawings under a label that
    says where they are from."""
    figures = "".join(
        f"<figure><figcaption><b>{escape(title)}</b><span>{escape(answer)}</span></figcaption>{drawing}</figure>"
        for title, answer, drawing in pictures
    )
    return f'<div class="sketches"><p>{escape(label)}</p><div>{figures}</div></div>'


def sketch(body: str) -> str:
    width, height, _ = SKETCH
    return f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{body}</svg>'


def line_sketch(*lines: Sequence[tuple[float, float]]) -> str:
    """Lines through points, on axes from 0."""
    width, height, margin = SKETCH
    most_x, most_y = (max(point[axis] for points in lines for point in points) or 1 for axis in (0, 1))
    drawn = ""
    for points in lines:
        placed = [
            (margin + (width - 2 * margin) * x / most_x, height - margin - (height - 2 * margin) * y / most_y)
            for x, y in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed)
        drawn += f'<polyline points="{path}"/>{dots}'
    return sketch(drawn)
