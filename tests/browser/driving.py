"""What tests and measurements do to a page."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SCREEN: Any = {"width": 1440, "height": 900}


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


def visitors(chromium: Any, idle: list[Any]) -> Iterator[Any]:
    """A function that opens an address; at the end no visitor may have asked another host or met a script error. With
    options, of a context or `cold`, the visitor's context is nobody else's before and after."""
    contexts: dict[Any, set[str]] = {}
    """With the places that were visited in those that go on to the next visitor."""
    trouble: list[str] = []

    def open_(address: str, cold: bool = False, **options: Any) -> Any:
        own = cold or bool(options)
        context = idle.pop() if idle and not own else chromium.new_context(viewport=SCREEN, **options)
        contexts[context] = set() if own else {_home(address)}
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("request", lambda request: _own(request.url, address) or trouble.append(request.url))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.goto(address)
        page.wait_for_selector("#run")
        page.wait_for_function("document.querySelector('.race')?.race")
        return page

    yield open_
    for context, places in contexts.items():
        if places:
            forget(context, places)
            idle.append(context)
        else:
            context.close()
    assert not trouble


def forget(context: Any, places: set[str]) -> None:
    """All that a visitor left in a context: pages, cookies and whatever scripts can store."""
    for page in context.pages:
        page.close()
    context.clear_cookies()
    page = context.new_page()
    session = context.new_cdp_session(page)
    for origin in places:
        session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    page.close()


def _own(url: str, address: str) -> bool:
    return url.startswith((_home(address), "data:", "blob:"))


def _home(address: str) -> str:
    """Where the page is: an address may say more."""
    return "/".join(address.split("/", 3)[:3])
