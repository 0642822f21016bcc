"""Functions for programs: `gradio_client`, and agents when the page is started with --mcp."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import gradio as gr
from gradio.events import api

from app.insides import leave_undocumented
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, sentence
from app.settings import CONTROLS, start_of
from core.errors import UserError
from core.records import SCHEMA, Run, summarise
from core.settings import SPECS

Race = Callable[[str, dict[str, Any], Stop, list[Run]], Iterator[Event]]
"""Prompt, values of the controls by name, when to stop, and a list that the runs are put into -> the events of their
race."""
TELLS_PER_SECOND = 1.0
"""At most so often a caller hears how a race is going: only then does Gradio notice that nobody listens any more."""


FOR_PROGRAMS = ("run", "stop")
"""Endpoints that stream into a page or belong to a session: of no use to an agent."""


def leave_to_programs(page: gr.Blocks) -> None:
    """Keep the endpoints that only programs can use out of the list of tools; they can be called all the same."""
    leave_undocumented(page, FOR_PROGRAMS)


STARTING = {name: start_of(name) for name in CONTROLS}


def takes_settings(names: Sequence[str], start: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Give a function a parameter of its own for each named setting in place of its parameter `controls`, which gets
    their values by name, and a line for each under `Args:` of its docstring. Left out, they are those of `start`, or
    else as every page starts."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        own = [_parameter(name, {**STARTING, **(start or {})}[name]) for name in names]
        parameters: list[inspect.Parameter] = []
        for each in signature.parameters.values():
            parameters += (
                own if each.name == "controls" else [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)]
            )
        taken = signature.replace(parameters=parameters)

        def arguments(values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
            bound = taken.bind(*values, **named)
            bound.apply_defaults()
            controls = {name: bound.arguments.pop(name) for name in names}
            return {**bound.arguments, "controls": controls}

        if inspect.isgeneratorfunction(function):  # gradio asks it of the function it is given

            @wraps(function)
            def taking(*values: Any, **named: Any) -> Any:
                yield from function(**arguments(values, named))
        else:

            @wraps(function)
            def taking(*values: Any, **named: Any) -> Any:
                return function(**arguments(values, named))

        taking.__signature__ = taken  # type: ignore[attr-defined]
        taking.__annotations__ = {**function.__annotations__, **{each.name: each.annotation for each in own}}
        taking.__doc__ = _described(inspect.getdoc(function) or "", names)
        return taking

    return decorate


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """Text where the word auto may stand for a number."""
    kind = str if SPECS[name].auto else SPECS[name].kind
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=kind(default), annotation=kind)


def _described(doc: str, names: Sequence[str]) -> str:
    before, returns, after = doc.partition("\nReturns:")
    lines = "".join(f"\n    {name}: {SPECS[name].words(SPECS[name].most_on_page)}" for name in names)
    return before.rstrip() + ("" if "\nArgs:" in before else "\n\nArgs:") + lines + "\n" + returns + after


def offer_generate(race: Race, controls: dict[str, Any]) -> None:
    """Add the endpoint /generate to the page; what a caller leaves out is as the page starts with."""
    start = {name: controls[name].value for name in CONTROLS}
    stops = Stops()

    @takes_settings(CONTROLS, start)
    def generate(
        prompt: str, controls: dict[str, Any], documents: bool = False, request: gr.Request | None = None
    ) -> Iterator[dict[str, Any]]:
        """Continue a prompt by speculative decoding, race it against plain decoding, and report both.

        Objects {"status"} tell how it is going; the last value is the answer. It holds the text, the verdict in words,
        the measured speed-up (None without a race) and the metrics of both runs: tokens per second of engine time,
        acceptance rate, tokens per target pass. Nothing is estimated.

        Args:
            prompt: text to continue.
            documents: add the whole run documents, with every round and token, to the answer.
        """
        runs: list[Run] = []
        verdict: Event = {}
        status, told = "Starting", 0.0
        try:
            with stops.watch(request) as stop:
                for event in race(prompt, controls, stop, runs):
                    verdict = event if event["e"] == "verdict" else verdict
                    status = event["text"] if event["e"] == "status" else status
                    if time.monotonic() - told > 1 / TELLS_PER_SECOND:
                        told = time.monotonic()
                        yield {"status": status}
            if not verdict:
                raise UserError("The run ended before it began; please run it again.")
        except Exception as error:
            raise gr.Error(sentence(error), print_exception=False) from None
        yield report(runs, verdict, documents)

    api(generate, api_name="generate", concurrency_limit=None)


def report(runs: list[Run], verdict: Event, documents: bool = False) -> dict[str, Any]:
    """A race in a few figures; `documents` adds its run documents."""
    by_kind = {"plain" if run.settings.method == "plain" else "speculative": run for run in runs}
    metrics = {kind: summarise(run) for kind, run in by_kind.items()}
    speculative, plain = metrics.get("speculative"), metrics.get("plain")
    both = speculative and plain and speculative.tokens_per_second and plain.tokens_per_second
    first = runs[0]
    return {
        "text": first.text,
        "stop_reason": first.stop_reason,
        "verdict": verdict["text"],
        "why_slower": verdict["why"],
        "speedup": speculative.tokens_per_second / plain.tokens_per_second if both else None,  # type: ignore[union-attr]
        **{kind: found.to_dict() for kind, found in metrics.items()},
        **({"document": {"schema": SCHEMA, "runs": [run.to_dict() for run in runs]}} if documents else {}),
    }
