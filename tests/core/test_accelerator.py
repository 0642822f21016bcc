"""The command that measures everything on a GPU, tried whole on a CPU with tiny shapes: its figures mean nothing."""

import json
import sys

import torch

from tests.accelerator import smallest
from tests.accelerator.__main__ import main


def test_the_whole_command_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    """Every part leaves its file, and none failed."""
    monkeypatch.setattr(sys, "argv", ["accelerator", "--out", str(tmp_path), "--small"])
    assert main() == 0, capsys.readouterr().out[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for stage in ("smallest", "precisions", "large"):
        assert stage in summary and json.loads((tmp_path / f"{stage}.json").read_text())
    assert summary["smallest"]["failed"] == [] and summary["tests"]["exit_status"] == 0
    rows = json.loads((tmp_path / "precisions.json").read_text())["bounds"]
    assert set(rows) == {"nf4", "int4", "bf16"} and all(
        "bound" in row["sentence"] for each in rows.values() for row in each
    )
    batches = json.loads((tmp_path / "batches.json").read_text())
    assert [row["texts"] for row in batches["bf16"]["rows"]] == [1, 2, 3] and summary["batches"]["exit_status"] == 0
    assert summary["bundled"]["greedy"] == 0 and (tmp_path / "bundled_greedy.json").exists()


def test_a_failure_names_its_cause_and_the_next_step_is_tried(monkeypatch):
    def broken(device, small):
        raise RuntimeError("no kernel image is available for execution on the device")

    steps = (("a product", "the driver", broken), ("copying", "others", smallest.copying))
    monkeypatch.setattr(smallest, "STEPS", steps)
    left, said = [], []
    found = smallest.measure(torch.device("cpu"), True, lambda document: left.append(len(document)), said.append)
    assert left == [1, 2] and found["copying"]["ok"]
    assert found["a product"]["look_at"] == "the driver" and not found["a product"]["ok"]
    assert "FAILED: no kernel image is available for execution on the device. Look at: the driver" in said
