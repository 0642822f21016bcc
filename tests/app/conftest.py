"""Fakes beside the tests are importable by name."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / room) for room in ("browser", "core"))]
