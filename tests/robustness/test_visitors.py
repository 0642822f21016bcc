"""One device and many visitors: what one does never holds up the page of the others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from driving import free_port
from fakes import FakeEngine
from measure_tabs import measure, scripted_engine

from app.api import STARTING
from app.page import build, launch_options
from app.settings import CONTROLS
from core.settings import Settings

LOADING = 4.0
"""Seconds that a load takes, whatever anybody wishes."""


class Deaf(FakeEngine):
    """Whose first load after the page's own tells how far it is and ignores Stop."""

    def __init__(self) -> None:
        super().__init__(pace=0)
        self.loads = False
        self.loading, self.ended = threading.Event(), 0.0

    def is_loaded(self, settings: Settings) -> bool:
        return not self.loads

    def fetch(self, *_: Any) -> None:
        pass

    def load(self, settings: Settings, progress: Any = None, *_: Any) -> Any:
        if self.loads:
            self.loads = False
            self.loading.set()
            until = time.monotonic() + LOADING
            while time.monotonic() < until:
                progress(f"Reading: {until - time.monotonic():.1f} s left")
                time.sleep(0.05)
            self.ended = time.monotonic()
        return SimpleNamespace(target=None, draft=None, head=None)


@pytest.fixture
def page() -> Iterator[tuple[Deaf, str, int]]:
    engine = Deaf()
    made = build(engine)
    (run,) = (number for number, each in made.fns.items() if each.api_name == "run")
    _, address, _ = made.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options())
    yield engine, address, run
    made.close(verbose=False)


def visit(address: str, function: int, session: str, leave: threading.Event | None = None) -> Iterator[str]:
    """What a browser tab does to run something: joins the queue, and reads what comes until it is closed."""
    asked = {
        "data": ["def f():", *(STARTING[name] for name in CONTROLS)],
        "fn_index": function,
        "session_hash": session,
    }
    httpx.post(f"{address}gradio_api/queue/join", json=asked).raise_for_status()
    with httpx.stream("GET", f"{address}gradio_api/queue/data", params={"session_hash": session}, timeout=30) as stream:
        for line in stream.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            yield message.get("msg", "")
            if message.get("msg") in ("process_completed", "close_stream") or (leave and leave.is_set()):
                return


def test_a_tab_that_closes_while_models_load_holds_nobody_up(page: tuple[Deaf, str, int]) -> None:
    engine, address, run = page
    engine.loads = True
    for _ in visit(address, run, "ann", engine.loading):
        pass
    begun = time.monotonic()
    done: list[float] = []

    def next_visitor() -> None:
        assert "process_completed" in list(visit(address, run, "bob"))
        done.append(time.monotonic())

    other = threading.Thread(target=next_visitor)
    other.start()
    slowest = 0.0
    while time.monotonic() - begun < LOADING + 0.5:
        asked = time.monotonic()
        httpx.get(f"{address}config", timeout=30).raise_for_status()
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.05)
    other.join(20)
    assert slowest < LOADING / 2, f"everybody waited {slowest:.1f} s for a tab that was gone"
    assert done and engine.ended and done[0] > engine.ended, "the device was given away while models were loading"


def test_of_tabs_that_close_in_the_middle_nothing_stays(tmp_path: Path) -> None:
    """Of a training, a sweep and lanes of servers (a small edition of measure_tabs.py)."""
    for kind, found in measure(scripted_engine(tmp_path), tabs=5).items():
        assert found["during"]["turns"] == 5 and found["during"]["generators"], kind
        assert not any(found["left"].values()), f"{kind}: {found['left']}"
