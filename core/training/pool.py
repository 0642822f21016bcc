"""What the target knew at every token of the dialogues, computed once and kept in files that only grow.

Row t of a dialogue holds the features of token t and the target's distribution of token t + 1: its likeliest draft ids
with their probabilities, and the likeliest id of all. After an interruption the files are cut back to what the index
names, so nothing that was finished is lost and nothing half-written is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.loading.model import Model
from core.training.dialogues import BLOCK, Dialogue
from core.training.kept import require_room

KEPT = 32
"""Draft ids kept of a row of the target's distribution."""
HELD_OUT, HELD_OUT_AT_FIRST = 25, 5
"""Every so many-th dialogue is never trained on; of the first block more, so that there is enough to look at."""
ROWS_A_PASS = 3072


@dataclass(frozen=True)
class Entry:
    """A dialogue in the pool: rows `row` … `row + len(ids) - 2`."""

    ids: list[int]
    start: int
    temperature: float
    row: int

    @property
    def rows(self) -> int:
        return len(self.ids) - 1


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


class Pool:
    """Dialogues with their features, in `folder`. `width` is that of a row of features."""

    def __init__(self, folder: Path, width: int, draft_vocab: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kept = folder, min(KEPT, draft_vocab)
        self._types = {
            "features": (np.dtype(np.int16), width),  # bf16, bit by bit
            "teacher": (np.dtype(np.int32), self._kept),
            "probs": (np.dtype(np.float16), self._kept),
            "best": (np.dtype(np.int32), 1),
        }
        self.entries = self._read_index()
        rows = self.entries[-1].row + self.entries[-1].rows if self.entries else 0
        self._maps: dict[str, np.ndarray] = {}
        for name, (dtype, columns) in self._types.items():
            with self._file(name).open("ab") as file:
                file.truncate(rows * columns * dtype.itemsize)

    def __len__(self) -> int:
        return len(self.entries)

    def bytes(self) -> int:
        return sum(self._file(name).stat().st_size for name in self._types)

    def training(self, first: int) -> list[Entry]:
        """Of the first dialogues those to train on."""
        return [e for i, e in enumerate(self.entries[:first]) if not is_held_out(i) and usable(e)]

    def held_out(self) -> list[Entry]:
        return [e for i, e in enumerate(self.entries) if is_held_out(i) and usable(e)]

    def add(
        self, target: Model, dialogues: Sequence[Dialogue], layers: Sequence[int], draft_ids: Tensor, spare: int = 0
    ) -> None:
        """Run the target over the dialogues and keep what it knew. Raises UserError where the disk cannot take that and
        `spare` bytes more."""
        row_bytes = sum(dtype.itemsize * columns for dtype, columns in self._types.values())
        require_room(self._folder, row_bytes * sum(len(d.ids) for d in dialogues) + spare)
        order = sorted(range(len(dialogues)), key=lambda i: len(dialogues[i].ids))
        found: dict[int, list[np.ndarray]] = {}
        for group in grouped([len(dialogues[i].ids) for i in order], ROWS_A_PASS):
            members = [order[j] for j in group]
            for i, rows in zip(members, self._run(target, [dialogues[i] for i in members], layers, draft_ids)):
                found[i] = rows
        row = self.entries[-1].row + self.entries[-1].rows if self.entries else 0
        files = [self._file(name).open("ab") for name in self._types]
        added: list[Entry] = []
        for i, dialogue in enumerate(dialogues):
            for file, array in zip(files, found[i]):
                file.write(array.tobytes())
            added.append(Entry(dialogue.ids, dialogue.start, dialogue.temperature, row))
            row += len(dialogue.ids) - 1
        for file in files:
            file.close()
        with self._index.open("a", encoding="utf-8") as index:  # last: names only what is whole
            index.write("".join(json.dumps(asdict(entry)) + "\n" for entry in added))
        self.entries += added
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
            counted[b, max(0, entry.start - 2) : n - 1] = True  # a round drafts the answer's first token, too
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
        """One pass over right-padded texts; the arrays of each, in the order of the files."""
        network: Any = target.network
        longest = max(len(d.ids) for d in dialogues)
        ids = torch.tensor([d.ids + [0] * (longest - len(d.ids)) for d in dialogues], device=target.device)
        out = network.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer] for layer in layers], -1).to(torch.bfloat16)
        found = []
        for b, dialogue in enumerate(dialogues):
            n, first = len(dialogue.ids) - 1, dialogue.start - 1
            logits = network.get_output_embeddings()(out.last_hidden_state[b, first:n])[:, : target.vocab_size]
            values, indices = logits[:, draft_ids].float().topk(self._kept)
            probs = (values - logits.float().logsumexp(-1, keepdim=True)).exp()
            rows = [
                features[b, :n].cpu().view(torch.int16).numpy(),
                padded(indices.int(), first),
                padded(probs.half(), first),
                padded(logits.argmax(-1, keepdim=True).int(), first),
            ]
            found.append(rows)
        return found

    @property
    def _index(self) -> Path:
        return self._folder / "dialogues.jsonl"

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.bin"

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            dtype, columns = self._types[name]
            self._maps[name] = np.memmap(self._file(name), dtype, "r").reshape(-1, columns)
        return self._maps[name]

    def _read_index(self) -> list[Entry]:
        if not self._index.exists():
            return []
        lines = self._index.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        whole = whole[: len(whole) // BLOCK * BLOCK]
        self._index.write_text("".join(whole), encoding="utf-8")
        return [Entry(**json.loads(line)) for line in whole]


def is_held_out(index: int) -> bool:
    return index % (HELD_OUT_AT_FIRST if index < BLOCK else HELD_OUT) == 0


def usable(entry: Entry) -> bool:
    """Whether an answer is long enough for a row of it to be predicted."""
    return len(entry.ids) - entry.start >= 3


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
