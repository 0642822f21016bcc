"""What a program sees of the page, through Gradio's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from driving import free_port
from fakes import FakeEngine
from opened import Reader

from app.api import leave_to_programs
from app.page import build, launch_options
from core.records import run_from_dict, summarise

gradio_client = pytest.importorskip("gradio_client")
PLUMBING = {"/read_address", "/take", "/table", "/show", "/remove", "/open", "/describe"}


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    made = build(FakeEngine(pace=0))
    made.launch(server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options())
    yield made
    made.close(verbose=False)


@pytest.fixture(scope="module")
def client(page: Any) -> Any:
    return gradio_client.Client(page.local_url, verbose=False)


def test_every_endpoint_is_named_and_described_and_the_plumbing_is_not_shown(page: Any) -> None:
    info = page.get_api_info()
    assert not info["unnamed_endpoints"]
    assert {"/run", "/stop", "/generate"} <= set(info["named_endpoints"])
    assert not PLUMBING & set(info["named_endpoints"])
    for name, endpoint in info["named_endpoints"].items():
        assert len(endpoint["description"]) > 20, name
        for parameter in endpoint["parameters"]:
            assert not parameter["parameter_name"].startswith("param_"), name


def test_generate_reports_the_race_in_figures(client: Any) -> None:
    found = client.predict("def f():", max_new_tokens=20, documents=True, api_name="/generate")
    speculative, plain = (run_from_dict(run) for run in found["document"]["runs"])
    assert found["text"] == speculative.text
    assert found["verdict"] == "Identical to plain decoding, all 20 tokens."
    assert found["speculative"] == summarise(speculative).to_dict()
    assert found["plain"] == summarise(plain).to_dict()
    ratio = found["speculative"]["tokens_per_second"] / found["plain"]["tokens_per_second"]
    assert found["speedup"] == pytest.approx(ratio)


def test_generate_without_speculation(client: Any) -> None:
    found = client.predict("def f():", method="plain", max_new_tokens=5, api_name="/generate")
    assert found["speedup"] is None
    assert found["plain"]["new_tokens"] == 5
    assert "speculative" not in found
    assert "document" not in found


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"method": "magic"}, "There is no method 'magic'"),
        ({"prompt": " "}, "The prompt is empty"),
        ({"max_new_tokens": 0}, "New tokens must be"),
        ({"prompt": "explode"}, "Something failed on our side"),
    ],
)
def test_what_goes_wrong_is_the_pages_own_sentence(client: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        client.predict(**{"prompt": "x", **asked}, api_name="/generate")


def test_run_streams_the_race_and_ends_with_its_documents(client: Any) -> None:
    job = client.submit("def f():", max_new_tokens=20, api_name="/run")
    job.result(30)
    reader = Reader()
    events = [event for value, _ in job.outputs() for event in reader.read(value)]
    _, document = job.outputs()[-1]
    ends = [event["run"]["token_ids"] for event in events if event["e"] == "end"]
    assert sorted(ends) == sorted(run["token_ids"] for run in document["runs"])


def test_agents_are_not_offered_what_only_a_program_can_read() -> None:
    """Streams and the session's Stop stay callable, but are no tools."""
    made = build(FakeEngine(pace=0))
    leave_to_programs(made)
    assert not {"/run", "/stop"} & set(made.get_api_info()["named_endpoints"])
    assert "/generate" in made.get_api_info()["named_endpoints"]


def test_a_race_goes_to_its_page_once(page: Any) -> None:
    """What the race component draws holds the whole documents: no other component gets them, too."""
    (race,) = (block for block in page.blocks.values() if block.elem_id == "race")
    (run,) = (each for each in page.fns.values() if race in each.outputs and each.name == "run")
    assert run.outputs == [race]
