"""A round in six steps, with the run's own tokens, numbers and tensors. Run documents in, HTML out.

Steps 4 to 6 of a round: one draft accepted or rejected in numbers, what is written instead, and the roll back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from app.explain.one_pass import cache_bars, draft_step, mask_figure, of_trace, pass_step, rows_step, shapes, triangle
from app.tokens.markup import (
    HIDDEN,
    chip,
    milliseconds,
    named,
    paragraph,
    plural,
    probability,
    question,
    table,
    token_chip,
)
from core.drafting.methods import METHODS
from core.explaining import RoundTrace, drafted_by_model, trace_round
from core.loading.geometry import Geometry
from core.records import Round, Run, Token

CONTEXT, LINES = 160, 4
"""Characters and lines of text shown before the round, at most."""
EASY = 6
"""Drafts up to this long are easily followed."""


def interesting_round(run: Run) -> int:
    """The round that shows most: with something accepted and something rejected, else a rejection, else a draft."""

    def score(round_: Round) -> int:
        outcomes = {token.outcome for token in round_.drafted}
        short = len(round_.drafted) <= EASY
        return 8 * ("rejected" in outcomes) + 4 * ("accepted" in outcomes) + 2 * short + ("ignored" in outcomes)

    return max(range(len(run.rounds)), key=lambda index: (score(run.rounds[index]), -index))


def walk(run: Run, index: int) -> str:
    """The whole walk through round `index` (from 0). Raises UserError where there is no such round."""
    trace = trace_round(run, index)
    steps = (
        ("Draft", _guessed(run.rounds[index]), draft_step(run, trace)),
        ("One pass of the target", _read(run.rounds[index], trace), pass_step(run, trace)),
        ("A row of logits for each draft", _rows(run, trace), rows_step(run, trace)),
        ("Accept or reject", _judged(run.rounds[index]), accept_step(run, trace)),
        ("Correct, or a bonus", _written(run.rounds[index]), emit_step(run, trace)),
        ("Roll back", _forgotten(trace), roll_back_step(run, trace)),
    )
    body = "".join(
        f'<li class="step" id="step-{number}">{question(f"step-{number}", title, answer, content, 3)}</li>'
        for number, (title, answer, content) in enumerate(steps, 1)
    )
    return (
        f'<section class="round" data-round="{index}"><h2>Round {index + 1:,} of {len(run.rounds):,}</h2>'
        f"{paragraph(_in_a_sentence(run.rounds[index]), 'lead')}{_in_its_text(run, index)}"
        f'<div class="columns"><ol class="steps">{body}</ol>{_figures(run, trace)}</div></section>'
    )


# The answer of each step in one line


def _guessed(round_: Round) -> str:
    if not round_.drafted:
        return "Nothing was guessed."
    return f"{plural(len(round_.drafted), 'token')} guessed in {milliseconds(round_.draft_seconds)}."


def _read(round_: Round, trace: RoundTrace) -> str:
    return f"{plural(trace.fed, 'token')} read at once in {milliseconds(round_.verify_seconds)}."


def _rows(run: Run, trace: RoundTrace) -> str:
    width = _vocabulary(run, trace)
    scores = f" of {width:,} scores" if width else ""
    return f"{plural(trace.fed, 'row')}{scores}: each judges what comes after it."


def _judged(round_: Round) -> str:
    token = judged_token(round_)
    if token is None:
        return "There was nothing to judge."
    stand = sum(each.outcome == "accepted" for each in round_.drafted)
    refused = f"; {token_chip(token)} is refused" if token.outcome == "rejected" else ""
    guesses = plural(len(round_.drafted), "guess", "guesses")
    return f"{stand:,} of {guesses} {'stands' if stand == 1 else 'stand'}{refused}."


def _written(round_: Round) -> str:
    if round_.emitted is None:
        return "The text ended before."
    whence = {"bonus": "one more for free", "corrected": "in place of what was refused"}.get(round_.emitted.outcome)
    return f"{token_chip(round_.emitted)}{f', {whence}' if whence else ''}."


def _forgotten(trace: RoundTrace) -> str:
    gone = trace.target_cache.fullest - trace.target_cache.after
    entries = plural(gone, "entry", "entries")
    return (
        f"{entries} of the cache {'is' if gone == 1 else 'are'} forgotten." if gone else "Nothing has to be forgotten."
    )


def _in_a_sentence(round_: Round) -> str:
    k, n = len(round_.drafted), sum(t.outcome == "accepted" for t in round_.drafted)
    kept = plural(len(round_.kept), "token")
    if not k:
        return "Nothing was drafted in this round: one pass of the target, one token, as in plain decoding."
    guessed = f"{plural(k, 'token')} {'was' if k == 1 else 'were'} guessed and read by the target in one pass."
    if round_.emitted is None:
        return f"{guessed} The text ended inside the draft: {kept} for one pass."
    if round_.emitted.outcome == "bonus":
        taken = "It was kept" if k == n == 1 else "All were kept" if k == n else f"A path of {n} was kept"
        return f"{guessed} {taken}, and the pass gave one more for free: {kept} for one pass."
    taken = {0: "None was kept", 1: "One was kept"}.get(n, f"{n} were kept")
    return f"{guessed} {taken}, the next was refused and replaced: {kept} for one pass."


def _in_its_text(run: Run, index: int) -> str:
    """The round's tokens where they stand in the text."""
    round_ = run.rounds[index]
    before = run.prompt + "".join(t.text for r in run.rounds[:index] for t in r.kept)
    shown = "".join(before[-CONTEXT:].splitlines(keepends=True)[-LINES:])
    cut = "…" if len(before) > len(shown) else ""
    chips = "".join(token_chip(token) for token in (*round_.drafted, *([round_.emitted] if round_.emitted else [])))
    return f'<p class="text"><span class="soft">{cut}{escape(HIDDEN.sub(named, shown))}</span>{chips}</p>'


def _figures(run: Run, trace: RoundTrace) -> str:
    """The mask of this round, and what it is a part of."""
    geometry = Geometry.of((run.environment.get("target") or {}).get("geometry"))
    cached, fed = trace.target_cache.before, trace.fed
    total = cached + fed
    return (
        '<div class="figures"><h3>Who sees whom in this pass</h3>'
        f"{mask_figure(run, trace, geometry.window if geometry else 0)}"
        f'<div class="beside">{triangle(cached, fed)}<p>Textbook traces run without a cache: all {total:,} tokens go '
        f"through every layer, and attention is a triangle of {total:,} × {total:,}. With the cache only the lit rows "
        f"are computed, {fed:,} × {total:,}. They hold the same numbers, so the probabilities are the same."
        "</p></div></div>"
    )


def judged_token(round_: Round) -> Token | None:
    """The token whose test is worked through: the first that was refused, else the first that was tested."""
    judged = [token for token in round_.drafted if token.outcome in ("accepted", "rejected")]
    return next((token for token in judged if token.outcome == "rejected"), judged[0] if judged else None)


def accept_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    token = judged_token(round_)
    if token is None:
        return paragraph("There was no draft to judge.")
    return _greedy_test(run, trace, token) if run.settings.temperature == 0 else _sampled_test(run, trace, token)


def _vocabulary(run: Run, trace: RoundTrace) -> int | None:
    """The width of the rows that are compared."""
    found = of_trace(trace, "rows to judge by")
    return list(found[0][1] or ())[-1] if found else None


def _greedy_test(run: Run, trace: RoundTrace, token: Token) -> str:
    width = _vocabulary(run, trace)
    compared = shapes([("rows", (trace.fed, width)), ("likeliest tokens", (trace.fed,))]) if width else ""
    best = token.top_target or []
    likeliest = f"{chip(best[0].text)} with {probability(best[0].p)}" if best else "another token"
    own = next((c.p for c in best if c.id == token.id), None)
    if token.outcome == "accepted":
        outcome = f"The target's likeliest token there is {likeliest}, the same: <b>accepted</b>."
    else:
        given = f", to {chip(token.text)} it gives {probability(own)}" if own is not None else ""
        outcome = f"The target's likeliest token there is {likeliest}{given}: <b>rejected</b>."
    test = paragraph(
        "At temperature 0 the target's law puts everything on its likeliest token, so a draft stands exactly if it "
        f"is that token. Take {token_chip(token)}. {outcome}"
    )
    note = paragraph("Nothing is drawn. Above temperature 0 the test compares p and q, and chance has a say.", "note")
    return test + compared + note


def _sampled_test(run: Run, trace: RoundTrace, token: Token) -> str:
    round_, width = run.rounds[trace.index], _vocabulary(run, trace)
    k = len(round_.drafted)
    point_mass = not drafted_by_model(run, round_)
    q_of: list[tuple[str, Iterable[int] | None]] = [] if point_mass else [("q", (k, width or 0))]
    compared = shapes([("p", (k + 1, width)), *q_of, ("numbers drawn", (k + 1,))]) if width else ""
    p, q, u = (x if isinstance(x, (int, float)) else 0.0 for x in (token.p, token.q, token.draw))
    chance = min(1.0, p / q) if q else 0.0
    smaller = u * q < p
    tree = any(t.parent != (i - 1 if i else None) for i, t in enumerate(round_.drafted))
    later = tree and _tested_siblings(round_, token) > 0
    lines = [
        ("target's probability", "p", f"{p:.4f}", _bar("p", p)),
        ("draft's probability", "q", f"{q:.4f}", _bar("q", q)),
        ("chance of acceptance", "min(1, p/q)", f"min(1, {p:.4f} / {q:.4f}) = <b>{chance:.4f}</b>", ""),
        ("number drawn", "u", f"{u:.4f}", ""),
        (
            "accepted if",
            "u·q &lt; p",
            f"{u:.4f} · {q:.4f} = {u * q:.4f} {'&lt;' if smaller else '≥'} {p:.4f}: <b>{escape(token.outcome)}</b>",
            "",
        ),
    ]
    if later:
        lines = lines[:2]
    worked = "".join(
        f'<tr><th scope="row">{name}</th><td>{symbol}</td><td>{value}</td><td>{bar}</td></tr>'
        for name, symbol, value, bar in lines
    )
    siblings = (
        "A sibling was refused before it: what is left of the target's law, norm(max(0, p − q)), judged this one; p "
        "here is before that."
        if later
        else ""
    )
    origin = (
        "It was copied, with q = 1 for it and 0 for all others" if point_mass else "It was drawn from the draft's law q"
    )
    return (
        paragraph(
            f"Take {token_chip(token)}. {origin}, so it is kept with probability "
            "min(1, p/q): always where the target likes it at least as much, else as often as makes up for the draft's "
            f"excess. {siblings}"
        )
        + compared
        + f'<table class="worked"><tbody>{worked}</tbody></table>'
        + _all_tests(round_)
    )


def _bar(name: str, value: float) -> str:
    return f'<meter class="{name}" aria-label="{name}" min="0" max="1" value="{value:.4f}"></meter>'


def _tested_siblings(round_: Round, token: Token) -> int:
    at = next(i for i, t in enumerate(round_.drafted) if t is token)
    return sum(t.parent == token.parent and t.outcome == "rejected" for t in round_.drafted[:at])


def _all_tests(round_: Round) -> str:
    """Every draft of the round, judged or not."""
    rows = [[token_chip(t), _figure(t.p), _figure(t.q), _figure(t.draw), escape(t.outcome)] for t in round_.drafted]
    return (
        table(["draft", "p", "q", "u", "outcome"], rows, "tests", "All drafts of this round") if len(rows) > 1 else ""
    )


def _figure(value: Any) -> str:
    return probability(value) if isinstance(value, (int, float)) else "–"


def emit_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    emitted, ignored = round_.emitted, sum(t.outcome == "ignored" for t in round_.drafted)
    if emitted is None:
        return paragraph("The text ended inside the draft, so nothing follows it.")
    parts = []
    if emitted.outcome == "plain":
        parts.append(paragraph(f"The row's own token is written: {token_chip(emitted)}."))
    elif emitted.outcome == "bonus":
        parts.append(
            paragraph(
                "Everything on the path was accepted, so the row after it is a law that nobody has used yet. One token "
                f"{_drawn(run)} from it costs no further pass: {token_chip(emitted)}."
            )
        )
    else:
        parts += _corrected(run, round_, emitted)
    if ignored:
        what, they = ("One more draft was", "it was") if ignored == 1 else (f"{ignored} more drafts were", "they were")
        parts.append(paragraph(f"{what} never judged: ignored, which says nothing of how good {they}.", "note"))
    return "".join(parts)


def _drawn(run: Run) -> str:
    return "taken" if run.settings.temperature == 0 else "drawn"


def _corrected(run: Run, round_: Round, emitted: Token) -> Iterator[str]:
    refused = [t for t in round_.drafted if t.outcome == "rejected"]
    if run.settings.temperature == 0:
        yield paragraph(f"In place of the refused token comes the target's own: {token_chip(emitted)}.")
        return
    yield paragraph(
        "The replacement is not drawn from p: the draft already had its chance to say what q favours. It is drawn from "
        f"what p has over q, <code>norm(max(0, p − q))</code>, in the row that refused the draft, and came out as "
        f"{token_chip(emitted)}. Acceptance and replacement together give each token exactly the probability p."
    )
    if len(refused) == 1:
        yield _residual(run, round_, refused[0], emitted)


def _residual(run: Run, round_: Round, refused: Token, emitted: Token) -> str:
    """p, q and what is left, for the tokens of which both are known."""
    point_mass = not drafted_by_model(run, round_)
    p = {c.id: (c.text, c.p) for c in refused.top_target or []}
    p[refused.id] = (refused.text, refused.p or 0.0)
    if emitted.p is not None:
        p[emitted.id] = (emitted.text, emitted.p)
    q = {c.id: c.p for c in refused.top_draft or []}
    q[refused.id] = refused.q or 0.0
    most = min((c.p for c in refused.top_draft or []), default=1.0)
    rows = []
    for token_id, (text, p_of) in sorted(p.items(), key=lambda item: -item[1][1]):
        q_of = 0.0 if point_mass and token_id != refused.id else q.get(token_id)
        name = token_chip(refused) if token_id == refused.id else chip(text, "corrected" * (token_id == emitted.id))
        if q_of is None:
            rows.append([name, probability(p_of), f"≤ {most:.3f}", f"≥ {max(0.0, p_of - most):.3f}"])
        else:
            rows.append([name, probability(p_of), probability(q_of), f"<b>{max(0.0, p_of - q_of):.3f}</b>"])
    return table(["token", "p", "q", "max(0, p − q)"], rows, "tests", "What is left of the target's law")


def roll_back_step(run: Run, trace: RoundTrace) -> str:
    target, draft = trace.target_cache, trace.draft_cache
    dropped = target.fullest - target.after
    forgotten = f"{plural(dropped, 'entry', 'entries')} of drafts that do not stand {'is' if dropped == 1 else 'are'}"
    happened = f"{forgotten} forgotten" if dropped else "Everything that was fed still stands"
    parts = [
        paragraph(
            f"{happened}: the cache states its new length, {target.after:,}, and nothing is computed again. The newest "
            "token has not been fed yet; the next round begins with it."
        ),
        _kept_shapes(trace),
        '<div class="caches">',
        cache_bars(target.before, target.fullest, target.after, "Target's cache, in tokens"),
    ]
    if draft is not None:
        parts.append(cache_bars(draft.before, draft.fullest, draft.after, "Draft's cache, in tokens"))
    parts.append("</div>")
    parts.append(paragraph(_about_the_drafts_cache(run, trace), "note"))
    return "".join(parts)


def _kept_shapes(trace: RoundTrace) -> str:
    """A layer's keys before and after the roll back, in tokens that count."""
    keys = next((tensor.shape for tensor in trace.tensors if tensor.name == "keys"), None)
    if keys is None:
        return ""
    sizes = ((keys[0], keys[1], n, keys[3]) for n in (trace.target_cache.fullest, trace.target_cache.after))
    return shapes(zip(("keys of a layer", "those that still count"), sizes))


def _about_the_drafts_cache(run: Run, trace: RoundTrace) -> str:
    draft, method = trace.draft_cache, METHODS[run.settings.method]
    if draft is not None:
        behind = trace.target_cache.after - draft.after
        if method.tree:
            return "The draft's cache is cut back to the text before the round: its tree is fed anew where it stands."
        if behind > 0:
            return (
                f"The draft has not read its own last token, so it is {plural(behind, 'token')} short of the target's "
                "cache and will be fed them with the next round."
            )
        return "Both caches end at the same token."
    if method.network == "target":
        return "The first layers write into the target's own cache: there is no second one."
    if method.network == "head":
        return (
            "The head keeps a row of its own for every token but the first, made from the target's hidden states; the "
            "rows it made from its own guesses are dropped after the round."
        )
    if method.network is None:
        return "There is no draft model, so there is no second cache."
    if (run.environment.get("drafter") or {}).get("translated"):
        return "The draft reads the text in tokens of its own, so its cache has a length of its own."
    return "What the draft's cache held is not recorded in this run."
