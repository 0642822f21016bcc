"""A runner whose passes are captured as CUDA graphs: a pass then costs its bytes, not its hundreds of kernel launches.

What is captured is the fused forward (`core.runners.static_layers`) where there is one for the model, and where it has
been found to answer as transformers does; elsewhere transformers' own modules. One graph per number of fed tokens and
reach of the attention, captured when first needed, kept with the runner. A graph replays on the addresses it was
captured on, so keys, values and inputs stay where they are (`core.runners.static_cache`) and whatever changes between
replays is written there before. Off CUDA, and where a capture fails, the same passes run eagerly: the results are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import first_line
from core.runners import architecture
from core.runners.architecture import rotations
from core.runners.clock import off_the_clock, synchronise, timed_pass
from core.runners.dynamic import DynamicRunner, early_exit_network, unlike
from core.runners.features import Features, Tap
from core.runners.static_cache import Inputs, StaticStore, run_pass
from core.runners.static_layers import FusedPass, StaticNetwork
from core.runners.waits import WaitsRefused

CAPTURED_AT_ONCE, NEWEST = 17, 2
"""Passes over up to this many tokens (the longest automatic draft and the newest token) are captured when first fed if
all their rows are asked for, as a round does; so are those over the newest tokens alone, by which a model drafts. Large
trees, the chunks of a prompt and what is left over of it are captured only when they come again."""
LONGEST_CAPTURED = 80
MOST_CAPTURED = 96
"""Of one network; more stay eager. Rounds need 17 for every doubling of the text, and as many for their trees. They
share their memory (`core.loading.memory.captured_bytes`)."""
Forward = Callable[[StaticStore, Inputs, int], tuple[Tensor, Tensor | None]]
"""Feeds the inputs where the window stands: logits [rows, padded vocab] and the features [n, …] of a pass that notes
them. Captured as it is, or run eagerly."""
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

    Passes run by `fused`, or without it by transformers' modules. `limit` bounds the doubling of the capacity;
    `failure` is the reason in words after a capture failed, when passes have gone on eagerly.
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
        self.fused = fused
        self.kind = self.fused_kind if fused else GraphRunner.kind
        self.vocab_size = vocab_size
        self._store = StaticStore(network, capacity, limit)
        self.device = self._store.device
        self._eager = eager or self.device.type != "cuda"
        self._passes: dict[Any, Passes] = {None: self._new_passes(None)}
        """By what a pass runs: all layers (None), the first so many, or all with the features of some (a tuple)."""
        self._length = self._fed = 0
        self._features: Features | None = None

    @property
    def length(self) -> int:
        return self._length

    @property
    def failure(self) -> str | None:
        return next((passes.failure for passes in self._passes.values() if passes.failure), None)

    @timed_pass
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        logits, features = self.run(self._features.layers if self._features else None, ids, self._length, parents, rows)
        if self._features and features is not None:
            self._features.add(self._length, features)
        self._fed = len(ids)
        self._length += self._fed
        return logits

    def reserve(self, length: int) -> None:
        """Make room for a text of `length` tokens: growing later, on a run's clock, would void every captured pass."""
        if self._store.reserve(length):
            for passes in self._passes.values():
                passes.forget()

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self._features = Features(layers, self._length)
        if self._features.layers not in self._passes:
            self._passes[self._features.layers] = self._new_passes(self._features.layers)
        return self._features

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        if self._features:
            self._features.truncate(self._length)

    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        if list(path) != list(range(len(path))):
            self._store.compact(base, path)
        if self._features:
            self._features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> GraphView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        if layers not in self._passes:
            self._passes[layers] = self._new_passes(layers)
        return GraphView(self, layers)

    def reset(self) -> None:
        self._length = self._fed = 0
        self._features = None
        self._store.clear()

    @torch.inference_mode()
    def run(
        self, layers: Any, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Feed ids [n] at position `start` through the first `layers` layers (None: all; a tuple: all, noting what is
        at these boundaries); logits [rows or n, vocab] and the features [n, …] asked for."""
        self.reserve(start + len(ids))
        logits, features = self._passes[layers](ids, start, parents, rows or len(ids))
        return logits[:, : self.vocab_size], features

    def _new_passes(self, what: int | tuple[int, ...] | None) -> Passes:
        layers, noted = (None, what) if isinstance(what, tuple) else (what, ())
        forward: Forward
        if self.fused:
            forward = FusedPass(self.fused, layers, noted)
        elif noted:
            tap = Tap(self._network, noted)
            forward = ModulesPass(tap.network, tap)
        else:
            forward = ModulesPass(self._network if layers is None else early_exit_network(self._network, layers))
        return Passes(forward, self._store, self._eager)


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
        logits, _ = self._full.run(self.layers, ids, start, parents, rows)
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

    def __call__(self, store: StaticStore, inputs: Inputs, rows: int) -> tuple[Tensor, Tensor | None]:
        logits = run_pass(self._network, store, inputs, rows)
        return logits, self._tap.rows() if self._tap else None


class Passes:
    """The passes of one forward over a static cache, replayed where they are captured and eager elsewhere."""

    def __init__(self, forward: Forward, store: StaticStore, eager: bool) -> None:
        self._forward = forward
        self._store = store
        self._eager = eager
        self._captured: dict[tuple[int, int, bool], Captured] = {}
        self._outputs: list[Tensor] = []
        self._met: set[tuple[int, int, bool]] = set()
        self._side: Any = None
        self.failure: str | None = None

    def __call__(
        self, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Feed ids [n] at position `start`; the last `rows` rows of logits and, where they are noted, the features of
        all rows, the caller's to keep."""
        n, store = len(ids), self._store
        store.window.start.fill_(start)
        store.window.reach = store.reach_for(start + n)
        key = (n, store.window.reach, parents is not None)
        if self._worth_capturing(key, rows) and (captured := self._capture(key, ids, parents)):
            # The next replay of any graph of the pool may overwrite them.
            logits, features = captured.replay(ids, parents)
            return logits[n - rows :].clone(), None if features is None else features.clone()
        return self._forward(store, Inputs(ids, parents), rows)

    def forget(self) -> None:
        """The addresses have changed: captured passes are void."""
        if self._captured:
            synchronise(self._store.device)  # one of them may still be running
        self._captured.clear()
        self._side = None  # a memory pool whose graphs are all gone cannot be captured into again

    def _worth_capturing(self, key: tuple[int, int, bool], rows: int) -> bool:
        if key in self._captured:
            return True
        n = key[0]
        if self._eager or self.failure or n > LONGEST_CAPTURED or len(self._captured) >= MOST_CAPTURED:
            return False
        again = key in self._met
        self._met.add(key)
        return again or n <= NEWEST or n == rows <= CAPTURED_AT_ONCE

    def _capture(self, key: tuple[int, int, bool], ids: Tensor, parents: Sequence[int] | None) -> Captured | None:
        if key not in self._captured:
            try:
                if self._side is None:
                    self._side = torch.cuda.Stream(self._store.device), torch.cuda.graph_pool_handle()
                with off_the_clock(self._store.device):
                    self._captured[key] = self._new_capture(Inputs(ids, parents))
            except Exception as error:  # a kernel that synchronises, no memory left …: eager passes still work
                self.failure = f"its passes cannot be captured: {first_line(error, 160)}"
                self.forget()
                return None
        return self._captured[key]

    def _new_capture(self, inputs: Inputs) -> Captured:
        """All captures leave what they give in the same memory, where it is good until the next replay: otherwise each
        would keep its rows of logits, hundreds of megabytes of all together."""
        n = len(inputs.ids)
        if not self._outputs:
            given = [found for found in self._forward(self._store, inputs, n) if found is not None]
            self._outputs = [found.new_empty(LONGEST_CAPTURED, found.shape[1]) for found in given]
        return Captured(self._forward, self._store, inputs, [output[:n] for output in self._outputs], *self._side)


class Captured:
    """One pass as a CUDA graph, with the inputs and the outputs (logits, and features where they are noted) at their
    fixed addresses."""

    def __init__(
        self, forward: Forward, store: StaticStore, inputs: Inputs, outputs: list[Tensor], stream: Any, pool: Any
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        n = len(inputs.ids)
        self._graph = record(lambda: write(forward(store, inputs, n), outputs), store.device, stream, pool)

    def replay(self, ids: Tensor, parents: Sequence[int] | None) -> tuple[Tensor, Tensor | None]:
        """Logits [n, padded vocab] and the features [n, …] that are noted, good until the next replay."""
        self._inputs.set(ids, parents)
        self._graph.replay()
        return self._outputs[0], self._outputs[1] if len(self._outputs) > 1 else None


def write(given: tuple[Tensor, Tensor | None], outputs: Sequence[Tensor]) -> None:
    """Put what a pass gave where it is to be left."""
    for found, output in zip(given, outputs):
        if found is not None:
            output.copy_(found)


def record(work: Callable[[], object], device: torch.device, stream: Any, pool: Any = None) -> torch.cuda.CUDAGraph:
    """What this work does on a CUDA device as a graph, captured on the stream into the pool, replayed once."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    # The outer context puts the stream back even where ending a failed capture raises.
    with torch.cuda.stream(stream):
        work()  # libraries set themselves up and choose their kernels outside the capture
        with WaitsRefused():
            work()
        # thread_local: other threads may be using the device meanwhile.
        with (
            workspaces_of_its_own(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph.replay()  # the first replay also moves the graph to the device
    return graph


@contextmanager
def workspaces_of_its_own() -> Iterator[None]:
    """cuBLAS then works in memory of the graph's pool. PyTorch otherwise keeps a workspace for each of its 32 streams,
    which come round again, and frees it with any graph that was captured on the stream, under the others that still
    use it (pytorch issue 193402).

    This empties the whole process's table of workspaces, as PyTorch's own graphs of compiled code do around every
    recording. What was in use goes back to its stream's free list, and is taken anew by the next product; only a
    thread between setting its workspace and queueing its product could be hurt, and there is none: those who share a
    device take turns on it (app.serving.device), and a command has one thread."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
