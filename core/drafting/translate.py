"""Drafting for a target with another tokenizer: the text re-encoded for the draft, its law moved onto target tokens.

The draft's distribution after the sampler chain is pushed forward: the probability of a draft token goes to the target
token with the same bytes, what has no such token is cut off, the rest is renormalised. Tokens are drawn from exactly
that, so the usual rule stays lossless. How the draft reads the text decides only how often it is right.
"""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence

import torch
from torch import Tensor

from core.drafting import Draft
from core.drafting.chain import Chain, Ending
from core.drafting.length import Recorded
from core.loading.pair import Translation
from core.progress import Stop
from core.runners import Runner, prefill
from core.runners.host import ids_on
from core.sampling import Sampling

REACH = 32
"""The most draft tokens that are encoded again when the text grows."""
LEAST_MASS = 1e-6
"""Less than this of the draft's probability on target tokens counts as none."""


class TranslateDrafter:
    """Draws a chain of target tokens from a draft that knows other tokens.

    `limit`: how many tokens fit in the draft's context; the same text may be more tokens for it than for the target.
    """

    cache: Runner | None = None
    """It has one, but of the draft's own tokens."""

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        translation: Translation,
        limit: int | None = None,
        ending: Ending | None = None,
    ) -> None:
        self.runner = runner
        self.ending = ending
        self._sampling = sampling
        self._limit = limit
        self._draft_ids, self._target_ids, self._draft_of = translation.to(runner.device)
        self._text = DraftText(translation)
        self._read = 0  # tokens of the context that are in _text
        self._fed: list[int] = []  # the draft's tokens in the runner's cache

    def prefill(self, context: list[int], stop: Stop) -> float:
        start = time.perf_counter()
        self._follow(context)
        encoding = time.perf_counter() - start
        self._fed += self._text.ids[self.runner.length : self._limit]
        return encoding + prefill(self.runner, self._fed, stop)

    def propose(self, context: list[int], length: int, uniforms: Tensor) -> Draft:
        self._follow(context)
        ids, device = self._text.ids, self.runner.device
        if self._limit is not None:
            length = min(length, self._limit - len(ids) + 1)  # the last drafted token is not fed
        if length < 1 or not ids or self._text.unfinished:
            return Draft.none(device)
        self._keep(min(self.runner.length, len(ids) - 1))
        fresh = ids_on(device, ids[self.runner.length :])
        chain, fed = Chain(length, self._sampling, uniforms, self.ending), []
        while True:
            row = self.runner.feed(fresh, rows=1)
            fed.append(fresh)
            chosen = self._choose(row, chain)
            if chosen is None or not chain.goes_on():
                break
            fresh = chosen
        self._fed += torch.cat(fed).tolist()
        return chain.draft(device)

    def _choose(self, row: Tensor, chain: Chain) -> Tensor | None:
        """Draw a target token by the draft's logits [1, vocab]: the draft token [1] to feed for it; None, decided
        before any draw, where the draft would leave the target's vocabulary or is too unsure. The host waits for that
        decision: once a token, for less than the pass it may save."""
        shown = self._on_target(row, -torch.inf, "amax")
        if self._sampling.greedy:
            favourite = row.argmax(-1)
            found = (self._draft_ids == favourite).nonzero()[:, 0]
            drawn = chain.add(shown, None, self._target_ids[found]) if len(found) else None
            return favourite if drawn is not None else None
        q = self._on_target(self._sampling.probabilities(row), 0.0, "sum")
        mass = q.sum(-1, keepdim=True)
        if bool(mass < LEAST_MASS):
            return None
        drawn = chain.add(shown, q / mass)
        return self._draft_of[drawn] if drawn is not None else None

    def _on_target(self, row: Tensor, empty: float, reduce: str) -> Tensor:
        """Move a row over the draft's vocabulary [1, vocab] to the target's; equal tokens meet by `reduce`."""
        moved = row.new_full((1, len(self._draft_of)), empty)
        index = self._target_ids[None]
        return moved.scatter_reduce_(1, index, row[:, self._draft_ids], reduce)

    def _follow(self, context: list[int]) -> None:
        """Take up what is new in the context, and cut the cache back to what it shares with the text re-encoded."""
        self.truncate(len(context))
        common = min(self._text.extend(context[self._read :]), self.runner.length)
        self._read = len(context)
        for fed, wanted in zip(self._fed[common : self.runner.length], self._text.ids[common:]):
            if fed != wanted:
                break
            common += 1
        self._keep(common)

    def _keep(self, length: int) -> None:
        self.runner.truncate(length)
        del self._fed[length:]

    def repeat(self, recorded: Recorded) -> None:
        self.ending = None  # the lengths are the recorded ones

    def truncate(self, length: int) -> None:
        # Drafted tokens need no care: the next round compares what was fed with the text. Only if text that was
        # committed is taken back, which decoding never does, it is read again from the start.
        if length < self._read:
            self._text.clear()
            self._read = 0

    def reset(self) -> None:
        self._text.clear()
        self._read = 0
        self._keep(0)


class DraftText:
    """The committed text in the draft's tokens.

    When text is added, only a tail is encoded again, back to where the draft's tokenizer would split in any case: so a
    round costs the same however long the text is. Special tokens split too; special tokens the draft does not have
    are left out.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.clear()

    def clear(self) -> None:
        self.ids: list[int] = list(self._translation.lead)
        self._ends = [0] * len(self.ids)  # where each token ends in _bytes
        self._begin_run()

    def _begin_run(self) -> None:
        """Text after a special token, or at the start."""
        self._first = len(self.ids)
        self._bytes = bytearray()
        self._encoded = 0

    @property
    def unfinished(self) -> int:
        """Bytes at the end that begin a character without completing it."""
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self._bytes[-4:]))
        return len(decoder.getstate()[0])

    def extend(self, target_ids: Sequence[int]) -> int:
        """Add target tokens; returns how many ids at the start stand as they were."""
        stable = len(self.ids)
        for token in target_ids:
            piece = self._translation.target_bytes[token]
            if piece is not None:
                self._bytes += piece
            else:
                stable = min(stable, self._encode_tail())
                self._add_special(token)
        return min(stable, self._encode_tail())

    def _add_special(self, token: int) -> None:
        opening = len(self.ids) == len(self._translation.lead) and not self._bytes
        found = self._translation.specials.get(token)
        if found is None or (opening and token == self._translation.target_bos):
            return  # the draft has a beginning of its own, or none
        self.ids.append(found)
        self._ends.append(0)
        self._begin_run()

    def _encode_tail(self) -> int:
        """Encode up to the last complete character; returns how many ids stand unchanged before it."""
        complete = len(self._bytes) - self.unfinished
        if complete <= self._encoded:
            return len(self.ids)
        keep = self._safe_cut()
        start = self._start(keep)
        del self.ids[keep:], self._ends[keep:]
        for piece in self._translation.encode(bytes(self._bytes[start:complete]), beginning=keep == self._first):
            self.ids.append(piece.id)
            self._ends.append(start + piece.end)
        self._encoded = complete
        return keep

    def _safe_cut(self) -> int:
        """How many ids to keep: up to the last that ends a word, else as many as reach and whole characters allow."""
        furthest = max(self._first, len(self.ids) - REACH)
        for keep in range(len(self.ids), furthest - 1, -1):
            at = self._start(keep)
            # Before a space that follows no other, word-splitting tokenizers split whatever comes after.
            if at and self._bytes[at] == 0x20 and not self._bytes[at - 1 : at].isspace():
                return keep
        while furthest > self._first and self._bytes[self._start(furthest)] & 0xC0 == 0x80:
            furthest -= 1
        return furthest

    def _start(self, index: int) -> int:
        """Where the token at this index begins in the bytes of its run."""
        return self._ends[index - 1] if index > self._first else 0
