"""Block drafters: DFlash guesses a whole block in one pass, DSpark tells each row of it the token before it, too.

What the target computed for the text is injected into every layer as keys and values: no pass of the drafter over the
text, and no row of a block stays behind it. A block is the newest token, the anchor, and masks after it; its rows see
the text before the anchor and each other. They fill in the tokens at their own places, the anchor's row being unused
(DFlash), or predict the ones that follow (`sample_from_anchor`, DSpark). After z-lab's dflash (MIT, arXiv 2602.06036),
DeepSpec (MIT) and vLLM's speculators (Apache-2.0).

Here the networks as modules: drafting extends a cache by a block, training packs many blocks of a text into one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.heads import DraftLayer, DraftNetwork, KeysValues, Rotation, Shape, attend

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Shape):
    """`block_size` rows in a block; `mask_id` stands for tokens not known yet. Of each layer, `causal`: rows see of
    their block only those before them; `windows`: how many tokens before the anchor they see (None: all).

    `markov_rank` > 0: a bias by the token before, of a kind of `MARKOV_HEADS`; `confidence`: a head that says how
    likely each row's token is accepted, with `confidence_with_markov` by the token before, too. `own_head`: logits are
    its own and not the target's head's, `softcap` their bound."""

    block_size: int
    mask_id: int
    sample_from_anchor: bool = False
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    own_head: bool = False
    softcap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", self.causal or (False,) * self.depth)
        object.__setattr__(self, "windows", self.windows or (None,) * self.depth)

    @property
    def algorithm(self) -> str:
        """What other engines call it."""
        return "dspark" if self.sample_from_anchor else "dflash"

    @property
    def first(self) -> int:
        """The first row of a block that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.first


class MarkovHead(nn.Module):
    """A bias of low rank on a row's logits, by the token before it: W1 is looked up by the target's ids, W2 gives the
    drafter's. `gated` weighs it by the row's hidden state, `rnn` keeps a state over the block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Of rows with hidden states [..., H] after tokens [...]: the latent [..., rank] whose product with W2 is the
        bias, and the state [..., rank] for the rows after them (rnn only)."""
        before = self.markov_w1(previous)
        if self.kind == "vanilla":
            return before, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before, None
        state = torch.zeros_like(before) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The latents [..., rows, rank] of whole blocks: hidden states [..., rows, H] after tokens [..., rows]."""
        if self.kind != "rnn":
            return self.step(hidden, previous)[0]
        latents, state = [], None
        for row in range(hidden.shape[-2]):
            latent, state = self.step(hidden[..., row, :], previous[..., row], state)
            latents.append(latent)
        return torch.stack(latents, -2)


class ConfidenceHead(nn.Module):
    """The log-odds that a row's token is accepted, given that those before it are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features).squeeze(-1)


class DFlashNetwork(DraftNetwork):
    """Its state dict has the names and shapes of z-lab's and DeepSpec's files. Embeddings and, without `own_head`,
    logits are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, config.own_head)
        self.config = config
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.depth))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.hidden_size + config.markov_rank * config.confidence_with_markov
        self.confidence_head = ConfidenceHead(width) if config.confidence else None

    def inject(self, features: Tensor) -> Tensor:
        """Features of the target [..., feature_width] as what every layer takes keys and values of [..., hidden]."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: Tensor, rotation: Rotation) -> list[KeysValues]:
        """Each layer's, of what was injected [B, n, hidden]: [B, kv_heads, n, d]."""
        return [layer.self_attn.keys_values(context, rotation) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(
        self,
        embedded: Tensor,
        rotation: Rotation,
        seen: Callable[[int, Tensor, Tensor], KeysValues],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """Blocks as rows of embeddings [B, n, hidden]: their hidden states [B, n, hidden], normed.

        `seen` puts the keys and values that a layer makes of these rows behind those of the text, and returns all; its
        mask [n, …] is true where a row may look among them, None: everywhere."""
        hidden = embedded
        for i, layer in enumerate(self.layers):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)  # type: ignore[union-attr,operator]
            keys, values = seen(i, *attention.keys_values(x, rotation))  # type: ignore[union-attr,operator]
            attended = attend(attention.queries(x, rotation), keys, values, masks[i])  # type: ignore[union-attr,operator]
            hidden = layer.finish(hidden, attended)  # type: ignore[operator]
        return self.norm(hidden)

    def blocks(self, embed: Callable[[Tensor], Tensor], ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Many blocks of texts in one pass, as training asks for them: hidden states [B, A, block_size, hidden].

        ids [B, T] and features [B, T, feature_width] of whole texts; `anchors` [B, A] are positions in them. A block
        sees the text before its anchor and itself, whatever stands at and after the anchor."""
        rows, count = self.config.block_size, anchors.shape[1]
        tokens = ids.new_full((*anchors.shape, rows), self.config.mask_id)
        tokens[..., 0] = ids.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(rows, device=ids.device)).flatten(1)
        length = torch.arange(ids.shape[1], device=ids.device)
        embedded = embed(tokens.flatten(1))
        context = self.inject(features)
        past = self.keys_values(context, self.rotation(length, context))

        def seen(layer: int, keys: Tensor, values: Tensor) -> KeysValues:
            return torch.cat([past[layer][0], keys], 2), torch.cat([past[layer][1], values], 2)

        kinds = list(zip(self.config.causal, self.config.windows))
        masks = {kind: packed_mask(anchors, ids.shape[1], rows, *kind)[:, None] for kind in set(kinds)}
        rotation = self.rotation(positions, embedded)
        return self(embedded, rotation, seen, [masks[kind] for kind in kinds]).unflatten(1, (count, rows))

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Hidden states [..., hidden] as logits over the draft vocabulary, by its own head or the target's `head`;
        without the bias by the token before."""
        if not self.config.own_head:
            assert head is not None
            return head(hidden)
        logits = self.lm_head(hidden)
        bound = self.config.softcap
        return logits if bound is None else torch.tanh(logits / bound) * bound

    def bias(self, latent: Tensor) -> Tensor:
        """What is added to logits: latents of the `markov_head` [..., rank] over the draft vocabulary."""
        assert self.markov_head is not None
        return self.markov_head.markov_w2(latent)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Log-odds [...] that the tokens of rows with these hidden states [..., hidden] are accepted, given those
        before them, the last of which are `previous` [...]."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous).to(hidden.dtype)], -1)
        return self.confidence_head(hidden)


def packed_mask(anchors: Tensor, length: int, rows: int, causal: bool, window: int | None) -> Tensor:
    """Of blocks at `anchors` [B, A] behind a text of `length` tokens: [B, A · rows, length + A · rows], true where a
    row may look. A window counts back from the anchor, for all rows of its block alike (as speculators trains)."""
    device = anchors.device
    at = torch.arange(length, device=device)
    of_row = anchors.repeat_interleave(rows, 1)[..., None]
    text = at < of_row
    if window is not None:
        text &= at >= of_row - window
    count = anchors.shape[1] * rows
    block = torch.arange(count, device=device) // rows
    own = block[:, None] == block
    if causal:
        own = own.tril()
    return torch.cat([text, own.expand(len(anchors), -1, -1)], -1)


def usual_outputs(depth: int, layers: int) -> list[int]:
    """The layers of a target of `depth` whose outputs a drafter of so many layers reads where its config is silent, by
    z-lab's count."""
    if layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers)]
