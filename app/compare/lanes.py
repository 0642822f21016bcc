"""The lanes of a comparison as people set them up: values of controls or a JSON list in, settings and names out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.header import short_name, short_pair
from app.settings import settings_from
from core.errors import UserError
from core.settings import METHODS, POCKET_NAME, PRECISIONS, Settings

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
"""What a lane may set for itself; the rest, and what it leaves out, is the same for all."""


def lanes_from(base: Settings, controls: Mapping[str, Any], lanes: Any, most_new_tokens: int) -> list[Settings]:
    """Settings of every lane: `base` with `controls`, and over them what the lane says of KEYS.

    Raises UserError, with the lane's number, for what cannot be.
    """
    if not isinstance(lanes, Sequence) or isinstance(lanes, str) or not FEWEST <= len(lanes) <= MOST:
        raise UserError(f"A comparison takes a list of {FEWEST} to {MOST} lanes.")
    found = []
    for number, lane in enumerate(lanes, 1):
        try:
            own = _own(lane)
            found.append(settings_from(base, most_new_tokens=most_new_tokens, **{**controls, **own}))
        except UserError as error:
            raise UserError(f"Lane {number}: {error}") from None
    return found


def _own(lane: Any) -> dict[str, Any]:
    """What a lane sets for itself. One that names its target takes nothing else of the other's models."""
    if not isinstance(lane, Mapping) or not all(isinstance(key, str) for key in lane):
        raise UserError(f"a lane is an object with any of {', '.join(KEYS)}.")
    if unknown := [key for key in lane if key not in KEYS]:
        raise UserError(f"there is no {unknown[0]!r} to set; a lane has {', '.join(KEYS)}.")
    own = {key: value for key, value in lane.items() if value is not None}
    return {"draft": None, "revision": None, **own} if "target" in own else own


def lane_names(lanes: Sequence[Settings]) -> list[tuple[str, str]]:
    """What sets each lane apart from the others: its method, with the draft length where lengths differ; and its
    models with their precision, as far as they differ."""
    lengths = {each.draft_length for each in lanes if each.method != "plain"}
    pairs = {(each.target, each.draft) for each in lanes}
    precisions = {each.precision for each in lanes}
    names = []
    for each in lanes:
        name = METHODS[each.method][0]
        if each.method not in ("plain", "tree") and len(lengths) > 1:
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
