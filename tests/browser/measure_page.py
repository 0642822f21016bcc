"""What a long run costs the browser: main-thread seconds per wall second, early and late, and the longest task.

    python tests/browser/measure_page.py [TOKENS]

A scripted engine writes TOKENS (2,000) tokens in both lanes in real time. Smooth means: the late cost is that of the
early one, and no task is long enough to drop more than a few frames.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "app")]

from driving import ARGUMENTS, free_port, set_number  # noqa: E402

WATCH = """() => {
    window.longest = 0;
    new PerformanceObserver(list => {
        for (const task of list.getEntries()) window.longest = Math.max(window.longest, task.duration);
    }).observe({ entryTypes: ["longtask"] });
    window.updates = 0;
    const race = document.querySelector(".race").race;
    const update = race.update.bind(race);
    race.update = value => { window.updates += 1; update(value); };
}"""
TOKENS = "document.querySelectorAll('#plain-stream .t').length"


def main_thread(session: Any) -> dict[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {m["name"]: m["value"] for m in found if m["name"] in ("TaskDuration", "ScriptDuration", "LayoutDuration")}


def measure(page: Any, session: Any, tokens: int) -> list[dict[str, float]]:
    """Main-thread shares per quarter of the plain lane's tokens."""
    quarters = []
    before, start = main_thread(session), time.monotonic()
    for quarter in range(1, 5):
        page.wait_for_function(f"{TOKENS} >= {tokens * quarter // 4}", timeout=120_000, polling=250)
        now, end = main_thread(session), time.monotonic()
        quarters.append({name: (now[name] - before[name]) / (end - start) for name in now} | {"wall": end - start})
        before, start = now, end
    return quarters


def main(tokens: int) -> None:
    from fakes import FakeEngine
    from playwright.sync_api import sync_playwright

    from app.page import build, launch_options

    page_app = build(FakeEngine())
    _, address, _ = page_app.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(address)
        page.wait_for_function("document.querySelector('.race')?.race")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.evaluate(WATCH)
        set_number(page, "New tokens", tokens)
        page.click("#run")
        for n, quarter in enumerate(measure(page, session, tokens), 1):
            shares = ", ".join(f"{name} {share:.1%}" for name, share in quarter.items() if name != "wall")
            print(f"quarter {n}: {quarter['wall']:.1f} s, {shares}")
            print(f"updates {page.evaluate('window.updates')}, longest task {page.evaluate('window.longest'):.0f} ms")
        browser.close()
    page_app.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
