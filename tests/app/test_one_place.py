"""A setting is written once: whatever `Settings` has is a flag, a control, a parameter of every function for programs,
part of a link and of the command that is copied. Nothing here names a setting but to show what it is like."""

from __future__ import annotations

import argparse
import inspect
import shlex
from dataclasses import fields, replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

import gradio as gr
import pytest
from fakes import FakeEngine

from app.history.run_file import SettingsFile
from app.page import build
from app.playground.take_away import read_link
from app.serving.device import Device
from app.settings import CONTROLS, settings_from, start_of
from app.sidebar import control, sidebar
from app.sidebar.picker import Picker
from core.__main__ import parser
from core.cli import command, settings_of
from core.errors import UserError
from core.loading.pair import choose_target
from core.settings import SPECS, Settings, Spec

OWN = {"tree": "3x2", "target": "owner/large", "draft": "owner/small", "revision": "v2", "system": "Be brief."}
"""Texts that mean something; every other setting finds a value by itself."""


def another(spec: Spec) -> Any:
    """A value of the setting that is not its default."""
    if spec.choices is not None:
        return next(each for each in spec.choices if each != spec.default)
    if spec.kind is str:
        return OWN.get(spec.name, "text")
    return True if spec.kind is bool else spec.kind(1) if spec.default != 1 else spec.kind(0.5)


@pytest.fixture(scope="module")
def page() -> gr.Blocks:
    return build(FakeEngine(pace=0))


@pytest.fixture(scope="module")
def controls() -> dict[str, Any]:
    with gr.Blocks():
        return sidebar(Picker(FakeEngine(), Device()).build, Settings(), {"draft": None, "plain": None}, layers=8)


def test_every_field_has_words_and_a_default_within_its_limits() -> None:
    assert set(SPECS) == {field.name for field in fields(Settings)}
    for spec in SPECS.values():
        assert spec.label
        assert spec.help.endswith(".")
        assert spec.read(spec.default) == spec.default
        assert spec.read(another(spec)) == another(spec) != spec.default


@pytest.mark.parametrize("name", SPECS)
def test_a_setting_survives_the_command_line(name: str) -> None:
    asked = replace(Settings(), **{name: another(SPECS[name])})
    words = shlex.split(command(asked, "class A:"))
    assert settings_of(parser().parse_args(words[3:])) == replace(asked, target=choose_target(asked.target))


def test_every_command_that_decodes_has_every_flag() -> None:
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name in ("generate", "bench", "sweep"):
        flags = {action.dest: action for action in commands.choices[name]._actions}
        assert set(SPECS) <= set(flags)
        assert all(flags[setting].help.startswith(spec.help) for setting, spec in SPECS.items())


@pytest.mark.parametrize("name", CONTROLS)
def test_a_setting_has_a_control_with_its_words(name: str, controls: dict[str, Any]) -> None:
    spec = SPECS[name]
    assert (controls[name].label, controls[name].value) == (spec.label, start_of(name))
    assert controls[name].info.startswith(spec.help)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_a_control_holds_is_what_the_run_gets(name: str) -> None:
    value = another(SPECS[name])
    given = {"target": "owner/large", name: value}  # a revision is of a target
    assert getattr(settings_from(Settings(), **given), name) == value


@pytest.mark.parametrize("name", CONTROLS)
def test_a_link_carries_it(name: str, controls: dict[str, Any]) -> None:
    value = another(SPECS[name])
    values, refused = read_link(urlencode({name: value}), controls, partial(settings_from, Settings()))
    assert (values, refused) == ({name: value}, [])


@pytest.mark.parametrize("endpoint", ["/generate", "/run"])
def test_programs_can_set_it(page: gr.Blocks, endpoint: str) -> None:
    parameters = {p["parameter_name"]: p for p in page.get_api_info()["named_endpoints"][endpoint]["parameters"]}
    for name in CONTROLS:
        assert parameters[name]["parameter_has_default"], name


def test_programs_are_told_what_it_does(page: gr.Blocks) -> None:
    doc = next(inspect.getdoc(each.fn) or "" for each in page.fns.values() if each.api_name == "run")
    assert all(f"{name}: {SPECS[name].help}" in doc for name in CONTROLS)


def test_a_file_may_hold_it() -> None:
    for spec in SPECS.values():
        asked = replace(Settings(), **{spec.name: another(spec)}).to_dict()
        assert SettingsFile.model_validate(asked).model_dump() == asked


@pytest.mark.parametrize("name", SPECS)
def test_what_it_cannot_be_is_one_sentence_with_its_name(name: str) -> None:
    for value in ([], object(), "\0", float("nan")):
        with pytest.raises(UserError) as caught:
            SPECS[name].read(value)
        sentence = str(caught.value)
        assert sentence.endswith(".")
        assert SPECS[name].label.lower() in sentence.lower()


def test_a_setting_nobody_laid_out_gets_a_control_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is added to `Settings` alone is on the page: what it looks like follows from what it holds."""
    kinds = {
        "a": (Spec("A", "Help.", name="a", kind=bool, default=False), gr.Checkbox),
        "b": (Spec("B", "Help.", name="b", kind=int, default=3, low=0), gr.Number),
        "c": (Spec("C", "Help.", name="c", kind=str, default=None), gr.Textbox),
        "d": (Spec("D", "Help.", name="d", choices={"x": "The x"}, default="x"), gr.Dropdown),
        "e": (Spec("E", "Help.", name="e", kind=float, default=0.5, low=0, slider=1), gr.Slider),
    }

    class Extended:
        def __init__(self) -> None:
            vars(self).update({name: spec.default for name, (spec, _) in kinds.items()})

    for name, (spec, kind) in kinds.items():
        monkeypatch.setitem(SPECS, name, spec)
        with gr.Blocks():
            made = control(name, Extended())  # type: ignore[arg-type]
        assert type(made) is kind
        assert made.value == ("" if spec.default is None else spec.default)
