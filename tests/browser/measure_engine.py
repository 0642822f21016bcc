"""Does the page disturb the engine? Tokens per second of the same race without a page and under a reader of the page.

    python tests/browser/measure_engine.py [--target DIR --draft DIR] [--repeats 7] [--tokens 256]

Both take turns over the same loaded pair; engine time is measured by the lanes themselves. The reader is a
gradio_client in a process of its own that takes every update.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from driving import free_port  # noqa: E402

PROMPT = "def merge_sort(items):\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256)
    return parser.parse_args()


def read_race(address: str, options: dict[str, Any]) -> list[float]:
    """Tokens per second of a race read from the page; runs in the reader's process."""
    from gradio_client import Client

    *_, (_, document) = Client(address, verbose=False).submit(PROMPT, **options, api_name="/run")
    return [run["metrics"]["tokens_per_second"] for run in document["runs"]]


def main() -> None:
    from app.page import build, launch_options
    from app.playground.race import queued_race
    from app.serving import Engine
    from app.serving.device import Device
    from core.records import Run, Settings, summarise

    chosen = arguments()
    base = Settings(
        target=chosen.target,
        draft=chosen.draft,
        precision=chosen.precision,
        draft_length=4,
        max_new_tokens=chosen.tokens,
        ignore_eos=True,
    )
    engine = Engine(base)
    page = build(engine)
    _, address, _ = page.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options())
    reader = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def alone() -> list[float]:
        runs: list[Run] = []
        for _ in queued_race(Device(), engine, PROMPT, replace(base), lambda: False, runs):
            pass
        return [summarise(run).tokens_per_second for run in runs]

    def read() -> list[float]:
        options = {"draft_length": 4, "max_new_tokens": chosen.tokens, "precision": chosen.precision}
        return reader.submit(read_race, address, options).result()

    alone(), read()  # warm-up
    pairs = [(alone(), read()) for _ in range(chosen.repeats)]
    for lane, name in enumerate(("speculative", "plain")):
        without = median(a[lane] for a, _ in pairs)
        under = median(b[lane] for _, b in pairs)
        print(f"{name}: {without:.0f} tokens/s without a page, {under:.0f} under a reader, ratio {under / without:.3f}")
    reader.shutdown()
    page.close()


if __name__ == "__main__":
    main()
