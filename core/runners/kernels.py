"""Our own kernels for CPUs with AVX512-BF16 (`kernels.cpp`): compiled once by the machine's C++ compiler, kept in the
user's cache. Without such a processor or a compiler nothing of it is used, and PyTorch's operations do the same.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from core.disk import user_folder

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-fopenmp", "-shared", "-fPIC")
SECONDS = 120
"""A compiler takes a few; one that takes longer is stopped."""

torch.library.define("playground::multiply_into", "(Tensor x, Tensor codes, Tensor scales, Tensor(a!) out) -> ()")
torch.library.define("playground::normalise", "(Tensor x, Tensor weight, Tensor floor, Tensor(a!) out) -> ()")
torch.library.define("playground::silu_times", "(Tensor both, Tensor(a!) out) -> ()")
torch.library.define(
    "playground::attend",
    "(Tensor(a!) rows, Tensor cos, Tensor sin, Tensor(b!) cache, Tensor mask, int begin, int start, float scale, "
    "Tensor(c!) out) -> ()",
)


@cache
def has_kernels() -> bool:
    """Whether the operations `torch.ops.playground` can be called here; compiles and loads them where they can be."""
    if platform.machine() != "x86_64" or platform.system() != "Linux" or not _has_instructions():
        return False
    try:
        torch.ops.load_library(compiled_library())
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return False
    return True


def _has_instructions() -> bool:
    flags = Path("/proc/cpuinfo").read_text(errors="ignore").partition("flags")[2].partition("\n")[0].split()
    # A capability below the processor's is asked for by ATEN_CPU_CAPABILITY.
    widest = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return widest and {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= {*flags}


def compiled_library() -> Path:
    """The library of these sources for this PyTorch, compiled where it is not kept already. Raises OSError or
    SubprocessError where that cannot be."""
    name = hashlib.sha256(f"{SOURCE.read_text()}{FLAGS}{torch.__version__}".encode()).hexdigest()[:16]
    kept = user_folder("cache") / "kernels" / f"{name}.so"
    if kept.is_file():
        return kept
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        command = [compiler, *FLAGS, f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(made)]
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        os.replace(made, kept)  # another process may have been as quick
    return kept
