"""Arguments, the header's facts, the prompt chips, and the controls of the sidebar."""

import socket
from pathlib import Path

import gradio as gr
import pytest
from fakes import ENVIRONMENT, FakeEngine

from app.header import facts, header_html
from app.playground import FALLBACK, QUESTION, chip_prompts, starting_prompts
from app.serving.device import Device
from app.settings import read_arguments
from app.sidebar import replaced, sidebar
from app.sidebar.picker import Picker
from core.drafting.methods import METHODS
from core.settings import Settings


def test_the_header_names_device_pair_precision_memory_and_speculation() -> None:
    assert facts(ENVIRONMENT, Settings(draft_length=4)) == [
        "2 CPU cores",
        "pocket 27M + pocket-draft 1.7M",
        "NF4 + fp32",
        "33 MB of weights",
        "speculation on, draft length 4",
    ]
    assert facts(ENVIRONMENT, Settings(method="plain"))[-1] == "speculation off"
    assert "length" not in facts(ENVIRONMENT, Settings(method="tree", draft_length=4))[-1]


def test_model_names_are_escaped_and_folders_cut() -> None:
    model = {"name": "/models/<b>x</b>", "precision": "bf16", "parameters": 5, "weight_bytes": 10}
    found = facts({**ENVIRONMENT, "target": model, "draft": None}, Settings())
    assert "models" not in found[1]
    assert "<b>" not in header_html("<b>", ["<b>"])


def test_the_page_starts_with_prompts_also_without_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all(prompt.name and prompt.text.strip() for prompt in starting_prompts())
    assert {prompt.temperature for prompt in chip_prompts()} == {0.0, 0.7}, "each at the temperature it reads well at"
    assert len(starting_prompts()) > len(chip_prompts()) >= 8, "the others are there to be measured"
    monkeypatch.setattr("core.text.PROMPTS", tmp_path / "none.toml")
    assert starting_prompts() == [FALLBACK]


def test_a_chat_model_has_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight messages, each with what it shows; one is meant for a temperature."""
    prompts = starting_prompts(chat=True)
    assert len(prompts) == 8
    assert len({prompt.kind for prompt in prompts}) == 8
    assert all(prompt.note.endswith(".") and len(prompt.note) < 130 for prompt in prompts)
    assert [prompt.temperature for prompt in prompts if prompt.temperature] == [1.0]
    monkeypatch.setattr("core.text.CHAT_PROMPTS", tmp_path / "none.toml")
    assert starting_prompts(chat=True) == [QUESTION]


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "0"],
        ["--port", "99999"],
        ["--port", "x"],
        ["--auth", "ann"],
        ["--auth", ":secret"],
        ["--draft", "some/model"],
        ["--precision", "int3"],
        ["--host", "203.0.113.1", "--port", "7860"],
        ["--nonsense"],
    ],
)
def test_bad_arguments_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_arguments(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip()


def test_a_taken_port_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit):
            read_arguments(["--port", str(taken.getsockname()[1])])
    assert "Cannot listen" in capsys.readouterr().err


def test_arguments_are_read() -> None:
    chosen = read_arguments(["--target", "a/b", "--auth", "ann:pass:word"])
    assert (chosen.target, chosen.auth, chosen.host) == ("a/b", ("ann", "pass:word"), "127.0.0.1")


def test_every_method_has_a_sentence_and_the_unusable_ones_a_reason() -> None:
    assert all(method.label and method.help.endswith(".") for method in METHODS.values())
    with gr.Blocks() as page:
        picker = Picker(FakeEngine(), Device())
        controls = sidebar(picker.build, Settings(), {"draft": "no draft model", "ngram": None, "plain": None})
    method = controls["method"]
    assert [value for _, value in method.choices] == ["ngram", "plain"]
    assert method.value == "ngram"
    assert replaced({"draft": None, "ngram": None}, "draft") == ""
    found = replaced({"draft": "no draft model is named", "ngram": None}, "draft")
    assert found == "Method changed to N-gram; not Draft model: no draft model is named."
    texts = [block.value for block in page.blocks.values() if isinstance(block, gr.Markdown)]
    assert any("no draft model" in text for text in texts)
