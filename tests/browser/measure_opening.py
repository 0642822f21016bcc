"""How soon is the page there? First contentful paint, and when Run can be pressed, of new visitors to a running page.

python tests/browser/measure_opening.py http://127.0.0.1:7860 [VISITS]
"""

from __future__ import annotations

import shutil
import sys
from statistics import median

from driving import ARGUMENTS
from playwright.sync_api import sync_playwright

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main(address: str, visits: int) -> None:
    paints, ready = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for _ in range(visits):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(address)
            page.wait_for_function("document.querySelector('.race')?.race && document.querySelector('#run')")
            ready.append(page.evaluate("performance.now()"))
            paints.append(page.evaluate(PAINT))
            page.close()
        browser.close()
    for name, found in (("first paint", paints), ("ready to run", ready)):
        print(f"{name}: median {median(found):.0f} ms, {min(found):.0f} to {max(found):.0f}, {visits} visits")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
