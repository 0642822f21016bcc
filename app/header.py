"""The line at the top: what runs here, on what, and whether speculation is on."""

from __future__ import annotations

from html import escape
from typing import Any

from core.records import Settings

PRECISIONS: dict[str, str] = {"nf4": "NF4"}
DEVICES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}


def facts(environment: dict[str, Any], settings: Settings) -> list[str]:
    """Device, pair, precision, memory of the weights, speculation."""
    target, draft = environment["target"], environment.get("draft")
    models = [m for m in (target, draft) if m]
    memory = sum(m["weight_bytes"] for m in models)
    return [
        device(environment),
        pair_name(environment),
        " + ".join(dict.fromkeys(_precision(model) for model in models)),
        f"{_bytes(memory)} of weights",
        speculation(settings),
    ]


def device(environment: dict[str, Any]) -> str:
    name, kind = environment["device_name"], DEVICES.get(environment["device"], environment["device"])
    return name if kind in name or environment["device"] == "cuda" else f"{kind} · {name}"


def pair_name(environment: dict[str, Any]) -> str:
    """Target and draft by name, without owner or folder, with their sizes."""
    names: list[str] = []
    for model in (environment["target"], environment.get("draft")):
        if model:
            name = model["name"].rstrip("/").rsplit("/", 1)[-1]
            size = _count(model["parameters"])
            names.append(size if names and names[0].startswith(f"{name} ") else f"{name} {size}")
    return " + ".join(names)


def speculation(settings: Settings) -> str:
    if settings.method == "plain":
        return "speculation off"
    return f"speculation on, draft length {settings.draft_length}"


def header_html(found: list[str]) -> str:
    """Our own words and model names, escaped: names come from whoever started the app."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in found)
    return f'<h1>Speculative Decoding Playground</h1><ul class="facts">{items}</ul>'


def _precision(model: dict[str, Any]) -> str:
    return PRECISIONS.get(model["precision"]) or str(model["precision"])


def _count(n: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.1f}".removesuffix(".0") + unit
    return str(n)


def _bytes(n: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= size:
            return f"{n / size:.1f} {unit}" if n < 10 * size else f"{n / size:.0f} {unit}"
    return f"{n} bytes"
