"""Runner: one key/value cache over a model's weights. Nobody else touches a cache.

The invariant of the decoding loop: of C committed tokens, a cache holds C-1 (the newest is not fed yet). A round feeds
the newest token and the draft; afterwards `truncate` states how many of the fed tokens are still true. The length is
absolute and the rest is fed as `tokens[runner.length:]`, so an off-by-one heals itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from core.errors import Cancelled
from core.progress import Stop
from core.runners.clock import engine_time, synchronise
from core.runners.host import ids_on


class Runner(Protocol):
    """What decoding needs of a model. `feed` appends ids [n] and returns logits [n, vocab]; with `rows=r` only the
    last r rows. With `parents` the ids form a tree: parents[i] < i is the index of the token that ids[i] continues, -1
    for the tokens already in the cache; each sees its ancestors only and stands at the position of its depth.

    A target's runner can also be asked to `watch(layers)`: it then keeps the hidden states at these boundaries for
    every token it feeds, as `core.runners.features.Features` (trained heads draft from them)."""

    kind: str
    device: torch.device

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""
        ...

    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor: ...

    def truncate(self, length: int) -> None:
        """Forget every token past `length` (absolute; no effect when the cache is no longer than that)."""
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Of the tree just fed keep only the tokens at these indices, in this order, as the newest of the cache."""
        ...


class Favourites(NamedTuple):
    """Of rows of logits [n, vocab], told by the pass that made them: the likeliest token of each, `ids` [n] int64, the
    first of equal ones, NaN before all; its logit, `largest` [n] float32; and its share of the softmax, `shares` [n]
    float32, where that was asked for."""

    ids: Tensor
    largest: Tensor
    shares: Tensor | None = None

    def of(self, row: int) -> Favourites:
        """Those of one row."""
        return Favourites(*(None if each is None else each[row : row + 1] for each in self))  # type: ignore[arg-type]


def favourites_of(runner: object) -> Favourites | None:
    """Those of the rows that a runner's newest pass gave; None where it does not tell."""
    return getattr(runner, "favourites", None)


PREFILL_CHUNK = 256
"""Tokens of a prompt between two looks at `stop`. Such passes are not captured: over so many rows the products of a
large model take longer than the host to queue them, and of a small one a prompt is soon read."""


def prefill(runner: Runner, ids: Sequence[int], stop: Stop) -> float:
    """Feed what the cache misses of ids, in chunks between which `stop` is asked; returns the seconds it took."""
    start = engine_time()
    while runner.length < len(ids):
        if stop():
            raise Cancelled
        chunk = ids[runner.length : min(runner.length + PREFILL_CHUNK, len(ids))]
        runner.feed(ids_on(runner.device, chunk), rows=1)
    synchronise(runner.device)
    return engine_time() - start
