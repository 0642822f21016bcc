"""The attention mask of a round, drawn: who may see whom, and which row of logits judges what."""

from __future__ import annotations

from html import escape

from app.markup import chip, plural, quoted
from core.explaining.trace import RoundTrace
from core.metrics import depths
from core.records import Round, Run

ROOM = 9
"""Columns that fit beside the text."""
SHOWN_COLUMNS = 5
"""How many of the cached tokens get a column of their own."""
MOST_ROWS = 40
"""Rows drawn at most; a tree may have more."""


def mask_figure(run: Run, trace: RoundTrace, window: int = 0) -> str:
    """The grid of this round: one row for each token fed, a column for each token seen."""
    round_ = run.rounds[trace.index]
    cached = trace.target_cache.before
    known = _newest_texts(run, trace.index)
    own = max(0, min(SHOWN_COLUMNS, len(known) - 1, cached, ROOM - trace.fed))
    hidden = cached - own
    fed = [known[-1] if known else None, *(token.text for token in round_.drafted)]
    columns = [_column(text, "cached") for text in known[len(known) - 1 - own : len(known) - 1]]
    columns += [_column(text, "fed") for text in fed[: MOST_ROWS + 1]]
    more = f'<th scope="col" class="more"><span>{plural(hidden, "more column")}</span></th>' if hidden else ""
    narrow = " narrow" if trace.fed > 7 else ""
    rows = []
    for row in trace.rows[:MOST_ROWS]:
        seen = set(row.visible)
        cells = f'<td class="more on"><span class="hear">sees all {hidden}</span></td>' if hidden else ""
        cells += '<td class="on"><span class="hear">sees</span></td>' * own
        cells += "".join(_cell(column in seen, column == row.row) for column in range(min(len(fed), MOST_ROWS + 1)))
        name = _named(fed[row.row], "newest" if row.after is None else f"draft {row.after + 1}")
        judged = _judged(run, trace, row.row)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}<td class="judges">{judged}</td></tr>')
    left_out = len(trace.rows) - MOST_ROWS
    note = f"<p>{plural(left_out, 'more row')} of the tree not drawn.</p>" if left_out > 0 else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Attention mask of this round">'
        f'<table class="mask{narrow}"><thead><tr><td></td>{more}{"".join(columns)}'
        '<th scope="col" class="judges">judges</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}{_reading(run, trace, hidden, window)}"
    )


def _newest_texts(run: Run, index: int) -> list[str | None]:
    """Texts of the newest committed tokens before a round, the newest last; None for the prompt's last token, whose
    text a run document does not hold."""
    found: list[str | None] = []
    for round_ in reversed(run.rounds[:index]):
        found = [*(token.text for token in round_.kept), *found]
        if len(found) > SHOWN_COLUMNS:
            break
    return found if len(found) > SHOWN_COLUMNS else [None, *found]


def _column(text: str | None, kind: str) -> str:
    shown = "end of prompt" if text is None else quoted(text)
    return f'<th scope="col" class="{kind}"><span>{escape(shown)}</span></th>'


def _named(text: str | None, place: str) -> str:
    shown = '<span class="soft">end of prompt</span>' if text is None else chip(text)
    return f"{shown} <small>{place}</small>"


def _cell(sees: bool, itself: bool) -> str:
    if not sees:
        return '<td class="off"><span class="hear">hidden</span></td>'
    return f'<td class="on{" self" if itself else ""}"><span class="hear">sees</span></td>'


def _judged(run: Run, trace: RoundTrace, row: int) -> str:
    round_ = run.rounds[trace.index]
    judged = trace.rows[row].judges
    if judged:
        tokens = [round_.drafted[i] for i in judged[:3]]
        more = f" +{len(judged) - 3}" if len(judged) > 3 else ""
        return " ".join(chip(token.text, token.outcome) for token in tokens) + more
    if round_.emitted and round_.emitted.outcome in ("bonus", "plain") and row == last_row(round_):
        return f"nothing: gives {chip(round_.emitted.text, round_.emitted.outcome)}"
    return '<span class="soft">nothing</span>'


def last_row(round_: Round) -> int:
    """The row after the last accepted draft: the emitted token comes from it."""
    return max((i + 1 for i, token in enumerate(round_.drafted) if token.outcome == "accepted"), default=0)


def _reading(run: Run, trace: RoundTrace, hidden: int, window: int) -> str:
    """What the picture leaves out, and what it does not say by itself."""
    parts = []
    if hidden:
        parts.append(f"{plural(hidden, 'more column')} to the left, cached and all visible, drawn as one.")
    if window:
        parts.append(f"Layers with a sliding window see only the last {window:,} positions.")
    tree = len(set(depths(run.rounds[trace.index]))) < trace.fed - 1
    parts.append(
        "A drafted token sees its own ancestors and none of its siblings, as if each branch were alone."
        if tree
        else "A drafted token sees those before it and none after it: each row answers as if the text ended there."
    )
    return f'<p class="note">{" ".join(parts)}</p>'


def triangle(cached: int, fed: int) -> str:
    """The whole text against itself, to scale: what a pass without a cache computes, and the rows this one did."""
    total = cached + fed
    side = 132
    top = side * cached / total
    lit = f"0,{top:.1f} {top:.1f},{top:.1f} {side},{side} 0,{side}"
    return (
        f'<svg class="triangle" viewBox="-1 -1 {side + 2} {side + 2}" role="img" aria-label="Of {total:,} rows a pass '
        f'without a cache computes, this pass computed the last {fed:,}">'
        f'<polygon class="all" points="0,0 {side},{side} 0,{side}"/><polygon class="lit" points="{lit}"/>'
        f'<rect class="edge" x="0" y="0" width="{side}" height="{side}"/></svg>'
    )


def cache_bars(before: int, fullest: int, after: int, what: str) -> str:
    """One cache before, during and after a round; only the end of a long one is drawn."""
    start = max(0, before - 12)
    span = max(1, fullest - start)

    def bar(length: int, kind: str) -> str:
        cells = "".join(
            f'<i class="{"old" if at < before else "new" if at < after or kind != "after" else "gone"}"></i>'
            for at in range(start, length)
        )
        gone = "".join('<i class="gone"></i>' for _ in range(length, fullest)) if kind == "after" else ""
        return f'<span class="slots" style="--span:{span}">{cells}{gone}</span>'

    rows = "".join(
        f"<tr><th scope='row'>{word}</th><td>{length:,}</td><td>{'… ' if start else ''}{bar(length, kind)}</td></tr>"
        for word, length, kind in (("before", before, "before"), ("fed", fullest, "fed"), ("after", after, "after"))
    )
    return f'<table class="cache"><caption>{what}</caption><tbody>{rows}</tbody></table>'
