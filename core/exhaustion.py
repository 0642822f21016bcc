"""Running out of memory: how it shows, and how to give back what can be given back."""

from __future__ import annotations

import gc

import torch

SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left. On a CPU torch raises a RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def release_memory() -> None:
    """Return to the device what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
