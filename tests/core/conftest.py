"""What several tests stand on: a tiny pair of models saved in a folder, with a byte-level tokenizer."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from tiny import CONTEXT, PADDED, make_tokenizer, random_model  # noqa: E402

from core.loading import load_pair  # noqa: E402
from core.records import Settings  # noqa: E402
from core.runners.waits import WaitsRefused  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory, tokenizer):
    """`target` and `draft`, Llamas of 4 and 1 layers with a vocabulary padded past the tokenizer's, in float32."""
    folder = tmp_path_factory.mktemp("pair")
    for role, layers, seed in (("target", 4, 1), ("draft", 1, 2)):
        network = random_model(
            "llama",
            seed,
            vocab=PADDED,
            dtype=torch.float32,
            num_hidden_layers=layers,
            hidden_size=64,
            intermediate_size=128,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            eos_token_id=tokenizer.eos_token_id,
        )
        network.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return folder


@pytest.fixture(scope="session")
def pair(pair_folder):
    """The pair, loaded in float32 with its costs measured."""
    target, draft = str(pair_folder / "target"), str(pair_folder / "draft")
    return load_pair(Settings(target=target, draft=draft, precision="fp32", device="cpu"))


class Recorded(TorchDispatchMode):
    """Stands in for a CUDA graph: the operations of one pass with every number of the host baked in, done again on the
    same tensors, results where they were. What a pass asks of the host anew is missing from it."""

    def __init__(self, work):
        super().__init__()
        self._calls = []
        with self:
            work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self):
        for func, args, kwargs, results in self._calls:
            for held, found in zip(results, tree_leaves(func(*args, **kwargs))):
                if isinstance(held, torch.Tensor) and held.data_ptr() != found.data_ptr():
                    held.copy_(found)


@pytest.fixture
def captured_here(monkeypatch):
    """Stand-ins for CUDA graphs on a CPU, where a pass that would wait is refused as on a device."""

    def record(work, device, stream, pool=None):
        with WaitsRefused("cpu"):
            work()
        return Recorded(work)

    monkeypatch.setattr("core.runners.capture.can_capture", lambda device: True)
    monkeypatch.setattr("core.runners.capture.aside", lambda device: (None, None))
    monkeypatch.setattr("core.runners.capture.record", record)
