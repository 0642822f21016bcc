"""Tabs that are closed in the middle of what they asked for: does anything of them stay?

    python tests/robustness/measure_tabs.py [--tabs 50] [--scripted] [--json F]

For each kind of work as many tabs press its button; the first gets the device, the others wait or are refused, and all
are closed at once. Then: threads, turns on the device, generators of ours that are left, the memory of
the process, and how long the next visitor waits for a run. On the bundled pair, or `--scripted` on one without models.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import GeneratorType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("app", "browser", "core", "robustness"))]

import httpx  # noqa: E402
from driving import free_port  # noqa: E402
from measure_load import resident_megabytes  # noqa: E402

SOON = 30.0
"""Seconds after which nothing may be left of tabs that were closed."""
Left = dict[str, int]


class Page:
    """A page that is served, and what it keeps."""

    def __init__(self, engine: Any) -> None:
        from app.page import build, launch_options
        from app.serving.device import Device

        self.device = Device()
        self.blocks = build(engine, device=self.device)
        options = {"server_port": free_port(), "prevent_thread_lock": True, "quiet": True, **launch_options()}
        _, self.address, _ = self.blocks.launch(**options)
        self.api = f"{self.address}gradio_api/"
        self.others = self.begun()

    def asks(self, of: str, **given: Any) -> dict[str, Any]:
        """What a tab sends that presses the button of a function, with every control as the page starts; or calls one
        for programs with arguments of its own."""
        number, function = next((n, f) for n, f in self.blocks.fns.items() if getattr(f.fn, "__qualname__", "") == of)
        if function.api_visibility == "public":
            defaults = inspect.signature(function.fn).parameters
            names = [each for each in defaults if each != "request"][: len(function.inputs)]
            return {"fn_index": number, "data": [given.get(name, defaults[name].default) for name in names]}
        return {"fn_index": number, "data": [getattr(each, "value", None) for each in function.inputs]}

    def begun(self) -> int:
        """How many generators of ours were begun and have not ended: they hold what they work on."""
        gc.collect()
        ours = [each for each in gc.get_objects() if type(each) is GeneratorType and each.gi_frame is not None]
        return sum(each.gi_code.co_filename.startswith(str(ROOT / "app")) for each in ours)

    def at_work(self) -> Left:
        """Threads and turns on the device, which are counted at once."""
        threads = sum(each.name in ("training", "background") for each in threading.enumerate())
        return {"threads": threads, "turns": len(self.device._turns)}

    def left(self) -> Left:
        """What is there of visitors; to find generators takes as long as going through the whole memory."""
        return {**self.at_work(), "generators": self.begun() - self.others}


async def tab(page: Page, asked: dict[str, Any], session: str, heard: asyncio.Event) -> None:
    """Presses a button and reads what comes, until it is cancelled: then its connections are closed."""
    named = {"session_hash": session}
    async with (
        httpx.AsyncClient(timeout=None, verify=False) as client,
        client.stream("GET", f"{page.api}heartbeat/{session}"),
    ):
        (await client.post(f"{page.api}queue/join", json=asked | named)).raise_for_status()
        async with client.stream("GET", f"{page.api}queue/data", params=named) as stream:
            async for line in stream.aiter_lines():
                if '"process_generating"' in line or '"process_completed"' in line:
                    heard.set()


async def close_in_the_middle(page: Page, asked: dict[str, Any], tabs: int, prefix: str) -> tuple[Left, Left, float]:
    """What there is while the tabs are open, what is left of them, and how many seconds after."""
    heard = [asyncio.Event() for _ in range(tabs)]
    opened = [asyncio.create_task(tab(page, asked, f"{prefix}{n}", each)) for n, each in enumerate(heard)]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in heard)), 120)
    until = time.monotonic() + SOON
    # Servers are met before a turn is asked for.
    while page.at_work()["turns"] < min(tabs, page.device.longest) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    during, closed = page.left(), time.monotonic()
    for each in opened:
        each.cancel()
    await asyncio.gather(*opened, return_exceptions=True)
    while any(page.at_work().values()) and time.monotonic() - closed < SOON:
        await asyncio.sleep(0.1)
    while any((left := page.left()).values()) and time.monotonic() - closed < SOON:
        await asyncio.sleep(0.1)
    return during, left, time.monotonic() - closed


async def served_after(page: Page) -> float:
    """Seconds until the next visitor's short run has ended."""
    begun = time.monotonic()
    asked = page.asks("Playground.race", prompt="def f():", max_new_tokens=8)
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        named = {"session_hash": f"next{begun}"}
        (await client.post(f"{page.api}queue/join", json=asked | named)).raise_for_status()
        async with client.stream("GET", f"{page.api}queue/data", params=named) as stream:
            async for line in stream.aiter_lines():
                if '"process_completed"' in line:
                    assert '"success":true' in line.replace(" ", ""), line
                    return time.monotonic() - begun
    raise AssertionError("the next visitor got no answer")


def measure(engine: Any, tabs: int, tell: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """A kind of work -> what was there, what is left, how long that took, and the next visitor's wait. `faults` are
    sentences."""
    from stand_in_servers import stand_in_server

    async def all_kinds(page: Page, server: str) -> dict[str, Any]:
        lanes = [{"server": server}, {"method": "plain"}]
        kinds = {
            "training": page.asks("Train.start"),
            "sweep": page.asks("Tune.run"),
            "servers": page.asks("Compare.compare", lanes=lanes, prompt="def f():"),
        }
        found: dict[str, Any] = {}
        await close_in_the_middle(page, kinds["sweep"], tabs, "first")  # what is made once is made before memory counts
        for kind, asked in kinds.items():
            during, left, seconds = await close_in_the_middle(page, asked, tabs, kind)
            wait = await served_after(page)
            memory = resident_megabytes(os.getpid())
            found[kind] = {"during": during, "left": left, "seconds": seconds, "next": wait, "megabytes": memory}
            tell(f"{kind}: {found[kind]}")
        return found

    page = Page(engine)
    try:
        # On a thread of its own: whoever calls may have a loop already.
        with stand_in_server("llama.cpp", seconds_per_word=1.0) as server, ThreadPoolExecutor(1) as alone:
            return alone.submit(asyncio.run, all_kinds(page, server.address)).result()
    finally:
        page.blocks.close(verbose=False)


def scripted_engine(heads: Path) -> Any:
    """One without models, whose trainings end when they are stopped."""
    from fakes import FakeEngine

    class Endless(FakeEngine):
        def training(self, *given: Any, **more: Any) -> Any:
            session = super().training(*given, **more)
            session.endless = True
            return session

    engine = Endless(pace=1.0)
    engine.heads = heads
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tabs", type=int, default=50)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--json", metavar="F")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.scripted:
            engine = scripted_engine(Path(folder))
        else:
            os.environ["XDG_DATA_HOME"] = folder
            from app.serving.starting import engine_for

            engine = engine_for("pocket", None, "auto")
        result = measure(engine, chosen.tabs, lambda line: print(line, flush=True))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(result, indent=2) + "\n")
    return int(any(any(each["left"].values()) for each in result.values()))


if __name__ == "__main__":
    sys.exit(main())
