"""What tests and measurements do to a page."""

from __future__ import annotations

import socket
import time
from typing import Any

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_to_end(page: Any) -> None:
    """Press Run and wait for the end of the race."""
    page.click("#run")
    wait_idle(page)


def wait_idle(page: Any) -> None:
    page.wait_for_function(
        "document.querySelector('.race').dataset.state === 'idle'"
        " && !['idle', 'starting'].includes(document.querySelector('.status').dataset.kind)"
    )


def until(page: Any, expression: str, seconds: float = 10.0) -> None:
    """Wait for an expression on a page whose policy forbids `eval`, which `wait_for_function` needs."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def open_tab(page: Any, name: str) -> None:
    """Show a tab by the id of its gr.Tab."""
    page.click(f'#tabs [role="tab"][data-tab-id="{name}"]')


def fill_in(field: Any, text: str) -> None:
    """Type into a field that has just appeared: Gradio may set its starting value once more after it is there."""
    for _ in range(20):
        field.fill(text)
        field.page.wait_for_timeout(100)
        if field.input_value() == text:
            return
    raise AssertionError(f"the field does not keep {text!r}")


def set_number(page: Any, label: str, value: float) -> None:
    page.get_by_label(label, exact=True).first.fill(str(value))


def status(page: Any) -> str:
    return page.inner_text(".race .status-text")
