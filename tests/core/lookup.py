"""Models whose law is known exactly: a table instead of a network behind the Runner contract.

The law of the next token depends on the tokens since the last position divisible by BLOCK, and on nothing before them.
A long text is therefore many independent draws of its first BLOCK tokens, decoded by the real loop in one run, with
rounds that begin and end anywhere in a block.
"""

from collections.abc import Sequence
from itertools import product

import torch
from scipy.stats import chi2
from torch import Tensor

from core.decoding import speculative
from core.drafting import Drafter
from core.drafting.length import Controller, Fixed
from core.records import Run, Settings
from core.runners.features import Features
from core.sampling import Sampling

VOCABULARY, BLOCK = 5, 3
CPU = torch.device("cpu")

PREFIXES = [prefix for length in range(BLOCK) for prefix in product(range(VOCABULARY), repeat=length)]
ROW = {prefix: row for row, prefix in enumerate(PREFIXES)}
NEXT = [[ROW.get((*prefix, token), ROW[()]) for token in range(VOCABULARY)] for prefix in PREFIXES]
"""NEXT[row][token]: the row of the table that answers after one more token; a full block begins anew."""


def table(seed: int, spread: float = 1.5) -> Tensor:
    """Random logits, one row for every prefix of a block; a larger spread is a colder, surer model."""
    return spread * torch.randn(len(PREFIXES), VOCABULARY, generator=torch.Generator().manual_seed(seed))


def answers(rows: Sequence[Tensor], at: Sequence[int]) -> Tensor:
    """These rows of a table that was split into rows; to index it took a sixth of the time of decoding over tables."""
    return rows[at[0]] if len(at) == 1 else torch.cat([rows[i] for i in at])


class LookupRunner:
    """A Runner over a table. Its cache is the row after each token."""

    kind = "lookup"
    device = CPU

    def __init__(self, logits: Tensor) -> None:
        self.logits, self._answers = logits, logits.split(1)
        self.rows: list[int] = []
        self.length = 0
        self._fed = 0
        self._features: Features | None = None

    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        del self.rows[self.length :]
        fed: list[int] = []
        for i, token in enumerate(ids.tolist()):
            parent = i - 1 if parents is None else parents[i]
            before = fed[parent] if parent >= 0 else self.rows[-1] if self.rows else ROW[()]
            fed.append(NEXT[before][token])
        if self._features:
            self._features.add(self.length, self.logits[fed].repeat(1, len(self._features.layers)))
        self.rows += fed
        self.length, self._fed = len(self.rows), len(fed)
        return answers(self._answers, fed if rows is None else fed[-rows:])

    def watch(self, layers: Sequence[int]) -> Features:
        """In place of hidden states: the logits after each token, once for every layer."""
        self._features = Features(layers, self.length)
        return self._features

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        del self.rows[self.length :]
        if self._features:
            self._features.truncate(self.length)

    def keep(self, path: Sequence[int]) -> None:
        base = self.length - self._fed
        self.rows[base:] = [self.rows[base + i] for i in path]
        if self._features:
            self._features.keep(path)
        self.length, self._fed = len(self.rows), len(path)


class LookupView:
    """Like an early-exit view: a law of its own over the storage of another runner, which it runs ahead of."""

    kind = "lookup view"
    device = CPU

    def __init__(self, full: LookupRunner, logits: Tensor) -> None:
        self._full, self._answers = full, logits.split(1)

    @property
    def length(self) -> int:
        return len(self._full.rows)

    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        for token in ids.tolist():
            before = self._full.rows[-1] if self._full.rows else ROW[()]
            self._full.rows.append(NEXT[before][token])
        return answers(self._answers, self._full.rows[-(rows or len(ids)) :])

    def truncate(self, length: int) -> None:
        del self._full.rows[length:]


def decode(
    target: LookupRunner, drafter: Drafter | None, sampling: Sampling, length: int | Controller, tokens: int, seed: int
) -> Run:
    """A text of `tokens` tokens by the real loop, after a prompt of one whole block; `length` of the drafts."""
    controller = Fixed(length) if isinstance(length, int) else length
    settings = Settings(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed,
        max_new_tokens=tokens,
    )
    run = Run(settings, {}, "", prompt_ids=list(range(BLOCK)))
    with torch.inference_mode():
        for _ in speculative(target, drafter, run, length=controller):
            pass
    return run


def count_blocks(token_ids: list[int]) -> Tensor:
    """How often each block occurs: [VOCABULARY] * BLOCK."""
    blocks = torch.tensor(token_ids[: len(token_ids) // BLOCK * BLOCK]).view(-1, BLOCK)
    cells = (blocks * VOCABULARY ** torch.arange(BLOCK - 1, -1, -1)).sum(1)
    return torch.bincount(cells, minlength=VOCABULARY**BLOCK)


def block_law(logits: Tensor, sampling: Sampling) -> Tensor:
    """The exact probability of each block when the table alone is sampled: the chain rule, enumerated."""
    p = sampling.probabilities(logits).double()
    law = [
        torch.stack([p[ROW[block[:i]], block[i]] for i in range(BLOCK)]).prod()
        for block in product(range(VOCABULARY), repeat=BLOCK)
    ]
    return torch.stack(law)


def p_value(counts: Tensor, law: Tensor) -> float:
    """G-test: the chance of counts at least this far from the law if the law holds.

    Cells expected less than 5 times are pooled into one; a cell that the law excludes must be empty.
    """
    if counts[law == 0].any():
        return 0.0
    observed, expected = counts[law > 0].double(), law[law > 0] * counts.sum()
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    pooled = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    observed = torch.cat([observed[:pooled].sum()[None], observed[pooled:]])
    expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
    g = 2 * torch.xlogy(observed, observed / expected).sum()
    return float(chi2.sf(float(g), df=len(expected) - 1))
