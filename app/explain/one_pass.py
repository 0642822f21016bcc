"""The attention mask of a round, drawn: who may see whom, and which row of logits judges what.

Steps 1 to 3 of a round: the draft, the target's pass over it, and the rows of logits that come out.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from app.tokens.markup import chip, milliseconds, paragraph, plural, probability, quoted, shape, table, token_chip
from core.drafting.methods import METHODS, MTP
from core.explaining import RoundTrace, TracedTensor, drafted_by_model
from core.explaining.traffic import cost_table
from core.loading.geometry import Geometry
from core.records import Candidate, Round, Run, Token, depths

ROOM = 9
"""Columns that fit beside the text."""
SHOWN_COLUMNS = 5
"""How many of the cached tokens get a column of their own."""
MOST_ROWS = 40
"""Rows drawn at most; a tree may have more."""
MOST_SLOTS = 64
"""Of a cache, so many tokens are drawn at most."""


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
    """One cache before, during and after a round; only the end of a long one is drawn, and of a large draft the
    beginning."""
    start = max(0, before - 12)
    end = min(fullest, start + MOST_SLOTS)
    span = max(1, end - start)

    def bar(length: int, kind: str) -> str:
        cells = "".join(
            f'<i class="{"old" if at < before else "new" if at < after or kind != "after" else "gone"}"></i>'
            for at in range(start, min(length, end))
        )
        gone = '<i class="gone"></i>' * max(0, end - length) if kind == "after" else ""
        return f'<span class="slots" style="--span:{span}">{cells}{gone}</span>'

    before_it = "… " if start else ""
    rows = "".join(
        f"<tr><th scope='row'>{word}</th><td>{length:,}</td>"
        f"<td>{before_it}{bar(length, kind)}{' …' if length > end else ''}</td></tr>"
        for word, length, kind in (("before", before, "before"), ("fed", fullest, "fed"), ("after", after, "after"))
    )
    return f'<table class="cache"><caption>{what}</caption><tbody>{rows}</tbody></table>'


STAGES = {"in": "before the layers", "layer": "in every layer", "out": "after the layers"}


def draft_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    if not round_.drafted:
        return paragraph(_why_nothing(run, trace))
    k, levels = len(round_.drafted), 1 + max(depths(round_))
    time = milliseconds(round_.draft_seconds)
    parts = [paragraph(_who_drafted(run, round_, k, levels, time))]
    parts.append(
        f'<p class="chips">{" ".join(_guess(token, drafted_by_model(run, round_)) for token in round_.drafted)}</p>'
    )
    parts.append(_why_it_ended(round_))
    if drafted_by_model(run, round_):
        parts.append(_draft_shapes(run, trace, levels))
    return "".join(parts)


def _why_it_ended(round_: Round) -> str:
    """Of a draft that auto has ended; nothing of one that was as long as asked."""
    before = "That was decided before the token was drawn, from nothing that it turned out to be."
    if round_.refused is not None:
        return paragraph(
            f"It ended there because of the next token the drafter gave even the likeliest only "
            f"{probability(round_.refused)}: to draft and check another would have cost more than it brings. {before}"
        )
    if round_.ended == "odds":
        return paragraph(
            "It ended there because it was uncertain enough that all of these stand: another pass of the drafter would "
            f"have cost more than it brings. {before}"
        )
    return ""


def _why_nothing(run: Run, trace: RoundTrace) -> str:
    left = run.settings.max_new_tokens - sum(len(r.kept) for r in run.rounds[: trace.index])
    if run.settings.method == "plain":
        return "This run decoded plainly: no drafts. Choose another method in the sidebar to see speculation."
    if left <= 1:
        return "One token was left to write, and the target's own pass gives one: a draft could not have been used."
    if (refused := run.rounds[trace.index].refused) is not None:
        return (
            f"The drafter gave its likeliest first token {probability(refused)}: with so little, a guess would have "
            "cost more than it brings, so none was made. That was decided before the token was drawn."
        )
    if METHODS[run.settings.method].ngram:
        return "The last words had not occurred before, so there was nothing to copy. The round was a plain step."
    return "The draft length was 0: with the acceptance so far and the costs measured here, a plain step promised more."


def _who_drafted(run: Run, round_: Round, k: int, levels: int, time: str) -> str:
    method, tokens = METHODS[run.settings.method], plural(k, "token")
    if not drafted_by_model(run, round_):
        return (
            f"No model was asked: {tokens} had followed the same words earlier in the text. Looking that up took "
            f"{time}."
        )
    if method.network == "target":
        layers = (run.environment.get("drafter") or {}).get("exit_layer")
        total = run.environment["target"].get("layers")
        some = f"first {layers} of {total} layers" if layers else "first layers"
        return f"The target's own {some}, with its final norm and head, guessed {tokens} one by one, in {time}."
    if method.network == "head":
        head = run.environment.get("head") or {}
        layers = ", ".join(map(str, head.get("layers") or []))
        first = f"read what had entered the target's layers {layers} for the newest tokens" if layers else "read on"
        if head.get("kind") == MTP:
            return (
                f"The target's own MTP layer read what had left the last one for the newest tokens and guessed "
                f"{tokens} one by one, in {time}."
            )
        grown = f"as a tree, in {plural(levels, 'pass', 'passes')}" if method.tree else "one by one"
        return f"The trained head {first} and guessed {tokens} {grown}, in {time}."
    draft = run.environment.get("draft") or {}
    name = f"<b>{escape(str(draft.get('name', 'the draft model')))}</b>"
    passes = plural(levels, "pass", "passes")
    if method.tree:
        return f"{name} grew a tree of {tokens} in {passes}, one for each level, in {time}."
    grown = "one pass" if k == 1 else f"one after the other, {passes}"
    return f"{name} guessed {tokens}, {grown}, in {time}. It has to be right often, and much cheaper than the target."


def _guess(token: Token, by_model: bool | None) -> str:
    """A drafted token with what its drafter gave it; one that was copied was given nothing."""
    if not by_model:
        return chip(token.text)
    own = next((c.p for c in token.top_draft or [] if c.id == token.id), None)
    p = token.q if token.draw is not None or own is None else own
    return f'<span class="guess">{chip(token.text)}<small>{probability(p) if p is not None else ""}</small></span>'


def _draft_shapes(run: Run, trace: RoundTrace, levels: int) -> str:
    round_ = run.rounds[trace.index]
    model = run.environment.get("target" if METHODS[run.settings.method].network == "target" else "draft") or {}
    geometry = Geometry.of(model.get("geometry"))
    if geometry is None:
        return ""
    widths = [depths(round_).count(level) for level in range(levels)]
    fed = "1 token" if max(widths) == 1 else "the nodes so far"
    behind = trace.committed - trace.draft_cache.before if trace.draft_cache else 1
    first = f"at first {behind} tokens that it had not read, then {fed}" if behind > 1 else fed
    rows = (1, int(model.get("vocab_size") or geometry.vocabulary))
    return shapes([(f"{first} in", None), ("logits out", rows)]) + paragraph(
        "Each pass ends in the same sampler chain as the target's (temperature, top-k, top-p, min-p) and one draw. The "
        "number under a token is the draft's probability of it.",
        "note",
    )


def shapes(parts: Iterable[tuple[str, Iterable[int] | None]]) -> str:
    """A line of tensors in the order in which they are made."""
    found = [f"{name} <code>{shape(sizes)}</code>" if sizes is not None else name for name, sizes in parts]
    return f'<p class="shapes">{" → ".join(found)}</p>'


def of_trace(trace: RoundTrace, *names: str) -> list[tuple[str, Iterable[int] | None]]:
    sizes = {tensor.name: tensor.shape for tensor in trace.tensors}
    return [(name, sizes[name]) for name in names if name in sizes]


def pass_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    cached, fed = trace.target_cache.before, trace.fed
    geometry = Geometry.of((run.environment.get("target") or {}).get("geometry"))
    guesses = f" and {'the guess' if fed == 2 else f'the {fed - 1} guesses'}" if fed > 1 else ""
    parts = [
        paragraph(
            f"The target reads the newest token{guesses} at once: {plural(fed, 'row')} in, in "
            f"{milliseconds(round_.verify_seconds)}. The {plural(cached, 'token')} before them are in its cache: only "
            f"their keys and values are looked at. {_what_rows_cost(run, fed)}"
        ),
    ]
    if trace.tensors:
        parts.append(shapes(of_trace(trace, "token ids", "embedding", "queries", "scores", "attention", "logits")))
        parts.append(tensor_table(trace, geometry))
    else:
        parts.append(paragraph("The document of this run does not tell how its target is built.", "note"))
    return "".join(parts)


def _what_rows_cost(run: Run, fed: int) -> str:
    costs = cost_table(run, "target")
    if costs is None or fed == 1:
        return ""
    ratio = costs(fed) / costs(1)
    often = f"not {fed} times as fast, as is often said, but up to {fed / ratio:.1f} times, if all are right"
    if ratio >= fed:
        often = "no gain at all, however often the draft is right"
    return f"Measured here, a pass over {fed} tokens takes {ratio:.2f} times as long as over one: {often}."


def tensor_table(trace: RoundTrace, geometry: Geometry | None) -> str:
    """Every tensor of the pass, as it ran and without a cache."""
    rows: list[list[str]] = []
    stage = ""
    for real, whole in zip(trace.tensors, trace.uncached):
        if real.stage != stage:
            stage = real.stage
            count = f", {geometry.layers} times" if geometry and stage == "layer" else ""
            rows.append([f'<span class="stage">{STAGES[stage]}{count}</span>', "", "", ""])
        rows.append([_tensor_name(real), _tensor_shape(real), _tensor_shape(whole), escape(real.meaning)])
    fused = (
        " This target runs in a fused forward: no batch dimension, and several matrices multiplied as one."
        if geometry and geometry.runner.startswith(("native", "fused"))
        else ""
    )
    return (
        '<details class="tensors question" data-question="tensors"><summary>Every tensor of this pass, with its real '
        "shape</summary>"
        f"{table(['tensor', 'here, cached', 'without a cache', 'what it is'], rows, 'trace', 'Tensor trace')}"
        f'<p class="note">Dimensions in order: batch, heads, tokens fed, tokens seen or width.{fused} '
        "Shapes in brackets are never held whole: the kernel works through them piece by piece.</p></details>"
    )


def _tensor_name(tensor: TracedTensor) -> str:
    return f"{escape(tensor.name)} <small>{escape(tensor.dtype)}</small>"


def _tensor_shape(tensor: TracedTensor) -> str:
    text = shape(tensor.shape)
    return f"<code>{text}</code>" if tensor.stored else f'<code class="soft">[{text}]</code>'


def rows_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    target = run.environment.get("target") or {}
    vocabulary = int(target.get("vocab_size") or 0)
    each = f"{vocabulary:,} logits, one for every token there is" if vocabulary else "logits"
    if not round_.drafted:
        return paragraph(f"The pass gives one row of {each}: the law of the next token.")
    rows = []
    for row in trace.rows:
        after = "newest token" if row.after is None else chip(round_.drafted[row.after].text)
        judged = [round_.drafted[i] for i in row.judges]
        says = judged[0].top_target if judged else None
        if not judged and round_.emitted and row.row == last_row(round_):
            says = round_.emitted.top_target
        judges = " ".join(token_chip(t) for t in judged) or _role(round_, row.row)
        rows.append([str(row.row), after, _says(says), judges])
    made = shapes(of_trace(trace, "final norm", "logits", "rows to judge by")) if trace.tensors else ""
    first = trace.target_cache.before
    then = (
        "and the row of a drafted token judges all its continuations; a leaf's row judges nothing: a free one."
        if max(len(row.judges) for row in trace.rows) > 1
        else "the row of the first draft judges the second, and the row after the last judges nothing: the free one."
    )
    intro = paragraph(
        f"The pass gives one row of {each}, for every token it was fed. A row predicts what comes <em>after</em> "
        f"its token. So the row of the newest token judges the first draft, {then} Without a cache these would be the "
        f"rows {first:,} to {first + trace.fed - 1:,} of {first + trace.fed:,}, the others computed for nothing."
    )
    return (
        intro + made + table(["row", "stands after", "the target would say", "judges"], rows, "rows", "Rows of logits")
    )


def _role(round_: Round, row: int) -> str:
    if round_.emitted and round_.emitted.outcome == "bonus" and row == last_row(round_):
        return f"nothing: gives {token_chip(round_.emitted)}"
    return '<span class="soft">nothing: not used</span>'


def _says(candidates: list[Candidate] | None) -> str:
    if not candidates:
        return '<span class="soft">not recorded</span>'
    return " ".join(f'<span class="guess">{chip(c.text)}<small>{probability(c.p)}</small></span>' for c in candidates)
