"""What `app.insides` relies on of the installed Gradio still holds; and nothing else relies on more."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from errno import ENOSPC
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr
import httpx
import pytest
from fakes import FakeEngine
from gradio.state_holder import SessionState
from packaging.requirements import Requirement
from starlette.middleware import Middleware

from app.api import FOR_PROGRAMS
from app.assets import ASSETS, address, asset, modules
from app.insides import (
    PLACES,
    UNCHECKED,
    BoundedBodies,
    forget_upload,
    give,
    hang_up,
    leave_undocumented,
    on_load,
    scope_of,
    sent_by,
    sent_with,
    uploaded_bytes,
)
from app.page import STYLES, build
from app.parts import prompts_uploaded
from app.serving.stops import ARRIVED, Arrivals
from app.tokens.charts import figure, tools

ROOT = Path(__file__).resolve().parents[2]
OF_GRADIO = re.compile(
    r"html-container|sidebar-content|toggle-button|info-text|block-info|wrap-inner|tabitem|data-tab-id|gradio-container"
    r"|role=\"tab|[\s(\"]\.(block|form|wrap|column|row)(?![-\w])"
)
"""Classes and roles that Gradio gives its elements, as selectors have them."""


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """A page of a few functions, each of which leans on one thing."""

    def noted(request: gr.Request) -> bool:
        return ARRIVED in scope_of(request).get("state", {})

    def grow() -> Iterator[str]:
        yield "one"
        yield "one and two"

    with gr.Blocks(analytics_enabled=False) as page:
        text = gr.Textbox()
        gr.api(noted, api_name="noted")
        gr.Button().click(grow, None, text, api_name="grow")
        choice = gr.Radio(["new"])
        for name, how in (("checked", {}), ("unchecked", UNCHECKED)):
            gr.Button().click(lambda chosen: chosen, choice, text, api_name=name, **how)
    _, address, _ = page.launch(
        prevent_thread_lock=True, quiet=True, app_kwargs={"middleware": [Middleware(Arrivals)]}, ssr_mode=False
    )
    yield address
    page.close()


def call(address: str, name: str, *given: Any) -> list[Any]:
    """The messages by which Gradio answers a call of an endpoint, as its own page gets them."""
    event = httpx.post(f"{address}gradio_api/call/{name}", json={"data": given}).json()["event_id"]
    lines = httpx.get(f"{address}gradio_api/call/{name}/{event}").text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_choice_of_before_reaches_its_function(demo: str) -> None:
    """Among new choices Gradio refuses it, and says so in a toast."""
    assert call(demo, "unchecked", "old") == [["old"]]
    assert call(demo, "checked", "old") != [["old"]]


def test_a_note_of_middleware_reaches_the_function(demo: str) -> None:
    assert call(demo, "noted") == [[True]]


def test_of_a_string_that_grew_the_new_end_alone_is_sent(demo: str) -> None:
    config = httpx.get(f"{demo}config").json()
    (number,) = (each["id"] for each in config["dependencies"] if each["api_name"] == "grow")
    visitor = "a-visitor"
    httpx.post(f"{demo}gradio_api/queue/join", json={"data": [], "fn_index": number, "session_hash": visitor})
    sent = []
    with httpx.stream("GET", f"{demo}gradio_api/queue/data", params={"session_hash": visitor}) as stream:
        for line in stream.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line else {}
            if message.get("msg") == "process_generating":
                sent.append(message["output"]["data"])
            if message.get("msg") == "close_stream":
                break
    assert sent[0] == ["one"]
    assert sent[1] == [[["append", [], " and two"]]]


def test_a_figure_is_sent_as_its_own_json_says() -> None:
    sent = gr.Plot().postprocess(figure("tokens", "seconds", "a-name"))
    assert sent and json.loads(sent.plot)["config"] == tools("a-name")


def test_a_session_keeps_no_copy_of_the_page_nor_of_what_was_shown() -> None:
    page = build(FakeEngine())
    session = SessionState(page)
    (run,) = (function for function in page.fns.values() if function.name == "run" and function.api_name == "run_1")
    for each in run.outputs:
        session._update_value_in_config(each._id, "x" * 1000)
    assert not list(session.components)


def test_every_endpoint_is_found_by_its_name() -> None:
    page = build(FakeEngine())
    found = {function.api_name for function in page.fns.values()}
    assert {*FOR_PROGRAMS} <= found
    leave_undocumented(page, FOR_PROGRAMS)
    offered = page.get_api_info()["named_endpoints"]
    assert "/generate" in offered
    assert not {f"/{name}" for name in FOR_PROGRAMS} & set(offered)


def test_the_server_can_be_told_to_hang_up() -> None:
    with gr.Blocks(analytics_enabled=False) as page:
        gr.Markdown("x")
    page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    assert page.server.force_exit is False
    hang_up(page)
    assert page.server.force_exit is True
    page.close(verbose=False)


def test_what_a_script_sends_along_is_read() -> None:
    assert sent_with(gr.EventData(None, {"number": 3})) == {"number": 3}
    assert sent_with(gr.EventData(None, "words")) == {}


def test_an_event_is_offered_where_the_script_names_it() -> None:
    with gr.Blocks(analytics_enabled=False):
        html = gr.HTML(js_on_load=on_load("history/history.js", "refresh"))
        html.refresh(lambda: None)
        with pytest.raises(AttributeError):
            html.show(lambda: None)


def test_events_of_scripts_and_of_gradio_share_a_listener() -> None:
    with gr.Blocks(analytics_enabled=False) as page:
        html, button = gr.HTML(js_on_load=on_load("history/history.js", "refresh")), gr.Button()
        gr.on([button.click, sent_by(html, "refresh")], lambda: None)
    (function,) = page.fns.values()
    assert function.targets == [(button._id, "click"), (html._id, "refresh")]


def test_props_given_late_are_in_the_page() -> None:
    with gr.Blocks(analytics_enabled=False) as page:
        html = gr.HTML(start=[])
        give(html, start=["def"])
        assert address("page/page.js")
    (found,) = (each for each in page.get_config_file()["components"] if each["type"] == "html")
    assert found["props"]["props"]["start"] == ["def"]


def test_gradio_is_bounded_to_the_minor_that_was_tested() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (wanted,) = (Requirement(line) for line in lines if line.startswith("gradio"))
    major, minor, *_ = version("gradio").split(".")
    assert version("gradio") in wanted.specifier
    assert f"{major}.{int(minor) + 1}.0" not in wanted.specifier
    front = (ROOT / "README.md").read_text(encoding="utf-8").split("---")[1]
    (stated,) = re.findall(r"^sdk_version: (\S+)$", front, re.MULTILINE)
    assert stated in wanted.specifier


def test_one_sheet_and_one_script_alone_name_what_is_gradios() -> None:
    sheets = [path.relative_to(ASSETS).as_posix() for path in ASSETS.glob("*/*.css")]
    assert set(STYLES) == {*sheets} - {"tokens/replay_page.css"}
    bare = {name: re.sub(r"/\*.*?\*/", "", asset(name), flags=re.DOTALL) for name in [*sheets, *modules()]}
    assert {name for name, text in bare.items() if OF_GRADIO.search(text)} == {"page/gradio.css", "page/gradio.js"}


OF_A_PAGE = {"launch", "close", "load", "queue", "api"}
"""What Gradio documents of `gr.Blocks`."""


def reaches(text: str) -> set[str]:
    """Where Python reaches into what it was not offered: Gradio's private places, a page's undocumented attributes, and
    attributes of other modules that it sets."""
    inside = r"\.fns\b|force_exit|\._data\b|\.request\.scope|\"request\", None|\.props\b|document\.baseURI"
    found = set(re.findall(inside, text))
    tree = ast.parse(text)
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for each in imports for alias in each.names}
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            of_a_page = each.value.id == "page" not in names and each.attr not in OF_A_PAGE
            patched = each.value.id in names and isinstance(each.ctx, ast.Store)
            if of_a_page or patched:
                found.add(ast.unparse(each))
    return found


def test_one_module_alone_reaches_into_gradio() -> None:
    sources = [ROOT / "app.py", *(ROOT / "app").rglob("*.py")]
    found = {path.name: reaches(path.read_text(encoding="utf-8")) for path in sources}
    assert {name for name, what in found.items() if what} == {"insides.py"}, found


@pytest.mark.parametrize("line", ["import inspect\ninspect.getfile = print", "print(page.mcp_error)", "x = page.fns"])
def test_reaching_into_gradio_is_seen(line: str) -> None:
    assert reaches(line)


def test_what_follows_the_pair_takes_the_method_of_before() -> None:
    """The choices of methods change with the pair; other controls tell of it, or something is begun, before the method
    has followed."""
    page = build(FakeEngine())
    begun = ("run", "compare-run", "load-run", "tune-run", "many-run", "train-start", "train-resume")
    telling = {at for at, block in page.blocks.items() if block.elem_id in ("pair-target", "pair-draft", *begun)}
    following = [
        function
        for function in page.fns.values()
        if function.fn
        and {at for at, _ in function.targets} & telling
        and "method" in {block.elem_id for block in function.inputs}
    ]
    assert len(following) == 3 + len(begun) and not any(function.preprocess for function in following)


def test_an_upload_is_deleted_once_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    file = tmp_path / "uploads" / "a-hash" / "prompts.txt"
    file.parent.mkdir(parents=True)
    file.write_text("one\ntwo\n")
    assert [prompt.text for prompt in prompts_uploaded(str(file))] == ["one", "two"]
    assert not file.parent.exists()
    other = tmp_path / "mine.txt"
    other.write_text("one\n")
    prompts_uploaded(str(other))
    assert other.exists(), "nothing is deleted that nobody uploaded"


FREE = Event()
"""Until it is set, calls that are held wait."""


@pytest.fixture
def taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the functions of a page that takes uploads."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))

    def same(text: str) -> str:
        return text

    def held(text: str) -> None:
        FREE.wait()

    def fails(text: str) -> None:
        raise gr.Error(text[:1], print_exception=False)

    with gr.Blocks(analytics_enabled=False) as page:
        gr.UploadButton()
        gr.api(same)
        gr.api(held)
        gr.api(fails)
    middleware = [Middleware(BoundedBodies)]
    _, address, _ = page.launch(
        prevent_thread_lock=True, quiet=True, app_kwargs={"middleware": middleware}, ssr_mode=False
    )
    yield f"{address}gradio_api/"
    page.close(verbose=False)


def test_uploads_are_bounded(taking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio's own address for them is open to anybody who reaches the page."""
    monkeypatch.setattr("app.insides.MOST_UPLOADED", PLACES + 100)
    files = [{"files": (f"{n}.txt", b"x" * 60)} for n in range(4)]
    assert [httpx.post(f"{taking}upload", files=each).status_code for each in files] == [200, 200, 507, 507]
    assert uploaded_bytes() > PLACES + 100


def test_files_with_next_to_nothing_in_them_are_bounded_too(
    taking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk has a block and an entry for each; and of files that are gone no folders stay."""
    monkeypatch.setattr("app.insides.MOST_UPLOADED", 40 * PLACES)
    asked = ([("files", (f"{n}.txt", f"{k} {n}".encode())) for n in range(30)] for k in range(3))
    assert [httpx.post(f"{taking}upload", files=files).status_code for files in asked] == [200, 200, 507]
    for file in tmp_path.rglob("*.txt"):
        file.unlink()  # as Gradio does
    for folder in tmp_path.rglob("*"):
        os.utime(folder, (0, 0))
    assert uploaded_bytes() == 0
    assert not [*tmp_path.iterdir()]


def test_the_same_file_from_two_visitors_goes_with_neither_of_them_alone(taking: str) -> None:
    """Gradio would put both in one place, by what is in them."""
    first, second = (httpx.post(f"{taking}upload", files={"files": ("a.txt", b"one\n")}).json()[0] for _ in range(2))
    forget_upload(first)
    assert not Path(first).exists() and Path(second).read_text() == "one\n"


def test_calls_that_wait_are_bounded_by_all_that_came_with_them(taking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio's queue counts calls alone, and answers each before it is run. One that failed is let go of."""
    monkeypatch.setattr("app.insides.MOST_IN_REQUESTS", 450_000)
    FREE.clear()

    def called(name: str, wait: bool = False) -> int:
        answer = httpx.post(f"{taking}call/{name}", json={"data": ["x" * 100_000]})
        if wait:
            assert "event: error" in httpx.get(f"{taking}call/{name}/{answer.json()['event_id']}").text
        return answer.status_code

    assert [called("held") for _ in range(6)] == [200] * 4 + [503] * 2
    FREE.set()
    while called("held") == 503:  # until both were run
        continue
    gc.disable()
    try:
        assert [called("fails", wait=True) for _ in range(9)] == [200] * 9
    finally:
        gc.enable()


def test_an_upload_to_a_full_disk_is_answered_in_a_sentence(taking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is taken, once there is room."""

    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("starlette.datastructures.UploadFile.write", full)
        answer = httpx.post(f"{taking}upload", files={"files": ("a.txt", b"x")})
    assert answer.status_code == 507
    assert answer.text == "Files cannot be taken here just now: the disk is full. Paste the text instead."
    assert httpx.post(f"{taking}upload", files={"files": ("a.txt", b"x")}).status_code == 200


def test_a_request_is_bounded_whatever_is_in_it(taking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files that are small enough each, a form without a file, a call without an end, one while others are read:
    little of it is kept, and what is left on the disk is deleted in time."""
    monkeypatch.setattr("app.insides.MOST_IN_UPLOAD", 300_000)
    monkeypatch.setattr("app.insides.MOST_IN_REQUEST", 500_000)
    files = [("files", (f"{number}.txt", b"x" * 100_000)) for number in range(30)]
    assert httpx.post(f"{taking}upload", files=files).status_code == 413
    assert httpx.post(f"{taking}upload", data={"files": "x" * 900_000}, files={"o": b""}).status_code == 413
    pieces = (b" " * 100_000 for _ in range(10**6))
    with suppress(httpx.HTTPError):  # it hangs up on who goes on
        assert httpx.post(f"{taking}call/same", content=pieces).status_code == 413
    assert next(pieces), "an endless body was read to its end"
    assert 0 < uploaded_bytes() < 600_000
    for file in tmp_path.rglob("*"):
        os.utime(file, (0, 0))
    assert uploaded_bytes() == 0 and not [file for file in tmp_path.rglob("*") if file.is_file()]
    called = {"data": ["x"]}
    assert httpx.post(f"{taking}call/same", json=called).status_code == 200
    monkeypatch.setattr("app.insides.MOST_IN_REQUESTS", 5)
    assert httpx.post(f"{taking}call/same", json=called).status_code == 503
    monkeypatch.setattr("app.insides.MOST_IN_REQUESTS", 500)
    assert [httpx.post(f"{taking}call/same", json=called).status_code for _ in range(40)] == [200] * 40
