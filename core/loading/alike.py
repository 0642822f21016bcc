"""What a check at loading found is kept for the next start: that the fused forward of these weights answers here as
transformers' own does, which takes a second to see."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import transformers

from core.disk import user_folder
from core.runners.library import SETTING, native_obstacle

KEPT = 64
"""So many are remembered, the newest."""
ROOT = Path(__file__).parents[1]


def fingerprint(folder: Path, precision: str) -> str:
    """Of all that the answer hangs on: the files of a model, its precision, this program, its packages, the machine."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    capability = getattr(torch.backends.cpu, "get_cpu_capability", str)()
    machine = (platform.node(), platform.machine(), capability, native_obstacle(), os.environ.get(SETTING))
    parts = (str(folder.resolve()), stats, precision, machine, torch.__version__, transformers.__version__, _program())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _program() -> str:
    """Of the sources that load weights and make passes of them."""
    rooms = (ROOT / "loading", ROOT / "runners")
    sources = sorted(file for room in rooms for file in room.iterdir() if file.suffix in (".py", ".cpp"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def seen_alike(key: str) -> bool:
    return key in _known()


def remember(key: str) -> None:
    """Add to what is known; where nothing can be written the next start checks again."""
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        beside = _file().with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps([*_known(), key][-KEPT:]), encoding="utf-8")
        os.replace(beside, _file())


def _known() -> list[str]:
    with suppress(OSError, ValueError):
        known = json.loads(_file().read_text(encoding="utf-8"))
        return known if isinstance(known, list) else []
    return []


def _file() -> Path:
    return user_folder("cache") / "alike.json"
