"""Token ids to text as it streams: a character is shown once, when it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from core.records import Token

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, so also the most tokens one can be split over."""


class _Window(NamedTuple):
    """The last few ids; the first `read` of them are shown already."""

    ids: list[int]
    read: int


class Detokenizer:
    """Gives each token the text it adds after those before it.

    Bytes of an unfinished character are held back and shown with the token that completes it. Only a window of ids
    is decoded, so a step costs the same however long the text has grown; decoding it with and without the newest
    token, from the same start, leaves a tokenizer's treatment of a first token out of the difference.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._alone: dict[int, str] = {}
        recent = list(prompt_ids[-8:])
        self._window = _Window(recent, len(recent))

    def push(self, token_id: int) -> str:
        """Commit a token and return the text it adds."""
        text, self._window = self._step(self._window, token_id)
        return text

    def peek(self, token_ids: list[int], parents: list[int | None]) -> list[str]:
        """The text each drafted token would add after its parent (None: after what is committed)."""
        texts: list[str] = []
        windows: list[_Window] = []
        for token_id, parent in zip(token_ids, parents):
            text, window = self._step(self._window if parent is None else windows[parent], token_id)
            texts.append(text)
            windows.append(window)
        return texts

    def alone(self, token_id: int) -> str:
        """The text of a token apart from any context, unfinished characters shown as such."""
        if token_id not in self._alone:
            self._alone[token_id] = self._decode([token_id])
        return self._alone[token_id]

    def visible(self, tokens: Iterable[Token]) -> str:
        """The output text of kept tokens: everything but special tokens."""
        return "".join(token.text for token in tokens if token.id not in self._special)

    def _step(self, window: _Window, token_id: int) -> tuple[str, _Window]:
        if token_id in self._special:
            return self._decode([token_id]), _Window([], 0)
        ids = [*window.ids, token_id]
        held = len(ids) - window.read
        after = self._decode(ids)
        open_tail = 0
        if after.endswith(REPLACEMENT):
            if held < LONGEST_CHARACTER:
                return "", _Window(ids, window.read)
            open_tail = self._unfinished(ids, after)
        before, shown = self._decode(ids[: window.read]), self._decode(ids[: len(ids) - open_tail])
        return shown[len(before) :], _Window(ids[window.read :], held - open_tail)

    def _unfinished(self, ids: list[int], text: str) -> int:
        """How many of the last ids may be the beginning of one character, although broken bytes precede them."""
        tails = range(LONGEST_CHARACTER - 1, 0, -1)
        return next((n for n in tails if self._decode(ids[:-n]) + REPLACEMENT == text), 0)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
