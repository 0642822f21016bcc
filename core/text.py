"""Token ids to text as it streams: a character is shown once, when it is complete.

A person's text -> the ids a target continues: completed as it is, or put into the chat template.

Prompts to start from and to measure on: assets/prompts/prompts.toml, or a file of one's own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError, first_line
from core.loading.model import Model
from core.loading.pair import special_ids
from core.records import Round, Settings

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, so also the most tokens one can be split over."""


class _Window(NamedTuple):
    """The last few ids; the first `read` of them are shown already."""

    ids: list[int]
    read: int


class Detokenizer:
    """Gives each token the text it adds after those before it.

    Bytes of an unfinished character are held back and shown with the token that completes it. Only a window of ids
    is decoded, so a step costs the same however long the text has grown; decoding it with and without the newest
    token, from the same start, leaves a tokenizer's treatment of a first token out of the difference.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._alone: dict[int, str] = {}
        recent = list(prompt_ids[-8:])
        self._window = _Window(recent, len(recent))

    def push(self, token_id: int) -> str:
        """Commit a token and return the text it adds."""
        text, self._window = self._step(self._window, token_id)
        return text

    def peek(self, token_ids: list[int], parents: list[int | None]) -> list[str]:
        """The text each drafted token would add after its parent (None: after what is committed)."""
        texts: list[str] = []
        windows: list[_Window] = []
        for token_id, parent in zip(token_ids, parents):
            text, window = self._step(self._window if parent is None else windows[parent], token_id)
            texts.append(text)
            windows.append(window)
        return texts

    def write(self, round_: Round) -> str:
        """Fill in the texts of a round's tokens and candidates, commit the kept ones, and return the output text they
        add: everything but special tokens."""
        texts = self.peek([token.id for token in round_.drafted], [token.parent for token in round_.drafted])
        for token, text in zip(round_.drafted, texts):
            token.text = text
        for token in round_.kept:
            token.text = self.push(token.id)
        for token in (*round_.drafted, *filter(None, [round_.emitted])):
            for candidate in (*(token.top_target or ()), *(token.top_draft or ())):
                candidate.text = self.alone(candidate.id)
        return "".join(token.text for token in round_.kept if token.id not in self._special)

    def alone(self, token_id: int) -> str:
        """The text of a token apart from any context, unfinished characters shown as such."""
        if token_id not in self._alone:
            self._alone[token_id] = self._decode([token_id])
        return self._alone[token_id]

    def _step(self, window: _Window, token_id: int) -> tuple[str, _Window]:
        if token_id in self._special:
            return self._decode([token_id]), _Window([], 0)
        ids = [*window.ids, token_id]
        held = len(ids) - window.read
        after = self._decode(ids)
        open_tail = 0
        if after.endswith(REPLACEMENT):
            if held < LONGEST_CHARACTER:
                return "", _Window(ids, window.read)
            open_tail = self._unfinished(ids, after)
        before, shown = self._decode(ids[: window.read]), self._decode(ids[: len(ids) - open_tail])
        return shown[len(before) :], _Window(ids[window.read :], held - open_tail)

    def _unfinished(self, ids: list[int], text: str) -> int:
        """How many of the last ids may be the beginning of one character, although broken bytes precede them."""
        tails = range(LONGEST_CHARACTER - 1, 0, -1)
        return next((n for n in tails if self._decode(ids[:-n]) + REPLACEMENT == text), 0)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


MARKS = "\ue000", "\uf8ff"
"""The private-use characters, which stand for special tokens a person typed while the template is filled in."""


LONGEST_PROMPT = 1_000_000
"""Characters. To part fifty times as many into tokens takes all the memory there is; and a document that holds the
prompt can be opened again (app/history/parts.py)."""


def check_prompt(prompt: str) -> None:
    """Raise UserError for a prompt that no model can continue, whichever it is."""
    if not prompt.strip():
        raise UserError("The prompt is empty; type some text for the model to continue.")
    if len(prompt) > LONGEST_PROMPT:
        raise UserError(f"The prompt has {len(prompt):,} characters, and {LONGEST_PROMPT:,} are the most; shorten it.")


def encode_prompt(target: Model, prompt: str, settings: Settings) -> list[int]:
    """Encode a prompt; where the tokenizer has a chat template and settings.chat is "auto", as a user's message.

    Raises UserError for text that cannot be encoded, and for a system prompt that nobody would read.
    """
    check_prompt(prompt)
    if lone := next((c for c in prompt + (settings.system or "") if "\ud800" <= c <= "\udfff"), None):
        raise UserError(f"The prompt holds U+{ord(lone):04X}, half of a character that is not there; remove it.")
    tokenizer = target.tokenizer
    if answers_messages(target, settings):
        return encode_chat(tokenizer, target.name, prompt, settings.system)
    if settings.system:
        raise UserError(f"{target.name} is not a chat model here, so it takes no system prompt; leave it out.")
    # Text of the person's that looks like a special token stays text.
    ids = tokenizer.encode(prompt, split_special_tokens=True)
    if not ids:
        raise UserError("The prompt has no tokens in this model's vocabulary; type some other text.")
    return ids


def known_ids(target: Model, ids: list[int]) -> list[int]:
    """Ids that did not come from the target's own tokenizer, before any model is fed one: on a GPU one past the
    vocabulary ends the process. Raises UserError for such."""
    if unknown := next((token for token in ids if not 0 <= token < target.vocab_size), None):
        raise UserError(
            f"This document is not of {target.name}: it holds the token {unknown:,}, and the vocabulary ends at "
            f"{target.vocab_size - 1:,}. Choose the pair it was made with, or run its prompt again."
        )
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
    except Exception as error:  # whatever a stranger's template does
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


PROMPTS = Path(__file__).parent.parent / "assets" / "prompts" / "prompts.toml"
CHAT_PROMPTS = PROMPTS.with_name("chat.toml")


@dataclass(frozen=True)
class Prompt:
    """`kind` groups prompts by what they show (function, repetitive, high entropy …); `note` says it in a sentence.
    `temperature` is the one it is meant for, None: any; `chip`: whether a page offers it to begin with."""

    name: str
    text: str
    kind: str = ""
    note: str = ""
    temperature: float | None = None
    chip: bool = True


def answers_messages(model: Model, settings: Settings) -> bool:
    """Whether a prompt is put into a chat template."""
    return settings.chat == "auto" and bool(getattr(model.tokenizer, "chat_template", None))


def read_prompts(path: str | Path | None = None, chat: bool = False) -> list[Prompt]:
    """The bundled prompts (text to go on with, or messages for a `chat` model), those of another such .toml, or one
    prompt per line of any other text file. Raises UserError for a file without any."""
    file = Path(path or (CHAT_PROMPTS if chat else PROMPTS))
    try:
        content = file.read_text(encoding="utf-8")
        toml = file.suffix == ".toml"
        found = [_prompt(entry) for entry in tomllib.loads(content)["prompt"]] if toml else prompts_in(content)
    except OSError as error:
        raise UserError(f"The prompts file {file} cannot be read: {error.strerror}.") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a file of prompts ([[prompt]] with name and text): {error}.") from None
    if not found:
        raise UserError(f"{file.name} holds no prompts.")
    return found


def _prompt(entry: dict[str, Any]) -> Prompt:
    found = Prompt(**{k: v for k, v in entry.items() if k in Prompt.__dataclass_fields__})
    if not all(isinstance(words, str) for words in (found.name, found.text, found.kind)):
        raise TypeError("name, text and kind are text")
    return found


def prompts_in(text: str) -> list[Prompt]:
    """One prompt per line of a text."""
    return [Prompt(line[:24], line) for line in text.splitlines() if line.strip()]


def one_of_each_kind(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every kind, in order: few, and unlike each other."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.kind, prompt)
    return list(found.values())
