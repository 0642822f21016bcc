"""What every tab says to Gradio in the same words: how events go unseen, and where HTML made in Python stands."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.assets import address

PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Of an event that is the page's own: nothing spins over its outputs, and programs do not see it."""
QUIET: dict[str, Any] = {**PRIVATE, "queue": False}
"""Of one that answers at once, too."""


def imported(module: str) -> str:
    """JavaScript that begins to import a module of assets/. Gradio gives its page a `base`, behind any proxy."""
    return f'import(new URL("{address(module)}", document.baseURI))'


def on_load(module: str, *events: str) -> str:
    """For `js_on_load`: hands what Gradio gives a component's script to the module's `mount(element, page)`.

    `events` are what the module triggers: Gradio offers a listener for those alone whose quoted names stand here.
    """
    said = "".join(f'"{event}" ' for event in events)
    return f"/* {said}*/ {imported(module)}.then(({{ mount }}) => mount(element, {{ props, trigger, watch }}));"


def html_block(value: str = "", js_on_load: str | None = None, **options: Any) -> gr.HTML:
    """A place for HTML that is made, and escaped, in Python."""
    return gr.HTML(value, apply_default_css=False, js_on_load=js_on_load, **options)
