"""Assembles the page: header, sidebar, tabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from app.api import offer_generate
from app.assets import asset, preloads, route, theme
from app.compare import Compare
from app.explain import Explain
from app.header import DRAFTED_BY, facts, facts_before_loading, header_html, notes, short_pair, target_of
from app.history import History
from app.insides import QUIET, UNCHECKED, UPLOADS_STAY, BoundedBodies, KeptForGood, calling, html_block, keep_no_copies
from app.playground import Playground
from app.playground.race import queued_race
from app.playground.take_away import ADDRESS_READ, Check, TakeAway
from app.serving import Engine
from app.serving.device import Device
from app.serving.limits import PUBLIC_OF_ONE, PUBLIC_QUEUE, PUBLIC_SECONDS, PUBLIC_TOKENS
from app.serving.stops import Arrivals
from app.serving.turns import Event
from app.serving.visit import Visit
from app.settings import PAIR_CONTROLS, pair_from, prompt_text, settings_from
from app.sidebar import sidebar
from app.sidebar.picker import Picker
from app.tokens import STYLES as RACE_STYLES
from app.train import Train
from app.tune import Tune
from core.errors import UserError
from core.progress import Stop
from core.records import Run, Settings

LONGEST_VISIT = 12 * 3600
"""Seconds after which a visitor's runs are let go, if the tab was not closed before."""
LOOK_AT_UPLOADS = 600
"""Seconds: how often uploads are deleted that nobody read within UPLOADS_STAY."""
MOST_WAITING = 128
"""Calls of functions that Gradio holds back while others run, with all that came with them."""
MOST_SESSIONS = 1000
"""Of how many visitors something is kept at a time; the longest unseen is forgotten first."""
STYLES = (
    "page/page.css",
    "page/setup.css",
    "page/parts.css",
    "page/gradio.css",
    "page/present.css",
    *RACE_STYLES,
    "page/low.css",
    "page/plotly.css",
    "compare/compare.css",
    "compare/table.css",
    "explain/figures.css",
    "explain/explain.css",
    "explain/tokens.css",
    "explain/check.css",
    "playground/take_away.css",
    "playground/tour.css",
    "history/history.css",
    "tune/tune.css",
    "train/train.css",
    "sidebar/picker.css",
)
SCRIPTS = (
    "page/page.js",
    "playground/live.js",
    "playground/take_away.js",
    "compare/compare.js",
    "explain/explain.js",
    "history/history.js",
    "train/race_it.js",
    "train/train.js",
)
"""What is mounted on the page."""


def build(engine: Engine, public: bool = False, device: Device | None = None) -> gr.Blocks:
    """The whole page over a loaded pair."""
    keep_no_copies()
    pair = engine.load(engine.settings)
    methods = engine.methods(pair)
    if methods.get(engine.settings.method) is not None:  # a pair without a draft starts with what it can do
        engine.settings.method = next(method for method in ("ngram", "plain") if methods.get(method, "") is None)
    environment = engine.environment(pair)
    device = device or Device()
    if public:
        device.longest, device.of_one, device.seconds = PUBLIC_QUEUE, PUBLIC_OF_ONE, PUBLIC_SECONDS
    engine.public = public
    engine.chat = bool(environment["target"].get("chat"))
    picker = Picker(engine, device, public)
    most = {"most_new_tokens": PUBLIC_TOKENS} if public else {}
    playground = Playground(engine, device, choices=picker.choices, **most)
    comparison = Compare(engine, device, picker.choices, playground.most_new_tokens)
    tune = Tune(engine, device, playground.most_new_tokens, public, picker.choices)
    with gr.Blocks(
        title="Speculative Decoding Playground",
        fill_width=True,
        analytics_enabled=False,
        delete_cache=(LOOK_AT_UPLOADS, UPLOADS_STAY),
    ) as page:
        controls = sidebar(
            picker.build,
            engine.settings,
            methods,
            most=playground.most_new_tokens,
            layers=environment["target"]["layers"],
            unload=not public,
        )
        visit = gr.State(Visit(), time_to_live=LONGEST_VISIT)
        admitted = partial(_admitted, engine, playground.most_new_tokens)
        take_away = TakeAway(admitted, public)
        with gr.Row(elem_id="top"):
            header = html_block(_header(environment, engine, engine.settings), elem_id="header")
            html_block(DRAFTED_BY, elem_id="drafted-by")
            take_away.build()
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Playground", id="playground"):
                prompt, race = playground.build(controls, visit)
            with gr.Tab("Compare", id="compare"):
                comparison.build(controls, visit, tabs)
            with gr.Tab("Tune", id="tune"):
                tune.build(controls, tabs, visit)
            with gr.Tab("Train", id="train") as tab:
                Train(engine, device, public, picker.choices).build(controls, tabs, tab, page, playground.lent)
            with gr.Tab("Explain", id="explain") as tab:
                Explain(engine, device, public).build(visit, tab)
            with gr.Tab("History", id="history") as tab:
                History(comparison).build(visit, race, tabs, tab)
        # Gradio lets a state go with its tab once it was set; one that was only changed would stay for ever.
        page.load(lambda visit: visit, visit, visit, **QUIET)
        opened = take_away.connect(page, prompt, controls, visit)
        offer_generate(partial(_race, engine, device, admitted), controls)
        recognised = picker.connect(page, controls, visit, opened, take_away.linked, playground.finished)
        recognised.then(None, js=ADDRESS_READ)
        playground.follow(controls)
        _keep_header_true(engine, environment, header, controls, playground)
    return page.queue(max_size=MOST_WAITING)


def _admitted(engine: Engine, most_new_tokens: int, **controls: Any) -> Settings:
    """The settings that values of the controls make, where this page may run them."""
    settings = settings_from(engine.settings, most_new_tokens=most_new_tokens, **controls)
    engine.admit(settings)
    return settings


def _race(
    engine: Engine, device: Device, admitted: Check, prompt: str, controls: dict[str, Any], stop: Stop, runs: list[Run]
) -> Iterator[Event]:
    """The events of a race that no page shows."""
    yield from queued_race(device, engine, prompt_text(prompt), admitted(**controls), stop, runs)


def _header(environment: dict[str, Any], engine: Engine, settings: Settings) -> str:
    """The line at the top over a pair that is loaded."""
    said = notes(environment)
    if settings.target == engine.settings.target and (hint := engine.hint()):
        said = [*said, hint]
    return header_html(target_of(environment), facts(environment, settings), said)


def _keep_header_true(
    engine: Engine, started: dict[str, Any], header: gr.HTML, controls: dict[str, Any], playground: Playground
) -> None:
    """The header follows the controls it speaks of, and what is in memory; `started` is any environment here."""

    def describe(method: str, draft_length: str | int, **named: Any) -> str:
        try:
            settings = replace(pair_from(engine.settings, **named), method=method, draft_length=draft_length)
        except UserError:  # the run will say it
            settings = replace(engine.settings, method=method, draft_length=draft_length)
        if (pair := engine.loaded(settings)) is None:
            return header_html(short_pair(settings), facts_before_loading(started, settings))
        return _header(engine.environment(pair), engine, settings)

    names = ("method", "draft_length", *PAIR_CONTROLS)
    options: dict[str, Any] = {
        "fn": lambda *values: describe(**dict(zip(names, values))),
        "inputs": [controls[name] for name in names],
        "outputs": header,
        **QUIET,
        **UNCHECKED,
    }
    gr.on([controls[name].change for name in names], **options)
    playground.finished.then(**options)
    controls["unloaded"].change(**options)


def launch_options() -> dict[str, Any]:
    """What of the page goes to `launch()`: theme, style, page-wide script, and no way out to other hosts."""
    return {
        "theme": theme(),
        "css": "".join(asset(name) for name in STYLES),
        "js": calling("page/page.js", "mount"),
        "head": preloads(*SCRIPTS),
        "footer_links": ["api"],
        "run_history": False,
        "ssr_mode": False,
        "allowed_paths": [],
        "max_file_size": "2mb",
        "state_session_capacity": MOST_SESSIONS,
        "app_kwargs": {
            "middleware": [Middleware(Arrivals), Middleware(BoundedBodies), Middleware(KeptForGood)],
            "routes": [route()],
        },
    }
