"""What a person can get wrong, as one sentence that says what happened and what to do.

Running out of memory: how it shows, and how to give back what can be given back.
"""

from __future__ import annotations

import gc


class UserError(Exception):
    """Bad arguments or bad input. Shown as it is: in the page, or on stderr with exit status 2."""


class Cancelled(Exception):  # noqa: N818 (not an error)
    """Raised inside the engine when its caller asked it to stop."""


def first_line(error: Exception, longest: int = 300) -> str:
    """What a library's error says, as far as it fits into a sentence of ours; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left. On a CPU torch raises a RuntimeError."""
    import torch  # here, so that what only reads arguments starts at once

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def release_memory() -> None:
    """Return to the device what nothing refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def refused_pickle(name: str, file: str) -> str:
    """Why weights in a pickle are not read, and how to convert them."""
    return (
        f"{name} has its weights only as pickle files, which can run code when opened; this program loads safetensors "
        f'only. Choose another model, or convert it once: python -c "import torch, safetensors.torch as s; '
        f"s.save_file(torch.load('{file}', weights_only=True), 'model.safetensors')\"."
    )
