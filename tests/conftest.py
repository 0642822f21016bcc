"""One thread for every test: the models are tiny, and threads that wait for each other cost more than they bring."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
gc.disable()  # until all is imported: looking for garbage among what stays takes a sixth of the time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


LONG = ("test_accelerator", "test_visitors", "test_fuzz", "real", "browser")
"""Files, and rooms, whose tests take long and stay together: begun last, one process would wait for the other's."""


@pytest.hookimpl(tryfirst=True)  # before the processes are told what there is
def pytest_collection_modifyitems(items):
    """Tests of a file that share something slow to make stay together when several processes test."""
    items.sort(key=lambda item: item.path.stem not in LONG and item.path.parent.name not in LONG)
    for item in items:
        shared = any(each[-1].scope == "module" for each in item._fixtureinfo.name2fixturedefs.values())
        if item.get_closest_marker("xdist_group") is None and (shared or item.path.stem == "test_faults"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collectstart(collector):
    """What tests of the page import is not written out for an editor."""
    if collector.path.parent.name in ("app", "browser", "robustness"):
        import app.insides  # noqa: F401


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What was imported stays: nobody needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
