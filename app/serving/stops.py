"""The Stop button: which runs of which visitor have been asked to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from threading import Event, Lock
from typing import Any

from gradio import Request

from app.insides import scope_of
from app.serving.device import Asked

ARRIVED = "arrived"
LONGEST_WAIT = 60.0
"""Seconds that Gradio's queue may hold a run back and an earlier Stop still reach it."""


class Arrivals:
    """ASGI middleware that notes when each request came in.

    Gradio's queue holds a run back for a moment, and a Stop pressed right after it overtakes it there.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[ARRIVED] = time.monotonic()
        await self.app(scope, receive, send)


class Stops:
    """A visitor's Stop ends the runs that visitor has asked for by then, and nobody else's."""

    def __init__(self) -> None:
        self._going: dict[str, list[Event]] = {}
        self._pressed: dict[str, float] = {}
        self._lock = Lock()

    @contextmanager
    def watch(self, request: Request | None) -> Iterator[Asked]:
        """The run that this request asks for: whether the visitor behind it has pressed Stop after it."""
        visitor, asked = _visitor(request), Asked(address_of(request))
        event = asked.flag
        with self._lock:
            if self._pressed.get(visitor, -math.inf) > _arrival(request):
                event.set()
            self._going.setdefault(visitor, []).append(event)
        try:
            yield asked
        finally:
            with self._lock:
                self._going[visitor].remove(event)
                if not self._going[visitor]:
                    del self._going[visitor]

    def stop(self, request: Request | None) -> int:
        """Ask all runs of the visitor behind this request to stop; how many were going on."""
        visitor, now = _visitor(request), _arrival(request)
        with self._lock:
            self._pressed = {each: at for each, at in self._pressed.items() if now - at < LONGEST_WAIT}
            self._pressed[visitor] = now
            events = list(self._going.get(visitor, []))
        for event in events:
            event.set()
        return len(events)


def _visitor(request: Request | None) -> str:
    """Whose runs a call starts or stops: those of one browser tab, or of all callers without one."""
    return (request.session_hash if request else None) or "nobody"


def address_of(request: Request | None) -> str:
    """Whose runs count together in the queue: those from one address. Behind a proxy of this machine or its network it
    is the nearest one that the proxies name which is not theirs; what a visitor puts before it is not believed."""
    scope = scope_of(request)
    own = str((scope.get("client") or ("",))[0])
    told = dict(scope.get("headers") or ()).get(b"x-forwarded-for", b"").decode("latin-1")
    if not _is_inside(own):
        return own
    return next((each for each in map(str.strip, reversed(told.split(","))) if not _is_inside(each)), own)


def _is_inside(host: str) -> bool:
    try:
        return not ip_address(host).is_global
    except ValueError:
        return True


def _arrival(request: Request | None) -> float:
    """When a request came in, by `time.monotonic`; now, where no `Arrivals` noted it."""
    return scope_of(request).get("state", {}).get(ARRIVED, time.monotonic())
