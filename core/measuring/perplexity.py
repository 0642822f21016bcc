"""How well a model predicts a text, in each precision: what rounding its weights costs in quality.

Perplexity is exp of the mean negative log-likelihood of a token given those before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from core.errors import UserError, release_memory
from core.loading import load_model, resolve_device
from core.loading.model import Model
from core.progress import Progress, silent
from core.records import SCHEMA
from core.runners import ids_on

WINDOW = 512
"""Tokens read from an empty cache before the next start."""


@torch.inference_mode()
def perplexity(model: Model, ids: Sequence[int], window: int = WINDOW) -> float:
    """Perplexity of ids cut into windows, none longer than the model reads; the first token of each is given."""
    window, loss, counted = min(window, model.context_length), 0.0, 0
    with model.lease() as runner:
        for start in range(0, len(ids) - 1, window):
            part = ids_on(runner.device, ids[start : start + window])
            if len(part) < 2:
                break
            runner.truncate(0)
            laws = runner.feed(part).float().log_softmax(-1)
            loss -= laws[:-1].gather(1, part[1:, None]).sum().item()
            counted += len(part) - 1
    return math.exp(loss / counted)


def compare_precisions(
    name: str,
    text: str,
    precisions: Sequence[str],
    device: str = "auto",
    revision: str | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The perplexity of one text in each precision, loaded one after the other. Raises UserError where the text is too
    short or a precision cannot be had."""
    rows: list[dict[str, Any]] = []
    tokens = 0
    for precision in precisions:
        progress(f"reading in {precision}")
        model = load_model(name, resolve_device(device), precision, revision)
        ids = [i for i in model.tokenizer.encode(text, add_special_tokens=False) if i < model.vocab_size]
        if (tokens := len(ids)) < 2:
            raise UserError("A perplexity needs a text of at least two tokens.")
        found = perplexity(model, ids)
        rows.append({"precision": model.precision, "perplexity": found, "weight_bytes": model.weight_bytes()})
        rows[-1]["ratio"] = found / rows[0]["perplexity"]
        del model
        release_memory()
    return {"schema": SCHEMA, "target": name, "tokens": tokens, "window": WINDOW, "precisions": rows}


def perplexity_table(document: dict[str, Any]) -> str:
    """The document as a table in Markdown; ratios are to its first row."""
    rows = document["precisions"]
    lines = [
        f"{document['tokens']:,} tokens in windows of {document['window']}",
        "",
        f"| precision | perplexity | ÷ {rows[0]['precision']} | weights, MB |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        size = row["weight_bytes"] / 1e6
        lines.append(f"| {row['precision']} | {row['perplexity']:.3f} | {row['ratio']:.4f} | {size:,.0f} |")
    return "\n".join(lines)
