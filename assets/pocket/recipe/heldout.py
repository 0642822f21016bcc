"""Prompts cut from held-out files: what every figure of the evaluation is measured on."""

import hashlib

from .corpus import Document

LINES = 30
MAX_CHARACTERS = 900


def find_outer_lines(lines: list[str]) -> list[int]:
    """Where a top-level function or class begins."""
    return [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "async def ", "@"))]


def cut_prompt(document: Document) -> str | None:
    """From the first third of the file on: a function or class from its first line, cut inside it at a line's end."""
    lines = document.text.splitlines()
    for start in find_outer_lines(lines):
        if start < len(lines) // 3:
            continue
        body = lines[start : start + LINES]
        end = next((i for i, line in enumerate(body) if i > 1 and not line.strip()), len(body))
        text = "\n".join(body[: max(3, min(end, LINES) * 2 // 3)]) + "\n"
        if len(body) >= 12 and 120 <= len(text) <= MAX_CHARACTERS:
            return text
    return None


def choose_prompts(documents: list[Document], count: int) -> list[str]:
    """At most `count` prompts, one a file, from files in an order that only their content decides."""
    ordered = sorted(documents, key=lambda d: hashlib.blake2b(d.text.encode()).digest())
    found = (cut_prompt(document) for document in ordered)
    return [prompt for prompt in found if prompt][:count]
