"""Compiled code is loaded from nowhere that others can write to, made anew where it does not load; its lack is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.runners import library as room

ROOT = Path(__file__).resolve().parents[2]
GOOD = b"good"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Where compiled code is kept; a compiler that writes GOOD, and a loader that takes nothing else."""
    monkeypatch.setattr(room, "instructions", lambda: ("avx2", ()))
    monkeypatch.setattr(room, "find_compiler", lambda: ("cc",))
    monkeypatch.setattr(room, "user_folder", lambda kind: tmp_path)
    compiled = []

    def compile_(compiler, flags, made):
        compiled.append(made)
        made.unlink(missing_ok=True)
        made.write_bytes(GOOD)
        made.chmod(0o700)

    def loaded(made):
        if made.read_bytes() != GOOD:
            raise OSError("file too short")
        return made

    monkeypatch.setattr(room, "_compile", compile_)
    monkeypatch.setattr(room, "_loaded", loaded)

    def library():
        room.library.cache_clear()
        room._private_folder.cache_clear()
        return room.library(), len(compiled)

    yield library
    room.library.cache_clear()
    room._private_folder.cache_clear()


def test_code_is_compiled_once_and_anew_where_it_does_not_load(made, tmp_path):
    first, count = made()
    assert count == 1 and first.parent == tmp_path / "compiled" and first.parent.stat().st_mode & 0o777 == 0o700
    assert made() == (first, 1)
    first.write_bytes(b"")
    assert made() == (first, 2)
    first.chmod(0o722)
    assert made() == (first, 3), "a file that others may have written is not loaded"
    elsewhere = first.rename(tmp_path / "elsewhere")
    first.symlink_to(elsewhere)
    assert made() == (first, 4), "nor what a link leads to"


@pytest.mark.parametrize("how", ["open to all", "a link"])
def test_a_folder_that_others_can_write_to_is_not_used(made, tmp_path, how):
    folder, other = tmp_path / "compiled", tmp_path / "other"
    other.mkdir()
    if how == "a link":
        folder.symlink_to(other)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    found, _ = made()
    assert found.parent.resolve() not in (folder.resolve(), other)
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_without_any_folder_the_reason_is_told_and_a_folder_of_one_process_goes_with_it(made, tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    (tmp_path / "compiled").write_text("in the way")
    monkeypatch.setattr(room, "folder_for_now", full)
    with pytest.raises(room.Unavailable, match=r"no folder to keep it in .*No space left"):
        made()
    mine = tmp_path / "mine"
    mine.mkdir()
    script = "from core.runners.library import _private_folder as folder; print(folder().is_dir())"
    told = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "compiled"), "TMPDIR": str(mine)}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=told, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "True\n" and not list(mine.iterdir())
