"""The page's scripts: what they import, how they are served, and that nothing else is."""

from __future__ import annotations

import json
import re
from base64 import b64decode

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.assets import ASSETS, IMPORT, address, asset, import_map, modules, needed, preloads, route

MOUNTED = [module for module, text in modules().items() if "export function mount(" in text]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=[route()]))


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_in_the_form_that_is_read(module: str) -> None:
    """That what it imports is there, and is used, tsc and ESLint say."""
    other = re.search(r"^\s*(import\b.*|export\b.* from .*)$", IMPORT.sub("", asset(module)), re.MULTILINE)
    assert not other, other and other[0]


@pytest.mark.parametrize("page", ["tokens/race.html", "compare/compare.html", "train/train.html"])
def test_panes_speak_of_tokens_in_the_same_words(page: str) -> None:
    assert asset("tokens/legend.html") in asset(page)
    assert ">All guesses</button>" in asset(page)


def test_every_module_is_needed_by_something_that_is_mounted() -> None:
    assert {each for module in MOUNTED for each in needed(module)} == set(modules())


def test_modules_of_a_page_without_a_server_name_each_other_by_their_paths() -> None:
    found = json.loads(import_map("playground/take_away.js"))["imports"]
    assert set(found) == {"playground/take_away.js", "page/hand_over.js", "page/elements.js"}
    texts = {name: b64decode(url.removeprefix("data:text/javascript;base64,")).decode() for name, url in found.items()}
    assert texts["page/elements.js"] == asset("page/elements.js")
    assert 'import { make } from "page/elements.js";\n' in texts["page/hand_over.js"]
    assert not re.search(r'from "\.', "".join(texts.values()))


@pytest.mark.parametrize("module", modules())
def test_a_module_is_served_for_good(client: TestClient, module: str) -> None:
    answer = client.get(f"/{address(module)}")
    assert answer.text == asset(module)
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]


def test_what_a_module_needs_is_preloaded_with_it() -> None:
    assert re.findall(r'href="([^"]+)"', preloads("playground/take_away.js")) == [
        address(module) for module in ("playground/take_away.js", "page/hand_over.js", "page/elements.js")
    ]


@pytest.mark.parametrize("path", ["pairs.toml", "../app.py", "..%2fapp.py", "tokens/race.css", "", "tokens"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    version = address("tokens/race.js").split("/")[1]
    assert (ASSETS / "pairs.toml").exists()
    assert client.get(f"/scripts/{version}/{path}").status_code == 404


def test_modules_of_another_version_are_not_mixed_with_these(client: TestClient) -> None:
    assert client.get("/scripts/0123456789abcdef/tokens/race.js").status_code == 404


def test_an_unknown_module_has_no_address() -> None:
    with pytest.raises(ValueError, match="no module"):
        address("tokens/nothing.js")
