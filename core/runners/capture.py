"""Work replayed as CUDA graphs: the one place that captures, decides what is kept, and checks what it captured.

Work is a function of tensors on the device whose results depend on nothing but these and on memory that stays where it
is (weights, keys and values); done twice with the same it leaves the same. It is captured for a key when the key is
first met. A graph replays on the addresses it was captured on, so what it is given is copied to where its inputs lie,
and all graphs leave what they give in the same memory. A graph is kept if its replay gives what the work itself gives,
for what it was captured with and then elsewhere: a number of the host that was baked in shows the second time. Off
CUDA, and where a capture fails or gives other numbers, the work is done eagerly: the results are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from core.errors import first_line, out_of_memory
from core.runners.clock import off_the_clock, synchronise, timed
from core.runners.waits import WaitsRefused
from core.runners.widths import LONGEST

MOST_CAPTURED = 32
"""Of one runner; of more, the least recently used go: each of its operations takes memory on the device. Rounds of all
widths need 9 for each reach of the text, and as many if they check trees."""
GAVE_OTHER_NUMBERS = "a captured pass gave other numbers than the same pass run eagerly"
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.08}
"""How far results may lie apart, as a share of their norm: rounding, by the precision of the passes; transformers
computes parts of a float64 model in float32, and rounds the residual stream of a bf16 one to bf16 in every layer, which
in 30 layers comes to 0.03."""

TIMED = 5

Work = Callable[..., tuple[Tensor, ...]]
Given = Tensor | int


class Captures:
    """Works of one owner as graphs, that leave up to `most` rows. `failure` is the reason in words, after which all go
    on eagerly."""

    def __init__(self, device: torch.device, eager: bool = False, most: int = LONGEST) -> None:
        self._device, self._most = device, most
        self._eager = eager or not can_capture(device)
        self._held: OrderedDict[Hashable, Captured] = OrderedDict()
        self._outputs: dict[Hashable, Tensor] = {}
        self._side: Any = None
        self.failure: str | None = None

    def __len__(self) -> int:
        return len(self._held)

    @torch.inference_mode()
    def __call__(
        self, key: Hashable, work: Work, given: Sequence[Given], elsewhere: Sequence[Given] = ()
    ) -> tuple[Tensor, ...]:
        """What `work` gives for tensors of the shapes that belong to the key; numbers come to it as int64 tensors [].
        Its results [rows, …], the first of floats, are good until the next call. `elsewhere` is what it may be given
        to be checked once more, where that and a graph that has not moved there do no harm."""
        if self._eager or self.failure:
            return work(*self._on_device(given))
        if key not in self._held:
            with off_the_clock(self._device):
                reason = self._capture_checked(key, work, given, elsewhere)
            if reason:
                self.forget()
                self.failure = reason
                return work(*self._on_device(given))
        self._held.move_to_end(key)
        return self._held[key].replay(given)

    def forget(self) -> None:
        """Addresses have changed, or memory is wanted: what is captured is void."""
        if self._held:
            synchronise(self._device)  # one of them may still be running
        self._held.clear()
        self._outputs.clear()
        self._side = None  # a memory pool whose graphs are all gone cannot be captured into again

    def _on_device(self, given: Sequence[Given]) -> list[Tensor]:
        return [torch.full((), x, device=self._device) if isinstance(x, int) else x for x in given]

    def _capture_checked(
        self, key: Hashable, work: Work, given: Sequence[Given], elsewhere: Sequence[Given]
    ) -> str | None:
        """Capture the work and hold its replays against the work itself; the reason where that fails."""
        expected = [result.clone() for result in work(*self._on_device(given))]
        try:
            captured = self._capture(work, given, expected)
        except Exception as error:  # a kernel that synchronises, no memory left …: the work itself still goes
            return f"its passes cannot be captured: {first_line(error, 160)}"
        if not alike(expected, captured.replay(given)):
            return GAVE_OTHER_NUMBERS
        if elsewhere and not alike(work(*self._on_device(elsewhere)), captured.replay(elsewhere)):
            return GAVE_OTHER_NUMBERS
        self._held[key] = captured
        return None

    def _capture(self, work: Work, given: Sequence[Given], expected: Sequence[Tensor]) -> Captured:
        while len(self._held) >= MOST_CAPTURED:
            self._held.popitem(last=False)
        try:
            return self._recorded(work, given, expected)
        except Exception as error:
            if not (out_of_memory(error) and self._held):
                raise
        self.forget()  # graphs share their memory, so it comes back when all are gone
        return self._recorded(work, given, expected)

    def _recorded(self, work: Work, given: Sequence[Given], expected: Sequence[Tensor]) -> Captured:
        if self._side is None:
            self._side = aside(self._device)
        own = [x.clone() for x in self._on_device(given)]
        outputs = [self._left(place, result) for place, result in enumerate(expected)]

        def write() -> None:
            for result, output in zip(work(*own), outputs):
                output.copy_(result)

        return Captured(record(write, self._device, *self._side), own, tuple(outputs))

    def _left(self, place: int, result: Tensor) -> Tensor:
        """Where graphs leave a result: in the same memory, where it is good until the next replay. Otherwise each would
        keep its rows of logits, hundreds of megabytes of all together."""
        kind, rows = (place, result.dtype, result.shape[1:]), len(result)
        if kind not in self._outputs or len(self._outputs[kind]) < rows:
            self._outputs[kind] = result.new_empty(max(rows, self._most), *result.shape[1:])
        return self._outputs[kind][:rows]


def replayed(device: torch.device, key: Hashable, work: Work, given: Sequence[Given]) -> tuple[Tensor, ...]:
    """What work of nobody's own gives, such as a draw or a verdict: from a graph where the device has them, the
    caller's to keep."""
    if not can_capture(device):
        return work(*given)
    return tuple(result.clone() for result in _of_nobody(device)(key, work, given))


@cache
def _of_nobody(device: torch.device) -> Captures:
    return Captures(device)


@dataclass(frozen=True)
class Captured:
    """A graph with its inputs and outputs at their fixed addresses."""

    graph: Any
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]

    def replay(self, given: Sequence[Given]) -> tuple[Tensor, ...]:
        for held, x in zip(self.inputs, given):
            held.fill_(x) if isinstance(x, int) else held.copy_(x)
        self.graph.replay()
        return self.outputs


def alike(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether the first results [rows, …] are the same to rounding; where the second are the tokens that were drawn
    from them one after the other, up to the first that differs, as after a near-tie."""
    left, right = expected[0], found[0]
    if len(expected) > 1 and not expected[1].is_floating_point():
        agreeing = int((expected[1] == found[1]).cumprod(0).sum()) + 1
        left, right = left[:agreeing], right[:agreeing]
    return torch.equal(left, right) or apart(right, left) <= TOLERANCE.get(
        left.dtype, 0.0
    )  # NaN compares false to everything


def apart(found: Tensor, right: Tensor) -> float:
    """How far results lie apart, as a share of the norm of the right ones."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def aside(device: torch.device) -> tuple[Any, Any]:
    """A stream to capture on, and a pool of memory for what is captured."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


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


def time_replays(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of work as a captured pass would do it, the median of a few; as it is where nothing can be captured."""
    replay = record(work, device, *aside(device)).replay if device.type == "cuda" else work
    seconds = [timed(device, replay)[1] for _ in range(TIMED + 1)]
    return median(seconds[1:])


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
