"""A person's text -> the ids a target continues: completed as it is, or put into the chat template."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError

from core.errors import UserError, first_line
from core.model import Model
from core.records import Settings
from core.vocabulary import special_ids

MARKS = "\ue000", "\uf8ff"
"""The private-use characters, which stand for special tokens a person typed while the template is filled in."""


def encode_prompt(target: Model, prompt: str, settings: Settings) -> list[int]:
    """Encode a prompt; where the tokenizer has a chat template and settings.chat is "auto", as a user's message.

    Raises UserError for text that cannot be encoded, and for a system prompt that nobody would read.
    """
    if not prompt.strip():
        raise UserError("The prompt is empty; type some text for the model to continue.")
    if lone := next((c for c in prompt + (settings.system or "") if "\ud800" <= c <= "\udfff"), None):
        raise UserError(f"The prompt holds U+{ord(lone):04X}, half of a character that is not there; remove it.")
    tokenizer = target.tokenizer
    if settings.chat == "auto" and getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, target.name, prompt, settings.system)
    if settings.system:
        raise UserError(f"{target.name} is not a chat model here, so it takes no system prompt; leave it out.")
    # Text of the person's that looks like a special token stays text.
    ids = tokenizer.encode(prompt, split_special_tokens=True)
    if not ids:
        raise UserError("The prompt has no tokens in this model's vocabulary; type some other text.")
    return ids


def encode_chat(tokenizer: Any, name: str, prompt: str, system: str | None = None) -> list[int]:
    """The ids of a conversation that waits for the answer to `prompt`. Special tokens of the template are tokens;
    what looks like one in the person's own text stays text."""
    special = {token.content for i, token in tokenizer.added_tokens_decoder.items() if i in special_ids(tokenizer)}
    typed = [token for token in sorted(special, key=len, reverse=True) if token and token in prompt + (system or "")]
    if not typed:
        return tokenizer.encode(fill_template(tokenizer, name, prompt, system), add_special_tokens=False)
    marks = {token: mark for token, mark in zip(typed, _unused_marks(prompt + (system or "")))}
    meant = {mark: token for token, mark in marks.items()}
    for token, mark in marks.items():
        prompt, system = prompt.replace(token, mark), system and system.replace(token, mark)
    text = fill_template(tokenizer, name, prompt, system)
    ids: list[int] = []
    for part in re.split(f"([{''.join(meant)}])", text):
        ids += tokenizer.encode(meant.get(part, part), add_special_tokens=False, split_special_tokens=part in meant)
    return ids


def fill_template(tokenizer: Any, name: str, prompt: str, system: str | None = None) -> str:
    """The text of the conversation, up to where the model's answer begins; thinking aloud is switched off where the
    template offers that."""
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    try:
        switches = {"enable_thinking": False} if "enable_thinking" in tokenizer.get_chat_template() else {}
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches)
    except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        if system and "system" in str(error).lower():
            raise UserError(_no_system(name)) from error
        raise UserError(
            f"The chat template of {name} cannot be filled in ({first_line(error, 200)}); switch chat off to complete "
            "the text as it is."
        ) from error
    if system and system.strip() not in text:
        raise UserError(_no_system(name))
    return text


def _no_system(name: str) -> str:
    return f"The chat template of {name} has no place for a system prompt; leave it out, or put it into the prompt."


def _unused_marks(text: str) -> list[str]:
    first, last = map(ord, MARKS)
    return [chr(code) for code in range(first, last + 1) if chr(code) not in text]
