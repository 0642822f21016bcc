"""The live check that speculation changes nothing: for greedy decoding the same text, for sampling the same law.

Sampling: n short continuations of one text by the real round loop, and how often each first and second token came,
against the law that the target itself gives them, computed exactly. Two samples are never compared with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.decoding import take_step
from core.drafting import Drafter
from core.drafting.build import build_drafter, settle_method
from core.drafting.ngram import NgramDrafter
from core.errors import Cancelled, UserError
from core.lanes import check_settings, finish_together
from core.loading.pair import Pair
from core.progress import Stop, never
from core.records import Divergence, Run, Settings, first_divergence
from core.runners import Runner, prefill
from core.runners.together import Together
from core.sampling import Sampling, Uniforms
from core.text import encode_prompt, known_ids

LEAST_EXPECTED = 5.0
"""A cell expected less often than this is pooled with others: the χ² approximation needs it."""
POSITIONS = 48
"""Of a text, how many of the latest positions are looked at for the one where the check can see most."""
BRANCHES = 48
"""For how many first tokens the law of the second is computed, each by one pass."""
SHORTEST_ROOM = 8
"""Tokens that must fit in the target's context after the text that is continued."""
AT_ONCE = 4
"""Texts that are decoded together, so that progress is told of often."""
NOTHING_TO_CHECK = "The method plain does not speculate, so there is nothing to check; choose another method."
Two = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """One kind of continuation. `ids` are its first tokens: two, or one where any second token counts (then `rest`
    names how: other than those in cells of their own), or none for all continuations not in another cell."""

    ids: tuple[int, ...]
    expected: float
    observed: int


@dataclass(frozen=True)
class LawCheck:
    """`n` continuations of a text of `context` tokens in `cells`, by likelihood; `p_value`: if the law is the target's,
    the chance of a deviation this large or larger. `excluded`: continuations with a token that the sampler's cut
    (top-k, top-p, min-p) rules out."""

    n: int
    context: int
    cells: list[Cell]
    g: float
    freedom: int
    p_value: float
    excluded: int
    drafted: int
    rejected: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GreedyCheck:
    """`texts` prompts decoded both ways; `tokens` compared, up to the first difference of each that differs.
    `divergences`: (number of the text, where and by how much)."""

    texts: int
    identical: int
    tokens: int
    divergences: list[tuple[int, Divergence]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    done: int
    total: int


def check_greedy(
    pair: Pair, prompts: Sequence[str], settings: Settings, stop: Stop = never
) -> Iterator[Progress | GreedyCheck]:
    """Decode each prompt plainly and speculatively at temperature 0 and compare; the last item is the result.

    When stopped, the prompts finished so far are the result.
    """
    if settings.method == "plain":
        raise UserError(NOTHING_TO_CHECK)
    greedy = replace(settings, temperature=0.0)
    identical = tokens = texts = 0
    divergences: list[tuple[int, Divergence]] = []
    yield Progress(0, len(prompts))
    for first in range(0, len(prompts), AT_ONCE):
        group = prompts[first : first + AT_ONCE]
        plain, ours = (
            finish_together(
                pair, [(text, replace(greedy, method=method)) for text in group], AT_ONCE, stop, tops=2, as_alone=True
            )
            for method in ("plain", settings.method)
        )
        if stop() or any(run.stop_reason == "cancelled" for run in (*plain, *ours)):
            break
        for number, runs in enumerate(zip(plain, ours), first):
            texts += 1
            divergence = parting(*runs)
            if divergence is None:
                identical += 1
                tokens += len(runs[0].token_ids)
            else:
                tokens += divergence.position
                divergences.append((number, divergence))
        yield Progress(texts, len(prompts))
    yield GreedyCheck(texts, identical, tokens, divergences)


def parting(plain: Run, ours: Run) -> Divergence | None:
    """Where two finished texts part: also where one ends and the other goes on, or ends for another reason."""
    one, other = (f"{run.stop_reason} after {len(run.token_ids)}" for run in (plain, ours))
    found = first_divergence(plain, ours)
    if found is None and one != other:
        return Divergence(min(len(plain.token_ids), len(ours.token_ids)), one, other, None)
    return found


def check_law(
    pair: Pair, run: Run | None, prompt: str, settings: Settings, n: int, stop: Stop = never, broken: bool = False
) -> Iterator[Progress | LawCheck]:
    """Sample `n` continuations with the drafter of `settings` and compare; the last item is the result.

    They continue the prompt, and of `run` (if any) the part of its output after which the target is least certain.
    `broken`: on purpose, take every draft without judging it, to see that the check notices.
    """
    settings = settle_method(pair, settings)
    sampling = Sampling.of(settings)
    if sampling.greedy:
        raise UserError("Greedy decoding draws nothing; choose a temperature above 0 to check the law.")
    if settings.method == "plain":
        raise UserError(NOTHING_TO_CHECK)
    prompt_ids = known_ids(pair.target, run.prompt_ids) if run else encode_prompt(pair.target, prompt, settings)
    check_settings(pair.target, prompt_ids, replace(settings, max_new_tokens=SHORTEST_ROOM))
    output = known_ids(pair.target, run.token_ids) if run else []
    text = (prompt_ids + output)[: pair.target.context_length - SHORTEST_ROOM]
    with ExitStack() as resources:
        slots = [_Slot(pair, settings, resources) for _ in range(AT_ONCE if pair.target.exact_rows else 1)]
        target, drafter = slots[0].target, slots[0].drafter
        pair.target.use_threads()
        try:
            prefill(target, text[: max(len(prompt_ids), len(text) - POSITIONS) - 1], stop)
            context = text[: choose_context(target, text, n, sampling, drafter)]
            law = two_token_law(target, context, sampling, n)
            for slot in slots:
                prefill(slot.target, context[:-1], stop)
                slot.drafter.prefill(context[:-1], stop)
        except Cancelled:
            return
        longest = max(1, min(slots[0].length.next(context), pair.target.context_length - len(context) - 2))
        counts: Counter[Two] = Counter()
        totals = Counter[str]()
        numbers = Uniforms(settings.seed, target.device)

        def drawn(slot: _Slot, turns: Iterator[int]) -> Generator[Two]:
            for turn in turns:
                if stop():
                    return
                gamma = 1 + turn % longest
                if slot.ending is not None:  # where it is too unsure to draft at all, there would be nothing to check
                    slot.drafter.ending = slot.ending if turn // longest % 2 else None  # type: ignore[attr-defined]
                yield continuation(slot.target, slot.drafter, context, gamma, sampling, numbers, totals, broken)

        yield Progress(0, n)
        for done in range(0, n, len(slots)):
            if stop():
                break
            pair.target.use_threads()  # the page may come back in another thread
            turns = iter(range(done, min(n, done + len(slots))))
            counts.update(Together[Two](pair.target.passes).run((drawn(slot, turns) for slot in slots), len(slots)))
            yield Progress(counts.total(), n)
    if counts:
        yield law.compare(counts, len(context), totals["drafted"], totals["rejected"])


class _Slot:
    """What draws one continuation after the other."""

    def __init__(self, pair: Pair, settings: Settings, resources: ExitStack) -> None:
        self.target = resources.enter_context(pair.target.lease())
        self.drafter, self.length = build_drafter(pair, self.target, settings, resources)
        self.ending = getattr(self.drafter, "ending", None)


def continuation(
    target: Runner,
    drafter: Drafter,
    context: list[int],
    gamma: int,
    sampling: Sampling,
    numbers: Uniforms,
    totals: Counter[str],
    broken: bool = False,
) -> Two:
    """Two tokens after `context` by the real round loop, from caches rolled back to it."""
    # What a head has read of its target's hidden states is gone: the last of them are made anew.
    target.truncate(max(0, len(context) - 1 - getattr(drafter, "in_step", False)))
    drafter.truncate(len(context) - 1)
    prefill(target, context[:-1], never)
    text = list(context)
    while len(text) < len(context) + 2:
        step = take_step(target, drafter, text, gamma, sampling, numbers)
        drafted = step.verdict.drafted
        kept = drafted[:1] if broken and drafted else step.kept
        totals["drafted"] += len(drafted)
        totals["rejected"] += len(step.verdict.rejected)
        text += kept
        target.truncate(len(text) - 1)
        drafter.truncate(len(text) - 1)
    return text[len(context)], text[len(context) + 1]


def choose_context(target: Runner, text: list[int], n: int, sampling: Sampling, drafter: Drafter | None = None) -> int:
    """How much of a text to continue: of the positions past the target's cache, the one where n continuations can
    tell most. Where the target is sure of one token, there is nothing to check; nor where an
    n-gram drafter has nothing to propose, if there is another place."""
    logits = target.feed(torch.tensor(text[target.length :], device=target.device))
    p = sampling.probabilities(logits)
    told = _spread(p, n).cpu()
    if isinstance(drafter, NgramDrafter):
        told = told * _proposes(drafter, text, len(told))
    best = int(told.argmax())
    length = len(text) - len(told) + best + 1
    target.truncate(length - 1)
    return length


def _spread(p: Tensor, n: int) -> Tensor:
    """How much n draws from each row of p can tell: the entropy over the tokens expected often enough, all others being
    one."""
    kept = torch.where(p * n >= LEAST_EXPECTED, p, 0.0).double()
    rest = (1 - kept.sum(-1)).clamp(min=0)
    return -(torch.xlogy(kept, kept).sum(-1) + torch.xlogy(rest, rest))


def _proposes(drafter: NgramDrafter, text: list[int], positions: int) -> Tensor:
    """1 for each of the last positions of a text after which the drafter has a proposal."""
    found = []
    for end in range(len(text) - positions + 1, len(text) + 1):
        drafter.reset()
        found.append(int(len(drafter.propose(text[:end], 1, torch.empty(0))) > 0))
    drafter.reset()
    return torch.tensor(found)


@dataclass(frozen=True)
class TwoTokenLaw:
    """The target's exact probability of each first token `first` [vocab] and, after the likeliest of them, of each
    second: `second[token]` [vocab]; float64."""

    first: Tensor
    second: dict[int, Tensor]

    def partition(self, n: int) -> dict[tuple[int, ...], float]:
        """Probabilities of the cells for n continuations: (a, b), then (a,) for all other seconds, then () for the
        rest. The cells depend on the law alone, never on what was drawn."""
        cells: dict[tuple[int, ...], float] = {(): 0.0}
        for a in self.first.nonzero()[:, 0].tolist():
            p = float(self.first[a])
            if p * n < LEAST_EXPECTED:
                cells[()] += p
                continue
            rest = p
            for b in (self.second[a] * p * n >= LEAST_EXPECTED).nonzero()[:, 0].tolist() if a in self.second else ():
                cells[a, b] = p * float(self.second[a][b])
                rest -= cells[a, b]
            if rest * n >= LEAST_EXPECTED:
                cells[(a,)] = rest
            else:
                cells[()] += max(0.0, rest)
        return cells

    def allows(self, pair: Two) -> bool:
        a, b = pair
        return bool(self.first[a] > 0) and (a not in self.second or bool(self.second[a][b] > 0))

    def compare(self, counts: Counter[Two], context: int, drafted: int = 0, rejected: int = 0) -> LawCheck:
        """G-test of the counts against this law."""
        n = sum(counts.values())
        law = self.partition(n)
        observed: Counter[tuple[int, ...]] = Counter()
        for pair, count in counts.items():
            cell = next(cell for cell in (pair, pair[:1], ()) if cell in law)
            observed[cell] += count
        cells = sorted((Cell(ids, p * n, observed[ids]) for ids, p in law.items()), key=lambda c: -c.expected)
        while len(cells) > 1 and cells[-1].expected < LEAST_EXPECTED:
            *cells, a, b = cells
            cells.append(Cell((), a.expected + b.expected, a.observed + b.observed))
            cells.sort(key=lambda c: -c.expected)
        g, freedom, p = g_test([c.observed for c in cells], [c.expected for c in cells])
        excluded = sum(count for pair, count in counts.items() if not self.allows(pair))
        return LawCheck(n, context, cells, g, freedom, p, excluded, drafted, rejected)


def two_token_law(target: Runner, context: list[int], sampling: Sampling, n: int) -> TwoTokenLaw:
    """Ask the target itself: one pass after the context, one more after each first token that n continuations can
    tell apart. Leaves the target's cache at the context without its newest token."""
    target.truncate(len(context) - 1)
    first = _law(target, context[target.length :], sampling)
    second: dict[int, Tensor] = {}
    for token in first.topk(min(BRANCHES, len(first))).indices.tolist():
        if float(first[token]) * n < 2 * LEAST_EXPECTED:
            break
        target.truncate(len(context))
        second[token] = _law(target, [token], sampling)
    target.truncate(len(context) - 1)
    return TwoTokenLaw(first, second)


def _law(target: Runner, ids: list[int], sampling: Sampling) -> Tensor:
    row = sampling.probabilities(target.feed(torch.tensor(ids, device=target.device), rows=1))[0].double().cpu()
    return row / row.sum()


def g_test(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """(G, degrees of freedom, p-value) of counts against expectations that have the same sum; G = 2 Σ o·ln(o/e)."""
    g = 2 * sum(o * math.log(o / e) for o, e in zip(observed, expected) if o)
    freedom = len(expected) - 1
    return max(0.0, g), freedom, chi_squared_survival(max(0.0, g), freedom)


def chi_squared_survival(x: float, freedom: int) -> float:
    """P(χ² ≥ x) with so many degrees of freedom: the regularised upper incomplete gamma function Q(k/2, x/2)."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
