"""Pictures of every tab over real runs on a running page: light, dark and phone.

python tests/browser/take_screenshots.py http://127.0.0.1:7860 FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driving import ARGUMENTS, run_to_end, set_number
from playwright.sync_api import sync_playwright

VIEWS = {"light": (1440, 900), "dark": (1440, 900), "phone": (390, 844)}
MINUTES = 180_000


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
    page.click("#tune-run")
    page.wait_for_selector("#tune-status .status-line[data-kind='finished']", timeout=MINUTES)
    page.wait_for_timeout(1500)


def train(page: Any) -> None:
    page.click("#train-start")
    page.wait_for_selector(".training .status[data-kind='finished']", timeout=2 * MINUTES)
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


def main(address: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for view, (width, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            page.goto(f"{address}/?__theme={'dark' if view == 'dark' else 'light'}")
            page.wait_for_function("document.querySelector('.race')?.race")
            set_number(page, "number input for Temperature", 0.7)
            for name, act in TABS.items():
                open_tab(page, name)
                act(page)
                page.wait_for_timeout(400)
                whole = name in ("Compare", "Tune", "Train") and view != "phone"
                page.screenshot(path=folder / f"{name.lower()}-{view}.png", full_page=whole)
        browser.close()


def open_tab(page: Any, name: str) -> None:
    """On a phone the last tabs are behind the menu at the end of the row."""
    tab = page.locator(f'#tabs [role="tab"][data-tab-id="{name.lower()}"]')
    if not tab.is_visible():
        page.locator("#tabs .overflow-menu button").first.click()
        tab = page.locator("#tabs .overflow-dropdown button", has_text=name)
    tab.click()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
