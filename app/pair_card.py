"""The card under the pair: what an inspection found, as HTML. Names come from people and hubs, so all is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from core.progress import in_bytes

MARKS = {"good": "✓", "caution": "!", "bad": "✕"}
LEVELS = {"good": "Good to go", "caution": "Note", "bad": "Will not work"}
MOST_DRAFTS = 3


def card_html(
    found: dict[str, Any], why: str = "", gated: bool = False, drafts: Sequence[tuple[str, float]] = ()
) -> str:
    """The card of an `Inspection` (core.inspecting), `to_dict()`; `why` is the catalogue's line on the pair, `drafts`
    are other drafts for its target with the speed-up predicted for each, the best first."""
    headline, *rest = found["verdict"]
    if gated:
        rest.insert(0, "Gated: accept its terms on its Hub page, then log in (hf auth login) or set HF_TOKEN.")
    rest += [why] if why else []
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts(found))
    best = "".join(f"<li>{escape(name)}, {speedup:.1f}×</li>" for name, speedup in drafts[:MOST_DRAFTS])
    more = "".join(f"<li>{escape(sentence)}</li>" for sentence in rest)
    level = found["level"]
    return (
        f'<div class="pair-card" data-level="{escape(level)}"><p class="pair-verdict">'
        f'<b aria-hidden="true">{MARKS[level]}</b><span class="for-ears">{LEVELS[level]}: </span>'
        f"{escape(headline)}</p><dl>{rows}</dl>"
        + (f'<p class="pair-drafts">Drafts with its tokens, and what is predicted:</p><ul>{best}</ul>' if best else "")
        + (f"<details><summary>{len(rest)} more to know</summary><ul>{more}</ul></details>" if rest else "")
        + "</div>"
    )


def waiting_html(text: str) -> str:
    return f'<div class="pair-card" data-level="waiting"><p class="pair-verdict">{escape(text)}</p></div>'


def trouble_html(text: str) -> str:
    """The card of a pair that cannot be looked at, with the sentence why."""
    return (
        '<div class="pair-card" data-level="bad" role="alert"><p class="pair-verdict">'
        f'<b aria-hidden="true">{MARKS["bad"]}</b>{escape(text)}</p></div>'
    )


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Download, memory, layers and predicted speed-up, each in a few characters."""
    target, draft, memory = found["target"], found["draft"], found["memory"]
    rows = [("Download", _download([m for m in (target, draft) if m]))]
    needed = in_bytes(memory["needed"])
    rows.append(("Memory", f"{needed} of {in_bytes(memory['free'])} free" if memory["free"] is not None else needed))
    if draft:
        rows.append(
            ("Draft", f"{draft['layers']} of {target['layers']} layers, {found['bytes_ratio']:.0%} of the bytes")
        )
    if found["predictions"]:
        rows.append(("Predicted", _speedup(found["predictions"][0])))
    return rows


def _download(models: list[dict[str, Any]]) -> str:
    sizes = [m["download_bytes"] for m in models]
    if any(size is None for size in sizes):
        return "size unknown"
    return in_bytes(sum(sizes)) if any(sizes) else "none, it is here"


def _speedup(prediction: dict[str, Any]) -> str:
    low, high = prediction["forecasts"][0], prediction["forecasts"][-1]
    rates = f"{low['acceptance']:.0%} to {high['acceptance']:.0%}"
    return f"{low['speedup']:.1f}× to {high['speedup']:.1f}× at {rates} accepted"
