"""A drafter's passes as programs of the native pass. A head's: one that joins the target's features and runs the
layers over them, one that goes on from its own output, and its vocabulary. A block drafter's: one that injects the
features, and one of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.heads import DraftNetwork, HeadNetwork, Shape
from core.heads.dflash import DFlashNetwork, MarkovHead
from core.runners import Favourites
from core.runners.architecture import (
    HIDDEN,
    QUERIES,
    Attending,
    Block,
    gates_and_ups,
    of_heads,
    padded_heads,
    write_layer,
)
from core.runners.library import native_obstacle
from core.runners.native import turned
from core.runners.products import Packed
from core.runners.program import (
    ADDED,
    AHEAD,
    BLOCK,
    EMBED,
    ENTER,
    GROUP,
    HEADS,
    KEYS,
    LOGITS,
    NORM,
    PRODUCT,
    TILE,
    WIDE,
    Program,
    Weight,
    Workspace,
    filled,
    vector,
)
from core.runners.together import Cache, Rows, run_pass

EMBEDDED, INPUTS, FEATURES = 3, 4, 5
"""Row buffers beside those of `core.runners.architecture`; of features one for each norm."""


def why_not(network: DraftNetwork) -> str | None:
    """None where the native pass can run the drafter, else the reason."""
    config: Any = network.config
    if network.fc.weight.device.type != "cpu":
        return "the head is not on a CPU"
    if network.fc.weight.dtype == torch.float16:
        return "there is no native pass for fp16"
    if config.hidden_size % GROUP or config.target_hidden_size % GROUP:
        return "its build is unusual"
    return native_obstacle()


class Programs:
    """The steps of a drafter's passes over weights of its own, so that the network can go on learning. `starts` are
    where parts of them begin; the vocabulary is the last."""

    def __init__(self, config: Shape, network: DraftNetwork, count: int, parts: int, int4: bool) -> None:
        """Of the columns of logits the first `count` are told; features come in so many `parts`."""
        self.config, self.network, self.count, self._int4 = config, network, count, int4
        self.products: list[Packed] = []
        dtype = network.fc.weight.dtype
        self.work = dtype if dtype.itemsize > 2 else torch.float32
        """The type of outputs and logits; float64 is as exact as float32."""
        self.part = config.feature_width // parts
        hidden, padded = config.hidden_size, filled(config.head_dim, TILE)
        heads = (config.heads + 2 * config.kv_heads) * padded
        self.program = Program(
            [hidden, heads, config.heads * padded, hidden, hidden, *[self.part] * parts],
            width=hidden,
            heads=config.heads,
            key_heads=config.kv_heads,
            size=config.head_dim,
            wide_cache=True,
        )
        self._scale = config.head_dim**-0.5

    def _packed(self, linears: list[Any], rows: Tensor | None = None, columns: Tensor | None = None) -> Weight:
        self.products.append(Packed(linears, 4 if self._int4 else 16, rows, columns))
        return self.products[-1].native

    def _block(self, layer: Any, kind: int = 0) -> Block:
        attention, mlp, config = layer.self_attn, layer.mlp, self.config
        heads = padded_heads(config.heads + 2 * config.kv_heads, config.head_dim)
        of_queries = None if config.head_dim % TILE == 0 else padded_heads(config.heads, config.head_dim)
        modules = [layer.input_layernorm, None, layer.post_attention_layernorm, None]
        modules += [attention.q_norm, attention.k_norm] if config.qk_norm else [None, None]
        norms = [None if each is None else tuple(normed(each).values()) for each in modules]
        return Block(
            kind,
            self._packed([attention.q_proj, attention.k_proj, attention.v_proj], heads),
            self._packed([attention.o_proj], None, of_queries),
            self._packed([mlp.gate_proj, mlp.up_proj], gates_and_ups(config.intermediate_size)),
            self._packed([mlp.down_proj]),
            norms,  # type: ignore[arg-type]
            False,
        )

    @cached_property
    def _alone(self) -> Workspace:
        """Of logits that no pass comes before."""
        return self.workspace()

    def workspace(self) -> Workspace:
        """To be asked for once the program is whole."""
        return Workspace(self.program.widths, self.program.widest)

    def cache(self, windows: Sequence[int | None], capacity: int) -> Cache:
        """Keys and values of one text, whose layers are of kinds with these windows."""
        config, rotary = self.config, self.network.rotary
        kinds = [Attending(window, rotary.inv_freq.float(), rotary.attention_scaling) for window in windows]
        shape = config.depth, config.kv_heads, self.program.padded
        return Cache(shape, True, lambda size: turned(kinds, size), capacity)

    def logits(self, output: Tensor) -> Tensor:
        """What leaves the layers [n, hidden] as logits [n, draft vocabulary]."""
        n, last = len(output), len(self.program.steps)
        rows = Rows(self.program, self._alone, n, self.program.starts[-1], last, given=((HIDDEN, output),), wanted=n)
        found = run_pass(rows).logits
        assert found is not None
        return self.cut(found)

    def cut(self, logits: Tensor) -> Tensor:
        """Without the columns that fill up."""
        return logits[:, : self.count].to(self.work)


def embeddings(weight: Tensor) -> dict[str, Any]:
    """The fields of a step that looks up rows [vocab, width]."""
    narrow = weight.dtype == torch.bfloat16
    return {"table": weight.detach() if narrow else weight.detach().float(), "flags": 0 if narrow else WIDE}


def normed(module: Any) -> dict[str, Any]:
    """The fields of a step that normalises."""
    weight = module.weight.detach()
    return {"norm": vector(weight, filled(len(weight))), "eps": module.eps}


class HeadPrograms(Programs):
    """The steps of an EAGLE-3 head from features to logits: `starts[0]` is where a pass begins whose inputs are joined
    already, `starts[-1]` where the vocabulary does."""

    def __init__(self, network: HeadNetwork, table: Tensor, target_ids: Tensor, int4: bool) -> None:
        config = network.config
        parts = len(config.aux_layers) if config.fc_norm else 1
        super().__init__(network.config, network, len(target_ids), parts, int4)
        program, hidden = self.program, config.hidden_size
        joined = self._packed([network.fc])
        norms = network.fc_norm if config.fc_norm else [network.input_norm if config.norm_before_fc else None]
        for i, norm in enumerate(norms):
            scaled = normed(norm) if norm is not None else {}
            program.add(ENTER, FEATURES + i, at=i * self.part, width=self.part, weight=joined, **scaled)
        program.add(PRODUCT, 0, INPUTS, weight=joined)
        program.starts.append(len(program.steps))
        program.add(EMBED, to=EMBEDDED, width=hidden, factor=1.0, **embeddings(table))
        own_norm = normed(network.midlayer.hidden_norm)
        program.add(NORM, INPUTS, HIDDEN, width=hidden, **(own_norm if config.norm_before_residual else {}))
        for i, layer in enumerate(network.stack):
            block = self._block(layer)
            entering = None
            if i == 0:
                program.add(ENTER, EMBEDDED, width=hidden, weight=block.qkv, **normed(layer.input_layernorm))
                entering = {"source": INPUTS, "at": hidden, "width": hidden, "weight": block.qkv, **own_norm}
            write_layer(program, block, i, self._scale, True, hidden, entering)
        program.starts.append(len(program.steps))
        program.widest = max(program.widest, joined.ins, 2 * hidden)
        vocabulary = self._packed([network.lm_head], torch.arange(len(target_ids)))
        program.add(LOGITS, HIDDEN, width=hidden, weight=vocabulary, **normed(network.norm))


class NativePasses:
    """The keys and values of a head's rows, and passes over them."""

    def __init__(self, programs: HeadPrograms, capacity: int) -> None:
        self._programs = programs
        self._work = programs.workspace()
        self._cache = programs.cache((None,), capacity)

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    def __call__(
        self, ids: Tensor, start: int, rows: Tensor, joined: bool, seen: Tensor | None, wanted: int
    ) -> tuple[Tensor, Tensor, Favourites | None]:
        """A pass of ids [n] whose keys and values are put at row `start`; `rows` are features, or `joined` inputs [n,
        hidden]. Of a tree, each sees those of the last rows that `seen` [n, m] says. Outputs [n, hidden], the logits of
        the last rows `wanted` [wanted, draft vocabulary], and what is likeliest by them."""
        programs, program = self._programs, self._programs.program
        first, last = program.starts[0] if joined else 0, len(program.steps)
        parts = [(INPUTS, rows)] if joined else list(enumerate(rows.split(programs.part, -1), FEATURES))
        asked = Rows(program, self._work, len(ids), first, last, ids, self._cache, start, seen=seen)
        asked.given = parts
        asked.wanted, asked.both, asked.count, asked.shares = wanted, True, programs.count, True
        found = run_pass(asked)
        assert found.hidden is not None and found.logits is not None
        return found.hidden.to(programs.work), programs.cut(found.logits), found.favourites


class BlockPrograms(Programs):
    """The steps of a DFlash or DSpark drafter: those of what is injected; from `starts[0]` on those of a block, whose
    hidden states leave them normed; from `starts[1]` on those of its vocabulary, where that can be a step."""

    def __init__(
        self, network: DFlashNetwork, table: Tensor, factor: float, target: Weight | None, count: int, int4: bool
    ) -> None:
        """Embeddings are multiplied by `factor`; `target`: the matrix of the target's head, for logits by that."""
        super().__init__(network.config, network, count, 1, int4)
        config, program, hidden = network.config, self.program, network.config.hidden_size
        self.windows = tuple(dict.fromkeys(config.windows))
        joined = self._packed([network.fc])
        kinds = [self.windows.index(window) for window in config.windows]
        blocks = [self._block(layer, kind) for layer, kind in zip(network.layers, kinds)]
        program.add(ENTER, FEATURES, width=self.part, weight=joined)
        program.add(PRODUCT, 0, INPUTS, weight=joined)
        program.add(ENTER, INPUTS, width=hidden, weight=blocks[0].qkv, **normed(network.hidden_norm))
        for i, block in enumerate(blocks):
            program.add(HEADS, 0, QUERIES, flags=KEYS, **of_heads(block, i))
        program.starts.append(len(program.steps))
        program.add(EMBED, to=HIDDEN, width=hidden, factor=factor, **embeddings(table))
        for i, (block, causal) in enumerate(zip(blocks, config.causal)):
            write_layer(program, block, i, self._scale, True, hidden, seeing=BLOCK if causal else BLOCK | AHEAD)
        program.add(NORM, HIDDEN, HIDDEN, width=hidden, **normed(network.norm))
        program.starts.append(len(program.steps))
        if config.own_head and config.softcap is None:
            target = self._packed([network.lm_head], torch.arange(count))
        markov = network.markov_head
        self.shares = not config.confidence
        """Whether it is to be told how sure favourites are: what no other part of it says."""
        self.bias = markov and BiasProgram(markov, count, int4, self.shares)
        self.tells = target is not None
        """Whether logits come with a pass."""
        if target is not None:
            program.add(LOGITS, HIDDEN, width=hidden, weight=target)


class BiasProgram:
    """What a DSpark drafter adds to a row's logits by the token before it: the latent, looked up or given, times W2."""

    def __init__(self, head: MarkovHead, count: int, int4: bool, shares: bool) -> None:
        """`shares`: whether a row is told with how sure its favourite is."""
        table, rank = embeddings(head.markov_w1.weight), head.markov_w1.embedding_dim
        self._second = Packed([head.markov_w2], 4 if int4 else 16, torch.arange(count))
        self._count, self._shares = count, shares
        self._program = Program([rank])
        self._program.add(EMBED, width=rank, factor=1.0, **table)
        self._program.add(LOGITS, flags=ADDED, width=rank, weight=self._second.native)
        self._work = Workspace(self._program.widths, self._program.widest)

    def __call__(self, row: Tensor, previous: Tensor, latent: Tensor | None) -> tuple[Tensor, Favourites | None]:
        """Logits [1, draft vocabulary] after the token `previous` [1], and what is likeliest by them. The `latent` [1,
        rank] is looked up where it is that of the token alone."""
        given = () if latent is None else ((0, F.pad(latent, (0, self._program.widths[0] - latent.shape[1]))),)
        asked = Rows(self._program, self._work, 1, len(given), 2, previous, given=given, wanted=1, onto=row)
        asked.count, asked.shares = self._count, self._shares
        found = run_pass(asked)
        assert found.logits is not None
        return found.logits[:, : self._count].to(row.dtype), found.favourites


class NativeBlocks:
    """The keys and values of a text for a block drafter, and passes over them."""

    def __init__(self, programs: BlockPrograms, capacity: int) -> None:
        self._programs, self._work = programs, programs.workspace()
        self._cache = programs.cache(programs.windows, capacity)

    def inject(self, features: Tensor, start: int) -> None:
        """Put what the layers make of features [n, …] at row `start`."""
        program, given = self._programs.program, ((FEATURES, features),)
        run_pass(
            Rows(program, self._work, len(features), 0, program.starts[0], cache=self._cache, start=start, given=given)
        )

    def __call__(self, ids: Tensor, start: int, wanted: int) -> tuple[Tensor, Tensor | None, Favourites | None]:
        """A pass of a block of ids [n] behind the rows before `start`: hidden states [n, hidden], and of the last rows
        `wanted` logits [wanted, draft vocabulary] and what is likeliest by them."""
        programs, program = self._programs, self._programs.program
        asked = Rows(program, self._work, len(ids), program.starts[0], len(program.steps), ids, self._cache, start)
        asked.block = asked.both = True
        asked.wanted = wanted if programs.tells else 0
        asked.count, asked.shares = 0 if programs.bias else programs.count, programs.shares
        found = run_pass(asked)
        assert found.hidden is not None
        logits = None if found.logits is None else programs.cut(found.logits)
        return found.hidden.to(programs.work), logits, found.favourites
