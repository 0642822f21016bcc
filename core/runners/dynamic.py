"""Any causal model of transformers as a runner, and the early-exit view of it.

Also whether another runner answers as transformers' own forward does: asked once, before it is relied on. A fault
seldom shows in the first tokens of a text: positions and masks go wrong behind a cache, in trees, after a roll back. So
the check reads a prompt in two chunks, goes on, rolls back, judges a tree and keeps one path of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from core.runners import Runner
from core.runners.capture import TOLERANCE, apart
from core.runners.clock import timed_pass
from core.runners.features import Features, Tap, decoder_stack, shallow
from core.runners.host import ids_on, tree_depths, tree_mask


class DynamicRunner:
    """Any causal model of transformers, one eager forward per call, a cache that grows.

    The cache is made without a config on purpose: every layer then keeps all keys and values, sliding-window layers
    too (their mask still applies the window), so that rolling back is exact for them.
    """

    kind = "dynamic"
    capacity = 0
    """Tokens that a cache has room for when it is empty: this one's is made anew."""

    def __init__(self, network: nn.Module, vocab_size: int) -> None:
        self._network: Any = network
        self._vocab_size = vocab_size
        self._cache = DynamicCache()
        self._length = 0
        self._fed = 0
        self._features: tuple[Features, Tap] | None = None
        self.device: torch.device = next(network.parameters()).device

    @property
    def length(self) -> int:
        return self._length

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        crop(self._cache, self._length)  # an early-exit view may have run ahead in the first layers
        network = self._features[1].network if self._features else self._network
        logits = forward(network, self._cache, self._length, ids, parents, rows)
        if self._features:
            features, tap = self._features
            features.add(self._length, tap.rows().to(self.device))
        self._fed = len(ids)
        self._length += self._fed
        return logits[:, : self._vocab_size].to(self.device)

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self._features = Features(layers, self._length), Tap(self._network, layers)
        return self._features[0]

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        crop(self._cache, self._length)
        if self._features:
            self._features[0].truncate(self._length)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        end = base + len(path)
        layer: Any
        for layer in self._cache.layers:
            index = base + ids_on(layer.keys.device, list(path))
            for kept in (layer.keys, layer.values):
                kept[:, :, base:end] = kept.index_select(2, index)
            layer.keys, layer.values = layer.keys[:, :, :end], layer.values[:, :, :end]
        if self._features:
            self._features[0].keep(path)
        self._fed, self._length = len(path), end

    def view(self, layers: int) -> EarlyExitView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        return EarlyExitView(self, layers)

    def reset(self) -> None:
        self._cache = DynamicCache()
        self._length = self._fed = 0
        self._features = None


class EarlyExitView:
    """Self-speculation: the first layers of a target, its own final norm and head, as a drafting runner.

    It writes the keys and values of the first layers where the target keeps its own; they are the target's own, so
    whatever either has fed of the committed text, the other need not feed again in those layers.
    """

    kind = "early exit"

    def __init__(self, full: DynamicRunner, layers: int) -> None:
        self._full = full
        self._network: Any = early_exit_network(full._network, layers)
        self.layers = layers
        self.device = full.device

    @property
    def length(self) -> int:
        return self._full._cache.get_seq_length(0)

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        logits = forward(self._network, self._full._cache, self.length, ids, parents, rows)
        return logits[:, : self._full._vocab_size].to(self.device)

    def truncate(self, length: int) -> None:
        crop(self._full._cache, length, self.layers)

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("an early-exit view drafts chains; the target's runner keeps the verified path")


def forward(
    network: Any, cache: DynamicCache, length: int, ids: Tensor, parents: Sequence[int] | None, rows: int | None
) -> Tensor:
    """Append ids [n] to a cache of `length` tokens; logits [rows or n, padded vocab]."""
    n = len(ids)
    depth = tree_depths(parents, n)
    return network(
        input_ids=ids[None],
        position_ids=ids_on(ids.device, depth)[None] + length,
        attention_mask=None if parents is None else tree_mask(network, parents, length, ids.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=n if rows is None else rows,
    ).logits[0]


def crop(cache: DynamicCache, length: int, layers: int | None = None) -> None:
    """Shorten the first `layers` layers (all by default) to at most `length` tokens."""
    layer: Any
    for layer in cache.layers[:layers]:
        surplus = layer.get_seq_length() - length
        if surplus > 0:
            layer.crop(-surplus)


def early_exit_network(network: nn.Module, layers: int) -> nn.Module:
    """A shallow copy of a causal model that stops after its first layers; shares every weight, changes nothing."""
    prefix: str = network.base_model_prefix  # type: ignore[assignment]
    name, decoder, stack = decoder_stack(network)
    short, decoder = shallow(network), shallow(decoder)
    config = copy.copy(network.config)
    decoder._modules[name] = nn.ModuleList(list(stack)[:layers])
    config.num_hidden_layers = layers  # type: ignore[union-attr]
    short._modules[prefix] = decoder
    short.config = decoder.config = config  # type: ignore[assignment]
    return short


PROMPT, CHUNK, BACK, SINGLY = 20, 13, 16, 4
"""Tokens of a prompt, how many of them are in its first chunk, how far it is rolled back, and how many are then fed one
at a time: the rounding of a single row of a small model in int4 may be five times that of most."""
TREE, PATH = (-1, 0, 0, 1, 1, 2), (0, 2, 5)
NOISE = 3
"""How many times what the model's own logits change by when a prompt is read in two chunks."""


@torch.inference_mode()
def unlike(own: Runner, ours: Runner, vocabulary: int) -> str | None:
    """None where the logits of `ours` are those of `own` to rounding, else where they part. Both start empty; what is
    fed stays in their caches."""
    ids = (torch.arange(PROMPT + len(TREE), device=own.device) * 7 + 1) % vocabulary
    prompt, nodes = ids[:PROMPT], ids[PROMPT:]

    def after_roll_back(runner: Runner) -> Tensor:
        runner.truncate(BACK)
        rows = [runner.feed(nodes[at : at + 1]) for at in range(SINGLY)]
        runner.truncate(BACK + 1)
        return torch.cat(rows)

    def after_tree(runner: Runner) -> Tensor:
        runner.keep(PATH)
        return runner.feed(nodes[:2])

    asked: tuple[tuple[str, Callable[[Runner], Tensor]], ...] = (
        ("the first tokens of a text", lambda runner: runner.feed(prompt[:CHUNK])),
        ("a second chunk of a prompt", lambda runner: runner.feed(prompt[CHUNK:])),
        ("tokens after a roll back", after_roll_back),
        ("a tree", lambda runner: runner.feed(nodes, TREE)),
        ("the text after a tree", after_tree),
    )
    whole = own.feed(prompt)
    own.truncate(CHUNK)
    rounding = apart(own.feed(prompt[CHUNK:]), whole[CHUNK:])
    own.truncate(0)
    allowed = max(TOLERANCE.get(whole.dtype, 0.0), NOISE * rounding)
    for where, answer in asked:
        if not apart(answer(ours), answer(own)) <= allowed:  # not `>`: NaN compares false to everything
            return where
    return None
