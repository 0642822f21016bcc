"""The device these tests run on: CUDA. ACCELERATOR=cpu tries the tests themselves where there is no GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[2])]

from tiny import make_tokenizer, random_model  # noqa: E402

from core.loading import load_pair  # noqa: E402
from core.records import Settings  # noqa: E402

WIDTH, CONTEXT = 128, 512


@pytest.fixture(scope="session")
def device():
    return torch.device(os.environ.get("ACCELERATOR", "cuda"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A target of 4 layers and a draft of 1 with wide enough layers for 4-bit blocks, saved in float32."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), make_tokenizer()
    for role, layers in (("target", 4), ("draft", 1)):
        network = random_model(
            "llama",
            seed=layers,
            vocab=320,
            dtype=torch.float32,
            num_hidden_layers=layers,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            eos_token_id=tokenizer.eos_token_id,
        )
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        network.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return folder


@pytest.fixture(scope="session")
def pairs(device, folder):
    """The pair by precision, loaded when first asked for."""
    loaded = {}

    def pair_in(precision):
        if precision not in loaded:
            target, draft = str(folder / "target"), str(folder / "draft")
            loaded[precision] = load_pair(Settings(target=target, draft=draft, precision=precision, device=device.type))
        return loaded[precision]

    return pair_in
