"""A lean llama for training: parameters named as transformers names them, float32 masters computed in bfloat16."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .settings import Shape

HEAD = 64
EPSILON = 1e-5


class Linear(nn.Linear):
    """A linear layer without bias whose float32 weight is cast to the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, EPSILON).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x[batch, heads, tokens, 64]; cos and sin are [tokens, 64]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, all [batch, heads, tokens, 64]. On a CPU in blocks of queries, each against the keys up to its
    end: compiled, that is twice as fast there as PyTorch's own kernel, forward and backward."""
    tokens = q.shape[-2]
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    size = max(128, tokens // 8)
    blocks = []
    for start in range(0, tokens, size):
        end = min(start + size, tokens)
        scores = (q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2)).float() * HEAD**-0.5
        seen = torch.arange(end, device=q.device) <= torch.arange(start, end, device=q.device)[:, None]
        weights = F.softmax(scores + torch.where(seen, 0.0, -1e9), dim=-1).to(q.dtype)
        blocks.append(weights @ v[:, :, :end])
    return torch.cat(blocks, dim=2)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.q_proj = Linear(shape.width, shape.heads * HEAD)
        self.k_proj = Linear(shape.width, shape.kv_heads * HEAD)
        self.v_proj = Linear(shape.width, shape.kv_heads * HEAD)
        self.o_proj = Linear(shape.heads * HEAD, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, HEAD).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, HEAD).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, HEAD).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = attend(rotate(q, cos, sin), k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.mlp)
        self.up_proj = Linear(shape.width, shape.mlp)
        self.down_proj = Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normalised copy of the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.width)
        self.post_attention_layernorm = Norm(shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids [batch, tokens] -> normalised hidden states after chosen layers; `unembed` makes logits of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.register_buffer("angles", torch.empty(shape.context, HEAD), persistent=False)
        self.reset(shape)

    def reset(self, shape: Shape) -> None:
        """Initial weights; projections back into the stream start small, so that depth does not amplify."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if small else 0.02)
        steps = torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD
        angles = torch.arange(shape.context, dtype=torch.float32)[:, None] * shape.rope_theta**-steps
        self.angles.copy_(torch.cat((angles, angles), dim=-1))

    def forward(self, ids: Tensor, exits: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Hidden states [batch, tokens, width] after each layer count in `exits`, then after the last."""
        x = self.embed_tokens(ids).to(dtype)
        angles = self.angles[: ids.shape[1]]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = []
        for index, layer in enumerate(self.layers, start=1):
            x = layer(x, cos, sin)
            if index in exits or index == len(self.layers):
                found.append(self.norm(x))
        return found

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] through the tied embedding."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


class Pair(nn.Module):
    """The target and every draft that learns beside it."""

    def __init__(self, target: Shape, drafts: dict[str, Shape]) -> None:
        super().__init__()
        self.target = Llama(target)
        self.drafts = nn.ModuleDict({name: Llama(shape) for name, shape in drafts.items()})

    def compile_layers(self) -> None:
        """Compile one layer at a time: all layers of a shape share the code, which takes seconds, not minutes."""
        torch._dynamo.config.recompile_limit = 64
        for model in (self.target, *self.drafts.values()):
            for layer in model.layers:
                layer.compile(dynamic=False)
