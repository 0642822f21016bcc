"""Trained draft heads (EAGLE-3 and its kin): one layer that reads the target's hidden states and drafts from them.

Here the head as a module: drafting feeds it through a key/value cache, training unrolls it over whole texts.

Row t of a first pass pairs the target's features of token t with the embedding of token t + 1 and predicts token t + 2.
A recurrent row pairs the head's own output with the embedding of the token it just predicted. After SafeAILab/EAGLE
(eagle/model/cnets.py, Apache-2.0) and vLLM's llama_eagle3.py; the flags are those of vLLM's speculators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HeadConfig:
    """Shape and flags. `aux_layers` are block boundaries of the target: 0 is the embedding, i the input of block i
    (transformers' hidden_states[i]), n the output of the last block before the final norm. `rope` is what transformers
    calls rope_parameters. Flags: `norm_before_fc` one norm over the joined features, `fc_norm` one for each of them,
    `norm_before_residual` the residual takes the normed features, `norm_output` recurrent rows get the normed output.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    own_embedding: bool = False

    @property
    def feature_width(self) -> int:
        """Width of a row of features: the named layers side by side, lowest first."""
        return len(self.aux_layers) * self.target_hidden_size


class HeadAttention(nn.Module):
    """Projections of the attention; queries, keys and values see embedding and features side by side (2H)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, bias, d = 2 * config.hidden_size, config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * d, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.heads * d, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(d, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(d, config.rms_norm_eps)


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config)
        self.mlp = HeadMLP(config)


class HeadNetwork(nn.Module):
    """Its state dict has the names and shapes of the original checkpoint format (`d2t` holds offsets).

    A first pass: `join(features)`, then `forward`, then `logits` of the output. A recurrent pass: `feed_back(output)`
    takes the place of `join`. Embeddings come from the target's table (or `embed_tokens` with `own_embedding`)."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.feature_width, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers)
        self.midlayer = HeadLayer(config)
        self.norm = nn.RMSNorm(hidden, eps)
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

    def join(self, features: Tensor) -> Tensor:
        """Features of the target [..., feature_width] as the block's input [..., hidden]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(features)

    def project(self, embedded: Tensor, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings and inputs [B, n, hidden] at positions [n] or [B, n]: the residual stream [B, n, hidden],
        queries [B, heads, n, d] and keys and values [B, kv_heads, n, d]; rotated."""
        config, layer, attention = self.config, self.midlayer, self.midlayer.self_attn
        normed = layer.hidden_norm(inputs)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        shape = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = (project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        if config.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        cos, sin = self.rotary(v, positions if positions.dim() > 1 else positions[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return normed if config.norm_before_residual else inputs, q, k, v

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What attention gave [B, heads, n, d], added to the residual stream, then the MLP: output [B, n, hidden]."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def forward(
        self,
        embedded: Tensor,
        inputs: Tensor,
        positions: Tensor,
        past: KeysValues | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """One pass of n rows after `past` (keys and values [B, kv_heads, m, d]). `mask` [n, m + n] is true where a row
        may look; None: causal. Returns the un-normed output [B, n, hidden] and keys and values of the n rows alone."""
        residual, q, k, v = self.project(embedded, inputs, positions)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
        n, m = q.shape[2], keys.shape[2] - q.shape[2]
        if mask is None and n > 1 and m:
            mask = torch.ones(n, m + n, dtype=torch.bool, device=q.device).tril(m)
        group = q.shape[1] // keys.shape[1]
        attended = F.scaled_dot_product_attention(
            q, repeat(keys, group), repeat(values, group), attn_mask=mask, is_causal=mask is None and n > 1
        )
        return self.finish(residual, attended), (k, v)

    def logits(self, output: Tensor) -> Tensor:
        """Outputs [..., hidden] as logits over the draft vocabulary."""
        return self.lm_head(self.norm(output))

    def feed_back(self, output: Tensor) -> Tensor:
        """What a recurrent row takes in place of joined features."""
        return self.norm(output) if self.config.norm_output else output


def repeat(keys: Tensor, group: int) -> Tensor:
    """Keys or values [B, kv_heads, n, d] once for every query head."""
    return keys.repeat_interleave(group, 1) if group > 1 else keys
