"""Running what drafts a block in one pass: DFlash and DSpark beside the target's embedding and head, and P-EAGLE.

Their runners share a contract: `read` appends stable rows, of which there is one for every token of the text but the
newest, and `advance` appends the newest of them and drafts behind them. No row of a block stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.costs import table_of
from core.heads import KeysValues
from core.heads.block import bytes_of
from core.heads.dflash import DFlashNetwork
from core.heads.graph import GraphHeadRunner
from core.heads.native import BlockPrograms, NativeBlocks, why_not
from core.heads.runner import REPEATS, ROWS, HeadCosts, HeadRunner
from core.runners import Favourites, favourites_of
from core.runners.clock import timed, timed_pass
from core.runners.products import Packed, Share
from core.runners.program import Weight
from core.sampling import likeliest


class BlockHead:
    """The weights of a DFlash or DSpark drafter, shared by all its runners, with what it borrows of its target; `int4`
    rounds them to 4 bits where the native pass runs it.

    Draft tokens past the target's real vocabulary are cut off: they are padding, and can never be right."""

    def __init__(self, network: DFlashNetwork, target: Any, vocab_size: int, int4: bool = False) -> None:
        self.network, self.config, self.vocab_size = network, network.config, vocab_size
        self.device, self.dtype = network.fc.weight.device, network.fc.weight.dtype
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self._real = int((network.draft_ids < vocab_size).sum())  # its ids ascend: padding is at the end
        self.target_ids = network.draft_ids[: self._real]
        table = network.embed_tokens if self.config.own_embedding else target.get_input_embeddings()
        self._embed: Callable[[Tensor], Tensor] = table
        self._head = None if self.config.own_head else head_of(target)
        self._odds = self._parts_of_odds()
        self._int4 = int4
        self.native: BlockPrograms | None = None
        if not why_not(network):
            shared = None if self.config.own_head else packed_head(target)
            self.native = BlockPrograms(network, table.weight.detach(), scale_of(table), shared, self._real, int4)

    @property
    def layers(self) -> tuple[int, ...]:
        """The boundaries of the target whose hidden states it reads."""
        return self.config.aux_layers

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.config.drafted

    def weight_bytes(self) -> int:
        """Of its own weights as passes read them."""
        return bytes_of(self.network, self._int4 and self.native is not None)

    def embed(self, ids: Tensor) -> Tensor:
        return self._embed(ids).to(self.device, self.dtype)

    @timed_pass
    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] as logits [n, draft vocabulary], without the bias by the token before."""
        return self.native.logits(hidden) if self.native and self.native.tells else self.network_logits(hidden)

    def network_logits(self, hidden: Tensor) -> Tensor:
        """The same by the network itself."""
        return self.network.logits(hidden.to(self.dtype), self._head)[:, : self._real]

    @timed_pass
    @torch.inference_mode()
    def after(
        self, row: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [1, draft vocabulary] of a row with hidden state [1, hidden] after the token `previous` [1], and the
        state for the row after it; `state`: that of the row before."""
        if self.network.markov_head is None:
            return row, None
        latent, state = self.network.markov_head.step(hidden.to(self.dtype), previous, state)
        return row + self.network.bias(latent)[:, : self._real], state

    @torch.inference_mode()
    def confidence(self, hidden: Tensor, previous: Tensor) -> float | None:
        """How likely a row's token is to be accepted, by the head trained for it: of what comes before it alone."""
        if self._odds is None:
            return None
        of_row, of_token = self._odds
        return (hidden[0].to(of_row.dtype).dot(of_row) + of_token[previous[0]]).sigmoid().item()

    def _parts_of_odds(self) -> tuple[Tensor, Tensor] | None:
        """Of the log-odds that a token is accepted: the weights of its row [hidden], and what the token before it adds
        [vocab], which then need not be asked row by row."""
        confidence, markov = self.network.confidence_head, self.network.markov_head
        if confidence is None:
            return None
        weight, bias = (parameter.detach().float() for parameter in confidence.proj.parameters())
        of_row, of_latent = weight[0].tensor_split([self.config.hidden_size])
        if markov is None or not self.config.confidence_with_markov:
            return of_row, bias.expand(self.config.vocab_size)
        return of_row, markov.markov_w1.weight.detach().float() @ of_latent + bias

    def on_target(self, rows: Tensor, fill: float) -> Tensor:
        """Rows [n, draft vocabulary] over the target's vocabulary [n, vocab], `fill` for what it cannot say."""
        full = torch.full((len(rows), self.vocab_size), fill, dtype=rows.dtype, device=rows.device)
        return full.index_copy_(1, self.target_ids, rows)


def head_of(target: Any) -> Callable[[Tensor], Tensor]:
    """A causal model's own way from hidden states to logits, in its own precision: multipliers and bounds included."""
    config, head = target.config.get_text_config(decoder=True), target.get_output_embeddings()
    embedding = target.get_input_embeddings().weight
    bound = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def logits(hidden: Tensor) -> Tensor:
        rows = head(hidden.to(embedding.dtype)).to(hidden.device)
        rows = rows if scale == 1 else rows * scale
        return rows if bound is None else torch.tanh(rows / bound) * bound

    return logits


def scale_of(table: Any) -> float:
    """What a model multiplies the rows of its table of embeddings by, in the table's own type."""
    scale = getattr(table, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(table.weight.dtype))


def packed_head(target: Any) -> Weight | None:
    """The matrix of a causal model's head as the native pass reads it, where the model itself runs by that."""
    head = target.get_output_embeddings()
    return head.product.native if isinstance(head, Share) and isinstance(head.product, Packed) else None


class Blocks:
    """One key/value cache over a DFlash or DSpark drafter: what its layers make of the target's features of every token
    before the anchor. `length` counts these rows; row i stands at position i."""

    favourites: Favourites | None = None
    """Of the rows whose logits are asked for next, where the pass tells and nothing is added to them."""

    def __init__(self, head: BlockHead) -> None:
        self.head = head
        self.device = head.device
        self.length = 0

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    @timed_pass
    @torch.inference_mode()
    def read(self, ids: Tensor, features: Tensor) -> Tensor:
        """Inject the target's features [n, …] of n tokens, and return them: rows of the text have no output. `ids` are
        those of the tokens after them, which no row needs."""
        self._inject(features)
        return features

    @timed_pass
    @torch.inference_mode()
    def advance(self, ids: Tensor, features: Tensor, width: int) -> Tensor:
        """Inject the features [n, …] of the newest n tokens but one, of which `ids` [n] are the tokens after them, the
        last being the anchor; then the hidden states [width, hidden] of the rows that draft after it."""
        self._inject(features)
        config = self.head.config
        rows = config.block_size
        if all(config.causal):  # no row sees those behind it
            rows = config.first + width
        block = ids.new_full((rows,), config.mask_id)
        block[0] = ids[-1]
        return self._block(block, config.first, width)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `BlockHead.logits`."""
        return self.head.logits(hidden)

    def after(
        self, row: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `BlockHead.after`."""
        return self.head.after(row, hidden, previous, state)

    def confidence(self, hidden: Tensor, previous: Tensor) -> float | None:
        """As `BlockHead.confidence`."""
        return self.head.confidence(hidden, previous)

    def _inject(self, features: Tensor) -> None:
        raise NotImplementedError

    def _block(self, ids: Tensor, first: int, width: int) -> Tensor:
        """Of a block of ids [n] the hidden states [width, hidden] of rows from `first` on."""
        raise NotImplementedError


class NativeBlockRunner(Blocks):
    """By the native pass: one call of our own code injects features, another has a block with its logits."""

    def __init__(self, head: BlockHead, capacity: int = 512) -> None:
        super().__init__(head)
        assert head.native is not None
        self._programs = head.native
        self._passes = NativeBlocks(head.native, capacity)
        self._told: tuple[Tensor, Tensor] | None = None
        """What the newest block gave, and its logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Those of the newest block came with it."""
        if self._told is not None and hidden is self._told[0]:
            return self._told[1]
        self.favourites = None
        return self.head.logits(hidden)

    @timed_pass
    @torch.inference_mode()
    def after(
        self, row: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What is likeliest then is told, too."""
        bias, markov, latent = self._programs.bias, self.head.network.markov_head, None
        if bias is None or markov is None:
            return row, None
        if markov.kind != "vanilla":
            latent, state = markov.step(hidden.to(self.head.dtype), previous, state)
        logits, self.favourites = bias(row, previous, latent)
        return logits, state

    def _inject(self, features: Tensor) -> None:
        self._passes.inject(features, self.length)
        self.length += len(features)

    def _block(self, ids: Tensor, first: int, width: int) -> Tensor:
        hidden, logits, told = self._passes(ids, self.length, len(ids) - first)
        hidden = hidden[first : first + width]
        self._told = None if logits is None else (hidden, logits[:width])
        self.favourites = None if self.head.network.markov_head else told
        return hidden


class BlockRunner(Blocks):
    """By the network itself."""

    def __init__(self, head: BlockHead, capacity: int = 512) -> None:
        super().__init__(head)
        self._capacity = 0
        self._grow(capacity)

    def _inject(self, features: Tensor) -> None:
        network, start, end = self.head.network, self.length, self.length + len(features)
        self._reserve(end)
        context = network.inject(features.to(self.head.dtype))
        rotation = self._cos[None, start:end], self._sin[None, start:end]
        for held, made in zip(self._cache, network.keys_values(context[None], rotation)):
            for place, new in zip(held, made):
                place[:, start:end] = new[0]
        self.length = end

    def _block(self, ids: Tensor, first: int, width: int) -> Tensor:
        config, start, rows = self.head.config, self.length, len(ids)
        self._reserve(start + rows)
        masks = [self._mask(start, rows, *each) for each in zip(config.causal, config.windows)]
        rotation = self._cos[None, start : start + rows], self._sin[None, start : start + rows]
        hidden = self.head.network(self.head.embed(ids)[None], rotation, self._seen, masks)
        return hidden[0, first : first + width]

    def _seen(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Put a block's behind those of the text, where the next ones overwrite them."""
        held, start = self._cache[layer], self.length
        end = start + keys.shape[2]
        held[0, :, start:end], held[1, :, start:end] = keys[0], values[0]
        begin = self._begin(start, self.head.config.windows[layer])
        return held[None, 0, :, begin:end], held[None, 1, :, begin:end]

    def _mask(self, start: int, rows: int, causal: bool, window: int | None) -> Tensor | None:
        if not causal:
            return None
        text = start - self._begin(start, window)
        return torch.ones(rows, text + rows, dtype=torch.bool, device=self.device).tril(text)

    @staticmethod
    def _begin(anchor: int, window: int | None) -> int:
        return 0 if window is None else max(0, anchor - window)

    def _reserve(self, length: int) -> None:
        if length > self._capacity:
            self._grow(max(length, 2 * self._capacity))

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        config, like = self.head.config, torch.empty(0, dtype=self.head.dtype, device=self.device)
        shape = config.depth, 2, config.kv_heads, capacity, config.head_dim
        cache = torch.zeros(shape, dtype=self.head.dtype, device=self.device)
        if self._capacity:
            cache[:, :, :, : self._capacity] = self._cache
        self._cache, self._capacity = cache, capacity
        positions = torch.arange(capacity, device=self.device)
        self._cos, self._sin = (part[0] for part in self.head.network.rotation(positions, like))


class ParallelRunner:
    """P-EAGLE over a runner of its head: rows of tokens not known yet go behind the newest, in the same pass."""

    def __init__(self, runner: HeadRunner | GraphHeadRunner) -> None:
        self.runner = runner
        self.head = runner.head
        self.device = runner.device

    @property
    def length(self) -> int:
        return self.runner.length

    def truncate(self, length: int) -> None:
        self.runner.truncate(length)

    def read(self, ids: Tensor, features: Tensor) -> Tensor:
        """Append stable rows, as a runner of heads does."""
        return self.runner.read(ids, features)

    def advance(self, ids: Tensor, features: Tensor, width: int) -> Tensor:
        """Append stable rows: ids [n] and the target's features [n, …] of the token before each; the outputs [width,
        hidden] of the newest and of the masks behind it."""
        network, config, stable = self.head.network, self.head.config, self.length + len(ids)
        assert config.mask_id is not None
        masks = ids.new_full((width - 1,), config.mask_id)
        unknown = network.mask_hidden.detach()[0].expand(width - 1, -1).to(features.dtype)
        output = self.runner.read(torch.cat([ids, masks]), torch.cat([features, unknown]), width)
        self.truncate(stable)
        return output[len(ids) - 1 :]

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        return self.runner.logits(output)

    @property
    def favourites(self) -> Favourites | None:
        return favourites_of(self.runner)

    def after(
        self, row: Tensor, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of a row after the token before it, of which they know nothing."""
        return row, None

    def confidence(self, hidden: Tensor, previous: Tensor) -> None:
        """It was trained for none."""


def blocks_of(head: BlockHead, capacity: int = 512) -> Blocks:
    """A new runner with an empty cache."""
    return (NativeBlockRunner if head.native else BlockRunner)(head, capacity)


def in_blocks(runner: Any) -> Blocks | ParallelRunner:
    """A runner of a drafter that drafts in blocks, to be used as such."""
    return runner if isinstance(runner, Blocks) else ParallelRunner(runner)


@torch.inference_mode()
def time_blocks(target: Any, runner: Blocks | ParallelRunner, context: int, repeats: int = REPEATS) -> HeadCosts:
    """Blocks drafted behind passes of the target's runner, which push the drafter out of the processor's caches: `read`
    has a whole block with its logits, behind n new rows, and `draft` what drawing n tokens adds."""
    head = runner.head
    features = target.watch(head.layers)

    def ones(n: int) -> Tensor:
        return torch.ones(n, dtype=torch.long, device=runner.device)

    target.feed(ones(context), rows=1)
    runner.read(ones(context), features.take(context))
    read: dict[int, list[float]] = {n: [] for n in ROWS}
    draft: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(repeats + 1):
        for n in ROWS:
            target.feed(ones(n))
            rows = features.take(context + n)
            (hidden, logits), seconds = timed(runner.device, lambda rows=rows, n=n: _block(runner, ones(n), rows))
            read[n].append(seconds)
            _, seconds = timed(
                runner.device, lambda found=(logits, hidden), n=n: [_draw(runner, *found) for _ in range(n)]
            )
            draft[n].append(seconds)
            runner.truncate(context)
            target.truncate(context)
    return HeadCosts(table_of(read), table_of(draft))


def _block(runner: Blocks | ParallelRunner, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    hidden = runner.advance(ids, features, runner.head.drafted)
    return hidden, runner.logits(hidden)


def _draw(runner: Blocks | ParallelRunner, logits: Tensor, hidden: Tensor) -> None:
    previous = runner.head.target_ids[:1]
    row, _ = runner.after(logits[:1], hidden[:1], previous, None)
    runner.confidence(hidden[:1], previous)
    if favourites_of(runner) is None:
        likeliest(row)
