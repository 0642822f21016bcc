"""The lanes of a comparison as people set them up: values of controls or a JSON list in, settings and names out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.compare.servers import ServerContender, asked_server
from app.header import short_name, short_pair
from app.settings import settings_from
from app.sidebar.picker import OTHER
from core.drafting.methods import METHODS
from core.errors import UserError
from core.settings import POCKET_NAME, PRECISIONS, Settings

FEWEST, MOST = 2, 4
KEYS = (
    "target",
    "draft",
    "revision",
    "precision",
    "draft_precision",
    "method",
    "draft_length",
    "tree",
    "exit_layer",
)
"""What a lane of ours may set for itself; the rest, and what it leaves out, is the same for all."""
OF_SERVER = ("server", "model")
"""What a lane sets that is a running server."""

SIDEBAR, SAME = "as sidebar", "same as lane 1"
SERVER = "a running server\u2026"
LANE = ("pair", "target", "draft", "precision", "method", "draft_length", "server", "model")
"""The controls of a lane, in the order in which `Compare.run` takes their values."""
ADDRESS = (
    (
        "server",
        "Address",
        "Where a running server answers: vLLM, SGLang, llama.cpp or another that speaks as OpenAI's does. The key in "
        "PLAYGROUND_SERVER_KEY goes to those that --server named where the page was started, and to no others.",
        "http://127.0.0.1:8000",
    ),
    ("model", "Model", "Which of the server's models; the first where it is left empty.", "its first model"),
)
"""Of a lane that is a running server: name, label, help and example of its fields."""


def lanes_from(
    base: Settings, controls: Mapping[str, Any], lanes: Any, most_new_tokens: int
) -> list[Settings | ServerContender]:
    """Settings of every lane: `base` with `controls`, and over them what the lane says of KEYS; or the server it names.

    Raises UserError, with the lane's number, for what cannot be.
    """
    if not isinstance(lanes, Sequence) or isinstance(lanes, str) or not FEWEST <= len(lanes) <= MOST:
        raise UserError(f"A comparison takes a list of {FEWEST} to {MOST} lanes.")
    found: list[Settings | ServerContender] = []
    for number, lane in enumerate(lanes, 1):
        try:
            own = _own(lane)
            if "server" in own:
                shared = settings_from(base, most_new_tokens=most_new_tokens, **controls)
                found.append(asked_server(number, own, shared))
                continue
            found.append(settings_from(base, most_new_tokens=most_new_tokens, **{**controls, **own}))
        except UserError as error:
            raise UserError(f"Lane {number}: {error}") from None
    return found


def _own(lane: Any) -> dict[str, Any]:
    """What a lane sets for itself. One that names its target takes nothing else of the other's models."""
    if not isinstance(lane, Mapping) or not all(isinstance(key, str) for key in lane):
        raise UserError(f"a lane is an object with any of {', '.join(KEYS)}.")
    if unknown := [key for key in lane if key not in (*KEYS, *OF_SERVER)]:
        raise UserError(f"there is no {unknown[0]!r} to set; a lane has {', '.join((*KEYS, *OF_SERVER))}.")
    own = {key: value for key, value in lane.items() if value is not None}
    if "model" in own and "server" not in own:
        raise UserError("a model is named with the server that has it; name the server too.")
    return {"draft": None, "revision": None, **own} if "target" in own else own


def chosen_lanes(values: Sequence[Any]) -> list[dict[str, Any]]:
    """The controls of each lane by name; what a lane has the same as lane 1 is taken from there."""
    first = dict(zip(LANE, values))
    found = []
    for at in range(0, len(values), len(LANE)):
        own = dict(zip(LANE, values[at : at + len(LANE)]))
        if own["pair"] == SAME:
            own |= {name: first[name] for name in ("pair", "target", "draft", "server", "model")}
        found.append({name: first[name] if value == SAME else value for name, value in own.items()})
    return found


def needed(pair: str, method: str) -> list[bool]:
    """Which controls a lane needs besides its pair: target, draft, server, model, precision, method, draft length."""
    ours = pair != SERVER
    return [pair == OTHER] * 2 + [not ours] * 2 + [ours, ours, ours and METHODS[method].heeds("draft_length")]


def lane_names(lanes: Sequence[Settings]) -> list[tuple[str, str]]:
    """What sets each lane apart from the others: its method, with the draft length where lengths differ; and its
    models with their precision, as far as they differ."""
    lengths = {each.draft_length for each in lanes if METHODS[each.method].drafts}
    pairs = {(each.target, each.draft) for each in lanes}
    precisions = {each.precision for each in lanes}
    names = []
    for each in lanes:
        name = METHODS[each.method].label
        if METHODS[each.method].heeds("draft_length") and len(lengths) > 1:
            name += f", length {each.draft_length}"
        models = [short_pair(each)] if len(pairs) > 1 else []
        if len(precisions) > 1:
            models.append(short_precision(each.precision))
        names.append((name, ", ".join(models)))
    return names


def short_precision(precision: str) -> str:
    return PRECISIONS.get(precision, precision).split(" (")[0]


def target_name(settings: Settings) -> str:
    return short_name(settings.target or POCKET_NAME)
