"""Functions for programs: `gradio_client`, and agents when the page is started with --mcp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
from gradio.events import api

from app.serving.turns import Event, sentence
from app.settings import CONTROLS
from core.errors import UserError
from core.records import SCHEMA, Run, summarise

Race = Callable[[str, dict[str, Any], list[Run]], Iterator[Event]]
"""Prompt, values of the controls by name, and a list that the runs are put into -> the events of their race."""


FOR_PROGRAMS = ("run", "stop")
"""Endpoints that stream into a page or belong to a session: of no use to an agent."""


def leave_to_programs(page: gr.Blocks) -> None:
    """Keep the endpoints that only programs can use out of the list of tools; they can be called all the same."""
    for function in page.fns.values():
        if function.api_name in FOR_PROGRAMS:
            function.api_visibility = "undocumented"


def offer_generate(race: Race, controls: dict[str, Any]) -> None:
    """Add the endpoint /generate to the page; what a caller leaves out is as the page starts with."""
    start = {name: controls[name].value for name in CONTROLS}

    def generate(
        prompt: str,
        method: str = start["method"],
        draft_length: str = str(start["draft_length"]),
        temperature: float = start["temperature"],
        top_k: int = start["top_k"],
        top_p: float = start["top_p"],
        min_p: float = start["min_p"],
        max_new_tokens: int = start["max_new_tokens"],
        seed: int = start["seed"],
        tree: str = "auto",
        exit_layer: str = "auto",
        precision: str = start["precision"],
        target: str = "",
        draft: str = "",
        system: str = "",
        documents: bool = False,
    ) -> dict:
        """Continue a prompt by speculative decoding, race it against plain decoding, and report both.

        The answer holds the text, the verdict in words, the measured speed-up (None without a race) and the metrics of
        both runs: tokens per second of engine time, acceptance rate, tokens per target pass. Nothing is estimated.

        Args:
            prompt: text to continue.
            method: who drafts: draft, ngram, ngram+draft, early-exit, tree, or plain for no speculation.
            draft_length: tokens proposed before the target checks them, 1 to 16, or auto.
            temperature: 0 is greedy; above 0 tokens are drawn.
            top_k: draw only from the k likeliest tokens; 0 switches it off.
            top_p: draw only from the likeliest tokens that together hold this probability; 1 switches it off.
            min_p: draw only from tokens at least this fraction as likely as the likeliest; 0 switches it off.
            max_new_tokens: where to stop at the latest.
            seed: the same seed and settings on the same machine give the same run.
            tree: for the method tree, children by depth such as 3x2x1, or auto.
            exit_layer: for early-exit, after which of the target's layers the drafting pass stops, or auto.
            precision: of the weights: auto, nf4, bf16, fp16 or fp32.
            target: Hub id of the model that writes; empty for the pair the page was started with.
            draft: Hub id of the model that drafts for that target.
            system: system prompt, for a chat model.
            documents: add the whole run documents, with every round and token, to the answer.
        """
        given = {
            "method": method,
            "draft_length": draft_length,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "tree": tree,
            "exit_layer": exit_layer,
            "precision": precision,
            "target": target,
            "draft": draft,
            "system": system,
        }
        runs: list[Run] = []
        verdict: Event = {}
        try:
            for event in race(prompt, {**start, **given}, runs):
                verdict = event if event["e"] == "verdict" else verdict
            if not verdict:
                raise UserError("The run ended before it began; please run it again.")
        except Exception as error:
            raise gr.Error(sentence(error), print_exception=False) from None
        return report(runs, verdict, documents)

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
