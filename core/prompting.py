"""A person's text -> the ids a target continues: completed as it is, or put into the chat template."""

from __future__ import annotations

from core.errors import UserError
from core.model import Model
from core.records import Settings


def encode_prompt(target: Model, prompt: str, settings: Settings) -> list[int]:
    """Encode a prompt; where the tokenizer has a chat template and settings.chat is "auto", as a user's message."""
    if not prompt.strip():
        raise UserError("The prompt is empty; type some text for the model to continue.")
    tokenizer = target.tokenizer
    if settings.chat == "auto" and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        # Templates that can think aloud take this switch; the others ignore it.
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        return tokenizer.encode(text, add_special_tokens=False)
    if settings.system:
        raise UserError(f"{target.name} is not a chat model here, so it takes no system prompt; leave it out.")
    # Text of the person's that looks like a special token stays text.
    ids = tokenizer.encode(prompt, split_special_tokens=True)
    if not ids:
        raise UserError("The prompt has no tokens in this model's vocabulary; type some other text.")
    return ids
