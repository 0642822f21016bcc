"""What the target knew at every token of the dialogues, computed once and kept in files that only grow.

Row t of a dialogue holds the features of token t and the target's distribution of token t + 1: its likeliest draft ids
with their probabilities, and the likeliest id of all. The dialogues lie beside as they were written; after an
interruption the files are cut back to what is whole, so nothing that was finished is lost and nothing half-written is
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.loading.model import Model
from core.progress import never
from core.runners import prefill
from core.training.dialogues import Dialogue, as_line, usable
from core.training.kept import require_room

KEPT = 32
"""Draft ids kept of a row of the target's distribution."""
ROWS_A_PASS, ROWS_A_PASS_ON_CUDA = 512, 8192
"""Of a portion: what the target reads at once."""


@dataclass(frozen=True)
class Entry:
    """A dialogue that was read: its features are rows `row` … `row + rows - 1`."""

    dialogue: Dialogue
    row: int

    @property
    def ids(self) -> list[int]:
        return self.dialogue.ids

    @property
    def start(self) -> int:
        return self.dialogue.start

    @property
    def rows(self) -> int:
        return self.dialogue.rows

    @property
    def counted(self) -> int:
        """Rows whose first pass predicts a token of the answer."""
        return self.rows - 1 - max(0, self.start - 2)


@dataclass(frozen=True)
class Batch:
    """B texts padded to T rows. features [B, T, width]; tokens [B, T + steps], the token after each row's; teacher
    [B, T + steps, KEPT] draft indices and probabilities of the token after that, best [B, T + steps] its likeliest id;
    counted [B, T + steps] where that token belongs to an answer."""

    features: Tensor
    tokens: Tensor
    teacher: Tensor
    probs: Tensor
    best: Tensor
    counted: Tensor

    @property
    def first(self) -> int:
        """The first row that counts in any of the texts."""
        return int(self.counted.any(0).int().argmax())


class Pool:
    """Dialogues with their features, in `folder`. `width` is that of a row of features; `texts` are all dialogues,
    `entries` those that were read. `rows` are read at once.

    Texts are read a portion at a time, and portions never reach from one call of `write` into the next, so that what
    is read together does not hang on when it was read."""

    def __init__(self, folder: Path, width: int, draft_vocab: int, rows: int = ROWS_A_PASS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kept, self._rows = folder, min(KEPT, draft_vocab), rows
        self._types = {
            "features": (np.dtype(np.int16), width),  # bf16, bit by bit
            "teacher": (np.dtype(np.int32), self._kept),
            "probs": (np.dtype(np.float16), self._kept),
            "best": (np.dtype(np.int32), 1),
        }
        self.texts: list[Dialogue] = []
        self._ends: list[int] = []
        """How many texts there were after each call of `write`."""
        for dialogues in self._read_texts():
            self.texts += dialogues
            self._ends.append(len(self.texts))
        self.entries: list[Entry] = []
        self._maps: dict[str, np.ndarray] = {}
        self._cut_back()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def writes(self) -> int:
        """How often texts were added."""
        return len(self._ends)

    def bytes(self) -> int:
        return sum(self._file(name).stat().st_size for name in self._types)

    def training(self, first: int) -> list[Entry]:
        """Of the first dialogues those to train on."""
        return [e for e in self.entries[:first] if not e.dialogue.held_out and usable(e.dialogue)]

    def held_out(self) -> list[Entry]:
        return [e for e in self.entries if e.dialogue.held_out and usable(e.dialogue)]

    def write(self, dialogues: Sequence[Dialogue]) -> None:
        """Add texts, to be read in time."""
        lines = [as_line(dialogue) for dialogue in dialogues]
        require_room(self._folder, sum(map(len, lines)))
        with self._texts_file.open("a", encoding="utf-8") as file:
            file.write("".join(lines) + "\n")  # an empty line: they are all there
        self.texts += dialogues
        self._ends.append(len(self.texts))

    def portion(self, after: int) -> int:
        """Where the portion ends that begins after so many texts."""
        end = next(end for end in self._ends if end > after)
        last, longest = after, 0
        while last < end:
            longest = max(longest, self.texts[last].rows + 1)
            if last > after and longest * (last + 1 - after) > self._rows:
                break
            last += 1
        return last

    def read(self, target: Model, layers: Sequence[int], draft_ids: Tensor, spare: int = 0) -> None:
        """Run the target over the next portion of texts and keep what it knew. Raises UserError where the disk cannot
        take that and `spare` bytes more."""
        first = len(self.entries)
        dialogues = self.texts[first : self.portion(first)]
        row_bytes = sum(dtype.itemsize * columns for dtype, columns in self._types.values())
        require_room(self._folder, row_bytes * sum(d.rows for d in dialogues) + spare)
        found = self._run(target, dialogues, layers, draft_ids)
        for i, name in enumerate(self._types):
            with self._file(name).open("ab") as file:
                file.write(b"".join(arrays[i].tobytes() for arrays in found))
        self._append(dialogues)
        self._maps.clear()

    def batch(self, entries: Sequence[Entry], steps: int, device: torch.device) -> Batch:
        """Texts side by side, with room for `steps` recurrent rows after each."""
        size, width = len(entries), max(entry.rows for entry in entries)
        arrays = {
            name: np.zeros((size, width + steps, columns), dtype) for name, (dtype, columns) in self._types.items()
        }
        tokens = np.zeros((size, width + steps), np.int64)
        counted = np.zeros((size, width + steps), bool)
        for b, entry in enumerate(entries):
            n = entry.rows
            tokens[b, :n] = entry.ids[1:]
            arrays["features"][b, :n] = self._map("features")[entry.row : entry.row + n]
            for name in ("teacher", "probs", "best"):  # row t predicts token t + 2: what the target knew at t + 1
                arrays[name][b, : n - 1] = self._map(name)[entry.row + 1 : entry.row + n]
            counted[b, n - 1 - entry.counted : n - 1] = True  # a round drafts the answer's first token, too
        features = torch.from_numpy(arrays["features"]).view(torch.bfloat16)[:, :width]
        return Batch(
            features.to(device),
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(arrays["teacher"]).long().to(device),
            torch.from_numpy(arrays["probs"]).float().to(device),
            torch.from_numpy(arrays["best"][..., 0]).long().to(device),
            torch.from_numpy(counted).to(device),
        )

    @torch.inference_mode()
    def _run(
        self, target: Model, dialogues: Sequence[Dialogue], layers: Sequence[int], draft_ids: Tensor
    ) -> list[list[np.ndarray]]:
        """The arrays of each text, in the order of the files."""
        read = one_by_one if target.exact_rows else side_by_side
        found = []
        for dialogue, (features, logits) in zip(dialogues, read(target, dialogues, layers)):
            values, indices = logits[:, draft_ids].float().topk(self._kept)
            probs = (values - logits.float().logsumexp(-1, keepdim=True)).exp()
            first = dialogue.start - 1
            rows = [
                features.to(torch.bfloat16).cpu().view(torch.int16).numpy(),
                padded(indices.int(), first),
                padded(probs.half(), first),
                padded(logits.argmax(-1, keepdim=True).int(), first),
            ]
            found.append(rows)
        return found

    @property
    def _texts_file(self) -> Path:
        return self._folder / "texts.jsonl"

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            dtype, columns = self._types[name]
            self._maps[name] = np.memmap(self._file(name), dtype, "r").reshape(-1, columns)
        return self._maps[name]

    def _append(self, dialogues: Iterable[Dialogue]) -> None:
        for dialogue in dialogues:
            last = self.entries[-1] if self.entries else None
            self.entries.append(Entry(dialogue, last.row + last.rows if last else 0))

    def _read_texts(self) -> list[list[Dialogue]]:
        """What each call of `write` wrote; the file is cut to that."""
        if not self._texts_file.exists():
            return []
        content = self._texts_file.read_text(encoding="utf-8")
        whole = content[: content.rfind("\n\n") + 2] if "\n\n" in content else ""
        if whole != content:
            self._texts_file.write_text(whole, encoding="utf-8")
        return [[Dialogue(**json.loads(line)) for line in part.splitlines()] for part in whole.split("\n\n")[:-1]]

    def _cut_back(self) -> None:
        """To the portions that are whole in every file."""
        sizes = {name: dtype.itemsize * columns for name, (dtype, columns) in self._types.items()}
        there = {name: self._file(name).stat().st_size if self._file(name).exists() else 0 for name in sizes}
        whole = min(there[name] // size for name, size in sizes.items())
        rows = 0
        while len(self.entries) < len(self.texts):
            portion = self.texts[len(self.entries) : self.portion(len(self.entries))]
            rows += sum(dialogue.rows for dialogue in portion)
            if rows > whole:
                break
            self._append(portion)
        rows = self.entries[-1].row + self.entries[-1].rows if self.entries else 0
        for name, size in sizes.items():
            with self._file(name).open("ab") as file:
                file.truncate(rows * size)


def one_by_one(target: Model, dialogues: Sequence[Dialogue], layers: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each text the features [n, width] of all but its last token, and the logits [answer, vocab] after those from
    the one before its answer on; by the passes that decode."""
    for dialogue in dialogues:
        n, first = len(dialogue.ids) - 1, dialogue.start - 1
        with target.lease(n) as runner:
            features = runner.watch(layers)
            prefill(runner, dialogue.ids[:first], never)
            logits = runner.feed(torch.tensor(dialogue.ids[first:n]))
            yield features.take(n), logits


def side_by_side(
    target: Model, dialogues: Sequence[Dialogue], layers: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """As `one_by_one`, by one pass over right-padded texts."""
    network: Any = target.network
    longest = max(len(d.ids) for d in dialogues)
    ids = torch.tensor([d.ids + [0] * (longest - len(d.ids)) for d in dialogues], device=target.device)
    out = network.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[layer] for layer in layers], -1)
    for b, dialogue in enumerate(dialogues):
        n, first = len(dialogue.ids) - 1, dialogue.start - 1
        logits = network.get_output_embeddings()(out.last_hidden_state[b, first:n])
        yield features[b, :n], logits[:, : target.vocab_size]


def padded(rows: Tensor, first: int) -> np.ndarray:
    """Rows of an answer, with zeros for those of the prompt."""
    array = rows.cpu().numpy()
    return np.concatenate([np.zeros((first, *array.shape[1:]), array.dtype), array])


def grouped(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Ascending lengths in groups of at most `rows` rows, padded to the longest of the group."""
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        if groups and (len(groups[-1]) + 1) * length <= rows:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
