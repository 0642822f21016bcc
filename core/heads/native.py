"""A head's passes as programs of the native pass: one that joins the target's features and runs the layers over them,
one that goes on from its own output, and its vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.heads import HeadNetwork
from core.runners import Favourites
from core.runners.architecture import HIDDEN, Attending, Block, gates_and_ups, padded_heads, write_layer
from core.runners.library import native_obstacle
from core.runners.native import turned
from core.runners.products import Packed
from core.runners.program import (
    EMBED,
    ENTER,
    GROUP,
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


def why_not(network: HeadNetwork) -> str | None:
    """None where the native pass can run the head, else the reason."""
    config = network.config
    if network.fc.weight.device.type != "cpu":
        return "the head is not on a CPU"
    if network.fc.weight.dtype == torch.float16:
        return "there is no native pass for fp16"
    if config.hidden_size % GROUP or config.target_hidden_size % GROUP:
        return "its build is unusual"
    return native_obstacle()


class HeadPrograms:
    """The steps from features to logits over weights of its own, so that the network can go on learning: `starts[0]` is
    where a pass begins whose inputs are joined already, `starts[-1]` where the vocabulary does."""

    def __init__(self, network: HeadNetwork, table: Tensor, target_ids: Tensor, int4: bool) -> None:
        config = network.config
        self.config, self.network, self._int4 = config, network, int4
        self.products: list[Packed] = []
        dtype = network.fc.weight.dtype
        self.work = dtype if dtype.itemsize > 2 else torch.float32
        """The type of outputs and logits; float64 is as exact as float32."""
        hidden, padded = config.hidden_size, filled(config.head_dim, TILE)
        heads = (config.heads + 2 * config.kv_heads) * padded
        parts = len(config.aux_layers) if config.fc_norm else 1
        self.part = config.feature_width // parts
        widths = [hidden, heads, config.heads * padded, hidden, hidden, *[self.part] * parts]
        program = Program(
            widths,
            width=hidden,
            heads=config.heads,
            key_heads=config.kv_heads,
            size=config.head_dim,
            wide_cache=True,
        )
        self.table = table if table.dtype == torch.bfloat16 else table.float()

        def normed(module: Any) -> dict[str, Any]:
            weight = module.weight.detach()
            return {"norm": vector(weight, filled(len(weight))), "eps": config.rms_norm_eps}

        joined = self._packed([network.fc])
        norms = network.fc_norm if config.fc_norm else [network.input_norm if config.norm_before_fc else None]
        for i, norm in enumerate(norms):
            scaled = normed(norm) if norm is not None else {}
            program.add(ENTER, FEATURES + i, at=i * self.part, width=self.part, weight=joined, **scaled)
        program.add(PRODUCT, 0, INPUTS, weight=joined)
        program.starts.append(len(program.steps))
        wide = 0 if self.table.dtype == torch.bfloat16 else WIDE
        program.add(EMBED, to=EMBEDDED, flags=wide, width=hidden, factor=1.0, table=self.table)
        own_norm = normed(network.midlayer.hidden_norm)
        program.add(NORM, INPUTS, HIDDEN, width=hidden, **(own_norm if config.norm_before_residual else {}))
        scale = config.head_dim**-0.5
        for i, layer in enumerate(network.stack):
            block = self._block(layer, normed)
            entering = None
            if i == 0:
                program.add(ENTER, EMBEDDED, width=hidden, weight=block.qkv, **normed(layer.input_layernorm))
                entering = {"source": INPUTS, "at": hidden, "width": hidden, "weight": block.qkv, **own_norm}
            write_layer(program, block, i, scale, True, hidden, entering)
        program.starts.append(len(program.steps))
        program.widest = max(program.widest, joined.ins, 2 * hidden)
        vocabulary = self._packed([network.lm_head], torch.arange(len(target_ids)))
        program.add(LOGITS, HIDDEN, width=hidden, weight=vocabulary, **normed(network.norm))
        self.program = program
        self._work = Workspace(program.widths, program.widest)
        self.count = len(target_ids)

    def _packed(self, linears: list[Any], rows: Tensor | None = None, columns: Tensor | None = None) -> Weight:
        self.products.append(Packed(linears, 4 if self._int4 else 16, rows, columns))
        return self.products[-1].native

    def _block(self, layer: Any, normed: Any) -> Block:
        attention, mlp, config = layer.self_attn, layer.mlp, self.config
        heads = padded_heads(config.heads + 2 * config.kv_heads, config.head_dim)
        of_queries = None if config.head_dim % TILE == 0 else padded_heads(config.heads, config.head_dim)
        modules = [layer.input_layernorm, None, layer.post_attention_layernorm, None]
        modules += [attention.q_norm, attention.k_norm] if config.qk_norm else [None, None]
        norms = [None if each is None else tuple(normed(each).values()) for each in modules]
        return Block(
            0,
            self._packed([attention.q_proj, attention.k_proj, attention.v_proj], heads),
            self._packed([attention.o_proj], None, of_queries),
            self._packed([mlp.gate_proj, mlp.up_proj], gates_and_ups(config.intermediate_size)),
            self._packed([mlp.down_proj]),
            norms,  # type: ignore[arg-type]
            False,
        )

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        n, last = len(output), len(self.program.steps)
        rows = Rows(self.program, self._work, n, self.program.starts[-1], last, given=((HIDDEN, output),), wanted=n)
        found = run_pass(rows).logits
        assert found is not None
        return self.cut(found)

    def cut(self, logits: Tensor) -> Tensor:
        """Without the columns that fill up."""
        return logits[:, : self.count].to(self.work)


class NativePasses:
    """The keys and values of a head's rows, and passes over them."""

    def __init__(self, programs: HeadPrograms, capacity: int) -> None:
        self._programs = programs
        self._work = Workspace(programs.program.widths, programs.program.widest)
        config, rotary = programs.config, programs.network.rotary
        kind = Attending(None, rotary.inv_freq.float(), rotary.attention_scaling)
        shape = config.depth, config.kv_heads, filled(config.head_dim, TILE)
        self._cache = Cache(shape, True, lambda size: turned([kind], size), capacity)

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    def __call__(
        self, ids: Tensor, start: int, rows: Tensor, joined: bool, visible: Tensor | None, wanted: int
    ) -> tuple[Tensor, Tensor, Favourites | None]:
        """A pass of ids [n] whose keys and values are put at row `start`; `rows` are features, or `joined` inputs [n,
        hidden]. Of a tree, each row sees what `visible` [n, start + n] says. Outputs [n, hidden], the logits of the
        last rows `wanted` [wanted, draft vocabulary], and what is likeliest by them."""
        programs, program = self._programs, self._programs.program
        first, last = program.starts[0] if joined else 0, len(program.steps)
        parts = [(INPUTS, rows)] if joined else list(enumerate(rows.split(programs.part, -1), FEATURES))
        asked = Rows(program, self._work, len(ids), first, last, ids, self._cache, start, None, visible, parts)
        asked.wanted, asked.both, asked.count, asked.shares = wanted, True, programs.count, True
        found = run_pass(asked)
        assert found.hidden is not None and found.logits is not None
        return found.hidden.to(programs.work), programs.cut(found.logits), found.favourites
