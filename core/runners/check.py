"""Whether a runner answers as transformers' own forward does: asked once, before it is relied on.

A fault seldom shows in the first tokens of a text: positions and masks go wrong behind a cache, in trees, after a
roll back. So a check reads a prompt in two chunks, goes on, rolls back, judges a tree and keeps one path of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.runners import Runner

PROMPT, CHUNK, BACK = 20, 13, 16
"""Tokens of a prompt, how many of them are in its first chunk, and how far it is rolled back."""
TREE, PATH = (-1, 0, 0, 1, 1, 2), (0, 2, 5)
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.08}
"""How far logits may lie apart, as a share of their norm: rounding, by the precision of the passes; transformers
computes parts of a float64 model in float32, and rounds the residual stream of a bf16 one to bf16 in every layer, which
in 30 layers comes to 0.03."""
NOISE = 3
"""Or so many times what the model's own logits change by when a prompt is read in two chunks."""


@torch.inference_mode()
def unlike(own: Runner, ours: Runner, vocabulary: int) -> str | None:
    """None where the logits of `ours` are those of `own` to rounding, else where they part. Both start empty; what is
    fed stays in their caches."""
    ids = (torch.arange(PROMPT + len(TREE), device=own.device) * 7 + 1) % vocabulary
    prompt, nodes = ids[:PROMPT], ids[PROMPT:]

    def after_roll_back(runner: Runner) -> Tensor:
        runner.truncate(BACK)
        return runner.feed(nodes[:1])

    def after_tree(runner: Runner) -> Tensor:
        runner.keep(PATH)
        return runner.feed(nodes[:2])

    asked: tuple[tuple[str, Callable[[Runner], Tensor]], ...] = (
        ("the first tokens of a text", lambda runner: runner.feed(prompt[:CHUNK])),
        ("a second chunk of a prompt", lambda runner: runner.feed(prompt[CHUNK:])),
        ("a token after a roll back", after_roll_back),
        ("a tree", lambda runner: runner.feed(nodes, TREE)),
        ("the text after a tree", after_tree),
    )
    whole = own.feed(prompt)
    own.truncate(CHUNK)
    rounding = _apart(own.feed(prompt[CHUNK:]), whole[CHUNK:])
    own.truncate(0)
    allowed = max(TOLERANCE.get(whole.dtype, 0.0), NOISE * rounding)
    for where, answer in asked:
        if not _apart(answer(ours), answer(own)) <= allowed:  # not `>`: NaN compares false to everything
            return where
    return None


def _apart(logits: Tensor, right: Tensor) -> float:
    return float((logits.double() - right.double()).norm() / right.double().norm())
