"""What every tab says to Gradio in the same words: how events go unseen, and where HTML made in Python stands."""

from __future__ import annotations

from typing import Any

import gradio as gr

PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Of an event that is the page's own: nothing spins over its outputs, and programs do not see it."""
QUIET: dict[str, Any] = {**PRIVATE, "queue": False}
"""Of one that answers at once, too."""


def html_block(value: str = "", js_on_load: str | None = None, **options: Any) -> gr.HTML:
    """A place for HTML that is made, and escaped, in Python."""
    return gr.HTML(value, apply_default_css=False, js_on_load=js_on_load, **options)
