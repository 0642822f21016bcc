"""Self-speculation: which of the target's layers to leave after. The drafter itself is `ModelDrafter` over a view."""

from __future__ import annotations

import torch

from core.errors import UserError
from core.model import Model
from core.prompts import read_prompts
from core.theory import expected_tokens, honest

SHARES = (0.125, 0.25, 0.375, 0.5)
"""Of the target's layers: the exits that are tried. A later one costs more than half a pass for every drafted token."""
SAMPLE = 256
LONGEST = 8


def exit_layer(target: Model, asked: int | None) -> int:
    """The layer early exit leaves after: the one asked for, else the one that promises most by measurement."""
    if asked is None:
        if target.exit_layer is None:
            target.exit_layer = measure_exit_layer(target)
        return target.exit_layer
    if not 1 <= asked < target.layers:
        raise UserError(
            f"The exit layer must be between 1 and {target.layers - 1} for a target of {target.layers} layers, "
            f"not {asked}."
        )
    return asked


def measure_exit_layer(target: Model) -> int:
    """How often each exit agrees with the whole model on a few lines of text, weighed against what it costs."""
    text = "\n\n".join(prompt.text for prompt in read_prompts())
    room = min(SAMPLE, target.context_length)
    ids = torch.tensor(target.tokenizer.encode(text)[:room], device=target.device)
    costs = target.measure_costs()
    promises: dict[int, float] = {}
    with target.lease() as runner:
        whole = runner.feed(ids).argmax(-1)
        for layer in sorted({max(1, round(share * target.layers)) for share in SHARES}):
            runner.reset()
            agreement = (runner.view(layer).feed(ids).argmax(-1) == whole).float().mean().item()
            draft_seconds = layer / target.layers * costs(1)
            promises[layer] = max(
                honest(expected_tokens(agreement, gamma), gamma, costs, draft_seconds) for gamma in range(1, LONGEST)
            )
    return max(promises, key=lambda layer: promises[layer])
