"""Does memory stay flat? Resident memory over consecutive runs, then over swaps of the pair, as the page does both.

    python tests/robustness/measure_memory.py [--runs 300] [--swaps 50] [--json F]

Runs mix methods, lengths and temperatures over the bundled pair; a swap loads it in another precision, which drops the
one that was used longest ago. Prints the curve and by how much its last quarter lies above its second.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from app.playground.race import queued_race  # noqa: E402
from app.serving import Engine  # noqa: E402
from app.serving.device import Device  # noqa: E402
from app.serving.turns import guarded  # noqa: E402
from app.tokens import stream  # noqa: E402
from core.records import Run, Settings  # noqa: E402
from core.text import read_prompts  # noqa: E402

METHODS = ("draft", "ngram", "early-exit", "tree", "ngram+draft", "plain")
PRECISIONS = ("nf4", "fp32", "bf16")


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def run_once(engine: Engine, device: Device, settings: Settings, prompt: str) -> None:
    runs: list[Run] = []
    for _ in stream(guarded(queued_race(device, engine, prompt, settings, lambda: False, runs))):
        pass
    assert all(run.stop_reason in ("eos", "length") for run in runs)


def curve(steps: int, step: Any) -> list[float]:
    found = []
    for number in range(steps):
        step(number)
        gc.collect()
        found.append(resident_megabytes())
        if number % max(1, steps // 20) == 0:
            print(f"  {number:4d}  {found[-1]:8.1f} MB", flush=True)
    return found


def growth(found: list[float]) -> float:
    """Mean of the last quarter over mean of the second, minus one; the first quarter is warm-up."""
    quarter = len(found) // 4
    return mean(found[-quarter:]) / mean(found[quarter : 2 * quarter]) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--json", metavar="F")
    chosen = parser.parse_args()
    base = Settings(max_new_tokens=64)
    prompts = [prompt.text for prompt in read_prompts()]
    engine, device = Engine(base), Device()

    def one_run(number: int) -> None:
        settings = replace(
            base,
            method=METHODS[number % len(METHODS)],
            temperature=0.8 * (number % 2),
            seed=number,
            max_new_tokens=(32, 64, 128)[number % 3],
        )
        run_once(engine, device, settings, prompts[number % len(prompts)])

    def one_swap(number: int) -> None:
        run_once(engine, device, replace(base, precision=PRECISIONS[number % 3], max_new_tokens=16), prompts[0])

    result = {}
    for name, steps, step in (("runs", chosen.runs, one_run), ("swaps", chosen.swaps, one_swap)):
        print(f"{steps} {name}:", flush=True)
        found = curve(steps, step)
        result[name] = {"megabytes": [round(m, 1) for m in found], "growth": growth(found)}
        print(f"  last quarter over second: {growth(found):+.2%}", flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
