"""The attention mask of a round, drawn: who may see whom, and which row of logits judges what.

Steps 1 to 3 of a round: the draft, the target's pass over it, and the rows of logits that come out.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.explain.html import html
from app.tokens.markup import milliseconds, plural, probability
from core.drafting.methods import METHODS, MTP
from core.explaining import RoundTrace, drafted_by_model
from core.explaining.traffic import cost_table
from core.loading.geometry import Geometry
from core.records import Round, Run, Token, depths

Tensors = list[tuple[str, Iterable[int] | None]]
"""Names and shapes, in the order in which they are made; without a shape, a name alone."""
ROOM = 13
"""Columns that fit beside the text; three characters of the names before and behind them take the room of one."""
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
    judged = [token.text for token in round_.drafted]
    fed = [known[-1] if known else None, *judged]
    names = sum(max((len(text or "") for text in texts), default=0) for texts in (fed, judged))
    own = max(0, min(SHOWN_COLUMNS, len(known) - 1, cached, ROOM - trace.fed - names // 3))
    hidden = cached - own
    columns = [(text, "cached") for text in known[len(known) - 1 - own : len(known) - 1]]
    columns += [(text, "fed") for text in fed[: MOST_ROWS + 1]]
    return html.mask(
        rows=[(row, set(row.visible), *_judged(round_, trace, row.row)) for row in trace.rows[:MOST_ROWS]],
        columns=columns,
        fed=fed,
        hidden=hidden,
        own=own,
        drawn=min(len(fed), MOST_ROWS + 1),
        left_out=len(trace.rows) - MOST_ROWS,
        reading=_reading(run, trace, hidden, window),
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


def _judged(round_: Round, trace: RoundTrace, row: int) -> tuple[list[Token], Token | None]:
    """The drafts that a row judges, and the token that one which judges nothing gives for free."""
    gives = round_.emitted if round_.emitted and round_.emitted.outcome in ("bonus", "plain") else None
    return [round_.drafted[i] for i in trace.rows[row].judges], gives if row == last_row(round_) else None


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
    return " ".join(parts)


def triangle(cached: int, fed: int) -> str:
    """The whole text against itself, to scale: what a pass without a cache computes, and the rows this one did."""
    side, total = 132, cached + fed
    return html.triangle(side, f"{side * cached / total:.1f}", fed, total)


def cache_bars(before: int, fullest: int, after: int, what: str) -> str:
    """One cache before, during and after a round; only the end of a long one is drawn, and of a large draft the
    beginning."""
    start = max(0, before - 12)
    end = min(fullest, start + MOST_SLOTS)

    def slots(length: int, gone: bool = False) -> list[str]:
        kinds = [
            "old" if at < before else "new" if at < after or not gone else "gone"
            for at in range(start, min(length, end))
        ]
        return kinds + ["gone"] * max(0, end - length) if gone else kinds

    rows = [
        ("before", before, slots(before), before > end),
        ("fed", fullest, slots(fullest), fullest > end),
        ("after", after, slots(after, gone=True), after > end),
    ]
    return html.cache(what, rows, max(1, end - start), start > 0)


STAGES = {"in": "before the layers", "layer": "in every layer", "out": "after the layers"}


def draft_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    if not round_.drafted:
        return html.p(_why_nothing(run, trace))
    k, levels = len(round_.drafted), 1 + max(depths(round_))
    by_model = drafted_by_model(run, round_)
    name, who = _who_drafted(run, round_, k, levels, milliseconds(round_.draft_seconds))
    guesses = [(token.text, _given(token), by_model) for token in round_.drafted]
    made = _draft_shapes(run, trace, levels) if by_model else []
    return html.draft(name, who, guesses, _why_it_ended(round_), made)


def _why_it_ended(round_: Round) -> str:
    """Of a draft that auto has ended; nothing of one that was as long as asked."""
    before = "That was decided before the next token was drawn, not after looking at it."
    if round_.refused is not None:
        return (
            "The draft ended there: the drafter gave even its likeliest next token only "
            f"{probability(round_.refused)}, so to draft and check it would have cost more than it brings. {before}"
        )
    if round_.ended == "odds":
        return (
            "The draft ended there: it was too uncertain that all of these stand, so another pass of the drafter would "
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
    method, auto = METHODS[run.settings.method], run.settings.draft_length == "auto"
    if method.ngram and not method.network:
        why = (
            "or what followed them then was too unlikely to be worth checking"
            if auto
            else "so there was nothing to copy"
        )
        return f"The last words had not occurred before, {why}. The round was a plain step."
    return "The draft length was 0: with the acceptance so far and the costs measured here, a plain step promised more."


def _who_drafted(run: Run, round_: Round, k: int, levels: int, time: str) -> tuple[str, str]:
    """The name of the draft model, if one drafted, and how a sentence with it, or without, goes on."""
    method, tokens = METHODS[run.settings.method], plural(k, "token")
    if not drafted_by_model(run, round_):
        return "", (
            f"No model was asked: {tokens} had followed the same words earlier in the text. Looking that up took "
            f"{time}."
        )
    if method.network == "target":
        layers = (run.environment.get("drafter") or {}).get("exit_layer")
        total = run.environment["target"].get("layers")
        some = f"first {layers} of {total} layers" if layers else "first layers"
        return "", f"The target's own {some}, with its final norm and head, guessed {tokens} one by one, in {time}."
    if method.network == "head":
        head = run.environment.get("head") or {}
        layers = ", ".join(map(str, head.get("layers") or []))
        first = f"read what had entered the target's layers {layers} for the newest tokens" if layers else "read on"
        if head.get("kind") == MTP:
            return "", (
                f"The target's own MTP layer read what had left the last one for the newest tokens and guessed "
                f"{tokens} one by one, in {time}."
            )
        grown = f"as a tree, in {plural(levels, 'pass', 'passes')}" if method.tree else "one by one"
        return "", f"The trained head {first} and guessed {tokens} {grown}, in {time}."
    name = str((run.environment.get("draft") or {}).get("name", "the draft model"))
    passes = plural(levels, "pass", "passes")
    if method.tree:
        return name, f"grew a tree of {tokens} in {passes}, one for each level, in {time}."
    grown = "one pass" if k == 1 else f"one after the other, {passes}"
    return name, f"guessed {tokens}, {grown}, in {time}. It has to be right often, and much cheaper than the target."


def _given(token: Token) -> float | None:
    """What a drafted token's drafter gave it."""
    own = next((c.p for c in token.top_draft or [] if c.id == token.id), None)
    return token.q if token.draw is not None or own is None else own


def _draft_shapes(run: Run, trace: RoundTrace, levels: int) -> Tensors:
    round_ = run.rounds[trace.index]
    model = run.environment.get("target" if METHODS[run.settings.method].network == "target" else "draft") or {}
    geometry = Geometry.of(model.get("geometry"))
    if geometry is None:
        return []
    widths = [depths(round_).count(level) for level in range(levels)]
    fed = "1 token" if max(widths) == 1 else "the nodes so far"
    behind = trace.committed - trace.draft_cache.before if trace.draft_cache else 1
    first = f"at first {behind} tokens that it had not read, then {fed}" if behind > 1 else fed
    rows = (1, int(model.get("vocab_size") or geometry.vocabulary))
    return [(f"{first} in", None), ("logits out", rows)]


def of_trace(trace: RoundTrace, *names: str) -> Tensors:
    sizes = {tensor.name: tensor.shape for tensor in trace.tensors}
    return [(name, sizes[name]) for name in names if name in sizes]


def pass_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    cached, fed = trace.target_cache.before, trace.fed
    geometry = Geometry.of((run.environment.get("target") or {}).get("geometry"))
    guesses = f" and {'the guess' if fed == 2 else f'the {fed - 1} guesses'}" if fed > 1 else ""
    about = (
        f"The target reads the newest token{guesses} at once: {plural(fed, 'row')} in, in "
        f"{milliseconds(round_.verify_seconds)}. The {plural(cached, 'token')} before them are in its cache: only "
        f"their keys and values are looked at. {_what_rows_cost(run, fed)}"
    )
    if not trace.tensors:
        return html.p(about) + html.p("The document of this run does not tell how its target is built.", "note")
    made = of_trace(trace, "token ids", "embedding", "queries", "scores", "attention", "logits")
    return html.p(about) + html.shapes(made) + tensor_table(trace, geometry)


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
            rows.append([html.stage(STAGES[stage] + count), "", "", ""])
        rows.append([html.tensor_name(real), html.tensor_shape(real), html.tensor_shape(whole), real.meaning])
    fused = (
        " This target runs in a fused forward: no batch dimension, and several matrices multiplied as one."
        if geometry and geometry.runner.startswith(("native", "fused"))
        else ""
    )
    return html.tensors(rows, fused)


def rows_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    target = run.environment.get("target") or {}
    vocabulary = int(target.get("vocab_size") or 0)
    each = f"{vocabulary:,} logits, one for every token there is" if vocabulary else "logits"
    if not round_.drafted:
        return html.p(f"The pass gives one row of {each}: the law of the next token.")
    rows = []
    for row in trace.rows:
        after = "newest token" if row.after is None else html.chip(round_.drafted[row.after].text)
        judged = [round_.drafted[i] for i in row.judges]
        emitted = round_.emitted if row.row == last_row(round_) else None
        says = judged[0].top_target if judged else emitted and emitted.top_target
        gives = emitted if emitted and emitted.outcome == "bonus" else None
        rows.append([row.row, after, html.says(says), html.role(judged, gives)])
    made = html.shapes(of_trace(trace, "final norm", "logits", "rows to judge by")) if trace.tensors else ""
    first = trace.target_cache.before
    then = (
        "and the row of a drafted token judges all its continuations; a leaf's row judges nothing and may give a bonus."
        if max(len(row.judges) for row in trace.rows) > 1
        else "the row of the first draft judges the second, and the row of the last judges nothing: it is for a bonus."
    )
    return html.logits(each, then, first, trace.fed, made, rows)
