"""A runner whose passes are captured as CUDA graphs: a pass then costs its bytes, not its hundreds of kernel launches.

What is captured (`core.runners.capture`) is the fused forward (`core.runners.static_layers`) where there is one for the
model, and where it has been found to answer as transformers does; elsewhere transformers' own modules. One graph per
width and reach of a pass (`core.runners.widths`), kept with the runner. Keys and values stay where they are
(`core.runners.static_cache`); when they move, what was captured is void. Off CUDA, and where a capture fails, the same
passes run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from core.errors import first_line
from core.runners import architecture
from core.runners.architecture import rotations
from core.runners.capture import Captures
from core.runners.clock import timed_pass
from core.runners.dynamic import DynamicRunner, early_exit_network, unlike
from core.runners.features import Features, Tap
from core.runners.static_cache import Inputs, StaticStore, run_pass, tree_inputs
from core.runners.static_layers import FusedPass, StaticNetwork
from core.runners.widths import LONGEST, ROUND, width_for

Forward = Callable[[StaticStore, Inputs, int], tuple[Tensor, ...]]
"""Feeds inputs of n rows in all: the last so many rows of logits [rows, padded vocab] and, of a pass that notes them,
the features [n, …]."""
CHANGING = ("dynamic", "longrope")
"""Kinds of rotary positions that a model computes anew, on the host, where the text has grown."""
ATTENTION = {"full_attention", "sliding_attention"}


def why_not(network: Any) -> str | None:
    """None where passes of this network can be captured, as far as one can tell before trying; else the reason."""
    return why_not_device(network) or why_not_static(network)


def why_not_device(network: Any) -> str | None:
    """The same, as far as the device tells."""
    devices = {parameter.device for parameter in network.parameters()}
    if len(devices) > 1:
        return f"the model is spread over {len(devices)} devices"
    device = devices.pop()
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, not {device.type}"
    return None


def why_not_static(network: Any, fused: StaticNetwork | None = None) -> str | None:
    """None where a static cache, and with `fused` the fused forward over it, gives this network's own answers, found
    out by asking it; else the reason."""
    config = network.config.get_text_config(decoder=True)
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION):
        return f"the model has {odd[0].replace('_', ' ')} layers"
    if changing := [kind for kind in rotations(config) if kind in CHANGING]:
        return f"the model's rotary positions are of the kind {changing[0]}, which change with the length of the text"
    way = "the fused forward" if fused else "a static cache"
    try:
        static = GraphRunner(network, config.vocab_size, 16, eager=True, fused=fused)
        where = unlike(DynamicRunner(network, config.vocab_size), static, config.vocab_size)
    except Exception as error:  # whatever a model's code does with a cache it does not know
        return f"the model does not work on {way}: {first_line(error, 160)}"
    return f"{way} changes the model's answers, at {where}" if where else None


def fused_for(network: Any, int4: bool = False) -> StaticNetwork | str:
    """The fused forward of a network over a static cache where it answers as transformers does; else the reason.
    `int4` quantises the weights, for both."""
    if reason := architecture.why_not_weights(network):
        return reason
    try:
        fused = StaticNetwork(network, int4)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a build that its config does not tell of
        return f"the model cannot be fused: {first_line(error, 160)}"
    return why_not_static(network, fused) or fused


class GraphRunner:
    """One static key/value cache over a model; implements `core.runners.Runner`.

    Passes run by `fused`, or without it by transformers' modules. `limit` is the model's context; `failure` is the
    reason in words after a capture failed, when passes have gone on eagerly.
    """

    kind, fused_kind = "graph", "fused-graph"

    def __init__(
        self,
        network: nn.Module,
        vocab_size: int,
        capacity: int = 512,
        limit: int | None = None,
        eager: bool = False,
        fused: StaticNetwork | None = None,
    ) -> None:
        self._network = network
        store = StaticStore(network, capacity, limit)
        self._begin(store, Captures(store.device, eager), vocab_size, fused)
        self._forwards: dict[Any, Forward] = {}
        """By what a pass runs: all layers (None), the first so many, or all with the features of some (a tuple)."""

    def _begin(
        self, store: StaticStore, captures: Captures, vocab_size: int, fused: StaticNetwork | None, slot: int = 0
    ) -> None:
        """As a text without a token, in a slot of a store."""
        self._store, self._captures, self._slot = store, captures, slot
        self.device, self.vocab_size, self.fused = store.device, vocab_size, fused
        self.kind = self.fused_kind if fused else GraphRunner.kind
        self._length = self._fed = 0
        self._features: Features | None = None

    @property
    def capacity(self) -> int:
        return self._store.capacity

    @property
    def length(self) -> int:
        return self._length

    @property
    def failure(self) -> str | None:
        return self._captures.failure

    @timed_pass
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        what = self._features.layers if self._features else None
        logits, *noted = self.run(what, ids, self._length, parents, rows)
        if self._features:
            self._features.add(self._length, *noted)
        self._fed = len(ids)
        self._length += self._fed
        return logits

    def reserve(self, length: int) -> None:
        """Make room for a text of `length` tokens: growing later, on a run's clock, would void every captured pass."""
        if self._store.reserve(length):
            self._captures.forget()

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self._features = Features(layers, self._length)
        return self._features

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        if self._features:
            self._features.truncate(self._length)

    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        if list(path) != list(range(len(path))):
            self._store.compact(base, path, self._slot)
        if self._features:
            self._features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> GraphView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        return GraphView(self, layers)

    def reset(self) -> None:
        self._length = self._fed = 0
        self._features = None
        self._store.clear(self._slot)

    @torch.inference_mode()
    def run(
        self, what: Any, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int | None
    ) -> tuple[Tensor, ...]:
        """Feed ids [n] at position `start` through the first layers (None: all; a tuple: all, noting what is at these
        boundaries); logits [rows or n, vocab] and, where they are noted, the features [n, …], the caller's to keep.

        What rounds feed is captured, and large trees; a longer part of a prompt is not: over so many rows products take
        longer than the host to queue them."""
        n = len(ids)
        captured = n <= ROUND or n == (rows or n) <= LONGEST
        width = width_for(n) if captured else n
        self.reserve(start + (2 * width if captured else n))  # what is captured is checked once behind itself
        reach = self._store.reach_for(start + n)
        tree = () if parents is None else tree_inputs(tuple(parents), width, self.device)
        padded = ids if width == n else pad(ids, (0, width - n))
        work = partial(self._pass, what, reach)
        if captured:
            given, behind = (padded, start, *tree), (padded, start + width, *tree)
            logits, *noted = self._captures((what, width, reach, bool(tree)), work, given, behind)
            logits, noted = logits[n - (rows or n) : n].clone(), [found[:n].clone() for found in noted]
        else:
            logits, *noted = work(padded, torch.full((), start, device=self.device), *tree, rows=rows)
        return logits[:, : self.vocab_size], *noted

    def _pass(
        self,
        what: Any,
        reach: int,
        ids: Tensor,
        start: Tensor,
        depth: Tensor | None = None,
        within: Tensor | None = None,
        rows: int | None = None,
    ) -> tuple[Tensor, ...]:
        if what not in self._forwards:
            self._forwards[what] = self._new_forward(what)
        depth = self._store.order(len(ids)) if depth is None else depth[None]
        inputs = Inputs(ids[None], start[None], start[None], reach, depth, None if within is None else within[None])
        return self._forwards[what](self._store, inputs, rows or len(ids))

    def _new_forward(self, what: int | tuple[int, ...] | None) -> Forward:
        if self.fused:
            return FusedPass(self.fused, what)
        if isinstance(what, tuple):
            tap = Tap(self._network, what)
            return ModulesPass(tap.network, tap)
        return ModulesPass(self._network if what is None else early_exit_network(self._network, what))


class GraphView:
    """Self-speculation on a static cache: the first layers draft, and the full pass writes the same keys again."""

    kind = "early exit"

    def __init__(self, full: GraphRunner, layers: int) -> None:
        self._full = full
        self.layers = layers
        self.device = full.device
        self._length = full.length

    @property
    def length(self) -> int:
        # Where the full pass has been, the first layers have been too.
        return max(self._length, self._full.length)

    @timed_pass
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        start = self.length
        (logits,) = self._full.run(self.layers, ids, start, parents, rows)
        self._length = start + len(ids)
        return logits

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("an early-exit view drafts chains; the target's runner keeps the verified path")


class ModulesPass:
    """A pass through transformers' own modules; `tap` tells the hidden states of a tapped network."""

    def __init__(self, network: nn.Module, tap: Tap | None = None) -> None:
        self._network, self._tap = network, tap

    def __call__(self, store: StaticStore, inputs: Inputs, rows: int) -> tuple[Tensor, ...]:
        logits = run_pass(self._network, store, inputs, rows)
        return (logits, self._tap.rows()) if self._tap else (logits,)
