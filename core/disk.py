"""The disk: where this program keeps what it makes, whether there is room, and what to say where there is none."""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from core.errors import UserError
from core.progress import in_bytes

NAME = "speculative-decoding-playground"
FOLDERS = {
    "cache": ("XDG_CACHE_HOME", "LOCALAPPDATA", "AppData/Local", "Library/Caches", ".cache"),
    "data": ("XDG_DATA_HOME", "APPDATA", "AppData/Roaming", "Library/Application Support", ".local/share"),
}
"""The variable that names it; that of Windows; where it is without them, below a home: on Windows, a Mac, elsewhere."""


def user_folder(kind: Literal["cache", "data"]) -> Path:
    """Where the user's caches are, or what is to stay, as the system has it: our folder there."""
    variable, windows, on_windows, on_mac, elsewhere = FOLDERS[kind]
    if given := os.environ.get(variable):
        base = Path(given)
    elif sys.platform == "win32":
        base = Path(os.environ.get(windows) or Path.home() / on_windows)
    else:
        base = Path.home() / (on_mac if sys.platform == "darwin" else elsewhere)
    return base / NAME


def writable(folder: Path) -> bool:
    """Whether files can be put into a folder, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def folder_for_now() -> Path:
    """A folder that goes with this process, for where the user's own cannot be written. Raises OSError."""
    folder = Path(mkdtemp(prefix="playground-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def free_space(folder: Path) -> int:
    """Bytes free where a folder is, or would be. Raises UserError where nothing above it is there: a missing drive."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    raise UserError(f"{folder} cannot be made: neither it nor anything above it is there; name another place.")


@contextmanager
def made_whole(file: Path) -> Iterator[Path]:
    """A place to write a file at, which takes the name in one move: whoever is killed leaves what was there before."""
    beside = file.with_suffix(".new")
    try:
        yield beside
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Put a text in a file's place at once: who reads meanwhile, or after a kill, finds the old one or the new."""
    with made_whole(file) as beside:
        beside.write_text(text, encoding="utf-8")


def require_room(what: str, folder: Path, needed: int, advice: str) -> None:
    """Raise UserError where the disk of a folder cannot take so many bytes more."""
    if needed > (free := free_space(folder)):
        raise UserError(
            f"{what} needs {in_bytes(needed)} more in {folder}, and {in_bytes(free)} are free there; {advice}."
        )


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def on_disk(full: str, refused: Callable[[str], str]) -> Iterator[None]:
    """What goes wrong in writing, as a UserError: `full` where there is no room, else `refused` of the reason."""
    try:
        yield
    except Exception as error:
        if (known := _of_system(error)) is None:
            raise
        raise UserError(full if is_full(known) else refused(known.strerror or str(known))) from None


def _of_system(error: Exception) -> OSError | None:
    """The error of the system that an exception is; tokenizers and safetensors tell it in their words."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
