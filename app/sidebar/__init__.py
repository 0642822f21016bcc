"""The controls beside the page, made from the settings (`core.settings`). Their `info` texts appear in the help strip
on hover and focus (assets/page/page.js)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from app.insides import QUIET, html_block
from app.settings import CONTROLS, MOST_NEW_TOKENS, start_of
from core.drafting.methods import METHODS
from core.settings import SPECS, Settings

ROWS = (
    ("tree",),
    ("exit_layer",),
    ("draft_length", "max_new_tokens"),
    ("temperature",),
    ("top_k", "top_p"),
    ("min_p", "seed"),
    ("chat",),
    ("system",),
)
"""Controls under the method, row by row; a setting that is nowhere else comes after them."""


def sidebar(
    pair: Callable[[], dict[str, Any]],
    settings: Settings,
    reasons: dict[str, str | None],
    most: int = MOST_NEW_TOKENS,
    layers: int = 2,
    unload: bool = True,
) -> dict[str, Any]:
    """The controls by name; `pair` lays out those of the pair (`Picker.build`), `reasons` says of each method why the
    pair cannot use it (None: it can), `layers` how many the target has; `unload`: whether a visitor may free the
    models."""
    own: dict[str, dict[str, Any]] = {
        "max_new_tokens": {"most": most},
        "tree": {"visible": METHODS[settings.method].heeds("tree")},
        "exit_layer": {"visible": METHODS[settings.method].heeds("exit_layer"), "most": layers - 1},
        "chat": {"visible": False},  # until the pair is looked at
        "system": {"visible": False},
    }
    with gr.Sidebar(width=288, open=False, elem_id="sidebar"):
        controls = pair()
        with gr.Row(elem_classes="pair-of-controls"):
            controls["precision"] = control("precision", settings)
            controls["draft_precision"].render()
        controls["method"] = _methods(settings.method, reasons)
        controls["refused"] = _refused(reasons)
        placed = {*controls, *(name for row in ROWS for name in row)}
        for row in (*ROWS, *((name,) for name in CONTROLS if name not in placed)):
            with gr.Row(elem_classes="pair-of-controls") if len(row) > 1 else nullcontext():
                controls |= {name: control(name, settings, **own.get(name, {})) for name in row}
        controls["unload"] = gr.Button("Unload the models", size="sm", elem_id="unload", visible=unload)
        controls["unloaded"] = html_block(elem_id="unloaded")
        html_block(_HELP, elem_id="help")
    controls["method"].change(
        lambda chosen: [gr.update(visible=METHODS[chosen].heeds(name)) for name in ("tree", "exit_layer")],
        controls["method"],
        [controls["tree"], controls["exit_layer"]],
        **QUIET,
    )
    return controls


def control(name: str, settings: Settings, most: int | None = None, **how: Any) -> Any:
    """The control of a setting as `settings` has it; `most` is the largest number it takes here."""
    spec = SPECS[name]
    most = most or spec.most_on_page
    value = start_of(name, settings)
    how = {
        "label": spec.label,
        "info": spec.help + (" Changing it loads the models again." if spec.of_models and spec.choices else ""),
        "elem_id": name.replace("_", "-"),
        **how,
    }
    if spec.choices is not None:
        choices = [(label, each) for each, label in spec.choices.items()]
        return gr.Dropdown(choices, value=value, filterable=False, min_width=80, **how)
    if spec.kind is bool:
        return gr.Checkbox(value, min_width=80, **how)
    if spec.kind is str:
        return gr.Textbox(
            value, **{**({"max_lines": 1} if (most or 0) <= 300 else {"lines": 2, "max_lines": 4}), **how}
        )
    if spec.auto:
        return gr.Dropdown(_numbers(most or 0), value=value, filterable=False, min_width=80, **how)
    if spec.slider is not None:
        return gr.Slider(spec.low or 0, spec.slider, value=value, step=spec.step, **how)
    if most:
        how["info"] += f" At most {most:,}."
        value = min(value, most)
    return gr.Number(value, step=spec.step, min_width=80, **how)  # no bounds: `settings_from` answers in words


def follow_pair(reasons: dict[str, str | None], method: str, layers: int, chat: bool) -> dict[str, Any]:
    """What of the controls changes with the pair, as updates by name. A method it can use stays chosen."""
    order = usable(reasons)
    kept: dict[str, Any] = {} if method in order else {"value": order[0]}
    refused = _refusals(reasons)
    news = replaced(reasons, method)
    return {
        "method": gr.update(choices=_choices(order), **kept),
        "refused": gr.update(value=refused, visible=bool(refused)),
        "exit_layer": gr.update(choices=_numbers(layers - 1), value="auto"),
        "chat": gr.update(visible=chat),
        "system": gr.update(visible=chat) if chat else gr.update(visible=False, value=""),
        "news": gr.update(value=f'<p role="status">{escape(news)}</p>' if news else ""),
    }


def replaced(reasons: dict[str, str | None], method: str) -> str:
    """A sentence where another method takes the place of the one chosen, or nothing."""
    order = usable(reasons)
    if method in order:
        return ""
    why = reasons.get(method) or "this pair cannot use it"
    return f"Method changed to {METHODS[order[0]].label}; not {METHODS[method].label}: {why}."


def _numbers(most: int) -> list[tuple[str, str | int]]:
    return [("auto", "auto"), *((str(n), n) for n in range(1, most + 1))]


def usable(reasons: dict[str, str | None]) -> list[str]:
    """Those the pair can use, plain decoding last."""
    return sorted((m for m in METHODS if reasons.get(m, "") is None), key=lambda m: m == "plain")


def fitted(reasons: dict[str, str | None], settings: Settings) -> Settings:
    """The settings, by another method where the pair cannot use theirs: what follows the choice of a pair may be on its
    way to the control still."""
    return replace(settings, method=usable(reasons)[0]) if reasons.get(settings.method) else settings


def _choices(methods: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"{METHODS[m].label}\n{METHODS[m].help}", m) for m in methods]


def _methods(chosen: str, reasons: dict[str, str | None]) -> gr.Radio:
    order = usable(reasons)
    spec = SPECS["method"]
    value = chosen if chosen in order else order[0]
    return gr.Radio(_choices(order), value=value, label=spec.label, info=spec.help, elem_id="method")


def _refused(reasons: dict[str, str | None]) -> gr.Markdown:
    """Methods this pair cannot use, each with the reason."""
    text = _refusals(reasons)
    return gr.Markdown(text, elem_id="refused", visible=bool(text))


def _refusals(reasons: dict[str, str | None]) -> str:
    refused: dict[str, list[str]] = {}
    for method, reason in reasons.items():
        if reason is not None:
            refused.setdefault(reason, []).append(METHODS[method].label)
    lines = "\n".join(f"**{'; '.join(names)}**: {reason}  " for reason, names in refused.items())
    return f"Not with this pair\n\n{lines}" if refused else ""


_HELP = '<div class="help" aria-hidden="true"><p>Point at a control to read what it does.</p></div>'
