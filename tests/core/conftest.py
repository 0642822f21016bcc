"""What several tests stand on: a tiny pair of models saved in a folder, with a byte-level tokenizer."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

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


@pytest.fixture
def captured_here(monkeypatch):
    """Stand-ins for CUDA graphs on a CPU: what is captured is the operations of one pass, recorded with every number of
    the host baked in, and run again on the same tensors. What a pass asks of the host anew would be missing from it."""

    def record(work, device, stream, pool=None):
        with WaitsRefused("cpu"):
            work()
        return SimpleNamespace(replay=make_fx(work)())

    monkeypatch.setattr("core.runners.capture.can_capture", lambda device: True)
    monkeypatch.setattr("core.runners.capture.aside", lambda device: (None, None))
    monkeypatch.setattr("core.runners.capture.record", record)
