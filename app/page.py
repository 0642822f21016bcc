"""Assembles the page: header, sidebar, tabs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradio as gr

from app.device import Device
from app.engine import Engine
from app.header import facts, header_html, pair_name
from app.playground import Playground
from app.sidebar import sidebar
from app.theme import theme
from app.token_stream import asset
from app.visit import Visit

PUBLIC_TOKENS = 512
"""The longest run a stranger may ask for."""


def build(engine: Engine, public: bool = False) -> gr.Blocks:
    """The whole page over a loaded pair."""
    pair = engine.load(engine.settings)
    methods = engine.methods(pair)
    if methods.get(engine.settings.method) is not None:  # a pair without a draft starts with what it can do
        engine.settings.method = next(method for method in ("ngram", "plain") if methods.get(method, "") is None)
    environment = engine.environment(pair)
    device = Device()
    playground = Playground(engine, device, **({"most_new_tokens": PUBLIC_TOKENS} if public else {}))
    with gr.Blocks(title="Speculative Decoding Playground", fill_width=True, analytics_enabled=False) as page:
        header = gr.HTML(_header(environment, engine), elem_id="header", apply_default_css=False, js_on_load=None)
        controls = sidebar(
            pair_name(environment),
            engine.settings,
            methods,
            most=playground.most_new_tokens,
            layers=environment["target"]["layers"],
        )
        visit = gr.State(Visit())
        with gr.Tabs(elem_id="tabs"), gr.Tab("Playground", id="playground"):
            playground.build(controls, visit)
        _keep_header_true(engine, header, controls)
    return page


def _header(environment: dict[str, Any], engine: Engine, **changes: Any) -> str:
    return header_html(facts(environment, replace(engine.settings, **changes)))


def _keep_header_true(engine: Engine, header: gr.HTML, controls: dict[str, Any]) -> None:
    """The header follows the controls it speaks of."""

    def describe(method: str, draft_length: str | int, precision: str) -> str:
        settings = replace(engine.settings, precision=precision)
        loaded = engine.load(settings if engine.is_loaded(settings) else engine.settings)
        return _header(engine.environment(loaded), engine, method=method, draft_length=draft_length)

    names = ("method", "draft_length", "precision")
    inputs = [controls[name] for name in names]
    gr.on(
        [control.change for control in inputs],
        describe,
        inputs,
        header,
        show_progress="hidden",
        queue=False,
        api_visibility="private",
    )


def launch_options() -> dict[str, Any]:
    """What of the page goes to `launch()`: theme, style, page-wide script, and no way out to other hosts."""
    return {
        "theme": theme(),
        "css": asset("page.css") + asset("token_stream.css"),
        "js": f"() => {{ {asset('page.js')} }}",
        "footer_links": ["api"],
        "run_history": False,
        "ssr_mode": False,
        "allowed_paths": [],
        "max_file_size": "20mb",
    }
