"""A round in six steps, with the run's own tokens, numbers and tensors. Run documents in, HTML out.

Steps 4 to 6 of a round: one draft accepted or rejected in numbers, what is written instead, and the roll back.
"""

from __future__ import annotations

from typing import Any

from app.explain.html import html
from app.explain.one_pass import Tensors, cache_bars, draft_step, mask_figure, of_trace, pass_step, rows_step, triangle
from app.tokens.markup import HIDDEN, milliseconds, named, plural, probability
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
    round_ = run.rounds[index]
    geometry = Geometry.of((run.environment.get("target") or {}).get("geometry"))
    cached, fed = trace.target_cache.before, trace.fed
    before = run.prompt + "".join(t.text for r in run.rounds[:index] for t in r.kept)
    shown = "".join(before[-CONTEXT:].splitlines(keepends=True)[-LINES:])
    return html.walk(
        index,
        len(run.rounds),
        _in_a_sentence(round_),
        cut=len(before) > len(shown),
        before=HIDDEN.sub(named, shown),
        tokens=[*round_.drafted, *([round_.emitted] if round_.emitted else [])],
        steps=steps,
        mask=mask_figure(run, trace, geometry.window if geometry else 0),
        triangle=triangle(cached, fed),
        fed=fed,
        total=cached + fed,
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
    return html.judged(stand, len(round_.drafted), token if token.outcome == "rejected" else None)


def _written(round_: Round) -> str:
    if round_.emitted is None:
        return "The text ended before."
    whence = {"bonus": "one more for free", "corrected": "in place of what was refused"}.get(round_.emitted.outcome)
    return html.written(round_.emitted, whence)


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


def judged_token(round_: Round) -> Token | None:
    """The token whose test is worked through: the first that was refused, else the first that was tested."""
    judged = [token for token in round_.drafted if token.outcome in ("accepted", "rejected")]
    return next((token for token in judged if token.outcome == "rejected"), judged[0] if judged else None)


def accept_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    token = judged_token(round_)
    if token is None:
        return html.p("There was no draft to judge.")
    return _greedy_test(run, trace, token) if run.settings.temperature == 0 else _sampled_test(run, trace, token)


def _vocabulary(run: Run, trace: RoundTrace) -> int | None:
    """The width of the rows that are compared."""
    found = of_trace(trace, "rows to judge by")
    return list(found[0][1] or ())[-1] if found else None


def _greedy_test(run: Run, trace: RoundTrace, token: Token) -> str:
    width = _vocabulary(run, trace)
    made = html.shapes([("rows", (trace.fed, width)), ("likeliest tokens", (trace.fed,))]) if width else ""
    best = token.top_target or []
    own = next((c.p for c in best if c.id == token.id), None)
    return html.greedy_test(token, best[0] if best else None, own, made)


def _sampled_test(run: Run, trace: RoundTrace, token: Token) -> str:
    round_, width = run.rounds[trace.index], _vocabulary(run, trace)
    k = len(round_.drafted)
    point_mass = not drafted_by_model(run, round_)
    q_of: Tensors = [] if point_mass else [("q", (k, width or 0))]
    made = html.shapes([("p", (k + 1, width)), *q_of, ("numbers drawn", (k + 1,))]) if width else ""
    p, q, u = (x if isinstance(x, (int, float)) else 0.0 for x in (token.p, token.q, token.draw))
    tree = any(t.parent != (i - 1 if i else None) for i, t in enumerate(round_.drafted))
    return html.sampled_test(
        token,
        p,
        q,
        u,
        chance=min(1.0, p / q) if q else 0.0,
        later=tree and _tested_siblings(round_, token) > 0,
        copied=point_mass,
        made=made,
        tests=[[html.token(t), _figure(t.p), _figure(t.q), _figure(t.draw), t.outcome] for t in round_.drafted],
    )


def _tested_siblings(round_: Round, token: Token) -> int:
    at = next(i for i, t in enumerate(round_.drafted) if t is token)
    return sum(t.parent == token.parent and t.outcome == "rejected" for t in round_.drafted[:at])


def _figure(value: Any) -> str:
    return probability(value) if isinstance(value, (int, float)) else "–"


def emit_step(run: Run, trace: RoundTrace) -> str:
    round_ = run.rounds[trace.index]
    emitted, ignored = round_.emitted, sum(t.outcome == "ignored" for t in round_.drafted)
    if emitted is None:
        return html.p("The text ended inside the draft, so nothing follows it.")
    if emitted.outcome == "plain":
        found = html.plain(emitted)
    elif emitted.outcome == "bonus":
        found = html.bonus(emitted, "taken" if run.settings.temperature == 0 else "drawn")
    else:
        found = _corrected(run, round_, emitted)
    if ignored:
        what, they = ("One more draft was", "it was") if ignored == 1 else (f"{ignored} more drafts were", "they were")
        found += html.p(f"{what} never judged, which says nothing about how good {they}.", "note")
    return found


def _corrected(run: Run, round_: Round, emitted: Token) -> str:
    refused = [t for t in round_.drafted if t.outcome == "rejected"]
    if run.settings.temperature == 0:
        return html.replaced(emitted)
    return html.redrawn(emitted) + (_residual(run, round_, refused[0], emitted) if len(refused) == 1 else "")


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
        name = html.chip(text, refused.outcome if token_id == refused.id else "corrected" * (token_id == emitted.id))
        if q_of is None:
            rows.append([name, probability(p_of), f"≤ {most:.3f}", f"≥ {max(0.0, p_of - most):.3f}"])
        else:
            rows.append([name, probability(p_of), probability(q_of), html.bold(f"{max(0.0, p_of - q_of):.3f}")])
    return html.table(["token", "p", "q", "max(0, p − q)"], rows, "tests", "What is left of the target's law")


def roll_back_step(run: Run, trace: RoundTrace) -> str:
    target, draft = trace.target_cache, trace.draft_cache
    dropped = target.fullest - target.after
    forgotten = f"{plural(dropped, 'entry', 'entries')} of drafts that do not stand {'is' if dropped == 1 else 'are'}"
    happened = f"{forgotten} forgotten" if dropped else "Everything that was fed still stands"
    about = (
        f"{happened}: the cache states its new length, {target.after:,}, and nothing is computed again. The newest "
        "token has not been fed yet; the next round begins with it."
    )
    caches = [cache_bars(target.before, target.fullest, target.after, "Target's cache, in tokens")]
    if draft is not None:
        caches.append(cache_bars(draft.before, draft.fullest, draft.after, "Draft's cache, in tokens"))
    return (
        html.p(about) + _kept_shapes(trace) + html.caches(caches) + html.p(_about_the_drafts_cache(run, trace), "note")
    )


def _kept_shapes(trace: RoundTrace) -> str:
    """A layer's keys before and after the roll back, in tokens that count."""
    keys = next((tensor.shape for tensor in trace.tensors if tensor.name == "keys"), None)
    if keys is None:
        return ""
    sizes = ((keys[0], keys[1], n, keys[3]) for n in (trace.target_cache.fullest, trace.target_cache.after))
    return html.shapes(zip(("keys of a layer", "those that still count"), sizes))


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
