"""Model: weights and tokenizer on a device, loaded once, shared by lanes and visitors.

How many CPU threads a model is run with.

Threads meet at the end of every operation. If another program holds one core for a moment, all wait for it, and a pass
of a small model becomes tens of times slower; so more threads must earn their place by a clear gain.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from core.costs import (
    AT_ONCE,
    CHAIN,
    CONTEXT,
    GROWN,
    MEASURED_LENGTHS,
    REPEATS,
    TREES,
    CostTable,
    between_jumps,
    by_width,
    time_at_once,
    time_exit,
    time_here,
    time_passes,
)
from core.costs.rounds import RoundCosts, exit_costs
from core.errors import UserError
from core.loading.alike import fingerprint, remember, seen_alike
from core.runners.architecture import NativeNetwork, why_not
from core.runners.clock import off_the_clock, timed
from core.runners.dynamic import DynamicRunner, unlike
from core.runners.graph import GraphRunner, fused_for, why_not_device, why_not_static
from core.runners.native import NativeRunner
from core.runners.products import Share
from core.runners.program import team
from core.runners.slots import Slots, pass_behind
from core.runners.static_layers import StaticNetwork
from core.runners.together import apart, beside
from core.runners.widths import USUAL, capacity_for

AnyRunner = DynamicRunner | NativeRunner | GraphRunner


EXIT_REPEATS = 2
KEPT = 4
"""Runners that are kept for later."""
ALL_THREADS = torch.get_num_threads()
"""As many as PyTorch would take, before any model chose fewer."""


@dataclass
class Model:
    """`vocab_size` is the real vocabulary: logits past it are padding and are cut off by the runner. `load_again` gives
    the network as transformers loads it, before the fused forward laid its weights out. `origin` is how the weights
    were quantised in the GGUF file they came from (Q4_1), None where they came from none. `folder` holds the weights:
    with it, that the fused forward was found alike is remembered."""

    name: str
    network: nn.Module
    tokenizer: Any
    precision: str
    stop_ids: frozenset[int]
    context_length: int
    vocab_size: int
    costs: CostTable | None = None
    bandwidth: float | None = None
    """Bytes that its device reads from memory in a second, measured with the costs of its pair."""
    exit_layer: int | None = None
    exit_agreement: float | None = None
    """Share of tokens that the measured exit layer's head and the whole model would choose alike."""
    grown: dict[int, tuple[CostTable, CostTable]] = field(default_factory=dict, repr=False)
    """A few passes behind a short text and behind a longer one, by the binary digits of its length."""
    at_once: dict[int, CostTable] = field(default_factory=dict, repr=False)
    """Passes over the rows of several texts, by how many these are."""
    exits: dict[int, RoundCosts] = field(default_factory=dict, repr=False)
    laid_out: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """How its weights lie, by the kind of runner, as runs tell it: finding that out walks all its modules."""
    threads: int = ALL_THREADS
    notes: list[str] = field(default_factory=list)
    load_again: Callable[[], nn.Module] | None = field(default=None, repr=False)
    origin: str | None = None
    folder: Path | None = None
    _idle: list[AnyRunner] = field(default_factory=list, init=False, repr=False)
    _slots: Slots | None = field(default=None, init=False, repr=False)
    _lock: Any = field(default_factory=Lock, init=False, repr=False)
    _fused: NativeNetwork | StaticNetwork | None = field(default=None, init=False, repr=False)
    _parameters: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        """Choose the kind of runner: on a CPU the fused forward, on CUDA captured passes of it, where they apply; else
        transformers' own forward, captured if that can be, with the reason."""
        self._parameters = published_count(self.network)
        if self.device.type != "cpu":
            self._capture_passes()
        elif reason := why_not(self.network):
            self.fall_back(reason)
        else:
            self.runner_kind = NativeRunner.kind
            self._fused = NativeNetwork(self.network, self.precision == "int4")
            if where := self._unlike_transformers(self._fused):
                self.fall_back(f"the native pass changes the model's answers, at {where}")

    def _capture_passes(self) -> None:
        if reason := why_not_device(self.network):
            if self.precision == "int4" and self.device.type == "cuda":
                raise UserError(f"{self.name} cannot be had in int4: {reason}; choose nf4 or bf16.")
            self.fall_back(reason)
            return
        found = fused_for(self.network, self.precision == "int4")
        if isinstance(found, StaticNetwork):
            self.runner_kind, self._fused = GraphRunner.fused_kind, found
            if told := found.measure_attention(self.context_length):
                self.notes.append(told)
        elif reason := why_not_static(self.network):
            self.fall_back(reason)
        else:
            self.runner_kind = f"{GraphRunner.kind} ({found})"

    def _unlike_transformers(self, fused: NativeNetwork) -> str | None:
        key = fingerprint(self.folder, self.precision) if self.folder else None
        if key and seen_alike(key):
            return None
        ours = NativeRunner(fused, self.vocab_size, capacity=16)
        where = unlike(DynamicRunner(self.network, self.vocab_size), ours, self.vocab_size)
        if key and not where:
            remember(key)
        return where

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def config(self) -> Any:
        return self.network.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @contextmanager
    def lease(self, room: int = 0) -> Iterator[AnyRunner]:
        """A runner with an empty cache, from a small pool; back in the pool when the block ends, unless its cache has
        grown beyond the usual. `room`: how many tokens it is to hold, where that is known. Of several texts that are
        decoded together, and whose passes are captured, each gets a slot beside the others."""
        if (slots := self._slots_beside()) and not slots.full:
            with slots.lease(min(room, self.context_length)) as runner:
                yield runner
            return
        with self._lock:
            runner = self._idle.pop() if self._idle else None
        runner = runner or self._new_runner()
        if isinstance(runner, GraphRunner):
            runner.reserve(min(room, self.context_length))
        try:
            yield runner
        finally:
            runner.reset()
            if isinstance(runner, GraphRunner) and runner.failure:
                self._give_up(runner.fused, runner.failure)
            with self._lock:
                usual = runner.capacity <= capacity_for(USUAL)
                if usual and len(self._idle) < KEPT and self.runner_kind.startswith(runner.kind):
                    self._idle.append(runner)

    def _slots_beside(self) -> Slots | None:
        """Those of the texts that are decoded together with the one that asks."""
        together = beside()
        return together.common(self, self.slots) if together and self.in_slots else None

    @contextmanager
    def slots(self, texts: int) -> Iterator[Slots]:
        """Slots for so many texts at once, of a model with the fused forward over a static cache. Kept for later unless
        they have grown beyond what the pool may hold."""
        fused = self._fused
        assert isinstance(fused, StaticNetwork)
        with self._lock:
            found, self._slots = self._slots, None
        if found is None or found.count < texts or found.fused is not fused:
            found = Slots(self.network, fused, self.vocab_size, texts, self.context_length)
        try:
            yield found
        finally:
            if reason := found.captures.failure:
                self._give_up(fused, reason)
            elif found.count * found.store.capacity <= KEPT * capacity_for(USUAL):
                with self._lock:
                    self._slots = found

    def _give_up(self, fused: StaticNetwork | None, reason: str) -> None:
        """After a failed capture: transformers' own modules instead of the fused forward, and if theirs cannot be
        captured, eagerly."""
        if not fused:
            self.fall_back(reason)
        elif self._fused is fused:
            self.runner_kind, self._fused = f"{GraphRunner.kind} (of the fused forward, {reason})", None
            self.drop_idle()

    def fall_back(self, reason: str) -> None:
        """From the next lease on, transformers' own forward."""
        self.runner_kind = f"{DynamicRunner.kind} ({reason})"
        self._fused = None
        self.drop_idle()

    def drop_idle(self) -> None:
        """Forget the runners kept for later, and with them the memory of their caches."""
        with self._lock:
            self._idle.clear()
            self._slots = None

    def _new_runner(self) -> AnyRunner:
        if isinstance(self._fused, NativeNetwork):
            return NativeRunner(self._fused, self.vocab_size)
        if self._fused or self.runner_kind.startswith(GraphRunner.kind):
            return GraphRunner(self.network, self.vocab_size, limit=self.context_length, fused=self._fused)
        return DynamicRunner(self.network, self.vocab_size)

    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers as they lie in memory (packed 4-bit weights count packed), ties once."""
        held = (*self.network.parameters(), *self.network.buffers())
        tensors = {id(t) if t.is_mkldnn else t.data_ptr(): t for t in held}
        extra = sum(quantisation_bytes(p) for p in self.network.parameters())
        return sum(t.numel() * t.element_size() for t in tensors.values()) + extra

    def parameter_count(self) -> int:
        """Parameters of the model as published: a packed 4-bit weight counts two per byte, ties once."""
        return self._parameters

    def choose_threads(self) -> int:
        """On a CPU: as many threads as a pass over a few tokens gains from; what all its runs then use."""
        if self.device.type == "cpu":
            ids = torch.ones(4, dtype=torch.long)
            with self.lease() as runner:

                def one_pass() -> None:
                    runner.truncate(0)
                    runner.feed(ids)

                def use(count: int) -> None:
                    self.threads = count
                    self.use_threads()

                use(fastest_threads(one_pass, use))
        return self.threads

    def use_threads(self) -> None:
        """Let the calling thread's passes be as the model's are timed. Native ones have a team of threads of their own,
        and PyTorch one beside it: OpenMP's spin for milliseconds after each of its loops, on the team's processors."""
        use_threads(1 if self.exact_rows else self.threads)
        team.size = self.threads

    @contextmanager
    def with_threads(self) -> Iterator[None]:
        """The same for a while."""
        with threads(torch.get_num_threads()):
            self.use_threads()
            yield

    @property
    def exact_rows(self) -> bool:
        """Whether its passes compute each token alike to the last bit, however many they are over."""
        return isinstance(self._fused, NativeNetwork)

    @property
    def passes(self) -> NativeNetwork | StaticNetwork | None:
        """What runs its passes, where that is not transformers' own forward."""
        return self._fused

    @property
    def shares(self) -> bool:
        """Whether its passes are over the rows of all texts that are decoded together."""
        return self._fused is not None

    @property
    def in_slots(self) -> bool:
        """Whether these texts have slots in one static cache."""
        return isinstance(self._fused, StaticNetwork)

    @property
    def pads(self) -> bool:
        """Whether its passes are padded to few widths, as captured ones are."""
        return self.runner_kind.startswith((GraphRunner.kind, GraphRunner.fused_kind))

    @property
    def measured_lengths(self) -> tuple[int, ...]:
        """Tokens of the passes whose costs are measured."""
        return (*MEASURED_LENGTHS, *TREES) if self.pads else MEASURED_LENGTHS

    def measure_costs(self) -> CostTable:
        """What passes over n = 1 … 17 tokens cost; measured once."""
        if self.costs is None:
            table = self.time_passes(lengths=self.measured_lengths)
            lengths, repeats = between_jumps(table)
            table = table | self.time_passes(repeats, lengths) if lengths else table
            self.costs = by_width(table) if self.pads else table
        return self.costs

    def time_passes(self, repeats: int = REPEATS, lengths: Sequence[int] = MEASURED_LENGTHS) -> CostTable:
        """The same, measured now."""
        with self.lease() as runner:
            return time_passes(runner, self.short_context(lengths), repeats, lengths)

    def measure_grown(self, runner: AnyRunner) -> tuple[CostTable, CostTable]:
        """A few passes behind a short text, and behind the one that `runner` holds: measured once for texts of about
        that length. On a CPU both at the same moment, for it may be slower now than when it was asked first; another
        runner of captured passes would cost more than that tells."""
        about = runner.length.bit_length()
        if about not in self.grown:
            with off_the_clock(self.device), apart():
                short = self.measure_costs() if self.pads else self.time_passes(2, GROWN)
                self.grown[about] = short, time_here(runner)
        return self.grown[about]

    def measure_at_once(self, texts: int) -> CostTable:
        """What passes over the rows of so many texts in their slots cost, by the rows of all; measured once."""
        if texts not in self.at_once:
            with self.slots(texts) as slots, ExitStack() as resources:
                context = self.short_context(AT_ONCE)
                runners = [resources.enter_context(slots.lease(context)) for _ in range(texts)]
                self.at_once[texts] = time_at_once(runners, pass_behind, context)
        return self.at_once[texts]

    def measure_exit(self, layers: int) -> RoundCosts:
        """What rounds of early exit after so many layers cost; measured once."""
        if layers not in self.exits:
            self.exits[layers] = exit_costs(*self.time_exit(layers, EXIT_REPEATS, sorted(self.measure_costs().seconds)))
        return self.exits[layers]

    def time_exit(
        self, layers: int, repeats: int, lengths: Sequence[int] = MEASURED_LENGTHS
    ) -> tuple[CostTable, CostTable]:
        """The passes of such rounds, measured now."""
        with self.lease() as runner:
            return time_exit(runner, layers, self.short_context(lengths), repeats, lengths)

    def short_context(self, lengths: Sequence[int]) -> int:
        """How many tokens lie before passes that are timed."""
        return max(1, min(CONTEXT, self.context_length - max(lengths) - CHAIN))


def published_count(network: nn.Module) -> int:
    """Parameters of a network whose layers have not been fused yet; some may have been packed while loading."""
    found = sum(
        p.numel() * 2 if getattr(p, "quant_state", None) is not None else p.numel() for p in network.parameters()
    )
    config: Any = network.config
    tied = network.get_output_embeddings() if config.tie_word_embeddings else None  # type: ignore[operator]
    shares = [module for module in network.modules() if isinstance(module, Share) and module is not tied]
    biases: dict[int, Any] = {id(share.product): share.product.bias for share in shares}
    return (
        found
        + sum(share.in_features * share.out_features for share in shares)
        + sum(len(bias) for bias in biases.values() if bias is not None)
    )


def quantisation_bytes(parameter: Tensor) -> int:
    """Scales of a bitsandbytes 4-bit weight, which live beside the parameter."""
    state = getattr(parameter, "quant_state", None)
    found = 0
    while state is not None:
        found += sum(t.numel() * t.element_size() for t in (state.absmax, state.code) if t is not None)
        state = getattr(state, "state2", None)
    return found


READ_BYTES, READS = 1 << 28, 5
"""More than the caches of processors hold."""


@cache
def read_bandwidth(device: torch.device, count: int, size: int = READ_BYTES) -> float:
    """Bytes a second that a device reads from memory, on so many threads of a CPU: the median of some sums over a
    buffer. Measured once in a process, in a fifth of a second."""
    with threads(count):
        buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        seconds = [timed(device, buffer.sum)[1] for _ in range(READS + 1)]
    return size / median(seconds[1:])


WORTH_IT = 1.3


FEWEST, LONG_ENOUGH = 3, 0.1
"""Times that work is done on so many threads, and the seconds after which more of them would tell little more."""


def fastest_threads(work: Callable[[], object], use: Callable[[int], None], repeats: int = 7) -> int:
    """One thread, unless all of them do `work` at least 1.3 times as fast; OMP_NUM_THREADS decides where it is set.
    `use` sets how many there are."""
    most = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or most == 1:
        return most
    seconds = {1: math.inf, most: math.inf}
    for count in 2 * (1, most):  # loading may leave something busy for a moment
        use(count)
        seconds[count] = min(seconds[count], _time(work, repeats))
    return most if seconds[1] > WORTH_IT * seconds[most] else 1


def use_threads(count: int) -> None:
    """Threads are a setting of the calling thread, and a server's calls come from many."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for the calling thread's work, and then as many as before."""
    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def _time(work: Callable[[], object], repeats: int) -> float:
    samples = []
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        work()
        if repeat >= 2:
            samples.append(time.perf_counter() - start)
        if len(samples) >= FEWEST and sum(samples) > LONG_ENOUGH:
            break
    return median(samples)
