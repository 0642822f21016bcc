"""A start: what runs beside the imports, what is left for later, and that arguments are read before all that."""

import gc
import inspect
import pathlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.serving.starting import beside, clear_up, leave_garbage, without_stubs
from core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


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
