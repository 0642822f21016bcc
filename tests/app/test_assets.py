"""The page's scripts: what they import, how they are served, and that nothing else is."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.assets import ASSETS, EXPORT, address, asset, imports_of, in_one_script, in_order, modules, preloads, route

MOUNTED = [module for module, text in modules().items() if "export function mount(" in text]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=[route()]))


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_what_there_is_and_uses_it(module: str) -> None:
    body = re.sub(r"^import .*$", "", asset(module), flags=re.MULTILINE)
    for source, names in imports_of(module).items():
        assert set(names) <= set(EXPORT.findall(asset(source)))
        assert all(re.search(rf"\b{name}\b", body) for name in names)


@pytest.mark.parametrize("page", ["tokens/race.html", "compare/compare.html", "train/train.html"])
def test_panes_speak_of_tokens_in_the_same_words(page: str) -> None:
    assert asset("tokens/legend.html") in asset(page)
    assert ">Show final text</button>" in asset(page)


@pytest.mark.parametrize("module", MOUNTED)
def test_what_is_mounted_can_be_put_into_one_script(module: str) -> None:
    script = in_one_script(module)
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    order = in_order(module)
    assert all(order.index(needed) < order.index(each) for each in order for needed in imports_of(each))


def test_every_module_is_needed_by_something_that_is_mounted() -> None:
    assert {each for module in MOUNTED for each in in_order(module)} == set(modules())


def test_modules_that_need_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = {
        "a.js": 'import { b } from "./b.js";\n\nexport const a = b;\n',
        "b.js": 'import { a } from "./a.js";\n\nexport const b = a;\n',
    }
    monkeypatch.setattr("app.assets.modules", lambda: circle)
    with pytest.raises(ValueError, match=r"a\.js -> b\.js -> a\.js"):
        in_order("a.js")


@pytest.mark.parametrize(
    "line", ['import all from "./b.js";', 'import * as b from "./b.js";', "export default 1;", "export { x };"]
)
def test_a_form_that_one_script_cannot_hold_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.assets.modules", lambda: {line: f"{line}\n", "b.js": "export const b = 1;\n"})
    with pytest.raises(ValueError, match="form"):
        in_one_script(line)


@pytest.mark.parametrize("module", modules())
def test_a_module_is_served_for_good(client: TestClient, module: str) -> None:
    answer = client.get(f"/{address(module)}")
    assert answer.text == asset(module)
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]


def test_what_a_module_needs_is_preloaded_with_it() -> None:
    assert re.findall(r'href="([^"]+)"', preloads("playground/take_away.js")) == [
        address(module) for module in ("page/elements.js", "page/hand_over.js", "playground/take_away.js")
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
