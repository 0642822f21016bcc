"""The lossless check in words: what was compared, what came out, and what a p-value says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from app.playground.race import TIE
from app.tokens.markup import chip, paragraph, plural, quoted, table
from core.explaining.lossless import Cell, GreedyCheck, LawCheck

SUSPICIOUS, WRONG = 0.01, 1e-4
"""p-values below which the page asks to look again, and says that the law is not the target's."""
SHOWN_CELLS = 12
Texts = Callable[[Sequence[int]], list[str]]


def law_html(found: LawCheck, texts: Texts, broken: bool) -> str:
    """The result of a sampling check. `texts` names tokens by their ids."""
    kind, title = _verdict(found, broken)
    return (
        f'<div class="result" data-kind="{kind}"><h3>{title}</h3>'
        + f'<div class="halves"><div>{paragraph(_p_in_words(found.p_value))}{paragraph(_how(found))}'
        + f"{paragraph(_caveats(found), 'note')}</div><div>{_cells(found, texts)}</div></div></div>"
    )


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


def _p_in_words(p: float) -> str:
    where = f"in {p:.0%} of such checks" if p >= 0.095 else f"in {p:.1%} of such checks"
    if p < 0.00095:
        where = f"once in {_round(1 / p)} such checks" if p > 1e-300 else "in practically no such check"
    return (
        f"If the law were equal, a deviation this large or larger would be seen <b>{where}</b> (p = {_figure(p)}). "
        "The smaller this number, the harder it is to believe that the law is equal; a large one is what an equal law "
        "gives, most of the time."
    )


def _round(value: float) -> str:
    if value >= 1e9:
        return f"10<sup>{math.floor(math.log10(value))}</sup>"
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


def _cells(found: LawCheck, texts: Texts) -> str:
    """Expected and observed counts of the likeliest kinds."""
    most = max(max(c.expected, c.observed) for c in found.cells)
    rows = []
    for cell in found.cells[:SHOWN_CELLS]:
        spread = (cell.observed - cell.expected) / math.sqrt(
            cell.expected * (1 - cell.expected / (found.n + 1e-9)) + 1e-9
        )
        bars = (
            f'<span class="count"><i style="width:{100 * cell.expected / most:.1f}%"></i>'
            f'<i class="seen" style="width:{100 * cell.observed / most:.1f}%"></i></span>'
        )
        rows.append([_kind(cell, texts), f"{cell.expected:.1f}", f"{cell.observed:,}", f"{spread:+.1f}", bars])
    left = len(found.cells) - SHOWN_CELLS
    more = paragraph(f"and {plural(left, 'rarer kind')}, all in the sum.", "note") if left > 0 else ""
    heads = ["continuation", "expected", "seen", "σ apart", "expected over seen"]
    return table(heads, rows, "cells", "Expected and seen") + more


def _kind(cell: Cell, texts: Texts) -> str:
    if not cell.ids:
        return '<span class="soft">all others</span>'
    names = "".join(chip(text) for text in texts(cell.ids))
    return names if len(cell.ids) == 2 else f'{names} <span class="soft nowrap">+ any other</span>'


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
        return '<div class="result" data-kind="open"><h3>Stopped before the first text was done.</h3></div>'
    kind, title = _greedy_verdict(found)
    rows = [
        [
            escape(quoted(prompts[number].strip())),
            f"{d.position + 1:,}",
            chip(d.first_text),
            chip(d.second_text),
            "–" if d.logit_gap is None else f"{d.logit_gap:.3g}",
        ]
        for number, d in found.divergences
    ]
    heads = ["text", "differs at token", "plain", "speculative", "logits apart"]
    told = (
        paragraph(
            "The last column is the distance between the target's two best logits at that token. Near zero the two "
            "passes rounded a tie differently: a pass over several tokens adds its numbers in another order than one "
            "over a single token. A wrong rule would part anywhere, at distances of any size."
        )
        if rows
        else paragraph("The same tokens came out with and without drafts, one by one.")
    )
    return (
        f'<div class="result" data-kind="{kind}"><h3>{title}</h3>'
        + (table(heads, rows, "cells", "First differences") if rows else "")
        + f"{told}</div>"
    )


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


def progress_html(text: str, done: int = 0, total: int = 0) -> str:
    share = f' max="{total}" value="{done}"' if total else ""
    bar = f'<progress aria-label="progress"{share}></progress>'
    return f'<div class="result" data-kind="running">{bar}<p role="status">{escape(text)}</p></div>'


def sentence_html(text: str, kind: str = "error") -> str:
    return f'<div class="result" data-kind="{kind}"><p role="status">{escape(text)}</p></div>'
