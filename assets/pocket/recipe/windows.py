"""Token streams cut into training windows that begin at the start of a line."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .corpus import read_corpus


def encode_corpus(file: Path, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Every document followed by end-of-text, as one uint16 array."""
    tokenizer.model_max_length = 10**9
    pieces: list[int] = []
    texts = [document.text for document in read_corpus(file)]
    for ids in tokenizer(texts, add_special_tokens=False).input_ids:
        pieces += ids
        pieces.append(tokenizer.eos_token_id)
    return np.array(pieces, dtype=np.uint16)


def find_line_starts(tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions that follow a newline or an end of text; and those of them that are not indented or blank."""
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    after = np.flatnonzero((tokens == newline) | (tokens == tokenizer.eos_token_id)) + 1
    starts = np.concatenate(([0], after[after < len(tokens)]))
    spaces = [i for piece, i in tokenizer.get_vocab().items() if not piece.strip("ĠĊĉ")]
    return starts, starts[~np.isin(tokens[starts], spaces)]


class Windows:
    """Windows of `length + 1` tokens over a stream; an epoch covers the stream once, in a shuffled order."""

    def __init__(self, tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.tokens = tokens
        self.seed = seed
        self.starts, self.outer = find_line_starts(tokens, tokenizer)
        self.orders: dict[tuple[int, int], np.ndarray] = {}

    def cut(self, length: int, epoch: int) -> np.ndarray:
        """First positions of an epoch's windows. A window reaches at least to where the next one begins, which is at
        an outer line (a def, a class, an import) if the last quarter of the window has one, else at any line."""
        rng = np.random.default_rng((self.seed, length, epoch))
        position = int(self.outer[rng.integers(min(len(self.outer), 20))])
        found = []
        while position + length + 1 <= len(self.tokens):
            found.append(position)
            limit = position + length
            outer = int(self.outer[np.searchsorted(self.outer, limit, side="right") - 1])
            line = int(self.starts[np.searchsorted(self.starts, limit, side="right") - 1])
            following = outer if outer > limit - length // 4 else line
            position = following if following > position else limit
        return rng.permutation(np.array(found))

    def order(self, length: int, epoch: int) -> np.ndarray:
        """`cut`, remembered."""
        if (length, epoch) not in self.orders:
            self.orders[length, epoch] = self.cut(length, epoch)
        return self.orders[length, epoch]

    def take(self, length: int, count: int, cursor: dict[str, int]) -> tuple[Tensor, Tensor]:
        """The next (inputs, labels), both [count, length]; `cursor` remembers epoch and place for each length."""
        rows = []
        while len(rows) < count:
            epoch, place = cursor.get(f"{length}.epoch", 0), cursor.get(f"{length}.place", 0)
            order = self.order(length, epoch)
            if place >= len(order):
                cursor[f"{length}.epoch"], cursor[f"{length}.place"] = epoch + 1, 0
                continue
            rows.append(self.tokens[order[place] : order[place] + length + 1])
            cursor[f"{length}.place"] = place + 1
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        return batch[:, :-1], batch[:, 1:]
