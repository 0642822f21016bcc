"""The Stop button: which runs of which visitor have been asked to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradio import Request


def visitor(request: Request | None) -> str:
    """Whose runs a call starts or stops: those of one browser tab, or of all callers without one."""
    return (request.session_hash if request else None) or "nobody"


class Stops:
    """A visitor's Stop ends that visitor's runs, and nobody else's."""

    def __init__(self) -> None:
        self._going: dict[str, list[Event]] = {}
        self._lock = Lock()

    @contextmanager
    def watch(self, session: str) -> Iterator[Event]:
        """An event that is set when this visitor presses Stop while the block lasts."""
        event = Event()
        with self._lock:
            self._going.setdefault(session, []).append(event)
        try:
            yield event
        finally:
            with self._lock:
                self._going[session].remove(event)
                if not self._going[session]:
                    del self._going[session]

    def stop(self, session: str) -> int:
        """Ask all of this visitor's runs to stop; how many there were."""
        with self._lock:
            events = list(self._going.get(session, []))
        for event in events:
            event.set()
        return len(events)
