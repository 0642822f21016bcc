"""Settings in the address: what a link may say, and what becomes of the rest."""

from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.playground.take_away import LONGEST_PROMPT, LONGEST_QUERY, read_link
from app.settings import CONTROLS, settings_from
from core.drafting.methods import METHODS
from core.errors import UserError
from core.settings import Settings


@dataclass
class Control:
    """As much of a control as a link needs."""

    value: Any
    choices: list[tuple[str, Any]] | None = None
    minimum: float | None = None
    maximum: float | None = None


def choice(value: Any, *values: Any) -> Control:
    return Control(value, [(str(each), each) for each in values])


PRECISIONS = ("auto", "nf4", "int4", "bf16", "fp16", "fp32")
KNOWN: dict[str, Control] = {
    "method": choice("draft", *METHODS),
    "draft_length": choice("auto", "auto", *range(1, 17)),
    "tree": Control("auto"),
    "exit_layer": choice("auto", "auto", 1, 2, 3),
    "temperature": Control(0.0, minimum=0, maximum=2),
    "top_k": Control(0),
    "top_p": Control(1.0),
    "min_p": Control(0.0),
    "max_new_tokens": Control(128),
    "seed": Control(0),
    "precision": choice("auto", *PRECISIONS),
    "draft_precision": choice("auto", *PRECISIONS),
    "chat": choice("auto", "auto", "off"),
}
ALL = {name: KNOWN.get(name, Control("")) for name in CONTROLS}
CHECK = partial(settings_from, Settings(), most_new_tokens=512)


def read(query: str) -> tuple[dict[str, Any], list[str]]:
    return read_link(query, ALL, CHECK)


def test_a_link_says_what_the_controls_will_hold() -> None:
    asked = {"method": "tree", "draft_length": 7, "tree": "3x2", "temperature": 0.75, "top_k": 5, "seed": 2**32 - 1}
    prompt = "def f(a, b):\n    # ünï & = + % ? #\n"
    values, refused = read("?" + urlencode({**asked, "prompt": prompt}))
    assert refused == []
    assert values == {**asked, "prompt": prompt}
    assert {name: type(value) for name, value in values.items()} == {
        **{name: type(value) for name, value in asked.items()},
        "prompt": str,
    }


def test_what_is_not_ours_is_left_alone() -> None:
    assert read("?__theme=dark&view=api&utm_source=x&constructor=1") == ({}, [])
    assert read("") == ({}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "magic"), ("method", ""), ("draft_length", "0"), ("draft_length", "many"), ("tree", "9x9x9x9"),
        ("exit_layer", "9"), ("temperature", "nan"), ("temperature", "inf"), ("temperature", "-1"),
        ("temperature", "3"), ("top_p", "0"), ("top_k", "1e400"), ("max_new_tokens", "513"), ("seed", "x"),
        ("seed", "-1"), ("precision", "int1"), ("prompt", "x" * (LONGEST_PROMPT + 1)),
    ],
)  # fmt: skip
def test_a_bad_value_is_left_out_and_said_and_the_others_stay(name: str, value: str) -> None:
    values, refused = read(urlencode({"min_p": "0.1", name: value}))
    assert values == {"min_p": 0.1}
    assert len(refused) == 1
    assert refused[0].startswith(f"The link's {name.replace('_', ' ')} was left out: ")
    assert refused[0].endswith(".")


def test_what_the_page_does_not_admit_is_not_taken_from_a_link() -> None:
    """A public page refuses models of a visitor's own in its check; a link gets no further."""

    def check(**controls: Any) -> Settings:
        if controls["target"]:
            raise UserError("This page is public.")
        return CHECK(**controls)

    values, refused = read_link("target=/etc/passwd&seed=4", ALL, check)
    assert values == {"seed": 4}
    assert refused == ["The link's target was left out: This page is public."]


@pytest.mark.parametrize("query", ["x" * (LONGEST_QUERY + 1), "&".join(f"a{i}=1" for i in range(100))])
def test_a_query_of_any_size_is_one_sentence(query: str) -> None:
    assert read(query) == ({}, ["The link is too long to be one of this page's; its settings were left out."])


@given(st.dictionaries(st.sampled_from(["prompt", *CONTROLS]), st.text(max_size=30)) | st.text(max_size=200))
def test_whatever_a_link_says_the_settings_stay_possible(asked: dict[str, str] | str) -> None:
    query = asked if isinstance(asked, str) else urlencode(asked, errors="replace")
    values, _ = read(query)
    values.pop("prompt", None)
    for name, value in values.items():
        CHECK(**{**{name: each.value for name, each in ALL.items()}, name: value})
