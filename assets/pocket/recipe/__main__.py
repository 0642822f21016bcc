"""`python -m assets.pocket.recipe`: from Python sources to finished folders, each stage resumable."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from .settings import Recipe
from .stages import STAGES, Stages

POCKET = Path(__file__).parents[1]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m assets.pocket.recipe", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path.home() / ".cache" / "speculative-playground" / "pocket",
        help="everything on the way: corpus, checkpoints, logs (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=POCKET, help="where the finished pair goes (default: its place)")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of %(default)s")
    parser.add_argument("--tokens", type=int, help="budget of the joint phase; may change when a run is resumed")
    parser.add_argument("--steps", type=int, help="stop the joint phase after so many steps in all")
    parser.add_argument(
        "--prompts", type=int, default=8, help="held-out prompts of the evaluation (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a number of Recipe")
    arguments = parser.parse_args()
    if unknown := set(arguments.stages.split(",")) - set(STAGES):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; choose from {', '.join(STAGES)}")
    return arguments


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes."""
    recipe = Recipe()
    changes = {name: type(getattr(recipe, name))(value) for name, value in (s.split("=") for s in arguments.set)}
    changes |= {k: getattr(arguments, k) for k in ("tokens", "seed") if getattr(arguments, k) is not None}
    return replace(recipe, **changes)


def choose_device(name: str) -> torch.device:
    """CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def run() -> None:
    """Run the chosen stages in their order."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    stages = Stages(read_recipe(arguments), arguments.work, arguments.output, device, not arguments.no_compile)
    prompts = {"prompts": arguments.prompts}
    more = {"train": {"steps": arguments.steps}, "evaluate": prompts, "bench": prompts}
    for name in STAGES:
        if name in arguments.stages.split(","):
            print(f"== {name}", flush=True)
            getattr(stages, name)(**more.get(name, {}))


if __name__ == "__main__":
    run()
