"""Whether the native pass is right on processors that this machine is not: tests of it, run under emulation.

    python -m tests.emulated [PYTEST ARGUMENTS …]

The passes of NEON, with and without dot products, run in qemu (`qemu-aarch64`, of Debian's package qemu-user), compiled
by ziglang; all else runs here. What is compiled for Apple's processors is compiled, and not run. Those of AVX2 and, in
the encoding of AVX-512, of AVX-VNNI run as they are, where the processor knows them. Emulation says what comes out, and
nothing about speed. Exit status: 0 where all is right, 2 where a tool is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from core.runners import library, program

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "emulated.cpp"
TESTS = ("core/test_int4.py", "core/test_attention.py", "core/test_together.py", "core/test_features.py")
LAYOUT, LEVELS, PASS = range(3)
OLDER = {
    "avx2": library.INSTRUCTIONS["avx2"],
    "avxvnni": (
        ("avx512_vnni", "avx512vl"),
        ("-mavx2", "-mfma", "-mavx512vl", "-mavx512vnni", "-U__AVX512VNNI__", "-D__AVXVNNI__"),
    ),
}
"""Sets that a newer processor runs too: what it must have, and the flags of GCC."""
SET_PTRACER = 0x59616D61
"""prctl's: who may read a process's memory, where the kernel lets parents alone do so (Yama)."""


class Emulated:
    """Stands in for the compiled code: another processor's, in a process that reads and writes this one's memory."""

    def __init__(self, binary: Path) -> None:
        ctypes.CDLL(None).prctl(SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        command = ["qemu-aarch64", "-cpu", "max", str(binary), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.passes = 0

    def _ask(self, what: int, *there: Any) -> int:
        assert self._process.stdin and self._process.stdout
        addresses = [ctypes.addressof(getattr(each, "_obj", each)) for each in there]
        self._process.stdin.write(struct.pack("3q", what, *addresses, *[0] * (2 - len(addresses))))
        self._process.stdin.flush()
        answer = self._process.stdout.read(8)
        if len(answer) < 8:
            raise RuntimeError(f"the emulated process ended with status {self._process.wait()}")
        return struct.unpack("q", answer)[0]

    def native_layout(self) -> int:
        return self._ask(LAYOUT)

    def native_levels(self, levels: Any) -> None:
        self._ask(LEVELS, levels)

    def native_pass(self, steps: Any, each: Any) -> None:
        self.passes += 1
        self._ask(PASS, steps, each)

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compile_for(target: str, name: str, source: Path, made: Path, *more: str) -> None:
    """With the very flags that a machine of this kind would use."""
    flags = (*(flag for flag in library.FLAGS if flag != "-shared" or source == library.SOURCE), *more)
    chosen = library.spelt_for(library.ZIG, library.INSTRUCTIONS[name][1])
    subprocess.run([*library.ZIG, "-target", target, *flags, *chosen, str(source), "-o", str(made)], check=True)


class Counted:
    """Stands in for the compiled code: that of an older processor, which this one runs too."""

    def __init__(self, binary: Path) -> None:
        self._code = ctypes.CDLL(str(binary))
        self._code.native_layout.restype = ctypes.c_int64
        self._code.native_pass.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.native_layout, self.native_levels = self._code.native_layout, self._code.native_levels
        self.passes = 0

    def native_pass(self, steps: Any, each: Any) -> None:
        self.passes += 1
        self._code.native_pass(steps, each)

    def end(self) -> None:
        """Nothing runs beside."""


def tested(name: str, code: Emulated | Counted, how: str) -> bool:
    """Whether the tests pass with this code, and run it."""
    program.native.cache_clear()
    program.library = lambda: code  # type: ignore[assignment,return-value]
    print(f"Running tests with {name} {how}", flush=True)
    failed = pytest.main(["-q", "-p", "no:cacheprovider", *(sys.argv[1:] or [str(HERE / t) for t in TESTS])])
    code.end()
    print(f"{code.passes} passes ran with {name}", flush=True)
    return not failed and code.passes > 0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        for name, (needed, flags) in OLDER.items():
            if not (library.features().issuperset(needed) and shutil.which("g++")):
                print(f"{name} cannot be run here", file=sys.stderr)
                continue
            made = Path(folder) / f"{name}.so"
            subprocess.run(["g++", *library.FLAGS, *flags, str(library.SOURCE), "-o", str(made)], check=True)
            if not tested(name, Counted(made), "as it is"):
                return 1
        missing = [
            what
            for what, found in (
                ("qemu-aarch64 (Debian: apt-get install qemu-user)", shutil.which("qemu-aarch64")),
                ("ziglang (pip install ziglang)", library.find_spec("ziglang")),
            )
            if not found
        ]
        if missing:
            print(f"Nothing was emulated: there is no {' and no '.join(missing)}.", file=sys.stderr)
            return 2
        compile_for("aarch64-macos", "dotprod", library.SOURCE, Path(folder) / "apple.so")
        print("Compiles for Apple's processors", flush=True)
        for name in ("dotprod", "neon"):
            binary = Path(folder) / name
            compile_for("aarch64-linux-musl", name, SOURCE, binary, "-static")
            if not tested(name, Emulated(binary), "under emulation"):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
