"""Features: the hidden states of a target that a trained head drafts from, for the tokens of a runner's cache.

A layer's number is a boundary, as transformers numbers `hidden_states`: i is what enters layer i, and the number of
layers is what leaves the last one, before the final norm.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Features:
    """Rows of features, one for every token of a runner's cache from position `start` on, until they are taken.

    A row [len(layers) · width] has the hidden states at the boundaries `layers`, in the order asked for. They come from
    the very passes that fed the tokens, and go with them: the runner rolls them back as it does keys and values.
    """

    def __init__(self, layers: Sequence[int], start: int = 0) -> None:
        self.layers = tuple(layers)
        self.start = self.end = start
        """The positions of the first row, and after the last."""
        self._parts: list[Tensor] = []

    def add(self, at: int, rows: Tensor) -> None:
        """Rows [n, …] of the n tokens just fed at position `at`."""
        if at != self.end:
            self.truncate(at)
        self._parts.append(rows)
        self.end += len(rows)

    def truncate(self, length: int) -> None:
        """Forget what belongs to tokens past `length`."""
        if length <= self.start:
            self._parts, self.start, self.end = [], length, length
        while (surplus := self.end - length) > 0:
            last = self._parts.pop()
            self.end -= len(last)
            if surplus < len(last):
                self._parts.append(last[: len(last) - surplus])
                self.end = length

    def keep(self, path: Sequence[int]) -> None:
        """Of the tree just added keep the rows at these indices, in this order."""
        last = self._parts[-1]
        self.end += len(path) - len(last)
        if list(path) == list(range(len(path))):
            self._parts[-1] = last[: len(path)]
        else:
            self._parts[-1] = last[torch.tensor(list(path), device=last.device)]

    def take(self, end: int) -> Tensor:
        """The rows [end - start, …] of the tokens before position `end`, one or more, which are then gone from here."""
        taken: list[Tensor] = []
        while self.start < end:
            part = self._parts.pop(0)
            used = min(len(part), end - self.start)
            if used < len(part):
                self._parts.insert(0, part[used:])
            taken.append(part[:used])
            self.start += used
        return taken[0] if len(taken) == 1 else torch.cat(taken)


class Tap:
    """A twin of a causal model of transformers: it shares every weight, and notes the hidden states at boundaries."""

    def __init__(self, network: nn.Module, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._found: dict[int, Tensor] = {}
        name, decoder, stack = decoder_stack(network)
        depth = len(stack)
        twins = list(stack)
        for boundary in sorted(set(layers)):
            at = min(boundary, depth - 1)
            twins[at] = self._noting(twins[at], boundary, leaving=boundary == depth)
        self.network = shallow(network)
        decoder_twin = shallow(decoder)
        decoder_twin._modules[name] = nn.ModuleList(twins)
        self.network._modules[network.base_model_prefix] = decoder_twin  # type: ignore[index]

    def rows(self) -> Tensor:
        """The features [n, len(layers) · width] of the pass just run."""
        states = [self._found[boundary] for boundary in self._layers]
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)

    def _noting(self, layer: nn.Module, boundary: int, leaving: bool) -> nn.Module:
        twin = copy.copy(layer)

        def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._found[boundary] = args[0][0]

        def left(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._found[boundary] = (output if isinstance(output, Tensor) else output[0])[0]

        twin._forward_pre_hooks = OrderedDict(twin._forward_pre_hooks)
        twin._forward_hooks = OrderedDict(twin._forward_hooks)
        twin.register_forward_hook(left) if leaving else twin.register_forward_pre_hook(entering)
        return twin


def decoder_stack(network: nn.Module) -> tuple[str, nn.Module, nn.ModuleList]:
    """The layers of a causal model of transformers, with the module that holds them and their name in it."""
    decoder: nn.Module = getattr(network, network.base_model_prefix)  # type: ignore[arg-type]
    name, stack = next((k, m) for k, m in decoder._modules.items() if isinstance(m, nn.ModuleList))
    return name, decoder, stack


def shallow(module: nn.Module) -> nn.Module:
    """A copy that shares all submodules and weights; exchanging one of them leaves the original as it is."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin.__dict__.pop("forward", None)  # accelerate's, over several GPUs: bound to the whole model
    return twin
