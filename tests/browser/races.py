"""Races made by hand or by the scripted engine, to be shown from their documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakes import ENVIRONMENT, FakeEngine

from app.playground.race import queued_race
from app.serving.device import Device
from core.records import SCHEMA, Candidate, Round, Run, Settings, Token


def scripted_race(texts: Sequence[str] | None = None, **settings: Any) -> dict[str, Any]:
    """The document of a race that the scripted engine ran."""
    engine = FakeEngine(pace=0, **({"texts": texts} if texts else {}))
    runs: list[Run] = []
    chosen = Settings(**{"draft_length": 5, "max_new_tokens": 60, **settings})
    for _ in queued_race(Device(), engine, "def f():\n", chosen, lambda: False, runs):
        pass
    return {"schema": SCHEMA, "runs": [run.to_dict() for run in runs]}


def document_of(*rounds: Round, **settings: Any) -> dict[str, Any]:
    """The document of a run that consists of these rounds."""
    run = Run(Settings(**{"temperature": 1.0, **settings}), ENVIRONMENT, "x = ", [1], stop_reason="length")
    run.rounds = list(rounds)
    kept = [token for each in rounds for token in each.kept]
    run.token_ids = [token.id for token in kept]
    run.text = "".join(token.text for token in kept)
    return run.to_dict()


def candidates(**p: float) -> list[Candidate]:
    """Candidates named by their text; the id of a text is its first letter's number."""
    return [Candidate(ord(text[0]), text, value) for text, value in p.items()]


def corrected_round() -> Round:
    """b was drafted with q = 0.6 where p = 0.3 and refused; a was drawn from the residual."""
    target, draft = candidates(a=0.5, b=0.3, c=0.1), candidates(b=0.6, a=0.3, d=0.05)
    drafted = [
        Token(98, "b", "rejected", p=0.3, q=0.6, draw=0.8, top_target=target, top_draft=draft),
        Token(99, "c", "ignored", p=0.1, q=0.9, parent=0, top_target=target, top_draft=draft),
    ]
    return Round(0, drafted, Token(97, "a", "corrected", p=0.5, top_target=target), 0.002, 0.009, 0.001)


def tree_round() -> Round:
    """Two first tokens with two continuations each: b and its second child were accepted, e came free.

    a     rejected          b     accepted
    ├ c   ignored           ├ d   rejected
    └ d   ignored           └ c   accepted ─ e (bonus)
    """
    shape = [("a", None, "rejected"), ("b", None, "accepted"), ("c", 0, "ignored"), ("d", 0, "ignored")]
    shape += [("d", 1, "rejected"), ("c", 1, "accepted")]
    drafted = [
        Token(ord(text), text, outcome, p=0.4, q=0.5, parent=parent, draw=None if outcome == "ignored" else 0.7)
        for text, parent, outcome in shape
    ]
    for token in drafted:
        token.top_target = token.top_draft = candidates(a=0.5, b=0.3, c=0.1)
    return Round(0, drafted, Token(101, "e", "bonus", p=0.5), 0.002, 0.009, 0.001)
