"""What a browser sees while libraries are imported and models loaded: how far that is, until the page takes over."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer

from core.progress import Progress

PAGE = Path(__file__).parents[2] / "assets" / "page" / "starting.html"
PORTS = range(7860, 7960)
"""Of which the page takes the first free one where none is asked for, as Gradio would."""


class FirstScreen(ThreadingTCPServer):
    """Answers where the page will be with the newest `line`. Raises OSError where it cannot listen."""

    allow_reuse_address = True
    daemon_threads = True
    line = "Starting…"

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Who hung up in the middle of an answer is no news."""


class Answer(BaseHTTPRequestHandler):
    """Not available yet, and how far it is; so programs that wait for the page are not deceived."""

    server: FirstScreen
    timeout = 5
    """Seconds that somebody may take to ask."""

    def do_GET(self) -> None:
        asked = self.path.endswith("/starting")
        body = self.server.line.encode() if asked else PAGE.read_bytes()
        self.send_response(503)
        self.send_header("Content-Type", f"text/{'plain' if asked else 'html'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Starting", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def first_screen(host: str, port: int | None, tell: Progress) -> Iterator[tuple[Progress, int | None]]:
    """Until the block ends, progress that is told there too, and the port, chosen here where None is asked for. Without
    it where no port can be had; on Spaces, which show a screen of their own."""
    ports = [] if os.environ.get("SPACE_ID") else PORTS if port is None else [port]
    screen = next(filter(None, (_listening(host, each) for each in ports)), None)
    if screen is None:
        yield tell, port
        return

    def tell_both(line: str) -> None:
        screen.line = line
        tell(line)

    port = screen.server_address[1]
    named = "localhost" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    tell(f"Starting at http://{named}:{port}/")
    threading.Thread(target=screen.serve_forever, args=(0.05,), name="first screen", daemon=True).start()
    try:
        yield tell_both, port
    finally:
        screen.shutdown()
        screen.server_close()


def _listening(host: str, port: int) -> FirstScreen | None:
    try:
        return FirstScreen(host, port)
    except OSError:
        return None
