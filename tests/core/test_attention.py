"""Attention split over its keys is attention; how it is split is chosen by what was measured."""

import pytest
import torch

from core.runners.attention import attend, choose_parts, describe_parts, parts_for, time_attention
from core.runners.widths import LONGEST, ROOM, WIDTHS, capacity_for, reach_for, reaches_up_to, width_for
from core.sampling import MOST_DRAFTED

CPU = torch.device("cpu")


@pytest.mark.parametrize("parts", [1, 4, 16])
@pytest.mark.parametrize("seen", [1, 100, 511, 512])
def test_parts_are_weighed_to_the_whole(parts, seen):
    """Also where whole parts are masked: they weigh nothing."""
    torch.manual_seed(seen)
    queries, keys, values = torch.randn(1, 2, 6, 16), *torch.randn(2, 1, 2, 512, 16)
    mask = torch.zeros(1, 1, 6, 512).masked_fill_(torch.arange(512) >= seen, torch.finfo(torch.float32).min)
    law = (queries @ keys.transpose(2, 3) * 0.3 + mask).softmax(-1)
    torch.testing.assert_close(attend(queries, keys, values, mask, 0.3, parts), law @ values, rtol=1e-5, atol=1e-5)


def test_a_split_must_be_clearly_faster():
    seconds = {(2048, 1): 10, (2048, 4): 9.5, (8192, 1): 30, (8192, 4): 12, (8192, 8): 10, (8192, 16): 11}

    def timed(reach, parts):
        if (reach, parts) == (2048, 8):
            raise RuntimeError("no kernel")
        return seconds[reach, parts]

    chosen = choose_parts(timed, 10_000)
    assert chosen == {2048: (1, 1.0), 8192: (8, 3.0)}
    assert [parts_for(chosen, reach) for reach in (256, 2048, 6144, 8192, 10240, 8200)] == [1, 1, 1, 8, 8, 1]
    assert (
        describe_parts(chosen)
        == "Attention is split over its keys, as measured here: over 8,192 positions in 8 (3.0x)."
    )
    assert describe_parts({2048: (1, 1.0)}) is None and choose_parts(timed, 1000) == {}


def test_what_is_timed_is_checked_first():
    timed = time_attention(2, 3, 16, torch.float32, CPU)
    assert timed(2048, 1) > 0 and timed(2048, 4) > 0


def test_widths_and_reaches_are_few_and_waste_little():
    for length in range(1, 40_000, 7):
        reach = reach_for(length)
        assert length <= reach <= max(1024, 2 * length) and reach_for(reach) == reach
        assert length <= 4096 or reach <= 1.25 * length + 1
        assert capacity_for(length) == reach + ROOM
    assert reaches_up_to(8192) == len({reach_for(length) for length in range(1, 8193)}) == 11
    assert all(width_for(n) == n for n in WIDTHS) and width_for(7) == 8 and width_for(LONGEST + 1) == LONGEST + 1
    assert max(MOST_DRAFTED, 2 * LONGEST) <= ROOM
    assert capacity_for(8190, 8192) == 8192 + ROOM and capacity_for(9000, 8192) == 9000 + ROOM
