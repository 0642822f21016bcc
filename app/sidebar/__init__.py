"""The controls beside the page. Their `info` texts appear in the help strip on hover and focus (assets/page.js)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gradio as gr

from app.insides import QUIET, html_block
from app.settings import LONGEST_DRAFT, MOST_NEW_TOKENS
from core.records import PRECISIONS, Settings

if TYPE_CHECKING:
    from app.sidebar.picker import Picker


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
    picker: Picker,
    settings: Settings,
    reasons: dict[str, str | None],
    most: int = MOST_NEW_TOKENS,
    layers: int = 2,
    chat: bool = False,
) -> dict[str, Any]:
    """The controls by name; `reasons` says of each method why the pair cannot use it (None: it can), `layers` how many
    the target has, `chat` whether it takes a system prompt."""
    with gr.Sidebar(width=288, elem_id="sidebar"):
        controls = picker.build()
        with gr.Row(elem_classes="pair-of-controls"):
            controls["precision"] = gr.Dropdown(
                [(PRECISION_NAMES[p], p) for p in PRECISIONS],
                value=settings.precision,
                label="Precision",
                info="How many bits a weight takes. Fewer bits are read faster from memory; auto takes what suits this "
                "machine. Changing it loads the models again.",
                filterable=False,
                min_width=80,
            )
            controls["draft_precision"].render()
        controls["method"] = _methods(settings.method, reasons)
        controls["refused"] = _refused(reasons)
        controls |= _shape(settings, controls["method"], layers)
        controls |= _numbers(settings, most)
        controls |= _chat(settings, chat)
        controls["unload"] = gr.Button("Unload the models", size="sm", elem_id="unload")
        controls["unloaded"] = html_block(elem_id="unloaded")
        html_block(_HELP, elem_id="help")
    return controls


def follow_pair(reasons: dict[str, str | None], method: str, layers: int, chat: bool) -> dict[str, Any]:
    """What of the controls changes with the pair, as updates by name. A method it can use stays chosen."""
    order = _usable(reasons)
    choices = [("\n".join(METHODS[m]), m) for m in order]
    kept: dict[str, Any] = {} if method in order else {"value": order[0]}
    refused = _refusals(reasons)
    return {
        "method": gr.update(choices=choices, **kept),
        "refused": gr.update(value=refused, visible=bool(refused)),
        "exit_layer": gr.update(choices=_exit_layers(layers), info=_exit_info(layers), value="auto"),
        "chat": gr.update(visible=chat),
        "system": gr.update(visible=chat) if chat else gr.update(visible=False, value=""),
    }


def _usable(reasons: dict[str, str | None]) -> list[str]:
    usable = [m for m, reason in reasons.items() if reason is None]
    return [m for m in METHODS if m in usable]


def _methods(chosen: str, reasons: dict[str, str | None]) -> gr.Radio:
    order = _usable(reasons)
    return gr.Radio(
        [("\n".join(METHODS[m]), m) for m in order],
        value=chosen if chosen in order else order[0],
        label="Method",
        info="Who guesses the next tokens. Whatever the method, the target has the last word on every token.",
        elem_id="method",
    )


def _refused(reasons: dict[str, str | None]) -> gr.Markdown:
    """Methods this pair cannot use, each with the reason."""
    text = _refusals(reasons)
    return gr.Markdown(text, elem_id="refused", visible=bool(text))


def _refusals(reasons: dict[str, str | None]) -> str:
    refused = {METHODS[m][0]: reason for m, reason in reasons.items() if reason is not None}
    lines = "\n".join(f"**{name}**: {reason}  " for name, reason in refused.items())
    return f"Not with this pair\n\n{lines}" if refused else ""


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
        _exit_layers(layers),
        value=settings.exit_layer or "auto",
        label="Exit layer",
        info=_exit_info(layers),
        visible=settings.method == "early-exit",
        filterable=False,
        elem_id="exit-layer",
    )
    method.change(
        lambda chosen: (gr.update(visible=chosen == "tree"), gr.update(visible=chosen == "early-exit")),
        method,
        [tree, exit_layer],
        **QUIET,
    )
    return {"tree": tree, "exit_layer": exit_layer}


def _exit_layers(layers: int) -> list[tuple[str, str | int]]:
    return [("auto", "auto"), *((str(n), n) for n in range(1, layers))]


def _exit_info(layers: int) -> str:
    return (
        f"After which of the target's {layers} layers the drafting pass stops. Auto takes the one that promises most "
        "when measured on a few lines."
    )


def _chat(settings: Settings, visible: bool) -> dict[str, Any]:
    """For targets with a chat template."""
    return {
        "chat": gr.Dropdown(
            [("as a chat message", "auto"), ("as text to continue", "off")],
            value=settings.chat,
            label="Prompt is taken",
            info="A chat model answers a message in its own template, thinking switched off where the template offers "
            "it. As text, the model goes on writing it.",
            filterable=False,
            visible=visible,
            elem_id="chat",
        ),
        "system": gr.Textbox(
            settings.system or "",
            label="System prompt",
            info="What the chat model is told before your message. Empty: nothing, or what its template says itself.",
            visible=visible,
            lines=2,
            max_lines=4,
            elem_id="system",
        ),
    }


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
