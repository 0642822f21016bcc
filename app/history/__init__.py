"""Tab: the runs of this visit, to show again, to put beside each other, to open from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.assets import asset
from app.compare import Compare
from app.header import drafting_head, pair_name, precisions, with_head
from app.history.run_file import open_file
from app.insides import NEWEST, PRIVATE, QUIET, scripted, sent_by, sent_with
from app.serving.turns import sentence
from app.serving.visit import Entry, Visit, alone
from app.tokens.markup import json_text
from app.tokens.replay import replay_value
from core.drafting.methods import METHODS
from core.errors import UserError
from core.records import median_of_known
from core.servers import load_document
from core.servers.records import pooled, speculation_from_dict

LONGEST_LABEL = 80
SETTINGS = {
    "Method": "method",
    "Draft length": "draft_length",
    "Tree": "tree",
    "Exit layer": "exit_layer",
    "Temperature": "temperature",
    "Top-k": "top_k",
    "Top-p": "top_p",
    "Min-p": "min_p",
    "Seed": "seed",
    "New tokens": "max_new_tokens",
}
"""Settings that are put beside each other, in the order of the sidebar."""
NONE = "–"

Head = dict[str, Any]
"""A run document without what grows with a run: see `app.serving.visit.Entry.heads`."""


class History:
    """The tab and the functions behind its buttons; what running servers answered is shown again by `compare`."""

    def __init__(self, compare: Compare) -> None:
        self.compare = compare

    def build(self, visit: gr.State, race: gr.HTML, tabs: gr.Tabs, tab: gr.Tab) -> None:
        """Lay out the tab; other runs are shown again in `race`, on the first of `tabs`."""
        events = ("refresh", "show", "remove", "open")
        history = scripted(asset("history/history.html"), "history/history.js", *events, elem_id="history")
        opened = [tab.select, sent_by(history, "refresh")]  # one listener: the answers of two may overtake one another
        gr.on(opened, self.table, visit, history, **NEWEST)
        history.show(self.show, visit, [race, tabs, history, *self.compare.places], **QUIET)
        history.remove(self.remove, visit, history, **QUIET)
        history.open(self.open, visit, history, concurrency_limit=2, **PRIVATE)

    def table(self, visit: Visit) -> str:
        return table(visit)

    @alone
    def show(self, visit: Visit, event: gr.EventData) -> tuple[Any, ...]:
        """An entry as it looked when it ended: in the panes of the Playground, or where running servers answered in
        those of Compare."""
        elsewhere = [gr.skip()] * len(self.compare.places)
        try:
            entry = visit.find(sent_with(event).get("number"))
            if entry.server_heads:
                return gr.skip(), gr.Tabs(selected="compare"), table(visit), *self.compare.again(entry)
            value = replay_value(entry.document())
        except Exception as error:
            return gr.skip(), gr.skip(), table(visit, sentence(error), error=True), *elsewhere
        visit.shown = entry.number
        return value, gr.Tabs(selected="playground"), table(visit), *elsewhere

    def remove(self, visit: Visit, event: gr.EventData) -> str:
        numbers = sent_with(event).get("numbers")
        visit.remove(number for number in numbers if isinstance(number, int)) if isinstance(numbers, list) else None
        return table(visit)

    def open(self, visit: Visit, event: gr.EventData) -> str:
        """A file's text, read in the browser, into the list."""
        asked = sent_with(event)
        name, text = asked.get("name"), asked.get("text")
        try:
            if not isinstance(text, str):
                raise UserError("The file holds no text.")
            found, label = open_file(text), str(name or "a file")[:LONGEST_LABEL]
            if found.load:
                entry = visit.add_load(load_document(found.load), label)
            else:
                entry = visit.add("opened", found.runs, label, found.server_runs)
        except Exception as error:
            return table(visit, sentence(error), error=True)
        return table(visit, f"{entry.label} is open as number {entry.number}.")


def table(visit: Visit, say: str = "", error: bool = False) -> str:
    """The component's value: a row per entry, and what there is to say."""
    rows = [{**row(entry), "columns": columns(entry)} for entry in visit.entries]
    value = {"rows": rows, "shown": visit.shown, "say": say, "error": error}
    return json_text(value)


@dataclass(eq=False)
class Lane:
    """The entry's runs with the same pair and settings, on one prompt or several. `row`: as Compare has them; `plain`:
    what they are held against there."""

    heads: list[Head]
    row: dict[str, Any]
    plain: Lane | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.heads[0]["settings"]

    def median(self, name: str) -> float | None:
        """Of the prompts: "tokens_per_second", or "ratio_to_plain"."""
        return self.row[name] and self.row[name]["median"]


def lanes(entry: Entry) -> list[Lane]:
    found = [Lane([entry.heads[place] for place in each["places"]], each["row"]) for each in entry.lanes]
    for lane, each in zip(found, entry.lanes):
        lane.plain = None if each["plain"] is None else found[each["plain"]]
    return found


def row(entry: Entry) -> dict[str, Any]:
    """An entry in the list, in figures; None where there is none."""
    found = _own_row(entry) if entry.heads else _server_row(entry)
    first, others = found.pop("first"), found.pop("others")
    return {
        "number": entry.number,
        "kind": entry.kind,
        "label": entry.label,
        "place": "compare" if entry.server_heads else "playground",
        "when": entry.when.isoformat(timespec="seconds"),
        "prompt": first["prompt"][:120],
        "temperature": first["settings"]["temperature"],
        "stopped": any(head["stop_reason"] == "cancelled" for head in [*entry.heads, *entry.server_heads]),
        **found,
        "method": found["method"] + (f" + {others} more" if others > 0 else ""),
    }


def _own_row(entry: Entry) -> dict[str, Any]:
    """What the list says of an entry with runs of ours; `first` is the one it speaks of, with `others` more lanes."""
    drafting = _drafting(entry)
    shown = drafting[0] if drafting else lanes(entry)[0]
    plain = shown.plain
    head, settings = shown.heads[0], shown.settings
    return {
        "first": head,
        "others": len(lanes(entry)) + len(server_lanes(entry)) - bool(drafting) - bool(plain),
        "pair": with_head(pair_name(head["environment"]), head["environment"], settings["method"]),
        "precision": precisions(head["environment"]),
        "method": METHODS[settings["method"]].label,
        "draft_length": settings["draft_length"] if METHODS[settings["method"]].heeds("draft_length") else None,
        "speculative": shown.median("tokens_per_second") if drafting else None,
        "plain": plain and plain.median("tokens_per_second"),
        "speedup": shown.median("ratio_to_plain") if drafting else None,
        "acceptance": shown.row["acceptance_rate"],
    }


def _server_row(entry: Entry) -> dict[str, Any]:
    """The same of an entry of servers' answers alone."""
    shown, *others = server_lanes(entry)
    figures = _server_figures(shown)
    return {
        "first": shown[0],
        "others": len(others),
        "pair": server_name(shown[0]),
        "precision": None,
        "method": shown[0]["server"]["drafter"] or "running server",
        "draft_length": None,
        "speculative": figures["speed"],
        "plain": None,
        "speedup": None,
        "acceptance": figures["accepted"],
    }


def columns(entry: Entry) -> list[dict[str, Any]]:
    """The entry's lanes as columns of the comparison: settings, then what was measured, each as it is shown.

    Plain decoding that ran beside others is not a column of its own: it is what theirs are measured against.
    """
    shown = _drafting(entry) or lanes(entry)[:1]
    ours = [{"settings": _settings(lane), "measured": _measured(lane)} for lane in shown]
    return [*ours, *(_server_column(lane) for lane in server_lanes(entry))]


def server_lanes(entry: Entry) -> list[list[Head]]:
    """The entry's answers of running servers by lane: those of one server and model."""
    found: dict[str, list[Head]] = {}
    for head in entry.server_heads:
        server = head["server"]
        found.setdefault(json.dumps([server["address"], server["model"], head["settings"]]), []).append(head)
    return list(found.values())


def server_name(head: Head) -> str:
    """Engine and version as the server reported them."""
    server = head["server"]
    return " ".join(part for part in (server["engine"], server["version"]) if part)


def _server_column(lane: list[Head]) -> dict[str, Any]:
    """A server's lane as a column: what it was asked, and what it and its reader measured."""
    head, figures = lane[0], _server_figures(lane)
    asked = head["settings"]
    settings = {name: _setting_of(asked, key) for name, key in SETTINGS.items()}
    return {
        "settings": {
            "Prompt": head["prompt"][:80] if len(lane) == 1 else f"{len(lane)} prompts",
            "Pair": f"{server_name(head)}: {head['server']['model']}",
            "Precision": NONE,
            **settings,
            "Method": head["server"]["drafter"] or "running server",
            "Device": head["server"]["address"],
        },
        "measured": {
            "Tokens/s": _shown(figures["speed"], "{:.0f}"),
            "Plain tokens/s": NONE,
            "Speed-up": NONE,
            "Accepted": NONE,
            "Drafts used": _shown(figures["accepted"], "{:.0%}"),
            "Tokens per pass": _shown(figures["per_pass"], "{:.2f}"),
            "Tokens written": f"{sum(each['metrics']['tokens'] for each in lane):,}",
            "Prefill": NONE,
            "Ended by": ", ".join(dict.fromkeys(each["stop_reason"] or "cancelled" for each in lane)),
        },
    }


def _setting_of(asked: dict[str, Any], key: str) -> str:
    value = asked.get(key)
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _server_figures(lane: list[Head]) -> dict[str, float | None]:
    """A server's answers as Compare sums them up: medians, and of the drafts that it counted the whole."""
    ended = [head for head in lane if head["stop_reason"] in ("eos", "length")] or lane
    counts = [speculation_from_dict(head["speculation"]) for head in ended if head["speculation"]]
    whole = pooled(counts) if len(counts) == len(ended) else None
    return {
        "speed": _median(ended, "tokens_per_second"),
        "accepted": whole and whole.acceptance_rate,
        "per_pass": median_of_known(each.tokens_per_pass for each in counts),
    }


def _settings(lane: Lane) -> dict[str, str]:
    first = lane.heads[0]
    environment = first["environment"]
    head = drafting_head(environment, first["settings"]["method"])
    return {
        "Prompt": first["prompt"][:80] if len(lane.heads) == 1 else f"{len(lane.heads)} prompts",
        "Pair": pair_name(environment),
        "Head": head["name"] if head else NONE,
        "Precision": precisions(environment),
        **{name: _setting(key, first["settings"]) for name, key in SETTINGS.items()},
        "Device": environment["device_name"],
    }


def _setting(key: str, settings: dict[str, Any]) -> str:
    value = settings[key]
    if not METHODS[settings["method"]].heeds(key):
        return NONE
    if key == "method":
        return METHODS[value].label
    return f"{value:g}" if isinstance(value, float) else "auto" if value is None else str(value)


def _measured(lane: Lane) -> dict[str, str]:
    heads, plain = lane.heads, lane.plain
    speedup = lane.median("ratio_to_plain") if lane is not plain else None
    return {
        "Tokens/s": _shown(lane.median("tokens_per_second"), "{:.0f}"),
        "Plain tokens/s": _shown(plain and plain.median("tokens_per_second"), "{:.0f}"),
        "Speed-up": _shown(speedup, "{:.2f}×"),
        "Accepted": _shown(lane.row["acceptance_rate"], "{:.0%}"),
        "Drafts used": _shown(_median(heads, "draft_utilisation"), "{:.0%}"),
        "Tokens per pass": _shown(lane.row["tokens_per_round"], "{:.2f}"),
        "Tokens written": f"{sum(head['metrics']['new_tokens'] for head in heads):,}",
        "Prefill": _shown(_median(heads, "prefill_seconds", 1000), "{:.1f} ms"),
        "Ended by": ", ".join(dict.fromkeys(head["stop_reason"] or "cancelled" for head in heads)),
    }


def _drafting(entry: Entry) -> list[Lane]:
    return [lane for lane in lanes(entry) if lane.settings["method"] != "plain"]


def _median(lane: list[Head], name: str, scale: float = 1.0) -> float | None:
    found = median_of_known(head["metrics"][name] for head in lane)
    return None if found is None else scale * found


def _shown(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)
