"""The race that is shown before a visitor's first: one that comes with the page, by the pair it was recorded with.

`python -m app.playground.example` records those of the pairs that are at hand, with the prompt and settings that the
page begins with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from app.assets import ASSETS
from core.settings import POCKET_NAME, SMOLLM2_NAME, Settings

EXAMPLES = ASSETS / "examples"
NEW_TOKENS = 64
"""Short enough to be read while it plays."""


def example_of(settings: Settings) -> tuple[dict[str, Any], str] | None:
    """A race of the pair of these settings and where it was recorded; None where there is none to show."""
    name = POCKET_NAME if settings.target is None else settings.target
    if name not in (POCKET_NAME, SMOLLM2_NAME) or settings.draft or settings.revision:
        return None
    return _read(EXAMPLES / f"{name}.json")


@cache
def _read(path: Path) -> tuple[dict[str, Any], str] | None:
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return document, f"on {document['runs'][0]['environment']['device_name']}"


def record(name: str) -> None:
    """Race the pair of this name as a page over it begins, and keep the document."""
    from app.playground import chip_prompts
    from app.serving.starting import engine_for
    from core.records import SCHEMA
    from core.text import Prompt

    engine = engine_for(name, None, "auto")
    pair = engine.load(engine.settings)
    prompt: Prompt = chip_prompts(bool(engine.environment(pair)["target"]["chat"]))[0]
    for tops in (0, 3):  # the first to warm up
        methods = (engine.settings.method, "plain")
        start = replace(engine.settings, temperature=prompt.temperature or 0.0, max_new_tokens=NEW_TOKENS)
        settings = [replace(start, method=method) for method in methods]
        lanes = [engine.open_lane(pair, prompt.text, each, lambda: False, tops) for each in settings]
        for _ in engine.race(lanes):
            pass
    document = {"schema": SCHEMA, "runs": [lane.run.to_dict() for lane in lanes]}
    EXAMPLES.mkdir(exist_ok=True)
    (EXAMPLES / f"{name}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from core.loading.pair import at_hand

    for each in filter(at_hand, (SMOLLM2_NAME, POCKET_NAME)):
        record(each)
