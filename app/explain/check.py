"""The lossless check in words: what was compared, what came out, and what a p-value says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from app.explain.html import html
from app.playground.race import TIE
from app.tokens.markup import plural, quoted
from core.explaining.lossless import GreedyCheck, LawCheck

SUSPICIOUS, WRONG = 0.01, 1e-4
"""p-values below which the page asks to look again, and says that the law is not the target's."""
SHOWN_CELLS = 12
Texts = Callable[[Sequence[int]], list[str]]


def law_html(found: LawCheck, texts: Texts, broken: bool) -> str:
    """The result of a sampling check. `texts` names tokens by their ids."""
    kind, title = _verdict(found, broken)
    p, left = found.p_value, len(found.cells) - SHOWN_CELLS
    return html.law(kind, title, _often(p), _figure(p), _how(found), _caveats(found), _cells(found, texts), left)


def _verdict(found: LawCheck, broken: bool) -> tuple[str, str]:
    if len(found.cells) < 2:
        return "open", "Nothing to tell apart: at this place the target always says the same."
    if not found.drafted:
        return "open", "No draft was proposed at this place, so only plain steps were checked."
    if found.p_value < WRONG:
        expected = ", as it must with the rule broken" if broken else ""
        return ("fine" if broken else "wrong"), f"The check fails{expected}: this is not the target's law."
    if found.p_value < SUSPICIOUS:
        return "open", "Unusual. By chance this happens now and then; another seed will tell."
    missed = " The broken rule was not noticed: here the draft's law is too close to the target's."
    if broken:
        return "open", f"No difference from the target's own law was found.{missed}"
    count = plural(found.n, "continuation")
    return "fine", f"No sign of a wrong rule: {count} show no difference from the target's own law."


def _often(p: float) -> str:
    if p <= 1e-300:
        return "in practically no such check"
    if p < 0.00095:
        return html.once(_round(1 / p))
    return f"in {p:.0%} of such checks" if p >= 0.095 else f"in {p:.1%} of such checks"


def _round(value: float) -> str:
    if value >= 1e9:
        return html.power(math.floor(math.log10(value)))
    digits = 10 ** (len(str(int(value))) - 1)
    return f"{int(value) // digits * digits:,}"


def _figure(p: float) -> str:
    return f"{p:.2f}" if p >= 0.01 else f"{p:.1g}" if p > 1e-300 else "0, to all digits"


def _how(found: LawCheck) -> str:
    return (
        f"{plural(found.n, 'continuation')} of two tokens each, after the first {found.context:,} tokens of the text, "
        f"where the target is least sure of the next. {found.drafted:,} tokens were drafted for them and "
        f"{found.rejected:,} rejected, by the real loop, with drafts of every length up to the run's. They fall into "
        f"{plural(len(found.cells), 'kind')}, whose probabilities the target itself gives exactly; G = {found.g:.1f} "
        f"with {plural(found.freedom, 'degree')} of freedom."
    )


def _cells(found: LawCheck, texts: Texts) -> list[list[str]]:
    """Expected and observed counts of the likeliest kinds."""
    most = max(max(c.expected, c.observed) for c in found.cells)
    rows = []
    for cell in found.cells[:SHOWN_CELLS]:
        spread = (cell.observed - cell.expected) / math.sqrt(
            cell.expected * (1 - cell.expected / (found.n + 1e-9)) + 1e-9
        )
        kind = html.continuation(texts(cell.ids) if cell.ids else [], len(cell.ids) == 2)
        bars = html.counts(100 * cell.expected / most, 100 * cell.observed / most)
        rows.append([kind, f"{cell.expected:.1f}", f"{cell.observed:,}", f"{spread:+.1f}", bars])
    return rows


def _caveats(found: LawCheck) -> str:
    excluded = (
        f" {plural(found.excluded, 'continuation')} held a token that the sampler's cut excludes in a pass over one "
        "token: near the cut, passes over several tokens may round to the other side."
        if found.excluded
        else ""
    )
    return (
        "Continuations that are expected fewer than five times are counted together. No check can prove a law equal; "
        f"this one can show it different.{excluded}"
    )


def greedy_html(found: GreedyCheck, prompts: Sequence[str]) -> str:
    """The result of a greedy check."""
    if not found.texts:
        return html.greedy("open", "Stopped before the first text was done.", [], "")
    kind, title = _greedy_verdict(found)
    rows = [
        [
            quoted(prompts[number].strip()),
            f"{d.position + 1:,}",
            html.chip(d.first_text),
            html.chip(d.second_text),
            "–" if d.logit_gap is None else f"{d.logit_gap:.3g}",
        ]
        for number, d in found.divergences
    ]
    told = (
        "The last column is the distance between the target's two best logits at that token. Near zero the two passes "
        "rounded a tie differently: a pass over several tokens adds its numbers in another order than one over a "
        "single token. A wrong rule would part anywhere, at distances of any size."
        if rows
        else "The same tokens came out with and without drafts, one by one."
    )
    return html.greedy(kind, title, rows, told)


def _greedy_verdict(found: GreedyCheck) -> tuple[str, str]:
    """One sentence to be quoted: whether all texts agree, but for ties that rounding decides."""
    count = f"{found.texts:,} of {plural(found.texts, 'text')}"
    if found.identical == found.texts:
        return (
            "fine",
            f"No sign of a wrong rule: {count} agree token for token, {plural(found.tokens, 'token')} in all.",
        )
    ties = sum(parted.logit_gap is not None and parted.logit_gap <= TIE for _, parted in found.divergences)
    if found.identical + ties == found.texts:
        return "fine", f"No sign of a wrong rule: {count} agree up to ties."
    other = found.texts - found.identical - ties
    where = f"{other:,} of {plural(found.texts, 'text')} {'parts' if other == 1 else 'part'}"
    return "open", f"Look again: rounding alone may not explain where {where}."
