"""The controls beside the page. Their `info` texts appear in the help strip on hover and focus (assets/page.js)."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.settings import LONGEST_DRAFT, MOST_NEW_TOKENS, PRECISIONS
from core.records import Settings

METHODS = {
    "draft": ("Draft model", "A small model proposes, the target checks."),
    "ngram": ("N-gram", "Proposes what followed the same words before; no second model."),
    "ngram+draft": ("N-gram, then draft", "Repeats where the text repeats, else asks the small model."),
    "early-exit": ("Early exit", "The target's own first layers propose."),
    "tree": ("Tree", "Proposes several continuations at once, checked in one pass."),
    "plain": ("Plain only", "No speculation: one token per pass."),
}
PRECISION_NAMES = {
    "auto": "auto",
    "nf4": "NF4 (4 bits)",
    "bf16": "bf16 (16 bits)",
    "fp16": "fp16 (16 bits)",
    "fp32": "fp32 (32 bits)",
}


def sidebar(
    pair: str, settings: Settings, reasons: dict[str, str | None], most: int = MOST_NEW_TOKENS, layers: int = 2
) -> dict[str, Any]:
    """The controls by name; `reasons` says of each method why this pair cannot use it (None: it can), `layers` how
    many the target has."""
    with gr.Sidebar(width=288, elem_id="sidebar"):
        controls: dict[str, Any] = {
            "pair": gr.Dropdown(
                [pair],
                value=pair,
                label="Pair",
                info="The target writes the text. The draft, much smaller, guesses what it will write next.",
                interactive=False,
                elem_id="pair",
            ),
            "precision": gr.Dropdown(
                [(PRECISION_NAMES[p], p) for p in PRECISIONS],
                value=settings.precision,
                label="Precision",
                info="How many bits a weight takes. Fewer bits are read faster from memory; auto takes what suits this "
                "machine. Changing it loads the models again.",
                filterable=False,
            ),
            "method": _methods(settings.method, reasons),
        }
        _refused(reasons)
        controls |= _shape(settings, controls["method"], layers)
        controls |= _numbers(settings, most)
        gr.HTML(_HELP, elem_id="help", apply_default_css=False, js_on_load=None)
    return controls


def _methods(chosen: str, reasons: dict[str, str | None]) -> gr.Radio:
    usable = [m for m, reason in reasons.items() if reason is None]
    order = [m for m in METHODS if m in usable]
    return gr.Radio(
        [("\n".join(METHODS[m]), m) for m in order],
        value=chosen if chosen in order else order[0],
        label="Method",
        info="Who guesses the next tokens. Whatever the method, the target has the last word on every token.",
        elem_id="method",
    )


def _refused(reasons: dict[str, str | None]) -> None:
    """Methods this pair cannot use, each with the reason."""
    refused = {METHODS[m][0]: reason for m, reason in reasons.items() if reason is not None}
    if refused:
        lines = "\n".join(f"**{name}**: {reason}  " for name, reason in refused.items())
        gr.Markdown(f"Not with this pair\n\n{lines}", elem_id="refused")


def _shape(settings: Settings, method: gr.Radio, layers: int) -> dict[str, Any]:
    """What only one method asks for, shown with it."""
    tree = gr.Textbox(
        settings.tree or "auto",
        label="Tree",
        info="Children by depth: 3x2x1 is three first tokens, two continuations of each, one of each of those. Auto "
        "follows which branches are accepted and what a pass costs; the draft length does not matter here.",
        visible=settings.method == "tree",
        max_lines=1,
        elem_id="tree",
    )
    exit_layer = gr.Dropdown(
        [("auto", "auto"), *((str(n), n) for n in range(1, layers))],
        value=settings.exit_layer or "auto",
        label="Exit layer",
        info=f"After which of the target's {layers} layers the drafting pass stops. Auto takes the one that promises "
        "most when measured on a few lines.",
        visible=settings.method == "early-exit",
        filterable=False,
        elem_id="exit-layer",
    )
    method.change(
        lambda chosen: (gr.update(visible=chosen == "tree"), gr.update(visible=chosen == "early-exit")),
        method,
        [tree, exit_layer],
        show_progress="hidden",
        queue=False,
        api_visibility="private",
    )
    return {"tree": tree, "exit_layer": exit_layer}


def _numbers(settings: Settings, most: int) -> dict[str, Any]:
    lengths: list[tuple[str, str | int]] = [("auto", "auto"), *((str(n), n) for n in range(1, LONGEST_DRAFT + 1))]
    controls: dict[str, Any] = {}
    with gr.Row(elem_classes="pair-of-controls"):
        controls["draft_length"] = gr.Dropdown(
            lengths,
            value=settings.draft_length,
            label="Draft length",
            info="How many tokens are proposed before the target checks them, all in one pass. Auto follows how many "
            "are accepted and what a pass costs on this machine.",
            filterable=False,
            min_width=80,
        )
        controls["max_new_tokens"] = _number(
            "New tokens",
            min(settings.max_new_tokens, most),
            f"Where to stop at the latest, up to {most:,}. Both lanes stop earlier when the text ends.",
            16,
        )
    controls["temperature"] = gr.Slider(
        0,
        2,
        value=settings.temperature,
        step=0.05,
        label="Temperature",
        info="0 is greedy: always the likeliest token, and both lanes write the same text. Above 0 tokens are drawn: "
        "the texts differ by chance, their law does not.",
    )
    with gr.Row(elem_classes="pair-of-controls"):
        controls["top_k"] = _number(
            "Top-k",
            settings.top_k,
            "Draw only from the k likeliest tokens. 0 switches it off. No effect at temperature 0.",
            5,
        )
        controls["top_p"] = _number(
            "Top-p",
            settings.top_p,
            "Draw only from the likeliest tokens that together hold this much probability. 1 switches it off.",
            0.05,
        )
    with gr.Row(elem_classes="pair-of-controls"):
        controls["min_p"] = _number(
            "Min-p",
            settings.min_p,
            "Draw only from tokens at least this fraction as likely as the likeliest one. 0 switches it off.",
            0.01,
        )
        controls["seed"] = _number(
            "Seed",
            settings.seed,
            "The same seed and settings on the same machine give the same run.",
            1,
        )
    return controls


def _number(label: str, value: float, info: str, step: float) -> gr.Number:
    """A compact number field. It has no bounds of its own: `settings_from` answers in words."""
    return gr.Number(value=value, label=label, info=info, step=step, min_width=80)


_HELP = '<div class="help" aria-hidden="true"><p>Point at a control to read what it does.</p></div>'
