"""What it costs to check n tokens in one pass, in words."""

from __future__ import annotations

from collections.abc import Mapping

CURVE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64)
"""Each row up to 9 and around 12 and 16, where kernels that work on 4, 8 or 16 rows at a time take a step; then as
far as the rows of a batch."""
BATCH, DRAFT = 16, 3
"""The batch the reading speaks of: 16 texts at once, 3 drafted tokens each, make the curve's 64 rows."""


def describe_costs(seconds: Mapping[int, float]) -> str:
    """The verification cost curve in two to four sentences; `seconds` of a pass by its number of tokens, with 1."""
    ratio = {n: s / seconds[1] for n, s in sorted(seconds.items())}
    sentences = [_small(ratio), _step(ratio), _batch(ratio)]
    return " ".join(sentence for sentence in sentences if sentence)


def _small(ratio: Mapping[int, float]) -> str:
    """What a draft of ordinary length costs to check."""
    n = max(n for n in ratio if n <= 8)
    if n == 1:
        return "Only a pass over one token was measured."
    each = (ratio[n] - 1) / (n - 1)
    if ratio[n] < 1.25:
        verdict = "nearly free"
    elif ratio[n] < 2:
        verdict = "cheap"
    elif each < 0.5:
        verdict = f"each further token costs {each:.2f} of a pass, so acceptance has to pay for it"
    elif ratio[n] < 0.9 * n:
        verdict = f"dear: each further token costs {each:.2f} of a pass"
    else:
        verdict = "no cheaper than one after the other, so speculation cannot win"
    return f"Checking {n} tokens costs {ratio[n]:.1f}× one: {verdict}."


def _step(ratio: Mapping[int, float]) -> str | None:
    """The steepest step at the lengths people draft, where it stands out from the rest of the curve."""
    steps = {n: ratio[n] - ratio[n - 1] for n in ratio if 2 < n <= 9 and n - 1 in ratio}
    if not steps:
        return None
    at = max(steps, key=lambda n: steps[n])
    longest = max(ratio)
    typical = (ratio[longest] - 1) / (longest - 1)
    if steps[at] < 0.15 or steps[at] < 2.5 * typical:
        return None
    return f"It climbs in steps, the highest from {at - 1} to {at}: {ratio[at - 1]:.1f}× to {ratio[at]:.1f}×."


def _batch(ratio: Mapping[int, float]) -> str | None:
    """Why a server with many texts at once gains less: its passes are wide before anything is drafted."""
    rows = BATCH * (DRAFT + 1)
    if rows not in ratio or BATCH not in ratio:
        return None
    wider = ratio[rows] / ratio[BATCH]
    most = (DRAFT + 1) / wider
    left = "nothing is left to gain" if most < 1.1 else f"at most {most:.1f}× is left to gain"
    return (
        f"A pass over {rows} costs {ratio[rows]:.1f}× one: with {BATCH} texts at once and {DRAFT} drafted tokens each, "
        f"{wider:.1f}× the time of plain decoding for at most {DRAFT + 1}× the tokens, so {left}."
    )
