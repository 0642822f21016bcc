"""Many visitors at once on one loaded pair: is any result lost, mixed up, or different from the same run alone?

    python tests/robustness/measure_load.py [--clients 20] [--runs 200] [--target DIR --draft DIR] [--json F]

Starts `python app.py`, lets every kind of run be done once alone, then lets all clients loose: mixed methods, lengths
and temperatures, every seventh run stopped by its visitor, every eleventh left without a word.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser")]

from driving import free_port  # noqa: E402

PROMPTS = ("def first(items):\n", "class Stack:\n    def push", "import json\n\nwith open(path) as")
VARIANTS: list[dict[str, Any]] = [
    {"method": "draft", "draft_length": 4, "max_new_tokens": 24},
    {"method": "draft", "draft_length": "auto", "max_new_tokens": 40},
    {"method": "ngram", "draft_length": 3, "max_new_tokens": 32},
    {"method": "early-exit", "draft_length": 2, "exit_layer": 1, "max_new_tokens": 16},
    {"method": "tree", "tree": "2x2", "max_new_tokens": 20},
    {"method": "draft", "draft_length": 4, "temperature": 0.9, "seed": 3, "max_new_tokens": 24},
    {"method": "plain", "max_new_tokens": 12},
]


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, int]]:
    """The address of `python app.py ARGUMENTS`, and its process."""
    command = [sys.executable, "app.py", *arguments, "--port", str(free_port())]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        yield next(m[1] for line in process.stdout if (m := re.search(r"Ready: (\S+)", line))), process.pid
    finally:
        process.terminate()
        process.wait(20)


def job(number: int) -> tuple[str, dict[str, Any]]:
    """The prompt and the controls of the n-th run."""
    return PROMPTS[number % len(PROMPTS)], VARIANTS[number % len(VARIANTS)]


def intent(number: int) -> str:
    return "stop" if number % 7 == 3 else "leave" if number % 11 == 5 else "finish"


def outcome(document: dict[str, Any]) -> list[list[int]]:
    return [run["token_ids"] for run in document["runs"]]


def visit(address: str, number: int, expected: dict[int, list[list[int]]]) -> str:
    """One visitor's run; what became of it in a word."""
    from gradio_client import Client

    with closing(Client(address, verbose=False)) as client:  # as a tab: what is kept of it goes with it
        return run_once(client, number, expected)


def told_by(job: Any) -> Iterator[Any]:
    """What a job tells, as it comes; raises what ended it. A job's own iterator waits for ever where it failed."""
    told = 0
    while not job.done() or told < len(job.outputs()):
        for each in job.outputs()[told:]:
            told += 1
            yield each
        time.sleep(0.01)
    job.result()


def run_once(client: Any, number: int, expected: dict[int, list[list[int]]]) -> str:
    prompt, controls = job(number)
    last: Any = ("", None)
    acted = False
    for last in told_by(client.submit(prompt, **controls, api_name="/run")):
        # Odd ones act as soon as they hear anything, in the queue; the others once their lanes are open.
        if acted or not (number % 2 or '"e":"open"' in last[0]):
            continue
        acted = True
        if intent(number) == "stop":
            client.predict(api_name="/stop")
        elif intent(number) == "leave":
            return "left"
    text, document = last
    if document is None:
        if any(words in text for words in ("waiting already", "Stopped while waiting")):
            return "refused or stopped in the queue"
        return "LOST"
    whole = expected[number % (len(PROMPTS) * len(VARIANTS))]
    if intent(number) == "stop":
        same = all(ids == alone[: len(ids)] for ids, alone in zip(outcome(document), whole))
        return "stopped, a beginning of the same run" if same else "MIXED UP"
    return "equal to the same run alone" if outcome(document) == whole else "MIXED UP"


def resident_megabytes(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def measure(address: str, clients: int, runs: int, process: int) -> dict[str, Any]:
    """Every kind of run alone, then `runs` runs by `clients` visitors at a time; the memory of the server's process
    before them and after each tenth of them."""
    from gradio_client import Client

    kinds = min(runs, len(PROMPTS) * len(VARIANTS))
    alone = Client(address, verbose=False)
    expected = {}
    for number in range(kinds):
        prompt, controls = job(number)
        *_, (_, document) = alone.submit(prompt, **controls, api_name="/run")
        expected[number] = outcome(document)
    start = time.monotonic()
    seconds: list[float] = []
    megabytes = [resident_megabytes(process)]

    def timed(number: int) -> str:
        begun = time.monotonic()
        try:
            return visit(address, number, expected)
        except Exception as error:
            return f"ERROR {type(error).__name__}: {error}"
        finally:
            seconds.append(time.monotonic() - begun)
            if len(seconds) % max(1, runs // 10) == 0:
                megabytes.append(round(resident_megabytes(process), 1))
                print(f"{len(seconds)} runs in {time.monotonic() - start:.0f} s, {megabytes[-1]} MB", flush=True)

    with ThreadPoolExecutor(clients) as visitors:
        found = Counter(visitors.map(timed, range(runs)))
    return {
        "clients": clients,
        "runs": runs,
        "seconds": time.monotonic() - start,
        "seconds_per_visit": {"median": median(seconds), "max": max(seconds)},
        "megabytes": megabytes,
        "outcomes": dict(found),
    }


def faults(result: dict[str, Any]) -> list[str]:
    return [word for word in result["outcomes"] if word.startswith(("LOST", "MIXED", "ERROR"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--json", metavar="F")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not chosen.target:
            from tiny_pair import make_pair

            chosen.target, chosen.draft = make_pair(Path(folder))
        models = ["--target", str(chosen.target), "--draft", str(chosen.draft), "--precision", "fp32"]
        with served(*models) as (address, process):
            result = measure(address, chosen.clients, chosen.runs, process)
    print(json.dumps(result, indent=2))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if faults(result) else 0


if __name__ == "__main__":
    sys.exit(main())
