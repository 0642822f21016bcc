"""A target's own layer for predicting several tokens (MTP), run by transformers, as a head with one key/value cache.

Row t pairs the target's last hidden state of token t, behind its final norm, with the embedding of token t + 1 and
predicts token t + 2 by the target's own head. transformers drafts as many tokens as there are such layers, one; here
the layer goes on from its own output, as vLLM and SGLang let it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from core.runners.clock import timed_pass
from core.runners.dynamic import crop


class MtpHead:
    """The layer with what it borrows of its target: embedding, final norm and head. `layers` is the boundary of the
    target that it reads, what leaves the last layer; it proposes every token of the target."""

    def __init__(self, model: MtpModel, target: Any, vocab_size: int) -> None:
        parts: Any = model
        self.model: Any = model
        self.norm: Callable[[Tensor], Tensor] = target.get_decoder().norm
        self.layers = (target.config.get_text_config(decoder=True).num_hidden_layers,)
        self.vocab_size = self.draft_vocab_size = vocab_size
        self.device: torch.device = next(target.parameters()).device
        self.placed: torch.device = next(parts.layers.parameters()).device
        self.target_ids = torch.arange(vocab_size, device=self.device)
        self._own = list(parts.layers.parameters())

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._own)

    def weight_bytes(self) -> int:
        """Of its own weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._own)

    @timed_pass
    @torch.inference_mode()
    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, vocab]."""
        return self.model._project_to_logits(output)[:, : self.vocab_size].to(self.device)

    def on_target(self, rows: Tensor, fill: float) -> Tensor:
        """Rows over the head's vocabulary over the target's, which is the same."""
        return rows


class MtpRunner:
    """One key/value cache over the layer; the contract of `core.heads.runner.HeadRunner`, for chains.

    The cache is made without a config on purpose, as the target's: it then keeps all keys and values, so that rolling
    back is exact where the layer's attention has a window too."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.device = head.device
        self.length = 0
        self._cache = MtpCache()

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [n, hidden] as logits [n, draft vocabulary]."""
        return self.head.logits(output)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        crop(self._cache, self.length)

    @timed_pass
    @torch.inference_mode()
    def read(self, ids: Tensor, features: Tensor) -> Tensor:
        """Append stable rows: ids [n] and the target's features [n, hidden] of the token before each; output [n,
        hidden]."""
        return self._pass(ids, self.head.norm(features.to(self.head.placed)))

    @timed_pass
    @torch.inference_mode()
    def draft(self, ids: Tensor, outputs: Tensor) -> Tensor:
        """Append recurrent rows: ids [n] and the outputs [n, hidden] they were proposed from; output [n, hidden]."""
        return self._pass(ids, outputs)

    def _pass(self, ids: Tensor, inputs: Tensor) -> Tensor:
        # Positions are those of the ids, one past the row's own: what transformers' masks expect of the first layer.
        start, self.length = self.length + 1, self.length + len(ids)
        positions = torch.arange(start, start + len(ids), device=inputs.device)
        return self.head.model.forward_layer(0, inputs[None], positions[None], self._cache, input_ids=ids[None])[0]
