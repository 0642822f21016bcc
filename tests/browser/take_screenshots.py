"""Pictures of every tab over real runs on a running page, each run once and shown in light, in dark and on a phone.

python tests/browser/take_screenshots.py http://127.0.0.1:7860 FOLDER [TAB …]
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driving import ARGUMENTS, open_tab, run_to_end
from playwright.sync_api import sync_playwright

VIEWS = {"light": (1440, 900), "dark": (1440, 900), "phone": (390, 844)}
MINUTES = 600_000


def playground(page: Any) -> None:
    run_to_end(page)


def compare(page: Any) -> None:
    page.click("#compare-run")
    page.wait_for_function(
        "document.querySelector('.comparison').dataset.state === 'idle'"
        " && document.querySelector('.comparison tbody tr')"
    )
    page.wait_for_timeout(1500)


def tune(page: Any) -> None:
    """Greedy, each prompt once: enough to decide, and minutes on a pair of 135 M."""
    page.locator("#tune-temperatures").get_by_label("1", exact=True).uncheck()
    page.locator("#tune-amount").get_by_label("New tokens").fill("32")
    page.locator("#tune-amount").get_by_label("Repeats").fill("1")
    page.click("#tune-run")
    page.wait_for_selector("#tune-status .status-line[data-kind='finished']", timeout=MINUTES)
    page.wait_for_timeout(1500)


def train(page: Any) -> None:
    page.click("#train-start")
    page.wait_for_selector(".training .status[data-kind='finished']", timeout=MINUTES)
    page.wait_for_timeout(1500)


def explain(page: Any) -> None:
    page.wait_for_selector("#explain-walk .steps")


def history(page: Any) -> None:
    page.wait_for_selector(".history tbody tr")


TABS: dict[str, Callable[[Any], None]] = {
    "Playground": playground,
    "Compare": compare,
    "Tune": tune,
    "Train": train,
    "Explain": explain,
    "History": history,
}


def main(address: str, folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        look(page, "light")
        page.goto(f"{address}/?__theme=light")
        page.wait_for_function("document.querySelector('.race')?.race")
        for name, act in TABS.items():
            if name.lower() in names or name == "Playground":
                look(page, "light")
                open_tab(page, name.lower())
                act(page)
                for view in VIEWS:
                    look(page, view)
                    if (name, view) == ("Playground", "phone"):  # where Run leads to on a phone
                        page.locator(".race").evaluate("race => race.scrollIntoView()")
                    page.wait_for_timeout(1000)
                    whole = name in ("Compare", "Tune", "Train") and view != "phone"
                    page.screenshot(path=folder / f"{name.lower()}-{view}.png", full_page=whole)
        browser.close()


def look(page: Any, view: str) -> None:
    width, height = VIEWS[view]
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("dark => document.body.classList.toggle('dark', dark)", view == "dark")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]), sys.argv[3:] or [name.lower() for name in TABS])
