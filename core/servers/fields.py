"""Values out of what a server sent: each is what it should be, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 2**53
MOST_MILLISECONDS = 1e9
LEAST = 1e-60
LONGEST_NAME = 200
HIGHEST_ID = 2**31 - 1


def whole(value: Any, most: int = MOST) -> int | None:
    """A count: an integer from 0 to `most`."""
    return value if type(value) is int and 0 <= value <= most else None


def amount(value: Any, most: float = MOST_MILLISECONDS) -> float | None:
    """A number from 0 to `most`, as `at_rest` has it."""
    return at_rest(float(value)) if type(value) in (int, float) and 0 <= value <= most else None


def at_rest(value: float) -> float:
    """0 in place of what is so little that something divided by it would be infinite."""
    return value if value >= LEAST else 0.0


def within(value: Any, part: str) -> Any:
    """A part of an object; None where there is no such part, or no object."""
    return value.get(part) if isinstance(value, Mapping) else None


def text(value: Any) -> str:
    """Text as it is, but for halves of characters, which could be neither stored nor shown."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def name(value: Any, longest: int = LONGEST_NAME) -> str | None:
    """A name on one line, without what a terminal would obey; cut to `longest` characters."""
    shown = "".join(c if c.isprintable() else " " for c in text(value)[: 4 * longest]).strip()
    return shown[:longest] or None


def counts(value: Any, longest: int = 4096, most: int = MOST) -> list[int] | None:
    """A list of counts."""
    if not isinstance(value, list) or len(value) > longest:
        return None
    found = [whole(each, most) for each in value]
    return None if None in found else found  # type: ignore[return-value]


def token_ids(value: Any, longest: int = 4096) -> list[int] | None:
    """A list of ids of a vocabulary."""
    return counts(value, longest, HIGHEST_ID)
