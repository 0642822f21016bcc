"""The native pass of the Llama family and its kin for CPUs: one call of our own code a pass (`native.cpp`).

What a row comes to, to the last bit, does not depend on the rows beside it, so text written speculatively with greedy
choices is the text of plain decoding. Results agree with transformers' to rounding; in 4 bits activations are rounded
to 8 bits by groups of 32.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from core.runners.architecture import HIDDEN, Attending, NativeNetwork
from core.runners.clock import timed_pass
from core.runners.features import Features
from core.runners.program import Program, Turning, Workspace, chain, run, team, tree


class NativeRunner:
    """One key/value cache over a NativeNetwork; implements `core.runners.Runner`."""

    kind = "native"

    def __init__(self, network: NativeNetwork, vocab_size: int, capacity: int = 512) -> None:
        self._net = network
        self._vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._length = self._fed = 0
        program = network.program()
        self._work = Workspace(program.widths, program.widest)
        self._capacity = 0
        self._grow(capacity)
        self.exit: NativeView | None = None
        self.features: Features | None = None

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def length(self) -> int:
        return self._length

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        n, start = len(ids), self._length
        program = self._net.program(self.features.layers if self.features else ())
        found = None
        if self.features:
            found = torch.empty(n, len(self.features.layers) * self._net.width, dtype=torch.float32)
        resumable = self.exit and parents is None and not self.features
        held = self.exit.take(ids, start) if self.exit and resumable else None
        if held is None:
            logits = self._pass(program, 0, len(program.steps), ids, start, parents, rows or n, found)
        else:
            at, resumed = self.exit.layers, len(held)  # type: ignore[union-attr]
            middle = program.starts[at]
            if resumed < n:
                self._pass(program, 0, middle, ids[resumed:], start + resumed, None, 0)
                held = torch.cat([held, self._hidden(n - resumed)])
            logits = self._pass(program, middle, len(program.steps), ids, start, None, rows or n, hidden=held)
        if self.features and found is not None:
            self.features.add(start, found.to(self._net.dtype))
        self._fed = n
        self._length += n
        return logits

    def watch(self, layers: Sequence[int]) -> Features:
        """From now on, until `reset`, keep the hidden states at these boundaries for every token fed."""
        self.features = Features(layers, self._length)
        return self.features

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        if self.features:
            self.features.truncate(self._length)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        base = self._length - self._fed
        if list(path) != list(range(len(path))):
            index = base + torch.tensor(list(path))
            self._cache[..., base : base + len(path), :] = self._cache.index_select(3, index)
        if self.features:
            self.features.keep(path)
        self._fed = len(path)
        self._length = base + self._fed

    def view(self, layers: int) -> NativeView:
        """The first `layers` layers as a runner of their own, over the same weights, keys and values."""
        self.exit = NativeView(self, layers)
        return self.exit

    def reset(self) -> None:
        self._length = self._fed = 0
        self.exit = self.features = None

    def through(
        self, layers: int, ids: Tensor, start: int, parents: Sequence[int] | None, rows: int
    ) -> tuple[Tensor, Tensor]:
        """What leaves the first `layers` layers [n, width] for tokens at position `start`, and the logits that the head
        gives the last `rows` of it."""
        program = self._net.program()
        end = program.starts[layers]
        self._pass(program, 0, end, ids, start, parents, 0)
        hidden = self._hidden(len(ids))
        head = program.starts[-1]
        return hidden, self._pass(program, head, len(program.steps), ids, start, parents, rows)

    def _hidden(self, n: int) -> Tensor:
        return self._work.buffers[HIDDEN][:n].clone()

    def _pass(
        self,
        program: Program,
        first: int,
        last: int,
        ids: Tensor,
        start: int,
        parents: Sequence[int] | None,
        wanted: int,
        noted: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run steps of a program for ids [n] behind `start` tokens; logits of the last `wanted`. `noted` takes the
        hidden states that the program puts out; `hidden` is the residual stream to go on from."""
        n = len(ids)
        if start + n > self._capacity:
            self._grow(max(start + n, 2 * self._capacity))
        each = self._work.fit(n, team.threads())
        if hidden is not None:
            self._work.buffers[HIDDEN][:n] = hidden
        rows, cells = (chain(start, n), None) if parents is None else tree(parents, start)
        logits = torch.empty(wanted, program.outs, dtype=torch.float32)
        each.first, each.last, each.wanted = first, last, wanted
        each.ids, each.rows = ids.data_ptr(), rows.buffer_info()[0]
        each.cells = cells.buffer_info()[0] if cells else None
        each.caches, each.capacities = self._caches.buffer_info()[0], self._capacities.buffer_info()[0]
        each.turnings, each.logits = ctypes.addressof(self._turnings), logits.data_ptr()
        if noted is not None:
            each.output, each.stride = noted.data_ptr(), noted.shape[1]
        run(program, each)
        return logits[:, : self._vocab_size]

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        net, program = self._net, self._net.program()
        dtype = torch.float32 if net.wide_cache else torch.bfloat16
        cache = torch.zeros(net.depth, 2, net.kv_heads, capacity, program.padded, dtype=dtype)
        if self._capacity:
            cache[..., : self._capacity, :] = self._cache
        self._cache, self._capacity = cache, capacity
        self._caches, self._capacities = array("Q", [cache.data_ptr()]), array("q", [capacity])
        self._rotations = [rotation(kind, capacity) for kind in net.kinds]
        turnings = [
            Turning(cos.data_ptr(), sin.data_ptr(), kind.window or 0)
            for kind, (cos, sin) in zip(net.kinds, self._rotations)
        ]
        self._turnings = (Turning * len(turnings))(*turnings)


def rotation(kind: Attending, capacity: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [capacity, half a head] of the positions, in float32."""
    angles = torch.outer(torch.arange(capacity).float(), kind.frequencies)
    return (angles.cos() * kind.scaling).contiguous(), (angles.sin() * kind.scaling).contiguous()


class NativeView:
    """Early exit over a NativeRunner: drafts with the first layers, and the full pass resumes from where they end."""

    kind = "early exit"

    def __init__(self, full: NativeRunner, layers: int) -> None:
        self._full = full
        self.layers = layers
        self.device = full.device
        self._length = full.length
        self._ahead: list[tuple[Tensor, Tensor]] = []
        """Ids and hidden states fed since the full pass: what it need not compute again."""

    @property
    def length(self) -> int:
        # Where the full pass has been, the first layers have been too.
        return max(self._length, self._full.length)

    @timed_pass
    @torch.inference_mode()
    def feed(self, ids: Tensor, parents: Sequence[int] | None = None, *, rows: int | None = None) -> Tensor:
        start = self.length
        hidden, logits = self._full.through(self.layers, ids, start, parents, rows or len(ids))
        self._ahead.append((ids, hidden))
        self._length = start + len(ids)
        return logits

    def take(self, ids: Tensor, start: int) -> Tensor | None:
        """Hidden states of a prefix of ids [n] at position `start`, if the view has just fed exactly those."""
        if not self._ahead or self._length <= start:
            return None
        fed = torch.cat([part for part, _ in self._ahead])
        hidden = torch.cat([part for _, part in self._ahead])
        self._ahead.clear()
        begins = self._length - len(fed)
        if begins != start or len(fed) > len(ids) or not torch.equal(ids[: len(fed)], fed):
            return None
        return hidden if len(fed) < len(ids) else hidden[:-1]

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        self._ahead.clear()

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("an early-exit view drafts chains; the target's runner keeps the verified path")
