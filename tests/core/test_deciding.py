"""Is a difference real? Intervals that hold, and recommendations that keep out of the noise."""

import random
from statistics import median

import pytest

from core.measuring.deciding import CONFIDENCE, compare, decide, interval, latency
from core.records import Round, Run, Settings, Token


def keyed(values):
    return {(0, at): value for at, value in enumerate(values)}


def test_an_interval_holds_the_median_as_often_as_it_says():
    """Of skewed values, whose mean lies far from their median: nothing is asked of how they are spread."""
    chance, true = random.Random(3), 2**0.5
    for count in (5, 8, 15):
        found = [interval([2 ** chance.random() ** 1 for _ in range(count)]) for _ in range(2000)]
        held = sum(each.low <= true <= each.high for each in found) / len(found)
        assert found[0].confidence >= CONFIDENCE
        assert held == pytest.approx(found[0].confidence, abs=0.02)


def test_few_values_decide_nothing():
    assert interval([2.0, 2.1, 2.2, 2.3]).confidence == pytest.approx(0.875)
    assert compare(keyed([2.0] * 4), keyed([1.0] * 4)) == "open"
    assert compare(keyed([2.0] * 5), keyed([1.0] * 5)) == "better"
    assert compare(keyed([1.0] * 5), keyed([2.0] * 5)) == "worse"
    assert compare(keyed([1.01, 0.99, 1.0, 1.02, 0.98]), keyed([1.0] * 5)) == "same"
    assert compare(keyed([1.3, 0.8, 1.0, 1.2, 0.9]), keyed([1.0] * 5)) == "open"


PLAIN = keyed([100.0, 90.0, 110.0, 95.0, 105.0])


def faster(*by):
    return {key: PLAIN[key] * by[at % len(by)] for at, key in enumerate(PLAIN)}


def test_a_fixed_length_must_beat_auto_beyond_the_noise():
    assert decide(PLAIN, {4: faster(1.8), "auto": faster(1.5)}).recommended == 4
    assert decide(PLAIN, {4: faster(1.52), "auto": faster(1.5)}).recommended == "auto"
    assert decide(PLAIN, {2: faster(1.2), 4: faster(1.8), "auto": faster(1.9)}).recommended == "auto"


def test_nothing_is_recommended_inside_the_noise():
    """One busy moment: auto looks slow beside a fixed length, and neither is to be trusted."""
    busy = decide(PLAIN, {4: faster(1.76, 1.2, 1.9), "auto": faster(1.25, 1.9, 1.3)})
    assert (busy.recommended, busy.pays, busy.fixed) == (None, True, 4)
    open_ = decide(PLAIN, {4: faster(1.3, 0.8), "auto": faster(0.9, 1.2)})
    assert (open_.recommended, open_.pays) == (None, None)


def test_plain_decoding_where_nothing_gains():
    lost = decide(PLAIN, {4: faster(0.7), "auto": faster(1.0)})
    assert (lost.recommended, lost.pays) == ("plain", False)
    assert decide(PLAIN, {3: faster(1.4)}).recommended == 3


def test_tokens_of_a_round_share_its_time():
    def round_(accepted, seconds):
        return Round(0, [Token(1, "", "accepted")] * accepted, Token(1, "", "bonus"), 0.0, seconds, 0.0)

    run = Run(Settings(), {}, "", [1], rounds=[round_(3, 0.4), round_(0, 0.3)])
    found = latency([run])
    assert (found.median, found.p95, found.longest) == (median([0.1] * 4 + [0.3]), 0.3, 0.4)
