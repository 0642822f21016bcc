"""What the tab shows before a first training: how one went, in small, greyed and labelled.

`python -m core train-head --target pocket --out DIR --hours 0.03` and then `python -m app.train.example DIR` keep the
looks of a training at held-out answers.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from app.parts import line_sketch, sketches_html
from app.playground.example import EXAMPLES
from core.progress import duration

LOOKS = EXAMPLES / "training.json"
MOST_DRAWN = 10


@cache
def example_html() -> str:
    """Two pictures of a training that was recorded."""
    found: dict[str, Any] = json.loads(LOOKS.read_text(encoding="utf-8"))
    looks = found["looks"]
    by_position = [
        [(look["seconds"], look["agreement"][at]) for look in looks] for at in range(len(looks[-1]["agreement"]))
    ]
    passes = [(look["seconds"], 1 + sum(look["agreement"])) for look in looks]
    first, last = by_position[0][0][1], by_position[0][-1][1]
    pictures = (
        (
            "How often is a guess right?",
            f"the first of a draft: {first:.0%} at the start, {last:.0%} at the end",
            line_sketch(*by_position),
        ),
        ("What does a pass yield?", f"{passes[0][1]:.2f} tokens, then {passes[-1][1]:.2f}", line_sketch(passes)),
    )
    went = f"{duration(looks[-1]['seconds'])} of a head for {found['target']}, recorded {found['where']}"
    return sketches_html(f"An example: {went}; yours comes here.", pictures)


def record(folder: Path) -> None:
    """Keep some of the looks that a training of a head for the bundled target took at held-out answers."""
    from core.lanes import device_name
    from core.loading import resolve_device
    from core.training.kept import TRAINING, read_progress

    lines = [line for line in read_progress(folder / TRAINING) if line["agreement"]]
    taken = sorted({round(at * (len(lines) - 1) / (MOST_DRAWN - 1)) for at in range(MOST_DRAWN)})
    looks = [
        {"seconds": round(lines[at]["seconds"], 1), "agreement": [round(share, 4) for share in lines[at]["agreement"]]}
        for at in taken
    ]
    found = {"target": "the bundled target", "where": f"on {device_name(resolve_device('auto'))}", "looks": looks}
    LOOKS.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
