"""Speculative decoding that can be seen: the engine. It knows models and nothing of the page (no gradio, no plotly).

From Python:
    load_pair     target and draft, on a device
    stream        a run, round by round
    generate      a run, to its end
    race          several runs on one device
    summarise     a run in figures
    Settings      everything that decides a run
    Run           settings, rounds and text: one JSON document
    Round         a draft and the target pass that judged it
    Token         a drafted or an emitted token, and what became of it
    UserError     what a caller can get wrong, in one sentence

From a shell: `python -m core --help`.

What every reader meets:
    verification  the rule: accept, correct, bonus
    sampling      logits to probabilities, and a run's random numbers
    decoding      one round, and the loop of rounds
    lanes         a run in progress, the race, a run repeated
    settings      every setting: type, limits, words
    records       runs, and what is computed from them
    text          ids to text; chat templates
    progress      how far long work has come
    disk          where what is made is kept, and whether there is room
    errors        what a person can get wrong

Rooms:
    drafting      who guesses, and how many tokens
    runners       a cache over a model's weights
    heads         trained draft heads, in the published formats
    training      how a head is trained on what its target writes
    costs         what a pass costs here
    loading       id or folder to model
    inspecting    a pair before it is downloaded
    measuring     bench, sweep, comparison
    servers       vLLM, SGLang, llama.cpp where they run
    explaining    tensors, memory traffic, the lossless check
    cli           the command line
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from core.errors import UserError
from core.progress import Progress, Stop, never, silent
from core.records import Round, Run, Token, summarise
from core.settings import Settings

if TYPE_CHECKING:
    from core.lanes import Lane
    from core.loading.pair import Pair

__all__ = [
    "Round",
    "Run",
    "Settings",
    "Token",
    "UserError",
    "generate",
    "load_pair",
    "race",
    "stream",
    "summarise",
]

# torch and transformers take seconds to import: each function does it when it is called.


def load_pair(settings: Settings | None = None, progress: Progress = silent) -> Pair:
    """Load the target and, where one is named, the draft; without a target, the pair that is here from the start.

    `progress` is called with a line of words now and then. What decides the models: target, draft, revision, device,
    precision and draft_precision. Raises UserError where a model cannot be had, does not fit or does not go with the
    other.
    """
    from core import loading

    return loading.load_pair(settings or Settings(), progress)


def stream(pair: Pair, prompt: str, settings: Settings | None = None, *, tops: int = 0, stop: Stop = never) -> Lane:
    """A run, round by round: an iterator of `Round` whose `run` grows with each.

    The first round takes the prefill too. `with` gives the caches back when the loop is left early; at the end they go
    back by themselves. A round holds what was drafted and what the target emitted, each `Token` with its outcome, the
    target's probability p and the draft's q (after temperature, top-k, top-p and min-p), and times in seconds of engine
    time. `tops` > 0 records that many of the likeliest tokens at every position; after `stop()` is true no further
    round is computed. Raises UserError where prompt, settings and pair do not go together.
    """
    from core.lanes import open_lane

    return open_lane(pair, prompt, settings or Settings(), stop, tops)


def generate(pair: Pair, prompt: str, settings: Settings | None = None, *, tops: int = 0) -> Run:
    """A run to its end: `text`, `token_ids`, `rounds`, `stop_reason` ("eos" or "length"). Arguments and errors are
    those of `stream`."""
    with stream(pair, prompt, settings, tops=tops) as lane:
        for _ in lane:
            pass
    return lane.run


def race(lanes: Mapping[str, Lane]) -> Iterator[tuple[str, Round]]:
    """Advance several streams on one device: next is the one with the least engine time so far, prefill included.

    Each then shows at any moment how far it would have come in the same time on a device of its own. Yields the name of
    the lane and its round; closes all of them at the end, also when the loop is left early.
    """
    from core import lanes as lanes_

    names = list(lanes)
    with closing(lanes_.race(list(lanes.values()))) as rounds:  # type: ignore[type-var]
        for index, round_ in rounds:
            yield names[index], round_
