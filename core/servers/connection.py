"""HTTP to one server: to the address that was given and nowhere else, within bounds of size and time.

Whatever goes wrong on the other side is one UserError. The key is read from the environment for each connection, sent
to the addresses that the owner of this machine named (on the command line, or in PLAYGROUND_SERVERS) and to no other,
and struck out of whatever comes back. Who types an address into a page may be anybody.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from threading import Thread, Timer
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from core.errors import Cancelled, UserError
from core.progress import Stop, never
from core.servers.fields import name, within

KEY_VARIABLE = "PLAYGROUND_SERVER_KEY"
SERVERS_VARIABLE = "PLAYGROUND_SERVERS"
"""Addresses that get the key, with commas between."""
LOOK_SECONDS = 0.1
"""How often Stop is looked at while a server is silent."""
LONGEST_ADDRESS = 300
LONGEST_ANSWER = 4_000_000
"""Bytes of an answer that is read whole."""
LONGEST_METRICS = 16_000_000
LONGEST_LINE = 1_000_000
"""Bytes of one event: vLLM repeats the ids of the whole prompt in the first."""
LONGEST_STREAM = 64_000_000
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 120.0
"""A server under load may take long to begin."""
LONGEST_SECONDS = 600.0
SHORTEST_SECRET = 8
"""Characters of a key that is struck out of answers; a shorter one would tear holes into any text."""

Clock = Callable[[], float]


def refuse_public(public: bool) -> None:
    """Raise UserError where the page is for strangers: they would choose what this machine connects to."""
    if public:
        raise UserError("This page is public: it connects to no servers.")


def read_address(given: str) -> str:
    """ "http://host:port", from what a person typed: with or without a slash or /v1 at its end.

    Raises UserError for anything that is not the http or https address of a server, a user or a key in it included.
    """
    try:
        parts = urlsplit(given.strip()[: LONGEST_ADDRESS + 1])  # which keeps what it was given for long
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UserError(f"{name(given)!r} is not the address of a server, such as http://127.0.0.1:8000.") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise UserError(f"The address of a server holds no user, key or question; put a key into {KEY_VARIABLE}.")
    if (
        len(given) > LONGEST_ADDRESS
        or parts.scheme not in ("http", "https")
        or not host
        or any(c.isspace() or not c.isprintable() for c in given.strip())
    ):
        raise UserError(f"{name(given)!r} is not the address of a server, such as http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


_named: set[str] = set()


def name_servers(addresses: Iterable[str]) -> None:
    """The owner's own servers, besides those of PLAYGROUND_SERVERS: the key is for them. UserError for what is no
    address."""
    _named.update(map(read_address, addresses))


def is_owners(address: str) -> bool:
    """Whether the owner named this address, as `read_address` has it."""
    told = filter(None, map(str.strip, os.environ.get(SERVERS_VARIABLE, "").split(",")))
    return address in _named or address in map(read_address, told)


T = TypeVar("T")


def until_stopped(work: Callable[[Connection], T], address: str, stop: Stop) -> T:
    """What `work` makes of a connection; Cancelled as soon as `stop()` is true, however long the server takes."""
    if stop is never:
        with Connection(address) as connection:
            return work(connection)
    answers: Queue[tuple[T | None, BaseException | None]] = Queue()
    connection = Connection(address, stop=stop)

    def ask() -> None:
        try:
            with connection:
                answers.put((work(connection), None))
        except BaseException as error:  # to whoever waits
            answers.put((None, error))

    Thread(target=ask, name="connecting", daemon=True).start()
    while True:
        try:
            found, error = answers.get(timeout=LOOK_SECONDS)
        except Empty:
            if stop():
                connection.leave()
                raise Cancelled("Stopped while waiting for a server.") from None
            continue
        if error is not None:
            raise error
        return found  # type: ignore[return-value]


class Connection:
    """A client of one server. `with` closes it; its methods raise UserError, and Cancelled after `stop`.

    A request ends after `longest_seconds`, whatever comes and however slowly. httpx bounds each wait for some bytes and
    no more, so a timer hangs up.
    """

    def __init__(
        self,
        address: str,
        clock: Clock = time.monotonic,
        silent_seconds: float = SILENT_SECONDS,
        longest_seconds: float = LONGEST_SECONDS,
        stop: Stop = never,
    ) -> None:
        self.address = read_address(address)
        self._clock, self._longest, self._silent = clock, longest_seconds, silent_seconds
        self._stop, self._left, self._late = stop, False, False
        self._socket: socket.socket | None = None
        self._key = _read_key() if is_owners(self.address) else None
        headers = {"Accept-Encoding": "identity", "User-Agent": "speculative-decoding-playground"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(silent_seconds, connect=CONNECT_SECONDS),
            follow_redirects=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a server may close an idle one as it is used again
            trust_env=False,  # no proxy and no .netrc: to the address given
            verify=ssl.create_default_context() if self.address.startswith("https:") else False,  # nothing to verify
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def leave(self) -> None:
        """Hang up, from any thread: nobody waits for an answer any more."""
        self._left = True
        self._hang_up()

    def _be_late(self) -> None:
        self._late = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Whoever reads from the server or writes to it finds the end of the stream."""
        if self._socket is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx tells of every step; here, of the socket that it opened."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._left or self._late:
                self._hang_up()

    def get_json(self, path: str) -> Any:
        """The JSON document at a path; None where the server has no such page (404, 405, 501)."""
        found = self._whole("GET", path, None, LONGEST_ANSWER)
        return None if found is None else self._json(found)

    def get_text(self, path: str) -> str | None:
        """The text at a path; None where the server has no such page."""
        found = self._whole("GET", path, None, LONGEST_METRICS)
        return None if found is None else self._decode(found)

    def post_json(self, path: str, body: Any) -> Any:
        """What a path answers to a JSON body; None where the server has no such page."""
        found = self._whole("POST", path, body, LONGEST_ANSWER)
        return None if found is None else self._json(found)

    def events(self, path: str, body: Any, most: int, stop: Stop = never) -> Iterator[tuple[float, Any]]:
        """The events of a stream, each as (seconds since the request was sent, its JSON), until the server ends it or
        `stop()` is true. More than `most` of them are an error: the server does not stop."""
        start = self._clock()
        with self._response("POST", path, body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                said = self._said(self._read(response, LONGEST_ANSWER, start))
                raise UserError(f"{self.address} does not stream its answer{said}.")
            seen = 0
            for line in self._lines(response, start, stop):
                if not line.startswith(b"data:"):
                    if line.startswith(b"error:"):
                        raise UserError(f"{self.address} gave up{self._said(line[6:])}.")
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = self._json(data)
                if within(event, "error") is not None:
                    raise UserError(f"{self.address} gave up{self._said(data)}.")
                if (seen := seen + 1) > most:
                    raise UserError(f"{self.address} does not stop: it sent more than {most:,} events.")
                yield self._clock() - start, event

    def _lines(self, response: httpx.Response, start: float, stop: Stop) -> Iterator[bytes]:
        """Lines as they arrive. A last line without its end is a stream that was cut."""
        rest, total = bytearray(), 0
        for piece in response.iter_raw():
            if stop():
                return
            if (total := total + len(piece)) > LONGEST_STREAM:
                raise UserError(f"{self.address} does not stop: it sent more than {LONGEST_STREAM:,} bytes.")
            self._in_time(start)
            for part in piece.splitlines(keepends=True):
                rest += part
                if len(rest) > LONGEST_LINE:
                    raise UserError(f"{self.address} sent a line of more than {LONGEST_LINE:,} bytes.")
                if rest.endswith(b"\n"):
                    yield self._struck(bytes(rest.strip()))
                    rest.clear()
                    if stop():
                        return
        self._in_time(start)  # it may be us who ended it
        if rest.strip():
            raise UserError(f"{self.address} hung up in the middle of a line.")

    @contextmanager
    def _response(self, method: str, path: str, body: Any) -> Iterator[httpx.Response]:
        """An answer to read from, refused where it is an error or leads elsewhere."""
        timer = Timer(self._longest, self._be_late)
        timer.daemon = True
        try:
            self._late = False
            self._in_time(self._clock())
            timer.start()
            request = self._client.build_request(method, self.address + path, json=body)
            request.extensions["trace"] = self._trace
            response = self._client.send(request, stream=True)
            try:
                self._check(response, path)
                yield response
            finally:
                response.close()
        except httpx.TimeoutException as error:
            waited = CONNECT_SECONDS if isinstance(error, httpx.ConnectTimeout) else self._silent
            raise UserError(f"{self.address} did not answer for {waited:g} seconds.") from None
        except httpx.ConnectError as error:
            raise UserError(f"{self.address} cannot be reached{self._reason(error)}.") from None
        except httpx.HTTPError as error:
            self._in_time(self._clock())  # or was it us?
            raise UserError(f"{self.address} hung up{self._reason(error)}.") from None
        except (httpx.InvalidURL, httpx.StreamError, UnicodeError, OSError) as error:
            raise UserError(f"{self.address} cannot be asked{self._reason(error)}.") from None
        finally:
            timer.cancel()

    def _check(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if 300 <= status < 400:
            elsewhere = self._heard(response.headers.get("location", "")) or "elsewhere"
            raise UserError(f"{self.address} sends on to {elsewhere}, which was not asked; give that address itself.")
        if response.headers.get("content-encoding", "identity") not in ("identity", ""):
            raise UserError(f"{self.address} packs its answers, although it was asked not to.")
        if status in (401, 403):
            if self._key:
                raise UserError(f"{self.address} refuses the key that was sent; put its key into {KEY_VARIABLE}.")
            raise UserError(
                f"{self.address} refuses an answer without a key. Put its key into {KEY_VARIABLE} and, as only servers "
                f"named at the start are sent it, its address into {SERVERS_VARIABLE} (or after --server)."
            )
        if status >= 400 and status not in NOT_THERE:
            said = self._said(self._read(response, LONGEST_ANSWER, self._clock()))
            raise UserError(f"{self.address} answers {path} with status {status}{said}.")

    def _whole(self, method: str, path: str, body: Any, longest: int) -> bytes | None:
        with self._response(method, path, body) as response:
            if response.status_code in NOT_THERE:
                return None
            return self._struck(self._read(response, longest, self._clock()))

    def _read(self, response: httpx.Response, longest: int, start: float) -> bytes:
        found = bytearray()
        for piece in response.iter_raw():
            found += piece
            if len(found) > longest:
                raise UserError(f"{self.address} sent an answer of more than {longest:,} bytes.")
            self._in_time(start)
        self._in_time(start)  # it may be us who ended it
        return bytes(found)

    def _in_time(self, start: float) -> None:
        if self._left or self._stop():
            raise Cancelled("Stopped while waiting for a server.")
        if self._late or self._clock() - start > self._longest:
            raise UserError(f"{self.address} took longer than {self._longest:g} seconds.")

    def _json(self, found: bytes) -> Any:
        text = self._decode(found)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            what = "an HTML page" if text.lstrip()[:1] == "<" else "something that is not JSON"
            raise UserError(f"{self.address} answers with {what}: is it a language model's server?") from None

    def _decode(self, found: bytes) -> str:
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.address} sent bytes that are not UTF-8 text.") from None

    def _said(self, found: bytes) -> str:
        """What the server gives as its reason, as the end of a sentence."""
        try:
            document = json.loads(self._struck(found))
        except (ValueError, RecursionError):
            return ""
        error = within(document, "error")
        reason = error if isinstance(error, str) else within(error, "message") or within(document, "message")
        said = name(reason)
        return f": {said.rstrip('.')}" if said else ""

    def _reason(self, error: Exception) -> str:
        """What the library says, which may quote the server, as the end of a sentence."""
        said = (self._heard(str(error)) or "").rstrip(".")
        return f": {said}" if said else ""

    def _heard(self, said: str) -> str | None:
        return name(self._struck(said.encode(errors="replace")).decode())

    def _struck(self, found: bytes) -> bytes:
        """Without the key, should the server send it back."""
        key = (self._key or "").encode()
        return found.replace(key, b"***") if len(key) >= SHORTEST_SECRET else found


NOT_THERE = (404, 405, 501)


def _read_key() -> str | None:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise UserError(f"The key in {KEY_VARIABLE} holds characters that no key has.")
    return key or None
