"""The fastest of everything that a visit measured in Tune, in whatever precision: from measurements alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.drafting.methods import METHODS
from core.measuring.report import basis_at, points_at

MOST_KEPT = 64


@dataclass(frozen=True)
class Fastest:
    """The fastest setting of a sweep at a temperature. `work` is what was asked of it: only what did the same work can
    be compared; `asked` is the precision as it was chosen, `precision` what that came to."""

    work: tuple[Any, ...]
    temperature: float
    asked: str
    precision: str
    method: str
    setting: int | str
    tokens_per_second: float

    @property
    def name(self) -> str:
        if self.method == "plain":
            return f"plain decoding in {self.precision}"
        return f"{METHODS[self.method].label.lower()}, draft length {self.setting}, in {self.precision}"


def keep(measured: Sequence[Fastest], document: dict[str, Any] | None) -> list[Fastest]:
    """What was measured before and what a sweep found, the newest last; a sweep made again takes the older's place."""
    found = _of(document) if document else []
    same = {(each.work, each.temperature, each.precision, each.method != "plain") for each in found}
    old = [e for e in measured if (e.work, e.temperature, e.precision, e.method != "plain") not in same]
    return [*old, *found][-MOST_KEPT:]


def fastest(document: dict[str, Any], temperature: float, measured: Sequence[Fastest]) -> Fastest | None:
    """Of the sweeps that did the same work as this one, at this temperature."""
    alike = _alike(document, temperature, measured)
    return max(alike, key=lambda each: each.tokens_per_second, default=None)


def describe_fastest(document: dict[str, Any], best: Fastest | None, measured: Sequence[Fastest]) -> str:
    """Which it is, and what was never measured."""
    if best is None:
        return ""
    precisions = dict.fromkeys(each.precision for each in _alike(document, best.temperature, measured))
    if len(precisions) == 1:
        return f"Only {best.precision} was measured: another precision may be faster; choose it and run again."
    return (
        f"The fastest of all that was measured here ({', '.join(precisions)}): {best.name}, "
        f"{best.tokens_per_second:.0f} tokens/s."
    )


def _alike(document: dict[str, Any], temperature: float, measured: Sequence[Fastest]) -> list[Fastest]:
    work = _work(document)
    return [each for each in measured if each.work == work and each.temperature == temperature]


def _work(document: dict[str, Any]) -> tuple[Any, ...]:
    settings, prompts = document["settings"], document["prompts"]
    models = (settings["target"], settings["revision"])
    return (*models, settings["max_new_tokens"], *(prompt["name"] for prompt in prompts))


def _of(document: dict[str, Any]) -> list[Fastest]:
    """The fastest drafting and plain decoding, at each temperature."""
    settings, found = document["settings"], []
    precision = document["environment"]["target"]["precision"]
    for row in document["temperatures"]:
        best = max(points_at(document, row["temperature"]), key=lambda p: p["tokens_per_second"]["median"])
        plain = basis_at(document, row["temperature"])["plain"]["median"]
        kind = (_work(document), row["temperature"], settings["precision"], precision)
        found.append(Fastest(*kind, settings["method"], best["draft_length"], best["tokens_per_second"]["median"]))
        found.append(Fastest(*kind, "plain", "auto", plain))
    return found
