"""Lanes side by side: who races with whom, and what their runs come to. Runs are made by hand; figures are exact."""

from __future__ import annotations

import pytest

from core.measuring.comparison import Contender, heats, row
from core.records import Candidate, Round, Run, Settings, Token

ENVIRONMENT = {"target": {"weight_bytes": 100}, "draft": {"weight_bytes": 7}, "head": {"weight_bytes": 3}}


def plain(ids: list[int], seconds: float = 1.0, stop: str = "length") -> Run:
    """A plain run: a token a round, each round as long."""
    tops = [Candidate(0, "a", 0.5), Candidate(1, "b", 0.25)]
    rounds = [Round(i, [], Token(id, "x", "plain", top_target=tops), 0, seconds, 0) for i, id in enumerate(ids)]
    return Run(Settings(method="plain"), ENVIRONMENT, "p", [1], ids, "", stop, rounds)  # type: ignore[arg-type]


def drafted(accepted: list[int], rounds_seconds: float, method: str = "draft", temperature: float = 0.0) -> Run:
    """A run of rounds of two drafted tokens, of which so many were accepted; ids count up from 0."""
    rounds, ids = [], []
    for index, count in enumerate(accepted):
        names = ["accepted"] * count + ["rejected", "ignored"][: 2 - count]
        start = len(ids)
        tokens = [Token(start + i, "x", name, parent=i - 1 if i else None) for i, name in enumerate(names)]
        emitted = Token(start + count, "x", "bonus" if count == 2 else "corrected")
        rounds.append(Round(index, tokens, emitted, 0, rounds_seconds, 0))
        ids += range(start, start + count + 1)
    settings = Settings(method=method, temperature=temperature)  # type: ignore[arg-type]
    return Run(settings, ENVIRONMENT, "p", [1], ids, "", "length", rounds)


def contender(runs: dict[int, Run], number: int = 1) -> Contender:
    return Contender(number, next(iter(runs.values())).settings, runs=runs)


def test_lanes_of_one_target_race_at_once_and_others_in_turn():
    """A target in another precision is another target; a lane that decodes plainly is the baseline of its heat."""
    lanes = [
        Settings(target="a", draft="b"),
        Settings(target="c", precision="nf4"),
        Settings(target="a", method="plain"),
        Settings(target="a", draft="other"),
        Settings(target="c", precision="bf16", method="plain"),
    ]
    found = heats(lanes)
    assert [[each.number for each in heat.contenders] for heat in found] == [[1, 3, 4], [2, 6], [5]]
    assert [(heat.baseline.number, heat.baseline.added) for heat in found] == [(3, False), (6, True), (5, False)]


def test_an_added_baseline_differs_in_its_method_alone():
    heat = heats([Settings(target="a", draft="b", temperature=0.7, seed=3), Settings(target="a", method="ngram")])[0]
    assert heat.baseline.settings == Settings(target="a", draft="b", temperature=0.7, seed=3, method="plain")
    assert heat.baseline.number == 3


def test_ratios_are_taken_prompt_by_prompt():
    """The second prompt is slow for both; the ratio of medians would say 1.5, that of the pairs says 2 and 4."""
    fast = contender({0: drafted([2, 2], 1.0), 1: drafted([2, 2], 3.0)})  # 3 tokens/s, 1 token/s
    base = contender({0: plain(list(range(6)), 1 / 1.5), 1: plain(list(range(6)), 4.0)}, 2)  # 1.5 and 0.25 tokens/s
    found = row(fast, base)
    assert found.tokens_per_second is not None and found.ratio_to_plain is not None
    assert (found.tokens_per_second.min, found.tokens_per_second.max) == pytest.approx((1, 3))
    assert (found.ratio_to_plain.min, found.ratio_to_plain.max) == pytest.approx((2, 4))
    assert found.prompts == 2
    itself = row(base, base)
    assert itself.ratio_to_plain is not None and itself.ratio_to_plain.median == 1
    assert (itself.baseline, itself.identical) == (True, None)


def test_rates_pool_the_rounds_of_all_prompts():
    """One prompt with one round must not weigh as much as one with three."""
    found = row(contender({0: drafted([0], 1.0), 1: drafted([2, 2, 2], 1.0)}), contender({0: plain([0])}, 2))
    assert found.acceptance_rate == 6 / 7
    assert found.tokens_per_round == 10 / 4
    assert found.accepted_by_position == [3 / 4, 3 / 4]
    assert found.drafts_by_position == [4, 4]


def test_texts_are_compared_with_the_baseline_token_for_token():
    base = contender({0: plain([0, 1, 2]), 1: plain([0, 9, 2])}, 2)
    same = row(contender({0: drafted([2], 1.0), 1: drafted([2], 1.0)}), base).identical
    assert same is not None
    assert (same.same, same.compared, same.first) == (1, 2, 2)
    assert same.logit_gap == pytest.approx(0.6931, abs=1e-4)  # log of 0.5 ÷ 0.25
    assert row(contender({0: drafted([2], 1.0, temperature=0.5)}), base).identical is None


@pytest.mark.parametrize(
    ("method", "draft"), [("draft", 7), ("ngram+draft", 7), ("tree", 7), ("head", 3), ("ngram", 0)]
)
def test_memory_counts_the_models_a_method_reads(method: str, draft: int):
    found = row(contender({0: drafted([2], 1.0, method)}), contender({0: plain([0])}, 2))
    assert found.weight_bytes == {"target": 100, "draft": draft}


def test_what_was_stopped_counts_only_where_nothing_came_to_its_end():
    finished, stopped = plain([1, 2], 1.0), plain([1], 5.0, stop="cancelled")
    both = row(contender({0: finished, 1: stopped}), contender({0: finished}, 2))
    alone = row(contender({1: stopped}), contender({0: finished}, 2))
    assert both.tokens_per_second is not None and alone.tokens_per_second is not None
    assert (both.prompts, both.tokens_per_second.median) == (1, 1.0)
    assert (alone.prompts, alone.tokens_per_second.median) == (1, 0.2)
    assert alone.ratio_to_plain is None  # its baseline did not come so far


def test_a_lane_without_runs_has_a_row_without_figures():
    gone = Contender(1, Settings(target="a"), error="It cannot be read.")
    found = row(gone, gone).to_dict()
    assert found["error"] == "It cannot be read."
    figures = ("tokens_per_second", "ratio_to_plain", "acceptance_rate", "tokens_per_round", "weight_bytes")
    assert {found[name] for name in figures} == {None}
