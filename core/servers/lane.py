"""One answer of a server while it streams: an iterator of chunks, which a reader can leave at any time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, Queue
from types import TracebackType

from core.errors import Cancelled, UserError
from core.progress import Stop, never
from core.servers.connection import LOOK_SECONDS, Connection
from core.servers.counters import between, missing_of
from core.servers.dialects import counters, listener, question, split_passes
from core.servers.records import Server, ServerChunk, ServerRun, per_pass
from core.settings import Settings

EVENTS_PER_TOKEN, MORE_EVENTS = 4, 256
"""No server sends more events than this many a token and these besides."""
WARM_UP_TOKENS = 8


def ask(connection: Connection, run: ServerRun, stop: Stop = never, counted: bool = True) -> Iterator[ServerChunk]:
    """Send the run's prompt and settings, and yield each chunk as it arrives; the run grows with them.

    `counted`: ask the server for more than the answer, which under load would be a load itself: its counters before and
    after, where the answer does not tell, although they count everything that the server does meanwhile; and where in a
    text of several tokens the drafted ones end. Raises UserError for whatever the server does wrong; what came until
    then stays in the run.
    """
    server, settings = run.server, run.settings
    before = counters(connection, server) if counted else None
    asked = question(connection, server, run.prompt, settings)
    run.missing += asked.missing
    heard = listener(asked.path, run)
    most = EVENTS_PER_TOKEN * settings.max_new_tokens + MORE_EVENTS
    try:
        for seconds, event in connection.events(asked.path, asked.body, most, stop):
            run.seconds = seconds
            if chunk := heard.hear(seconds, event):
                yield chunk
            if stop():
                break
    finally:
        heard.close()
        if not heard.ended:
            run.stop_reason = "cancelled"
    if stop():
        return
    if not heard.ended:
        raise UserError(f"{connection.address} hung up before the answer was complete.")
    if counted:
        split_passes(connection, run, stop)
    if (
        run.speculation is None
        and not heard.plain
        and before is not None
        and (after := counters(connection, server)) is not None
    ):
        run.speculation = between(before, after)
    if run.speculation:
        run.speculation = per_pass(run.speculation, run.new_tokens)
    run.missing += _missing(run, heard.plain)


def _missing(run: ServerRun, plain: bool) -> list[str]:
    """What this answer does not tell, in words; of speculation nothing is lacking where it is said to be `plain`."""
    found = []
    if run.new_tokens is None:
        found.append("number of tokens")
    if run.timings is None:
        found.append("the server's own timings")
    if run.token_ids is None:
        found.append("token ids")
    if any(chunk.outcomes is None for chunk in run.chunks):
        found.append("which tokens were drafted")
    elif any(len(set(chunk.outcomes or ())) > 1 for chunk in run.chunks):
        found.append("where the drafted tokens end in a text of several")
    return found if plain else found + missing_of(run.speculation)


class ServerLane:
    """An answer in progress: iterate it for its chunks; `run` grows with each. `with` ends it when left early.

    Reading happens in a thread of its own, so that Stop is heard while the server is silent, and times are those of
    arrival however slowly chunks are taken.
    """

    def __init__(self, server: Server, prompt: str, settings: Settings, stop: Stop = never) -> None:
        self.run = ServerRun(server, settings, prompt)
        self._stop, self._left = stop, threading.Event()
        self._chunks: Queue[ServerChunk | UserError | BaseException | None] = Queue()
        self._ended = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._read, name="answer", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with Connection(self.run.server.address, stop=self._stopping) as self._connection:
                for chunk in ask(self._connection, self.run, self._stopping):
                    self._chunks.put(chunk)
            self._chunks.put(None)
        except Cancelled:
            self._chunks.put(None)
        except BaseException as error:  # to whoever iterates
            self._chunks.put(error)

    def _stopping(self) -> bool:
        return self._left.is_set() or self._stop()

    def __iter__(self) -> ServerLane:
        return self

    def __next__(self) -> ServerChunk:
        while not self._ended:
            try:
                found = self._chunks.get(timeout=LOOK_SECONDS)
            except Empty:
                if self._stopping():
                    break
                continue
            if isinstance(found, ServerChunk):
                return found
            self._ended = True
            if found is not None:
                raise found
        self.close()
        raise StopIteration

    def __enter__(self) -> ServerLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the answer and hang up."""
        self._left.set()
        if self._connection is not None:
            self._connection.leave()
        if not self._ended:
            self._ended = True
            self.run.stop_reason = self.run.stop_reason or "cancelled"


def open_lane(server: Server, prompt: str, settings: Settings, stop: Stop = never) -> ServerLane:
    """An answer of a server, chunk by chunk. What reaches the server of the settings is `records.ASKED`; `chat` auto
    sends the prompt as a message, which the server puts into its own template, off as text to go on with."""
    return ServerLane(server, prompt, settings, stop)


def warm_up(server: Server, prompt: str, settings: Settings, stop: Stop = never) -> Server:
    """One short answer that does not count; the server as its answer describes it. Raises UserError as a lane does."""
    few = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    with open_lane(server, prompt, few, stop) as lane:
        for _ in lane:
            pass
    return lane.run.server
