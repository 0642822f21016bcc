"""Trained drafters that read the target's hidden states: what they have in common, and EAGLE-3's networks.

Here an EAGLE-3 head as a module: drafting feeds it through a key/value cache, training unrolls it over whole texts.
Block drafters are in `core.heads.dflash`.

Row t of a first pass pairs the target's features of token t with the embedding of token t + 1 and predicts token t + 2.
A recurrent row pairs the head's own output with the embedding of the token it just predicted. After SafeAILab/EAGLE
(eagle/model/cnets.py, Apache-2.0) and vLLM's llama_eagle3.py; the flags are those of vLLM's speculators. P-EAGLE has no
recurrent rows: a row of a token not known yet pairs `mask_hidden`, in place of features, with the embedding of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

KeysValues = tuple[Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]
"""cos and sin [B or 1, n, head_dim] of rows."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What every trained drafter has. `aux_layers` are block boundaries of the target: 0 is the embedding, i the input
    of block i (transformers' hidden_states[i]), n the output of the last block before the final norm. `rope` is what
    transformers calls rope_parameters; `depth` counts its layers."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    depth: int = 1
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    attention_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False

    @property
    def feature_width(self) -> int:
        """Width of a row of features: the named layers side by side, lowest first."""
        return len(self.aux_layers) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Shape):
    """An EAGLE-3 head. Flags: `norm_before_fc` one norm over the joined features, `fc_norm` one for each of them,
    `norm_before_residual` the residual takes the normed features, `norm_output` recurrent rows get the normed output.
    P-EAGLE: `mask_id` stands for tokens not known yet, and a pass drafts `block_size` tokens.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_id: int | None = None
    block_size: int = 1

    @property
    def algorithm(self) -> str | None:
        """What other engines call a drafter of whole blocks; None for a head that drafts one by one."""
        return "p-eagle" if self.block_size > 1 else None

    @property
    def drafted(self) -> int:
        """Tokens that a pass drafts."""
        return self.block_size


class Attention(nn.Module):
    """Projections of the attention of rows [..., width]."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        bias, d = shape.attention_bias, shape.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(width, shape.heads * d, bias=bias)
        self.k_proj = nn.Linear(width, shape.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(width, shape.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(shape.heads * d, shape.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(d, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(d, shape.rms_norm_eps) if shape.qk_norm else None

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Of rows [B, n, width]: [B, heads, n, d], rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate((q if self.q_norm is None else self.q_norm(q)).transpose(1, 2), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        """Of rows [B, n, width]: keys, rotated, and values [B, kv_heads, n, d]."""
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        return rotate((k if self.k_norm is None else self.k_norm(k)).transpose(1, 2), rotation), v.transpose(1, 2)


class HeadMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """An ordinary layer, norms before attention and MLP; whose keys and values are asked for is the caller's choice."""

    def __init__(self, shape: Shape, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, width or shape.hidden_size)
        self.mlp = HeadMLP(shape)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What attention gave [B, heads, n, d], added to the residual stream, then the MLP: output [B, n, hidden]."""
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class HeadLayer(DraftLayer):
    """EAGLE-3's first layer, whose attention sees embedding and features side by side (2H)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class DraftNetwork(nn.Module):
    """What the networks of all drafters have: features joined by `fc`, positions, and a vocabulary of the draft's own.

    Of the target's embedding and head a drafter may have its own, `embed_tokens` and `lm_head`; `d2t` holds offsets."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Shape, own_head: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(config.feature_width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        if own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=hidden,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope),
            )
        )

    @property
    def draft_ids(self) -> Tensor:
        """[draft_vocab] the target's id of each of the head's."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_draft_ids(self, ids: Tensor) -> None:
        """Ascending ids of the target's vocabulary that the head can propose."""
        ids = ids.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def rotation(self, positions: Tensor, like: Tensor) -> Rotation:
        """Of rows at positions [n] or [B, n], in the type of `like`."""
        return self.rotary(like, positions if positions.dim() > 1 else positions[None])


class HeadNetwork(DraftNetwork):
    """Its state dict has the names and shapes of the original checkpoint format; `further` are the layers behind the
    first.

    A first pass: `join(features)`, then `forward`, then `logits` of the output. A recurrent pass: `feed_back(output)`
    takes the place of `join`. Embeddings come from the target's table (or `embed_tokens` with `own_embedding`)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, own_head=True)
        self.config = config
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers)
        self.midlayer = HeadLayer(config)
        self.further = nn.ModuleList(DraftLayer(config) for _ in range(config.depth - 1))
        if config.mask_id is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.feature_width))

    def join(self, features: Tensor) -> Tensor:
        """Features of the target [..., feature_width] as the block's input [..., hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(features)

    def project(self, embedded: Tensor, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first layer of embeddings and inputs [B, n, hidden] at positions [n] or [B, n]: the residual stream [B,
        n, hidden], queries [B, heads, n, d] and keys and values [B, kv_heads, n, d]; rotated."""
        layer, rotation = self.midlayer, self.rotation(positions, embedded)
        normed = layer.hidden_norm(inputs)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        residual = normed if self.config.norm_before_residual else inputs
        return residual, layer.self_attn.queries(x, rotation), *layer.self_attn.keys_values(x, rotation)

    def project_further(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer behind the first, counted from 1, of what left the one before it."""
        further, rotation = self.stack[layer], self.rotation(positions, hidden)
        x = further.input_layernorm(hidden)
        return further.self_attn.queries(x, rotation), *further.self_attn.keys_values(x, rotation)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The first layer's end (`DraftLayer.finish`)."""
        return self.midlayer.finish(residual, attended)

    @property
    def stack(self) -> list[DraftLayer]:
        """All layers, first to last."""
        return [self.midlayer, *self.further]  # type: ignore[list-item]

    def forward(
        self,
        embedded: Tensor,
        inputs: Tensor,
        positions: Tensor,
        past: Sequence[KeysValues] = (),
        mask: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """One pass of n rows after `past`, each layer's keys and values [B, kv_heads, m, d]. `mask` [n, m + n] is true
        where a row may look; None: causal. Returns the un-normed output [B, n, hidden] and the layers' keys and values
        of the n rows alone."""
        n, m = embedded.shape[1], past[0][0].shape[2] if past else 0
        if mask is None and n > 1 and m:
            mask = torch.ones(n, m + n, dtype=torch.bool, device=embedded.device).tril(m)
        hidden, q, k, v = self.project(embedded, inputs, positions)
        made: list[KeysValues] = []
        for i, layer in enumerate(self.stack):
            if i:
                q, k, v = self.project_further(i, hidden, positions)
            made.append((k, v))
            keys, values = (torch.cat([before, new], 2) for before, new in zip(past[i], (k, v))) if past else (k, v)
            hidden = layer.finish(hidden, attend(q, keys, values, mask, causal=mask is None and n > 1))
        return hidden, made

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [..., hidden] as logits over the draft vocabulary."""
        return self.lm_head(self.norm(output))

    def feed_back(self, output: Tensor) -> Tensor:
        """What a recurrent row takes in place of joined features."""
        return self.norm(output) if self.config.norm_output else output


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys [B, heads, n, d] turned to their positions."""
    cos, sin = (part[:, None] for part in rotation)
    return x * cos + rotate_half(x) * sin


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Queries [B, heads, n, d] over keys and values [B, kv_heads, m, d], with a mask [n, m] that is true where a row
    may look: [B, heads, n, d]."""
    group = q.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(
        q, repeat(keys, group), repeat(values, group), attn_mask=mask, is_causal=causal
    )


def repeat(keys: Tensor, group: int) -> Tensor:
    """Keys or values [B, kv_heads, n, d] once for every query head."""
    return keys.repeat_interleave(group, 1) if group > 1 else keys
