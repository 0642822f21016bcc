"""Over how many rows passes run on a static cache, how much of it they read and how large it is: the one place that
decides.

A captured pass is good for one number of texts, of rows of each and one reach, so all come from small fixed sets: a
pass is padded up to the next, its surplus rows see what nobody reads and are seen by nobody, and are thrown away.
"""

from __future__ import annotations

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 17, 24, 32, 48, 66)
"""Each row as long as 4 bits cost by the row (bitsandbytes' fused kernel is for 1 … 5 on large GPUs); from there on
kernels work on 8 or 16 rows at once. 17 is the longest automatic draft and the newest token, 66 the largest tree with
two tokens of text."""
LONGEST = WIDTHS[-1]
ROUND = 17
"""Passes up to this width are captured whatever is asked of them: rounds and what a draft model catches up on."""
TEXTS = (1, 2, 4, 8, 16)
"""Over how many texts passes are, where several share one: over more, a multiple of the last."""
MOST_ROWS = TEXTS[-1] * ROUND
"""Passes over the rows of several texts are captured up to so many."""
SHORTEST_REACH = 256
ROOM = 256
"""Rows of a cache past the text it was made for: the longest draft (`core.sampling.MOST_DRAFTED`), or the widest pass
three times, so that neither makes a cache grow at the very end of a context."""

USUAL = 4096
"""Tokens that a runner kept for later may have room for; one that grew beyond gives its memory back."""


def width_for(rows: int) -> int:
    """The width of a pass over so many rows; their own number where there is none so wide."""
    return next((width for width in WIDTHS if width >= rows), rows)


def texts_for(slots: int) -> int:
    """Over how many texts a pass is that takes those of so many slots."""
    return next((texts for texts in TEXTS if texts >= slots), -(-slots // TEXTS[-1]) * TEXTS[-1])


def reach_for(length: int) -> int:
    """How many positions of a cache a pass reads that ends at `length` tokens: a power of two, beyond 1,024 a half and
    beyond 4,096 a quarter of the way to the next, so that few passes are captured and none reads much in vain."""
    top = max(SHORTEST_REACH, 1 << (length - 1).bit_length())
    grain = top if top <= 1024 else top // 4 if top <= 4096 else top // 8
    return -(-length // grain) * grain


def reaches_up_to(length: int) -> int:
    """How many reaches texts up to `length` tokens meet."""
    count, reach = 0, 0
    while reach < length:
        reach = reach_for(reach + 1)
        count += 1
    return count


def capacity_for(length: int, limit: int | None = None) -> int:
    """Rows of a cache for texts of `length` tokens, of a model whose context is `limit`."""
    whole = reach_for(length) if limit is None else min(reach_for(length), max(length, limit))
    return whole + ROOM
