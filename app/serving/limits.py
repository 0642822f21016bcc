"""What strangers may ask of one device: tokens before something begins, seconds once it has."""

from __future__ import annotations

from collections.abc import Sequence

PUBLIC_TOKENS = 512
"""The longest run."""
PUBLIC_QUEUE = 8
"""How many runs may wait or be on."""
PUBLIC_OF_ONE = 3
"""How many of them from one address."""
PUBLIC_SECONDS = 300.0
"""How long one may have the device."""
READING = 0.25
"""What a token of a prompt costs, in tokens that are written: prompts are read many tokens to a pass."""
BYTES_PER_TOKEN = 3
"""Of a prompt that no tokenizer has seen yet. One that packs them denser meets PUBLIC_SECONDS."""


def cost_in_tokens(prompts: Sequence[str], runs_of_each: float, new_tokens: int) -> int:
    """What so many runs of each prompt cost at most, in tokens written."""
    read = sum(len(prompt.encode(errors="replace")) for prompt in prompts) / BYTES_PER_TOKEN
    return round(runs_of_each * (len(prompts) * new_tokens + READING * read))
