import math

import pytest
from fakes import CONTROLS

from app.settings import settings_from
from core.errors import UserError
from core.records import Settings


def test_controls_become_settings_over_the_pair() -> None:
    found = settings_from(Settings(target="a", draft="b"), **{**CONTROLS, "draft_length": "7", "temperature": 0.5})
    assert (found.target, found.draft, found.draft_length, found.temperature) == ("a", "b", 7, 0.5)


def test_what_only_one_method_asks_for() -> None:
    """auto is the engine's own choice; a tree and an exit layer are taken as they are written."""
    chosen = settings_from(Settings(), **{**CONTROLS, "tree": "3x2x1", "exit_layer": 5})
    assert (chosen.tree, chosen.exit_layer) == ("3x2x1", 5)
    auto = settings_from(Settings(), **CONTROLS)
    assert (auto.tree, auto.exit_layer) == (None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "magic"),
        ("method", None),
        ("draft_length", 0),
        ("draft_length", 17),
        ("draft_length", "many"),
        ("draft_length", None),
        ("tree", "3y2"),
        ("tree", "x" * 1000),
        ("tree", "9x9x9x9"),
        ("tree", "0"),
        ("exit_layer", 0),
        ("exit_layer", "deep"),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", []),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**9),
        ("max_new_tokens", None),
        ("seed", -1),
        ("seed", 10**30),
        ("precision", "int1"),
        *(
            (name, f"x{half}")
            for name in ("target", "draft", "revision", "system")
            for half in ("\0", "\ud800", "\udfff")
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(name: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        settings_from(Settings(), **{**CONTROLS, name: value})
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_strangers_have_a_lower_limit() -> None:
    with pytest.raises(UserError, match="between 1 and 64"):
        settings_from(Settings(), most_new_tokens=64, **CONTROLS)
