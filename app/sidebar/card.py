"""The card under the pair: what an inspection found, and what is predicted for a GPU that is not here, as HTML. Names
come from people and hubs, so all is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from core.drafting.methods import METHODS
from core.inspecting.acceptance import EXPECTED, USUAL_RANGE
from core.measuring.deciding import Gain, about_even
from core.progress import in_bytes

MARKS = {"good": "✓", "caution": "!", "bad": "✕"}
LEVELS = {"good": "Good to go", "caution": "Note", "bad": "Will not work"}
MOST_DRAFTS = 3
_DRAFTS = f"Drafts with its tokens, and what is predicted if {EXPECTED:.0%} were accepted:"


def card_html(
    found: dict[str, Any],
    why: str = "",
    gated: bool = False,
    drafts: Sequence[tuple[str, float]] = (),
    method: str = "draft",
    gain: Gain | None = None,
) -> str:
    """The card of an `Inspection` (core.inspecting), `to_dict()`; `why` is the catalogue's line on the pair, `drafts`
    are other drafts for its target with the speed-up predicted for each, the best first; `method` is the one chosen,
    and `gain` what it brought this visitor."""
    headline, *rest = found["verdict"]
    if gated:
        rest.insert(0, "Gated: accept its terms on its Hub page, then log in (hf auth login) or set HF_TOKEN.")
    rest += [why] if why else []
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts(found, method, gain)
    )
    best = "".join(f"<li>{escape(name)}, {speedup:.1f}×</li>" for name, speedup in drafts[:MOST_DRAFTS])
    more = "".join(f"<li>{escape(sentence)}</li>" for sentence in rest)
    level = found["level"]
    return (
        f'<div class="pair-card" data-level="{escape(level)}"><p class="pair-verdict">'
        f'<b aria-hidden="true">{MARKS[level]}</b><span class="for-ears">{LEVELS[level]}: </span>'
        f"{escape(headline)}</p>"
        + f"<dl>{rows}</dl>"
        + (f'<p class="pair-drafts">{_DRAFTS}</p><ul>{best}</ul>' if best else "")
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


def outlooks_html(found: Sequence[dict[str, Any]], compared: str | None) -> str:
    """The cards of one or two predictions, and before two the sentence that compares them."""
    first = f'<p class="outlook-compared" role="status">{escape(compared)}</p>' if compared else ""
    return first + "".join(map(outlook_html, found))


def outlook_html(found: dict[str, Any]) -> str:
    """The card of a `DevicePrediction` (core.inspecting.devices), `to_dict()`: the decision, a column a precision, and
    where every number comes from."""
    card, outlooks = found["card"], found["outlooks"]
    level = "good" if found["go"] else "bad" if not any(each["fits"] for each in outlooks) else "caution"
    heads = "".join(f'<th scope="col">{escape(each["precision"])}</th>' for each in outlooks)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for name, cells in _outlook_rows(found)
    )
    sources = "".join(f"<dt>{escape(what)}</dt><dd>{escape(source)}.</dd>" for what, source in found["sources"].items())
    figures = f"{card['memory']:g} GB, {card['bandwidth']:,g} GB/s, {card['compute']:g} TFLOPS"
    return (
        f'<div class="pair-card outlook" data-level="{level}" role="status"><p class="pair-verdict">'
        f'<b aria-hidden="true">{MARKS[level]}</b>{escape(found["sentence"])}</p>'
        f"<p class='outlook-kind'>A prediction for {escape(card['name'])} ({figures}), not a measurement.</p>"
        f"<table><tr><td></td>{heads}</tr>{rows}</table>"
        f"<details><summary>Where these numbers come from</summary><dl>{sources}</dl></details></div>"
    )


def _cell(text: str) -> str:
    """A figure, and in smaller type what stands behind a comma in it."""
    figure, comma, more = text.partition(", ")
    return f"<td>{escape(figure)}{f'<small>{escape(more)}</small>' if comma else ''}</td>"


def _outlook_rows(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """A line per question, a cell per precision."""
    outlooks, measured = found["outlooks"], found["acceptance"] or {}
    rows = [
        (f"at {found['context']:,} tokens", [in_bytes(each["needed"]) for each in outlooks]),
        ("longest text, tokens", [f"{each['longest']:,}" if each["longest"] else "does not fit" for each in outlooks]),
        ("plain tokens/s", [f"{each['tokens_per_second']:,.0f}" if each["fits"] else "–" for each in outlooks]),
        ("bound by", [each["bound"] if each["fits"] else "–" for each in outlooks]),
    ]
    for at, gain in enumerate(outlooks[0]["gains"]):
        alpha = gain["acceptance"]
        name = f"{alpha:.0%} accepted" + (", measured" if alpha == measured.get("rate") else "")
        rows.append((name, [_gained(each, at) for each in outlooks]))
    return rows


def _gained(outlook: dict[str, Any], at: int) -> str:
    if not outlook["fits"]:
        return "–"
    gain = outlook["gains"][at]
    return f"{gain['speedup']:.2f}×, {gain['draft_length']} drafted" if gain["draft_length"] else "no gain"


def facts(found: dict[str, Any], method: str, gain: Gain | None = None) -> list[tuple[str, str]]:
    """Download, memory, layers and the speed-up to expect, each in a few characters."""
    target, draft, memory = found["target"], found["draft"], found["memory"]
    rows = [("Download", _download([m for m in (target, draft) if m]))]
    needed = in_bytes(memory["needed"])
    rows.append(("Memory", f"{needed} of {in_bytes(memory['free'])} free" if memory["free"] is not None else needed))
    if draft and METHODS[method].network in ("draft", "head"):
        rows.append(
            ("Draft", f"{draft['layers']} of {target['layers']} layers, {found['bytes_ratio']:.0%} of the bytes")
        )
    expected = _had(gain) if gain else _expected(found, method)
    return [*rows, ("Speed-up", expected)] if expected else rows


def _had(gain: Gain) -> str:
    """What the method brought in the visitor's own races."""
    races = "run" if gain.races == 1 else f"{gain.races} runs"
    told = f"{gain.speedup:.2f}× ({gain.low:.2f} to {gain.high:.2f}) in your last {races} here"
    if not gain.same:
        return told
    return f"about the same as plain: {told}" if about_even(gain.speedup) else f"too noisy to tell: {told}"


def _expected(found: dict[str, Any], name: str) -> str:
    """What is predicted of a method before a visitor has run it."""
    method = METHODS[name]
    if not method.drafts:
        return "none: plain decoding is what the others are held against"
    if method.network not in ("draft", "head"):
        return f"{'only where the text repeats itself' if method.ngram else 'not predicted'}; your first run tells"
    if not found["predictions"]:
        return ""
    chain = _predicted(found["predictions"][0], found["acceptance"])
    if method.ngram:
        return f"{chain}; more where the text repeats itself"
    return f"as a chain {chain}; your first run tells of the tree" if method.tree else chain


def _predicted(prediction: dict[str, Any], acceptance: dict[str, Any] | None) -> str:
    """What is predicted at the acceptance that was measured and where that was; else an if, with who says it is
    usual."""
    low, high = prediction["forecasts"][0], prediction["forecasts"][-1]
    if (measured := prediction["measured"]) and acceptance:
        between = f" ({' to '.join(map(_gain, ends))})" if (ends := prediction["between"]) else ""
        rate = f"{acceptance['rate']:.0%} accepted as measured {acceptance['where']}"
        return f"{_gain(measured)}{between} predicted, {rate}"
    rates = f"{low['acceptance']:.0%} to {high['acceptance']:.0%}"
    return f"{_gain(low)} to {_gain(high)} predicted if {rates} were accepted, {USUAL_RANGE}"


def _gain(forecast: dict[str, Any]) -> str:
    return f"{forecast['speedup']:.1f}×" if forecast["draft_length"] else "no gain"


def _download(models: list[dict[str, Any]]) -> str:
    sizes = [m["download_bytes"] for m in models]
    if any(size is None for size in sizes):
        return "size unknown"
    return in_bytes(sum(sizes)) if any(sizes) else "none, it is here"
