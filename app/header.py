"""The line at the top: which target runs, and for who opens the side panel on what, and how."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from core.drafting.methods import METHODS
from core.progress import in_bytes
from core.settings import POCKET_NAME, SMOLLM2_NAME, Settings

DEVICES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}


def facts(environment: dict[str, Any], settings: Settings) -> list[str]:
    """Device, pair, precision, memory of the weights, speculation."""
    target, draft = environment["target"], environment.get("draft")
    head = environment.get("head")
    memory = sum(m["weight_bytes"] for m in (target, draft, head) if m)
    return [
        device(environment),
        with_head(pair_name(environment), environment, settings.method),
        precisions(environment),
        f"{in_bytes(memory)} of weights",
        speculation(settings),
    ]


def facts_before_loading(environment: dict[str, Any], settings: Settings) -> list[str]:
    """The same of a pair that is not in memory; `environment` is any of this machine."""
    return [device(environment), short_pair(settings), "loads with the next run", speculation(settings)]


def target_of(environment: dict[str, Any]) -> str:
    """The target that was loaded, as short as it can be told."""
    return f"{short_name(environment['target']['name'])}, {_precision(environment['target'])}"


def notes(environment: dict[str, Any]) -> list[str]:
    """What is not as it was asked for, such as another precision, with its consequence."""
    models = [m for m in (environment["target"], environment.get("draft")) if m]
    return list(dict.fromkeys(note for model in models for note in model.get("notes") or ()))


def device(environment: dict[str, Any]) -> str:
    name, kind = environment["device_name"], DEVICES.get(environment["device"], environment["device"])
    return name if kind in name or environment["device"] == "cuda" else f"{kind} · {name}"


def short_name(name: str) -> str:
    """A model's name without owner or folder."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def short_pair(settings: Settings) -> str:
    """Target and draft as they were asked for, by their short names."""
    from core.loading.pair import SMOLLM2_LABEL

    names = [settings.target or POCKET_NAME, *([settings.draft] if settings.draft else [])]
    return " + ".join(SMOLLM2_LABEL if name == SMOLLM2_NAME else short_name(name) for name in names)


def pair_name(environment: dict[str, Any]) -> str:
    """Target and draft as they were loaded, by their short names, with their sizes."""
    names: list[str] = []
    for model in (environment["target"], environment.get("draft")):
        if model:
            name = short_name(model["name"])
            size = _count(model["parameters"])
            names.append(size if names and names[0].startswith(f"{name} ") else f"{name} {size}")
    return " + ".join(names)


def drafting_head(environment: dict[str, Any], method: str) -> dict[str, Any] | None:
    """What is told of the trained head, where the method is one that it drafts in."""
    return environment.get("head") if METHODS[method].network == "head" else None


def with_head(pair: str, environment: dict[str, Any], method: str) -> str:
    """The name of a pair with the trained head, where the method is one that it drafts in."""
    head = drafting_head(environment, method)
    return f"{pair} + head {_count(head['parameters'])}" if head else pair


def precisions(environment: dict[str, Any]) -> str:
    """The precisions of target and draft, once where they are the same."""
    models = [model for model in (environment["target"], environment.get("draft")) if model]
    names = (_precision(model) for model in models)
    return " + ".join(dict.fromkeys(names))


def _precision(model: dict[str, Any]) -> str:
    """The precision a model runs in, after the one it was stored in where it comes from a GGUF file."""
    name = "NF4" if model["precision"] == "nf4" else str(model["precision"])
    return f"from {model['origin']}, {name}" if model.get("origin") else name


def speculation(settings: Settings) -> str:
    method = METHODS[settings.method]
    if not method.drafts:
        return "speculation off"
    if not method.heeds("draft_length"):  # a tree, which has a shape in place of a length
        return "speculation on, drafts in a tree"
    return f"speculation on, draft length {settings.draft_length}"


def header_html(target: str, found: list[str], remarks: Sequence[str] = ()) -> str:
    """The title, the target as a button that opens the side panel, and what is known of the machine while that is open.
    Our own words and model names, escaped: names come from whoever started the app."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in found)
    said = "".join(f'<p class="remark" role="note">{escape(remark)}</p>' for remark in remarks)
    button = (
        '<button type="button" class="setup" data-settings-toggle aria-expanded="false" aria-controls="sidebar" '
        f'title="Another pair, another precision">{escape(target)}</button>'
    )
    return f'<h1>Speculative Decoding Playground</h1>{button}<ul class="facts">{items}</ul>{said}'


DRAFTED_BY = (
    '<label class="drafted-by"><span>drafted by</span> '
    '<select data-method aria-label="Method: who guesses the next tokens"></select></label>'
)
"""The method beside the target, filled with those of the side panel by assets/page/setup.js."""


def _count(n: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.1f}".removesuffix(".0") + unit
    return str(n)
