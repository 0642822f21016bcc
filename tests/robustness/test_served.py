"""The program as it is served: what a stranger cannot reach, what many visitors meet, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from driving import free_port
from gradio_client import Client
from measure_load import faults, measure

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_neverToBeSeenAnywhere"


class Served:
    """`python app.py ARGUMENTS` with a token in its environment; everything it prints is kept."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "app.py", *arguments, "--port", str(self.port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "1"},
        )
        self.log: list[str] = []
        self.ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.ready.wait(120), self.log
        self.address = f"http://127.0.0.1:{self.port}/"

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.log.append(line)
            if re.search(r"Ready: \S+", line):
                self.ready.set()


@pytest.fixture(scope="module")
def served(saved_pair: tuple[Path, Path]) -> Iterator[Served]:
    target, draft = map(str, saved_pair)
    app = Served("--target", target, "--draft", draft, "--precision", "fp32")
    yield app
    app.process.kill()
    app.process.wait(10)


@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=README.md",
        "gradio_api/file=app.py",
        "gradio_api/file=assets/page/page.css",
        "gradio_api/file=..%2f..%2fetc%2fpasswd",
        "gradio_api/file=/proc/self/environ",
        "gradio_api/file=http://127.0.0.1:9/",
        "gradio_api/proxy=http://127.0.0.1:9/",
        "assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "scripts/x/..%2f..%2f..%2fetc%2fpasswd",
        "static/..%2f..%2f..%2fetc%2fpasswd",
        "file=/etc/passwd",
    ],
)
def test_no_file_of_the_server_is_served(served: Served, path: str) -> None:
    answer = httpx.get(served.address + path)
    assert answer.status_code in (400, 403, 404)
    assert "root:" not in answer.text
    assert SECRET not in answer.text


def test_a_link_in_the_working_directory_leads_nowhere(served: Served, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    answer = httpx.get(f"{served.address}gradio_api/file={tmp_path / 'link'}")
    assert answer.status_code == 403


def test_an_upload_has_a_limit_and_a_name_of_our_own(served: Served) -> None:
    upload = served.address + "gradio_api/upload"
    assert httpx.post(upload, files={"files": ("big", b"x" * (21 << 20))}).status_code == 413
    (kept,) = httpx.post(upload, files={"files": ("../../../escape.json", b"{}")}).json()
    assert ".." not in kept
    assert kept.endswith("/escape.json")


def test_only_this_machine_is_served(served: Served) -> None:
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((str(address), served.port)) != 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"data": []}', b'{"data": [[[[]]]]}', b"[" * 20_000])
def test_requests_that_make_no_sense(served: Served, body: bytes) -> None:
    answer = httpx.post(
        served.address + "gradio_api/call/run", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 422)
    assert "Traceback" not in answer.text


def test_a_token_is_never_told(served: Served) -> None:
    """Neither in a run document, nor where a model cannot be had, nor in the log."""
    client = Client(served.address, verbose=False)
    *_, (text, document) = client.submit("def f():", max_new_tokens=4, api_name="/run")
    assert document["runs"]
    assert SECRET not in text + str(document)
    assert SECRET not in httpx.get(served.address + "config").text
    assert SECRET not in "".join(served.log)


def test_visitors_do_not_disturb_one_another(served: Served) -> None:
    """Many of one pair: every result is that of the same run alone (a small edition of measure_load.py)."""
    result = measure(served.address, clients=6, runs=14, process=served.process.pid)
    assert not faults(result)
    assert sum(result["outcomes"].values()) == 14
    assert result["outcomes"]["equal to the same run alone"] >= 7


def test_a_signal_ends_a_run_and_the_program(served: Served) -> None:
    """SIGTERM in the middle of a long run: the end, with status 0, and nothing of a trace-back. The last of the tests
    that the program serves."""
    job: Any = Client(served.address, verbose=False).submit("def f():", max_new_tokens=3000, api_name="/run")
    deadline = time.monotonic() + 120
    while not job.outputs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.outputs()
    told = len(served.log)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    assert "Traceback" not in "".join(served.log[told:])
