"""A saved race shown again: as a value of the race component, and as one HTML file that needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from secrets import token_urlsafe
from typing import Any

from app.assets import asset, import_map
from app.header import facts
from app.playground.race import lane_events, verdict_event
from app.serving.turns import Event
from app.tokens import STYLES, Window, encode
from app.tokens.markup import json_text
from core.records import SCHEMA, Run, run_from_dict

ENTRY = "tokens/replay_page.js"
SAME = ("target", "precision", "temperature", "top_k", "top_p", "min_p")
"""Settings in which a plain run must agree with a drafting one to be its baseline."""


def lanes_of(document: dict[str, Any]) -> dict[str, Run]:
    """The runs that the two panes show: the first of a drafting method, and plain decoding of the same prompt.

    Raises ValueError where the document, {"schema": 1, "runs": [...]} or a single run, is not one of ours.
    """
    documents = document.get("runs", [document]) if isinstance(document, dict) else None
    if not isinstance(documents, list) or not documents:
        raise ValueError("the document holds no run")
    runs = [run_from_dict(each) for each in documents]
    drafting = next((run for run in runs if run.settings.method != "plain"), None)
    plain = next((run for run in runs if run.settings.method == "plain" and _comparable(run, drafting or run)), None)
    return {lane: run for lane, run in (("speculative", drafting), ("plain", plain)) if run}


def _comparable(plain: Run, drafting: Run) -> bool:
    same = all(getattr(plain.settings, name) == getattr(drafting.settings, name) for name in SAME)
    return same and plain.prompt_ids == drafting.prompt_ids


def replay_events(document: dict[str, Any]) -> Iterator[Event]:
    """The events of a finished race, as `app.playground.race` gave them while it ran; lane after lane."""
    lanes = lanes_of(document)
    for kind, run in lanes.items():
        yield from lane_events(kind, run)
    yield verdict_event(list(lanes.values()))
    yield {"e": "done"}


def replay_value(document: dict[str, Any], example: str = "") -> str:
    """A value for the race component that shows the finished race at once, with its verdict; `example`: where it was
    recorded, of one that is shown before a visitor's first.

    Raises ValueError where the document is not a race or a run of ours.
    """
    events = list(replay_events(document))
    if example:
        events.insert(0, {"e": "example", "where": example})
    return Window().add(map(encode, events))


def replay_page(document: dict[str, Any]) -> str:
    """One HTML file that shows the race without a server: panes, numbers, charts, inspector and scrubber.

    It holds style, scripts and document, and asks no other file or host for anything; its policy runs
    what bears a word drawn for this page, which no text in it can know, and what that imports. Raises ValueError where
    the document is not a race or a run of ours.
    """
    lanes = lanes_of(document)
    style = "".join(asset(name) for name in ("tokens/replay_page.css", *STYLES))
    ours = token_urlsafe(16)
    policy = (
        f"default-src 'none'; style-src 'nonce-{ours}'; script-src 'nonce-{ours}'; base-uri 'none'; form-action 'none'"
    )
    shown = {"schema": SCHEMA, "runs": [run.to_dict() for run in lanes.values()]}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>A race of speculative and plain decoding</title>
<style nonce="{ours}">{style}</style>
</head>
<body>
<main>
<header><h1>Speculative Decoding Playground</h1><p>{_about(next(iter(lanes.values())))}</p></header>
<div id="component">{asset("tokens/race.html")}</div>
<details>
<summary>Prompt and settings</summary>
<pre id="prompt"></pre>
<dl id="settings"></dl>
<button type="button" id="save" title="The whole run document, as this page holds it">Save the race as JSON</button>
</details>
</main>
<script type="application/json" id="document">{json_text(shown)}</script>
<script type="application/json" id="verdict">{json_text(verdict_event(list(lanes.values())))}</script>
<script type="importmap" nonce="{ours}">{import_map(ENTRY)}</script>
<script type="module" nonce="{ours}">
import {{ mount }} from "{ENTRY}";

mount();
</script>
</body>
</html>
"""


def _about(run: Run) -> str:
    """What ran where and how, in escaped HTML."""
    settings = run.settings
    try:
        where = facts(run.environment, settings)[:-1]
    except (KeyError, TypeError, AttributeError):  # an environment that another version recorded
        where = []
    how = [f"method {settings.method}", f"temperature {settings.temperature:g}", f"seed {settings.seed}"]
    return " · ".join(escape(part) for part in [*where, *how])
