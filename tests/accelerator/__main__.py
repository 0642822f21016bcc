"""Everything this project claims of a GPU, measured in one command of under ten minutes, in parts that each leave their
own file and can be run alone.

    python -m tests.accelerator --out FOLDER [--stages smallest,tests,precisions,large,batches,bundled] [--small]

`smallest`: the smallest things that can fail, one after the other, each naming what to look at. `tests`: the tests that
need a GPU. `precisions`: what passes of a target of Llama 3.1 8B's shape with random weights cost in NF4, int4 and
bf16, captured and eager, beside the bytes they read over the measured bandwidth, and what `auto` takes there. `large`:
runs of that target in NF4 with a draft of Qwen2.5 0.5B's shape. `batches`: passes of it over the rows of 1 to 16 texts
at once, and `python -m core bench --batch` on the bundled pair. `bundled`: `python -m core bench` on the bundled pair.
`--small` takes tiny shapes and short runs, and the CPU where there is no GPU: it tries the script, its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAGES = ("smallest", "tests", "precisions", "large", "batches", "bundled")


def run_smallest(out: Path, small: bool) -> dict[str, Any]:
    import torch

    from tests.accelerator.smallest import measure

    def leave(document: dict[str, Any]) -> None:
        (out / "smallest.json").write_text(json.dumps(document, indent=1) + "\n")

    found = measure(torch.device("cuda" if has_gpu() else "cpu"), small, leave, say)
    failed = [name for name, step in found.items() if not step["ok"]]
    return {"steps": len(found), "failed": failed}


LEFT_OUT = ("gemma", "mistral", "olmo", "qwen", "gpt2", "nf4", "int4", "bf16")
"""Of the tests, where the script itself is tried."""


def run_tests(out: Path, small: bool) -> dict[str, Any]:
    """pytest in a process of its own: the project's tests hide GPUs unless told which to use."""
    device = "cpu" if small and not has_gpu() else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/accelerator", "-p", "no:cacheprovider"]
    command += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT)] if small else []
    environment = {"ACCELERATOR": device, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    done = logged(command, out / "tests.log", environment)
    lines = (out / "tests.log").read_text().strip().splitlines()
    return {"exit_status": done, "summary": lines[-1] if lines else "", "device": device}


def run_large(out: Path, small: bool) -> dict[str, Any]:
    from tests.accelerator.large import describe, measure

    document = measure(small, say)
    (out / "large.json").write_text(json.dumps(document, indent=1) + "\n")
    text = describe(document)
    (out / "large.txt").write_text(text + "\n")
    say(text)
    return document["verdicts"]


def run_precisions(out: Path, small: bool) -> dict[str, Any]:
    from tests.accelerator.large import measure_precisions

    document = measure_precisions(small, say)
    (out / "precisions.json").write_text(json.dumps(document, indent=1) + "\n")
    nearest = {name: max(row["share"] for row in rows) for name, rows in document["bounds"].items()}
    return {"auto": document["auto"], "share_of_bound": nearest}


def run_batches(out: Path, small: bool) -> dict[str, Any]:
    from tests.accelerator.large import measure_batches

    document = measure_batches(small, say)
    (out / "batches.json").write_text(json.dumps(document, indent=1) + "\n")
    command = [sys.executable, "-m", "core", "bench", "--target", "pocket", "--repeats", "1"]
    command += ["--methods", "draft" if small else "draft,ngram", "--batch", "1,2" if small else "1,2,4,8,16"]
    command += ["--max-new-tokens", "4"] if small else ["--draft-length", "3"]
    done = logged([*command, "--json", str(out / "batches_bundled.json")], out / "batches_bundled.log", {})
    return {"runners": {name: found["runner"] for name, found in document.items()}, "exit_status": done}


def run_bundled(out: Path, small: bool) -> dict[str, Any]:
    """Greedy with peers and growth, then at temperature 1."""
    kinds = {
        "greedy": ["--against", "transformers", "--contexts", "128,512,1024,max"],
        "sampled": ["--temperature", "1"],
    }
    methods = "draft" if small else "draft,early-exit,ngram,ngram+draft,tree"
    common = [sys.executable, "-m", "core", "bench", "--target", "pocket", "--methods", methods, "--repeats", "1"]
    if small:
        (out / "prompts.txt").write_text("import os\n")
        common += ["--prompts", str(out / "prompts.txt"), "--max-new-tokens", "12"]
        kinds = {"greedy": []}
    return {
        name: logged([*common, *extra, "--json", str(out / f"bundled_{name}.json")], out / f"bundled_{name}.log", {})
        for name, extra in kinds.items()
    }


def logged(command: list[str], log: Path, environment: dict[str, str]) -> int:
    """Run a command with its output in a file and here; its exit status."""
    say(" ".join(command))
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
        return process.wait()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def say(message: str) -> None:
    print(message, flush=True)


RUN = {
    "smallest": run_smallest,
    "tests": run_tests,
    "precisions": run_precisions,
    "large": run_large,
    "batches": run_batches,
    "bundled": run_bundled,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accelerator", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of " + ",".join(STAGES))
    parser.add_argument("--small", action="store_true", help="tiny shapes, and a CPU will do: to try the script")
    chosen = parser.parse_args()
    if unknown := set(chosen.stages.split(",")) - set(STAGES):
        parser.error(f"no stage {sorted(unknown)[0]!r}")
    if not has_gpu() and not chosen.small:
        say("There is no CUDA device here; --small tries the script without one.")
        return 2
    chosen.out.mkdir(parents=True, exist_ok=True)
    kept = chosen.out / "summary.json"  # stages run alone add to it
    summary: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    summary["small"] = chosen.small
    for stage in chosen.stages.split(","):
        start = time.perf_counter()
        try:
            found = RUN[stage](chosen.out, chosen.small)
        except Exception as error:  # the next stage may still tell something
            import traceback

            (chosen.out / f"{stage}.error.txt").write_text(traceback.format_exc())
            found = {"error": f"{type(error).__name__}: {error}"}
        summary[stage] = {**found, "seconds": round(time.perf_counter() - start, 1)}
        kept.write_text(json.dumps(summary, indent=1) + "\n")
    say(json.dumps(summary, indent=1))
    ran = [summary[stage] for stage in chosen.stages.split(",")]
    return int(any("error" in found or found.get("failed") or found.get("exit_status") for found in ran))


if __name__ == "__main__":
    sys.exit(main())
