"""A server on the loopback interface for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

POLL_SECONDS = 0.02
"""How long a server may take to notice that it is to end."""


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler], it: Any) -> Iterator[None]:
    """Answer requests with `handler`, whose attribute `it` is the stand-in that is asked, at `it.address`."""
    bound = type(handler.__name__, (handler,), {"it": it, "log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    it.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
