"""The table of methods: whole, read without torch, and obeyed by whoever iterates over it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from core.drafting.build import available, way_of
from core.drafting.methods import HEADS, METHODS, Means, method_of

ROOT = Path(__file__).parents[2]
DRAFTING = [method for method in METHODS.values() if method.drafts]


def test_the_table_is_read_without_torch():
    told = subprocess.run(
        [sys.executable, "-c", "import sys, core.settings; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == "False", told.stderr


@pytest.mark.parametrize("method", DRAFTING, ids=lambda method: method.name)
def test_an_entry_is_whole(method):
    assert way_of(method.name).build and way_of(method.name).costs
    assert method.label and method.help.endswith(".") and method.guesser
    assert method.elsewhere in ("", *METHODS) and (method.simple or method.elsewhere or method.tree)
    assert bool(method.heads) == (method.network == "head")


def test_readme_tells_of_each():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Ways of drafting")[1]
    assert re.findall(r"^\| `([a-z+-]+)` \|", text.split("\n## ")[0], re.MULTILINE) == [m.name for m in DRAFTING]


def test_what_a_pair_can_use_follows_from_what_it_has(pair):
    assert {name for name, reason in available(pair).items() if reason is None} == {
        name for name, method in METHODS.items() if method.network != "head"
    }
    nothing = Means("no draft", "no head", "", layers=1, same_tokens=True).reasons()
    assert {name for name, reason in nothing.items() if reason is None} == {"plain", "ngram"}
    for kind in HEADS:
        reasons = Means("no draft", None, kind, layers=1, same_tokens=True).reasons()
        assert reasons[method_of(kind).name] is None and reasons["draft"] == "no draft"
