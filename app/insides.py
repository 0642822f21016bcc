"""All that the page relies on of how Gradio is made, beyond what it documents; and what every tab says to it alike.

Each is a function here, with a sentence on what it relies on, held to the installed Gradio by tests/app/test_insides.py
and tests/browser/test_gradio.py. Its classes and roles, on which looks and scripts rely, stand in gradio.css and
gradio.js of assets/page. requirements.txt admits the minor version that all this was tested with.

Three more are habits. Of a string value that only grew, Gradio sends the new end alone (`app.tokens.Window`). Of a
figure it sends what its `to_json` gives, tools included (`app.tokens.charts.Chart`). A state that was set goes with its
browser tab; one that was only changed stays (`app.page.build`).
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
from asyncio import to_thread
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_bytes
from time import time
from typing import Any
from weakref import WeakSet

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from core.disk import is_full


@contextmanager
def without_stubs() -> Iterator[None]:
    """Import Gradio without the editor's stubs, which it writes anew for each of its components at every import: half
    of the import's time. A component whose class has no source file, as `inspect` says, gets none."""
    real = inspect.getfile

    def getfile(thing: Any) -> str:
        if getattr(thing, "__module__", "").startswith("gradio."):
            raise OSError("no stub")
        return real(thing)

    inspect.getfile = getfile
    try:
        yield
    finally:
        inspect.getfile = real


with without_stubs():  # for whoever imports this module before Gradio
    import gradio as gr
    from gradio import route_utils
    from gradio.events import EventListener
    from gradio.state_holder import SessionState
    from gradio.utils import get_upload_folder

    from app.assets import FOREVER, address

PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Of an event that is the page's own: nothing spins over its outputs, and programs do not see it."""
QUIET: dict[str, Any] = {**PRIVATE, "queue": False}
"""Of one that answers at once, too."""
UNCHECKED: dict[str, Any] = {"preprocess": False}
"""Of one that may come while the choices of its inputs change: a value of before reaches its function, where Gradio
would refuse it with words for programmers. Texts, numbers and choices arrive as the browser has them."""
NEWEST: dict[str, Any] = {**QUIET, "trigger_mode": "always_last"}
"""Of one that shows how things stand, too: Gradio drops an event that comes while another is answered, unless told to
answer the last of them once more."""


def html_block(value: str = "", js_on_load: str | None = None, **options: Any) -> gr.HTML:
    """A place for HTML that is made, and escaped, in Python."""
    return gr.HTML(value, apply_default_css=False, js_on_load=js_on_load, **options)


def scripted(html: str, module: str, *events: str, **options: Any) -> gr.HTML:
    """A component that a module of ours draws into `html`, from its value; `events` are what the module triggers."""
    drawn = {"value": "", "html_template": html, "css_template": "", "js_on_load": on_load(module, *events)}
    return gr.HTML(**{**drawn, **options}, apply_default_css=False)


def imported(module: str) -> str:
    """JavaScript that begins to import a module of assets/.

    Gradio's page has a `base`, from which it finds its own scripts behind any proxy: ours are found from there too.
    """
    return f'import(new URL("{address(module)}", document.baseURI))'


def calling(module: str, function: str, *values: Any) -> str:
    """For `js`: calls what a module exports, and waits for it: Gradio awaits what such a function returns."""
    given = ", ".join(json.dumps(value) for value in values)
    return f"async () => (await {imported(module)}).{function}({given})"


def on_load(module: str, *events: str) -> str:
    """For `js_on_load`: hands a component's element, props, trigger and watch to the module's `mount(element, page)`.
    Where that fails, the pane says so.

    `events` are what the module triggers: Gradio offers a listener for those alone whose quoted names stand here.
    """
    said = "".join(f'"{event}" ' for event in events)
    mounted = f"{imported(module)}.then(({{ mount }}) => mount(element, {{ props, trigger, watch }}))"
    return f"/* {said}*/ {mounted}.catch({NOT_LOADED});"


NOT_LOADED = """(error) => {
  console.error(error);
  const line = document.createElement("p");
  line.className = "not-loaded";
  line.setAttribute("role", "alert");
  line.textContent = "This part of the page could not be loaded (" + error.message + "). Reload the page.";
  element.prepend(line);
}"""


def give(component: gr.HTML, **props: Any) -> None:
    """Set props of an HTML component that is built already: they are read when the page is."""
    component.props.update(props)


def sent_by(component: gr.HTML, event: str) -> Any:
    """An event that a component's script triggers, for `gr.on`, which asks an event whose it is."""
    listener: Any = EventListener(event_name=event)
    listener.__self__ = component
    return listener


def sent_with(event: gr.EventData) -> dict[str, Any]:
    """What a component's script sent along with an event it triggered: `trigger(name, data)` arrives as `_data`."""
    return event._data if isinstance(event._data, dict) else {}


def leave_undocumented(page: gr.Blocks, names: Collection[str]) -> None:
    """Keep endpoints of these names out of what is offered to agents: `fns` holds all, and is read when MCP starts."""
    for function in page.fns.values():
        if function.api_name in names:
            function.api_visibility = "undocumented"


def scope_of(request: gr.Request | None) -> dict[str, Any]:
    """The ASGI scope of the HTTP request behind a call, where middleware leaves notes.

    Of a queued call it is that of joining the queue. Empty where there is no request: for a function that Python calls.
    """
    return getattr(getattr(request, "request", None), "scope", {})


HASHED = re.compile(r"/assets/[\w.-]+-[\w-]{8}\.(?:js|css)$")
"""Paths of Gradio's scripts and sheets whose names change with what is in them."""


class KeptForGood:
    """ASGI middleware by which a browser keeps Gradio's hashed scripts and sheets: Gradio says nothing of how long they
    hold, so that a page opened again would ask for each of more than a hundred anew."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                MutableHeaders(scope=message).setdefault("Cache-Control", FOREVER)
            await send(message)

        hashed = scope["type"] == "http" and HASHED.search(scope["path"])
        await self.app(scope, receive, sent if hashed else send)


MOST_UPLOADED = 64 << 20
"""Bytes of uploads that may lie on the disk at a time."""
PLACES = 8192
"""Bytes that a file with nothing in it and its folder take of a disk."""
MOST_IN_UPLOAD = 3 << 20
"""Bytes of one request with uploads: Gradio bounds each file in it, and takes a thousand."""
MOST_IN_REQUEST = 48 << 20
"""Bytes of any other request: the largest document that is opened, of characters that take three each."""
MOST_IN_REQUESTS = 96 << 20
"""Of all requests together that are being read or answered, and of calls that wait to be run."""
HANG_UP = {"Connection": "close"}
"""Without it, the rest of a request would be read, though to no end."""
UPLOADS_STAY = 3600
"""Seconds after which an upload is deleted that nobody read."""


def forget_upload(path: str) -> None:
    """Delete a file that a visitor uploaded: each is in a folder of its own below that for uploads."""
    file, folder = Path(path).resolve(), Path(get_upload_folder()).resolve()
    if file.is_relative_to(folder):
        file.unlink(missing_ok=True)
        with suppress(OSError):  # other files are in it
            file.parent.rmdir()


class Upload(route_utils.GradioUploadFile):
    """An upload in a folder of its own: Gradio names folders by what is in a file, so that the same from two visitors
    would be one, and go with the first that is read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sha.update(token_bytes())


route_utils.GradioUploadFile = Upload  # type: ignore[misc]


class Body:
    """How many bytes of a request have come."""

    size = 0


class BoundedBodies:
    """ASGI middleware that takes no more from visitors than memory and disk may hold of it: Gradio reads whole whatever
    comes, from anybody, and has a bound for single files alone. A queued call is answered at once, and keeps its
    request with all that came until it was run: what lies in a request's scope lives as long."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.bodies: WeakSet[Body] = WeakSet()

    def full(self) -> bool:
        return sum(body.size for body in self.bodies) > MOST_IN_REQUESTS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        upload = scope["path"].rstrip("/").endswith("/upload")
        if upload and await to_thread(uploaded_bytes) > MOST_UPLOADED:
            answer = PlainTextResponse("Too many files are being uploaded just now; please try again in an hour.", 507)
            await answer(scope, receive, send)
            return
        most = MOST_IN_UPLOAD if upload else MOST_IN_REQUEST
        body = scope.setdefault("state", {})["body"] = Body()
        self.bodies.add(body)

        async def received() -> Any:
            message = await receive()
            body.size += len(message.get("body", b""))
            if body.size > most:
                raise HTTPException(413, f"A request has at most {most:,} bytes here.", HANG_UP)
            if self.full():
                gc.collect()  # the errors of calls that failed hold these, in circles
            if self.full():
                raise HTTPException(503, "Too much is being sent just now; please try again in a minute.", HANG_UP)
            return message

        try:
            await self.app(scope, received, send)
        except OSError as error:
            if not upload:
                raise
            why = "the disk is full" if is_full(error) else error.strerror
            told = PlainTextResponse(
                f"Files cannot be taken here just now: {why}. Paste the text instead.", 507, HANG_UP
            )
            await told(scope, receive, send)


def uploaded_bytes() -> int:
    """Of everything that lies in Gradio's folder for uploads. What is left there of an upload that was cut short, of
    which Gradio knows nothing, and folders that are empty are deleted as old as uploads are."""
    root, found, oldest = Path(get_upload_folder()), 0, time() - UPLOADS_STAY
    for folder, _, names in os.walk(root, topdown=False):  # passes over what is deleted meanwhile
        for each in [*(Path(folder, name) for name in names), Path(folder)]:
            with suppress(OSError):  # deleted meanwhile, or a folder in use
                about = each.stat()
                if each.is_file() and about.st_mtime >= oldest:
                    found += about.st_size + PLACES
                elif each.is_file():
                    each.unlink()
                elif each != root and about.st_mtime < oldest:
                    each.rmdir()
    return found


def hang_up(page: gr.Blocks) -> None:
    """Let the server end though browsers hold connections open: uvicorn waits for them unless `force_exit` is set."""
    page.server.force_exit = True


def keep_no_copies() -> None:
    """Gradio keeps of every session a description of the whole page and the last value of each component, for deep
    links, of which there are none here: half a megabyte and all that was run last, long after a tab was closed."""

    class Nothing(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    kept: Any = SessionState
    kept.config_values = property(lambda session: Nothing(), lambda session, value: None)
    kept._update_value_in_config = lambda session, key, value: None


def without_tools(page: gr.Blocks) -> str | None:
    """Why a page that was launched offers agents no tools; None where it does, or was not asked to."""
    return page.mcp_error
