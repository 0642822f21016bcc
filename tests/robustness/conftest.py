"""A real engine over a tiny saved pair, as the page uses it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "app"), str(ROOT / "tests" / "browser"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a draft of random weights."""
    from tiny_pair import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))
