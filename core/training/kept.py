"""Where trained heads are kept on this machine, and what their trainings left there.

A head's folder holds the head itself (config.json, model.safetensors) and, in `training`, all that going on needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core import disk

if TYPE_CHECKING:
    from core.heads import HeadConfig
    from core.heads.dflash import DFlashConfig

TRAINING = "training"
"""The part of a head's folder that its training needs."""
PLAN = "plan.json"
"""What a training was asked for: prompts, the head it goes on from, its kind."""
PROGRESS = "progress.jsonl"
"""A line for every look at the held-out answers: a `Standing`."""


@dataclass(frozen=True)
class Kept:
    """A head in training, or trained. `standing` is that of the last look at held-out answers, empty before the first;
    `exported` tells whether the head can be drafted with."""

    folder: Path
    standing: dict[str, Any]
    exported: bool

    @cached_property
    def config(self) -> HeadConfig | DFlashConfig:
        """The shape of the exported head, whatever layers of its target it reads. Raises UserError where it cannot be
        read."""
        from core.heads.checkpoint import describe_head  # it needs PyTorch, and a list of heads does not

        return describe_head(self.folder, self.folder.name).anywhere


def heads_folder() -> Path:
    return disk.user_folder("data") / "heads"


def folder_name(target: str) -> str:
    """A folder's name for the heads of a target: the last part of its id, folder or file, as file systems take it."""
    return re.sub(r"[^\w.-]+", "-", Path(target).stem if target.endswith(".gguf") else Path(target).name).lower()[:200]


def kept_for(target: str) -> Kept | None:
    """The training for a target that was last worked on."""
    folders = [folder for folder in _numbered(target) if (folder / TRAINING).is_dir()]
    if not folders:
        return None
    folder = max(folders, key=lambda folder: _touched(folder / TRAINING))
    lines = read_progress(folder / TRAINING)
    return Kept(folder, lines[-1] if lines else {}, (folder / "model.safetensors").is_file())


def looks_by_kind(target: str) -> dict[str, list[dict[str, Any]]]:
    """Of each kind of new head, what the looks at held-out answers found in the training that was last worked on, of
    those whose texts are those of the last of all: they answered the same prompts."""
    folders = sorted((f / TRAINING for f in _numbered(target) if (f / TRAINING / PLAN).is_file()), key=_touched)
    plans = [(folder, json.loads((folder / PLAN).read_text(encoding="utf-8"))) for folder in folders]
    found = [(folder, plan) for folder, plan in plans if not plan["head"] and read_progress(folder)]
    alike = [(folder, plan) for folder, plan in found if plan["prompts"] == found[-1][1]["prompts"]]
    return {plan.get("kind", "eagle3"): read_progress(folder) for folder, plan in alike}


def new_folder(target: str) -> Path:
    """One that no training has used."""
    *_, last = _numbered(target)
    return last


def _numbered(target: str) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3 … up to the first that does not exist."""
    name, number = folder_name(target), 1
    while True:
        folder = heads_folder() / (name if number == 1 else f"{name}-{number}")
        yield folder
        if not folder.exists():
            return
        number += 1


def _touched(folder: Path) -> float:
    times = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a training that goes on has just put it in another's place
            times.append(file.stat().st_mtime)
    return max(times, default=folder.stat().st_mtime)


def read_progress(training: Path) -> list[dict[str, Any]]:
    """The whole lines of a training's progress, oldest first."""
    file = training / PROGRESS
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def require_room(folder: Path, needed: int) -> None:
    """Raise UserError where the disk of a folder cannot take so many bytes more."""
    disk.require_room("The training", folder, needed, "free some space and resume: what was learnt is kept")


def on_disk(folder: Path) -> AbstractContextManager[None]:
    """What a disk that cannot take the folder lacks, in a sentence."""
    full = f"The disk of {folder} is full; free some space and resume."
    return disk.on_disk(full, lambda why: f"{folder} cannot be written ({why}).")
