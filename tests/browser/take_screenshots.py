"""Pictures of a finished race on a running page: light, dark and phone.

python tests/browser/take_screenshots.py http://127.0.0.1:7860 FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from driving import ARGUMENTS, run_to_end
from playwright.sync_api import sync_playwright

VIEWS = {"light": (1440, 900), "dark": (1440, 900), "phone": (390, 844)}


def main(address: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, (width, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2)
            page.goto(f"{address}/?__theme={'dark' if name == 'dark' else 'light'}")
            page.wait_for_function("document.querySelector('.race')?.race")
            run_to_end(page)
            page.wait_for_timeout(300)
            page.screenshot(path=folder / f"playground-{name}.png", full_page=name == "phone")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
