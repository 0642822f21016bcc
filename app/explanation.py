"""A round in six steps, with the run's own tokens, numbers and tensors. Run documents in, HTML out."""

from __future__ import annotations

from html import escape

from app.explain_judging import accept_step, emit_step, roll_back_step
from app.explain_mask import mask_figure, triangle
from app.explain_pass import draft_step, pass_step, rows_step
from app.markup import HIDDEN, named, paragraph, plural, token_chip
from core.explaining.trace import RoundTrace, trace_round
from core.geometry import Geometry
from core.records import Round, Run

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
        ("Draft", draft_step(run, trace)),
        ("One pass of the target", pass_step(run, trace)),
        ("A row of logits for each draft", rows_step(run, trace)),
        ("Accept or reject", accept_step(run, trace)),
        ("Correct, or a bonus", emit_step(run, trace)),
        ("Roll back", roll_back_step(run, trace)),
    )
    body = "".join(
        f'<li class="step" id="step-{number}"><h3>{title}</h3>{content}</li>'
        for number, (title, content) in enumerate(steps, 1)
    )
    return (
        f'<section class="round" data-round="{index}"><h2>Round {index + 1:,} of {len(run.rounds):,}</h2>'
        f"{paragraph(_in_a_sentence(run.rounds[index]), 'lead')}{_in_its_text(run, index)}"
        f'<div class="columns"><ol class="steps">{body}</ol>{_figures(run, trace)}</div></section>'
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
