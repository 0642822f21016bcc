"""Many visitors share one pair: every result is that of the same run alone (a small edition of measure_load.py)."""

from __future__ import annotations

from pathlib import Path

from measure_load import faults, measure, served


def test_visitors_do_not_disturb_one_another(saved_pair: tuple[Path, Path]) -> None:
    target, draft = map(str, saved_pair)
    with served("--target", target, "--draft", draft, "--precision", "fp32") as (address, process):
        result = measure(address, clients=6, runs=14, process=process)
    assert not faults(result)
    assert sum(result["outcomes"].values()) == 14
    assert result["outcomes"]["equal to the same run alone"] >= 7
