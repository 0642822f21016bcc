"""Our own code for CPUs (`native.cpp`): compiled once for the instructions of this machine, kept in the user's cache.

The machine's C++ compiler makes it, or that of the package `ziglang`. Nothing is loaded from a folder that others can
write to. Where it cannot be had, `native_obstacle` says why, and transformers' own forward is what remains.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from core.disk import folder_for_now, user_folder
from core.errors import first_line

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-shared", "-fPIC", "-pthread", "-w"),
)
"""Products and sums are contracted where the source says so and nowhere else: rows must come to the same everywhere."""
SECONDS = 180
"""A compiler takes a few; one that takes longer is stopped."""
SETTING = "PLAYGROUND_INSTRUCTIONS"
"""The variable of the environment that names one of `INSTRUCTIONS` to be used instead of the best."""
INSTRUCTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512": (
        ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"),
    ),
    "avxvnni": (("avx2", "fma", "avx_vnni"), ("-mavx2", "-mfma", "-mavxvnni")),
    "avx2": (("avx2", "fma"), ("-mavx2", "-mfma")),
    "dotprod": (("asimddp",), ("-march=armv8.2-a+dotprod",)),
    "neon": (("asimd",), ()),
}
"""Sets of instructions, the best first: what a processor must have for them, and the flags of a compiler."""
ZIG = (sys.executable, "-m", "ziglang", "c++", "-nostdlib++")
IN_ZIG = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}
"""The compiler of the package `ziglang`, and flags that it knows by another name."""
NAMED = {"avx512bf16": ("avx512_bf16", "-mavx512bf16")}
"""What a set may have besides."""


class Unavailable(Exception):  # noqa: N818
    """Why there is no compiled code here: the end of a sentence."""


@cache
def library() -> ctypes.CDLL:
    """The compiled code. Raises Unavailable."""
    if sys.platform == "win32":
        raise Unavailable("it is written for Linux and macOS")
    name, flags = instructions()
    compiler = find_compiler()
    folder = _private_folder()
    made = folder / f"native-{name}-{_digest(flags, compiler)}.so"
    if not _ours(made):
        _compile(compiler, flags, made)
    try:
        return _loaded(made)
    except (OSError, AttributeError, ValueError):  # of a full disk, another C library …: made anew, once
        _compile(compiler, flags, made)
        try:
            return _loaded(made)
        except (OSError, AttributeError, ValueError) as error:
            raise Unavailable(f"what was compiled does not load ({first_line(error, 100)})") from None


@cache
def native_obstacle() -> str | None:
    """Why passes cannot run in code of our own here, as the end of a sentence; None where they can."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return None


@cache
def features() -> frozenset[str]:
    """What this processor calls the instructions it has."""
    if sys.platform == "darwin":
        return frozenset({"asimd", "asimddp"} if platform.machine() == "arm64" else {"avx2", "fma"})
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() in ("flags", "Features"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def instructions() -> tuple[str, tuple[str, ...]]:
    """The set of instructions in use and its flags. Raises Unavailable."""
    wanted = os.environ.get(SETTING)
    if wanted and wanted not in INSTRUCTIONS:
        raise Unavailable(f"{SETTING} is {wanted}, and may be {', '.join(INSTRUCTIONS)}")
    for name in [wanted] if wanted else INSTRUCTIONS:
        needed, flags = INSTRUCTIONS[name]
        if features().issuperset(needed):
            more = tuple(flag for feature, flag in NAMED.values() if name == "avx512" and feature in features())
            return name, flags + more
    raise Unavailable("this processor has none of the instructions it is written for (AVX2, AVX-512 VNNI, NEON)")


def find_compiler() -> tuple[str, ...]:
    """The command that compiles C++. Raises Unavailable."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return (found,)
    if find_spec("ziglang"):
        return ZIG
    raise Unavailable("there is no C++ compiler (pip install ziglang brings one)")


def spelt_for(compiler: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags as this compiler knows them."""
    return tuple(IN_ZIG.get(flag, flag) for flag in flags) if compiler == ZIG else flags


def _digest(flags: tuple[str, ...], compiler: tuple[str, ...]) -> str:
    """Of all that the compiled code hangs on."""
    parts = (SOURCE.read_bytes(), FLAGS, flags, compiler, sorted(features()), platform.libc_ver(), platform.machine())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@cache
def _private_folder() -> Path:
    """A folder that nobody else can write to: in the user's cache or, where that cannot be had, for this process."""
    folder = user_folder("cache") / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _ours(folder):
            return folder
    except OSError:
        pass
    try:
        return folder_for_now()
    except OSError as error:
        raise Unavailable(f"there is no folder to keep it in ({first_line(error, 100)})") from None


def _ours(path: Path) -> bool:
    """Whether a file or folder is there, is the user's own and no link, and nobody else may write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    whole = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    return whole and found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], made: Path) -> None:
    """Compile beside and put in place in one step: another process may be as quick."""
    try:
        with TemporaryDirectory(dir=made.parent) as folder:
            beside = Path(folder) / made.name
            command = [*compiler, *FLAGS, *spelt_for(compiler, flags), str(SOURCE), "-o", str(beside)]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            beside.chmod(0o700)
            os.replace(beside, made)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{Path(compiler[0]).name} could not compile it ({_complaint(error)})") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"it could not be compiled ({first_line(error, 100)})") from None


def _complaint(error: subprocess.CalledProcessError) -> str:
    said = (error.stderr or b"").decode(errors="replace").splitlines()
    return next((line for line in said if "error" in line), said[0] if said else f"status {error.returncode}")[:160]


def _loaded(made: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(made))
    found.native_pass.restype = None
    found.native_pass.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.native_layout.restype = ctypes.c_int64
    return found
