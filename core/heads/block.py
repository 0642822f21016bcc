"""The weights of a head as its passes read them.

On a CPU a head costs by the bytes of its matrices: they are in 4 bits where their shapes allow it, and a pass is a call
of our own code (`core.heads.native`). Elsewhere passes run by the network itself (`core.heads.graph`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.heads import DraftNetwork, HeadNetwork, Shape
from core.heads.native import HeadPrograms, why_not
from core.runners.clock import timed_pass
from core.runners.products import GROUP, ROWS, group_for

UNROUNDED = ("embed_tokens", "markov_head.markov_w1", "markov_head.gate", "markov_head.joint", "confidence_head")
"""Parts of drafters that are in 16 bits even where the others are in 4."""


def fits_int4(config: Shape) -> bool:
    """Whether the kernel for 4 bits takes every matrix of a drafter; the rows of its vocabulary can be filled up."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    projections = heads + 2 * config.kv_heads * config.head_dim
    products = ((hidden, config.feature_width), (projections, 2 * hidden), (hidden, heads))
    products += ((projections, hidden), (2 * inner, hidden), (hidden, inner), (ROWS, hidden))
    return all(group_for(rows, columns) for rows, columns in products)


def bytes_of(network: DraftNetwork, int4: bool) -> int:
    """Of a drafter's weights; in 4 bits with a scale and a zero for every group."""
    sizes = (
        parameter.numel()
        * (0.5 + 4 / GROUP if int4 and parameter.dim() > 1 and not name.startswith(UNROUNDED) else parameter.itemsize)
        for name, parameter in network.named_parameters()
    )
    return round(sum(sizes))


class FusedHead:
    """The weights of a head as passes read them, shared by all its runners; `int4` rounds them to 4 bits.

    `embedding` [vocab, hidden] is the head's own or the target's. Draft
    tokens past the target's real vocabulary are cut off: they are padding, and can never be right.
    """

    def __init__(self, network: HeadNetwork, embedding: Tensor, vocab_size: int, int4: bool = False) -> None:
        self.network, self.config, self.vocab_size = network, network.config, vocab_size
        self.device, self.dtype = network.fc.weight.device, network.fc.weight.dtype
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        real = network.draft_ids < vocab_size
        self.target_ids = network.draft_ids[real]
        self.table: Tensor = (network.embed_tokens.weight if self.config.own_embedding else embedding).detach()
        """Embeddings [vocab, hidden]."""
        self._int4 = int4
        self.native = None if why_not(network) else HeadPrograms(network, self.table, self.target_ids, int4)

    @property
    def layers(self) -> tuple[int, ...]:
        """The boundaries of the target whose hidden states it reads."""
        return self.config.aux_layers

    @property
    def drafted(self) -> int:
        """Tokens that a pass drafts: several of P-EAGLE."""
        return self.config.drafted

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def weight_bytes(self) -> int:
        """Of its own weights as passes read them."""
        return bytes_of(self.network, self._int4 and self.native is not None)

    @timed_pass
    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]: the end of every pass whose proposals are wanted."""
        return self.native.logits(output) if self.native else self.network_logits(output)

    def network_logits(self, output: Tensor) -> Tensor:
        """The same by the network itself."""
        return self.network.logits(output)[:, : len(self.target_ids)]  # its ids ascend: padding is at the end

    def on_target(self, rows: Tensor, fill: float) -> Tensor:
        """Rows [n, draft vocabulary] over the target's vocabulary [n, vocab], `fill` for what the head cannot say."""
        full = torch.full((len(rows), self.vocab_size), fill, dtype=rows.dtype, device=rows.device)
        return full.index_copy_(1, self.target_ids, rows)
