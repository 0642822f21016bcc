"""A trained head for a loaded target: found, checked against it, and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.drafting.methods import BLOCK, HEAD, MTP
from core.errors import UserError
from core.heads import HeadNetwork, Shape
from core.heads.block import FusedHead, fits_int4
from core.heads.checkpoint import Description, bytes_in_memory, describe_head, is_head, load_weights, read_config
from core.heads.dflash import DFlashNetwork
from core.heads.graph import GraphHeadRunner
from core.heads.mtp import MtpHead
from core.heads.parallel import BlockHead, blocks_of, in_blocks, time_blocks
from core.heads.runner import REPEATS, AnyHead, HeadCosts, runner_of, time_head
from core.loading.model import Model
from core.loading.precision import DTYPES, POCKET, choose_format
from core.runners.library import native_obstacle
from core.sampling import likeliest

BUNDLED = POCKET.parent / "heads"
KEPT = 2
"""Runners that are kept for later: those of a race's lanes."""
SAMPLE = 192
"""Tokens of text by which the numbering of a head's layers is settled."""


@dataclass
class Head:
    """A trained head of a target, a block drafter or its own MTP layer, on its device. `layers` are the boundaries of
    the target whose hidden states it reads."""

    name: str
    fused: AnyHead | BlockHead
    precision: str
    notes: list[str] = field(default_factory=list)
    costs: HeadCosts | None = None
    _idle: list[GraphHeadRunner] = field(default_factory=list, repr=False)

    @contextmanager
    def lease(self, room: int = 0) -> Iterator[Any]:
        """A runner with an empty cache for `room` tokens. One whose passes are captured is kept when the block ends,
        unless it grew beyond the usual; why they could not be is noted."""
        if isinstance(self.fused, BlockHead):
            yield blocks_of(self.fused, max(512, room))
            return
        runner = self._idle.pop() if self._idle else runner_of(self.fused)
        if not isinstance(runner, GraphHeadRunner):
            yield runner
            return
        try:
            runner.reserve(room)
            yield runner
        finally:
            runner.truncate(0)
            note = f"The head drafts without CUDA graphs: {runner.failure}."
            if runner.failure and note not in self.notes:
                self.notes.append(note)
            if runner.usual and len(self._idle) < KEPT:
                self._idle.append(runner)

    @property
    def kind(self) -> str:
        if isinstance(self.fused, MtpHead):
            return MTP
        return BLOCK if isinstance(self.fused, BlockHead) or self.fused.drafted > 1 else HEAD

    @property
    def algorithm(self) -> str | None:
        """What other engines call a block drafter of its kind; None for other heads."""
        return None if isinstance(self.fused, MtpHead) else self.fused.config.algorithm

    @property
    def layers(self) -> tuple[int, ...]:
        return self.fused.layers

    def weight_bytes(self) -> int:
        """Bytes of its own weights as they lie in memory; the embedding it borrows is its target's."""
        return self.fused.weight_bytes()

    def parameter_count(self) -> int:
        return self.fused.parameters

    def measure_costs(self, target: Model) -> HeadCosts:
        """What its passes cost here, where they stand in a round; measured once."""
        if self.costs is None:
            self.costs = self.time_passes(target)
        return self.costs

    def time_passes(self, target: Model, repeats: int = REPEATS) -> HeadCosts:
        """The same, measured now."""
        with target.lease() as runner, self.lease() as own:
            context = target.short_context((16,))
            if self.kind == BLOCK:
                return time_blocks(runner, in_blocks(own), context, repeats)
            return time_head(runner, own, context, repeats)


def head_folder(folder: Path) -> Path | None:
    """The folder itself where it holds a trained head and not a model."""
    return folder if is_head(read_config(folder)) else None


def load_head(name: str, folder: Path, target: Model, precision: str = "auto") -> Head:
    """The head of a folder for this target. Raises UserError where it is none, or one for another target."""
    found = describe_head(folder, name)
    candidates = check_target(found, name, target)
    config = found.config(candidates[0])
    precision = head_precision(config, target.device, precision)
    network = load_weights(folder, name, config, DTYPES[precision], target.device)
    fused = running_head(network, target, precision)
    notes = settle_layers(fused, target, candidates) if len(candidates) > 1 else []
    return Head(name, fused, precision, notes)


def fused_head(network: HeadNetwork, target: Model, precision: str) -> FusedHead:
    """A head as passes over this target read it."""
    embedding: Tensor = target.network.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    return FusedHead(network, embedding, target.vocab_size, precision == "int4")


def running_head(network: HeadNetwork | DFlashNetwork, target: Model, precision: str) -> FusedHead | BlockHead:
    """The same of any drafter."""
    if isinstance(network, DFlashNetwork):
        return BlockHead(network, target.network, target.vocab_size, precision == "int4")
    return fused_head(network, target, precision)


def best_precision(config: Shape, device: torch.device) -> str:
    """What a head's passes are fastest in. In 4 bits, its vocabulary's matrix too, the bundled head was accepted at the
    first position in 46 of 100 rounds instead of 47 in 32 bits, in a third of the time."""
    if device.type == "cuda":
        return "bf16"
    return "int4" if device.type == "cpu" and not native_obstacle() and fits_int4(config) else "fp32"


def head_precision(config: Shape, device: torch.device, asked: str) -> str:
    """The precision asked for, auto being the best. Raises UserError where a head cannot be had in it here."""
    best = best_precision(config, device)
    if asked in ("auto", best):
        return best
    if asked in ("nf4", "int4"):
        raise UserError(f"A trained head cannot be had in {asked} here; choose auto, bf16 or fp32 for the draft.")
    return choose_format(asked, device, None).precision


def bytes_needed(name: str, folder: Path, device: torch.device, precision: str = "auto") -> int:
    """What loading the head of a folder takes at most. Raises UserError where it is none."""
    config = describe_head(folder, name).anywhere
    return bytes_in_memory(folder, name, DTYPES[head_precision(config, device, precision)])


def check_target(found: Description, name: str, target: Model) -> list[tuple[int, ...]]:
    """The boundaries of this target that the head may mean. Raises UserError where it cannot be for this target."""
    return fitting_layers(found, name, target.config, target.name)


def fitting_layers(found: Description, name: str, config: Any, target: str) -> list[tuple[int, ...]]:
    """The same by the config of the target's text part."""
    depth = config.num_hidden_layers
    width, vocabulary = found.shape["target_hidden_size"], found.shape["vocab_size"]
    if (width, vocabulary) != (config.hidden_size, config.vocab_size):
        raise UserError(
            f"{name} is a head for another target: one of hidden size {width:,} and {vocabulary:,} tokens, where "
            f"{target} has {config.hidden_size:,} and {config.vocab_size:,}."
        )
    candidates = [layers for layers in found.candidates(depth) if len(layers) == found.features]
    candidates = [layers for layers in candidates if all(0 <= i <= depth for i in layers)]
    if not candidates or len(set(candidates[0])) < len(candidates[0]):
        raise UserError(f"{name} reads {found.features} layers that {target} with its {depth} layers has not.")
    return candidates


def settle_layers(head: FusedHead | BlockHead, target: Model, candidates: list[tuple[int, ...]]) -> list[str]:
    """Where a config leaves open how layers are counted, take the count by which the head is right more often; returns
    a note on it."""
    agreement = {layers: measure_agreement(head, target, layers) for layers in candidates}
    best = max(candidates, key=lambda layers: agreement[layers])
    head.config = head.network.config = replace(head.config, aux_layers=best)  # type: ignore[assignment]
    shares = " and ".join(f"{agreement[layers]:.0%} with {', '.join(map(str, layers))}" for layers in candidates)
    return [
        "Its config leaves open whether its layers are counted by what enters or by what leaves them; its first guess "
        f"was the target's own in {shares}, so it reads what enters {', '.join(map(str, best))}."
    ]


@torch.inference_mode()
def measure_agreement(head: FusedHead | BlockHead, target: Model, layers: tuple[int, ...]) -> float:
    """How often the head's first proposal is the target's choice on a few lines of text, read at these boundaries; of a
    block drafter, after every tenth token."""
    from core.text import read_prompts  # it needs the tokenizers of this package

    text = "\n\n".join(prompt.text for prompt in read_prompts())
    ids = torch.tensor(target.tokenizer.encode(text)[: min(SAMPLE, target.context_length)], device=target.device)
    with target.lease() as runner:
        features = runner.watch(layers)
        choices = likeliest(runner.feed(ids))[1]
        rows = features.take(len(ids) - 1)
    at = torch.arange(1, len(ids), device=ids.device)
    if isinstance(head, BlockHead):
        own, at = blocks_of(head, len(ids)), at[::10]
        starts = [own.length, *at[:-1].tolist()]
        output = torch.cat([own.advance(ids[a + 1 : b + 1], rows[a:b], 1) for a, b in zip(starts, at.tolist())])
    else:
        output = runner_of(head).read(ids[1:], rows)
    guesses = head.target_ids[likeliest(head.logits(output))[1]]
    return (guesses == choices[at]).float().mean().item()


def identify(config: Any, tokenizer: Any) -> dict[str, Any]:
    """What tells a target from others, whatever format it comes from: the entry `target` of a bundled head. `config`
    is that of its text part."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
    }


def bundled_head(config: Any, tokenizer: Any) -> Path | None:
    """The folder of the bundled head that was trained for a target, loaded or only looked at."""
    identity: dict[str, Any] | None = None
    for folder, of_head in bundled_heads():
        wanted = of_head.get("target")
        if isinstance(wanted, dict) and wanted.get("hidden_size") == config.hidden_size:
            identity = identity or identify(config, tokenizer)
            if identity.items() <= wanted.items():
                return folder
    return None


def bundled_heads() -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in sorted(BUNDLED.glob("*/")):
        if is_head(config := read_config(folder)):
            yield folder, config
