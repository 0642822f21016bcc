"""What tests and measurements do to a page."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
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


def until(page: Any, expression: str, seconds: float = 60.0) -> None:
    """Wait for an expression on a page whose policy forbids `eval`, which `wait_for_function` needs."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def expect(what: Any) -> Any:
    """Playwright's assertions, which wait for what they expect."""
    from playwright.sync_api import expect

    return expect(what)


def says(page: Any, place: str, words: str) -> None:
    """Wait until an element says these words."""
    page.wait_for_function(
        "([place, words]) => document.querySelector(place)?.innerText.includes(words)", arg=[place, words]
    )


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
    options of a context, or `cold`, the visitor's context is nobody else's before and after. A `newcomer` has opened
    nothing yet; others have all open that the page folds away."""
    pages: dict[Any, set[str]] = {}
    """With the places that were visited in those that go on to the next visitor."""
    listeners: dict[Any, dict[str, Any]] = {}
    trouble: list[str] = []

    def open_(
        address: str,
        *,
        permissions: Sequence[str] = (),
        dark: bool = False,
        cold: bool = False,
        newcomer: bool = False,
        **options: Any,
    ) -> Any:
        own = cold or bool(options)
        page = idle.pop() if idle and not own else chromium.new_context(viewport=SCREEN, **options).new_page()
        pages[page] = set() if own else {_home(address)}
        page.set_default_timeout(60_000)
        page.context.grant_permissions(permissions)
        page.emulate_media(color_scheme="dark" if dark else "light")
        listeners[page] = {
            "request": lambda request: _own(request.url, address) or trouble.append(request.url),
            "pageerror": lambda error: trouble.append(str(error)),
            "dialog": lambda dialog: trouble.append(dialog.message),
        }
        for event, listener in listeners[page].items():
            page.on(event, listener)
        page.goto(address)
        ready(page)
        if not newcomer:
            open_all(page)
        return page

    yield open_
    for page, places in pages.items():
        if not places:
            page.context.close()
            continue
        left = forget(page, places)
        for event, listener in listeners[page].items():
            page.remove_listener(event, listener)
        idle.append(left)
    assert not trouble


def ready(page: Any) -> None:
    """Wait until the page and its scripts are there."""
    page.wait_for_selector("#run")
    page.wait_for_function("document.querySelector('.race')?.race")
    page.wait_for_selector("#header [aria-expanded]")


def reload(page: Any) -> None:
    page.reload()
    ready(page)


def open_all(page: Any) -> None:
    """All prompts, the side panel and what is behind More, as somebody has them who works with the page."""
    page.evaluate(
        """() => {
            document.querySelector("[data-new]")?.removeAttribute("data-new");
            const press = (button, open) => document.querySelector(open) ?? document.querySelector(button).click();
            press(".more-chips", ".more-chips[hidden]");
            press(".gear", "#sidebar.open");
            press("#more", ".race[data-more]");
        }"""
    )
    page.wait_for_selector("#sidebar.open #pair", state="visible")


def forget(page: Any, places: set[str]) -> Any:
    """All that a visitor left in a context: other pages, cookies and whatever scripts can store. The page itself, or
    another if it was closed, comes back empty: what its process has compiled serves the next visitor."""
    context = page.context
    for other in context.pages:
        if other != page:
            other.close()
    if page.is_closed():
        page = context.new_page()
    else:
        page.evaluate("sessionStorage.clear(); window.name = ''")
        page.goto("about:blank")
        page.mouse.move(0, 0)  # where no control will be
        page.set_viewport_size(SCREEN)
    context.clear_cookies()
    context.clear_permissions()
    session = context.new_cdp_session(page)
    for origin in places:
        session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    session.detach()
    return page


def _own(url: str, address: str) -> bool:
    return url.startswith((_home(address), "data:", "blob:"))


def _home(address: str) -> str:
    """Where the page is: an address may say more."""
    return "/".join(address.split("/", 3)[:3])
