"""Operations for which the host would wait for the device: found before a capture, in this thread alone.

PyTorch's own alarm (`set_sync_debug_mode`) is a switch of the whole process, and would raise in other threads' runs. A
capture would raise too, but one that fails half-way leaves the allocator and the default generator of some versions in
the belief that it still goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ASKED_FOR = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
"""Operations that bring a value or a size to the host (`.item()`, `bool()` and `if` are the first)."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""By a mask, these ask how many of its places are true."""
COPIES = {"_to_copy": 0, "copy_": 1}
"""Those that may copy to the host, as `.tolist()` does first, and which of their arguments is the source."""


class WaitsRefused(TorchDispatchMode):
    """Raises RuntimeError in place of an operation that would wait for a device of this type.

    What a library's own kernel does on the device is not seen: if it waits, the capture fails.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self._type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what an operation is made of: under inference mode it comes here whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if self._waits(func.overloadpacket.__name__, args, kwargs):
            raise RuntimeError(f"{func.overloadpacket.__name__} makes the host wait for the device")
        return func(*args, **kwargs)

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in ASKED_FOR:
            return self._on_device(args[0])
        if name in INDEXING:
            by = (index for index in args[1] if index is not None)
            return any(self._on_device(index) and index.dtype in (torch.bool, torch.uint8) for index in by)
        if name not in COPIES or not self._on_device(args[COPIES[name]]):
            return False
        target = kwargs.get("device") if name == "_to_copy" else args[0].device
        return target is not None and torch.device(target).type != self._type

    def _on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.device.type == self._type
