"""An engine without models: rounds from a script, so that the page can be driven fast and exactly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from app.engine import Engine
from core.errors import UserError
from core.records import Candidate, Round, Run, Settings, Token

CODE = (
    'def merge_sort(items):\n    """Sort a list."""\n    if len(items) <= 1:\n        return items\n    middle = '
    "len(items) // 2\n    left = merge_sort(items[:middle])\n    right = merge_sort(items[middle:])\n    return "
    "merge(left, right)\n\n\n"
)
ENVIRONMENT = {
    "device": "cpu",
    "device_name": "2 CPU cores",
    "threads": 2,
    "target": {
        "name": "pocket",
        "precision": "nf4",
        "layers": 16,
        "parameters": 27_000_000,
        "weight_bytes": 26_400_000,
    },
    "draft": {"name": "pocket-draft", "precision": "fp32", "parameters": 1_700_000, "weight_bytes": 6_800_000},
}


def pieces(text: str) -> list[str]:
    """Text in token-like pieces."""
    found, word = [], ""
    for character in text:
        if word and not (character.isalnum() and word[-1].isalnum()) and word != " ":
            found.append(word)
            word = ""
        word += character
    return [*found, word]


@dataclass
class FakeLane:
    run: Run
    rounds: Iterator[Round]
    seconds: float = 0.0

    def close(self) -> None:
        self.run.stop_reason = self.run.stop_reason or "cancelled"


class FakeEngine(Engine):
    """Speaks `texts` over and over; `pace` is how much of the pretended engine time really passes."""

    def __init__(self, texts: Sequence[str] = tuple(pieces(CODE)), pace: float = 1.0, acceptance: float = 0.78) -> None:
        super().__init__(Settings(draft_length=5))
        self.texts = list(texts)
        self.pace = pace
        self.acceptance = acceptance

    def load(self, settings: Settings, progress: Callable[[str], None] | None = None) -> Any:
        return SimpleNamespace(target=None, draft=None)

    def is_loaded(self, settings: Settings) -> bool:
        return True

    def methods(self, pair: Any) -> dict[str, str | None]:
        return {"draft": None, "ngram": None, "early-exit": "the target was not trained for it", "plain": None}

    def environment(self, pair: Any) -> dict[str, Any]:
        return ENVIRONMENT

    def open_lane(self, pair: Any, prompt: str, settings: Settings, stop: Callable[[], bool]) -> Any:
        if not prompt.strip():
            raise UserError("The prompt is empty; write something to continue.")
        if "explode" in prompt:
            raise RuntimeError("a fault of ours")
        run = Run(settings, ENVIRONMENT, prompt, [1, 2, 3])
        return FakeLane(run, self._rounds(run, stop))

    def _rounds(self, run: Run, stop: Callable[[], bool]) -> Iterator[Round]:
        chance = random.Random(run.settings.seed)
        run.prefill_seconds = 0.004
        while not run.stop_reason:
            if stop():
                run.stop_reason = "cancelled"
                return
            round_ = self._plain(run) if run.settings.method == "plain" else self._speculative(run, chance)
            time.sleep(round_.seconds * self.pace)
            run.rounds.append(round_)
            run.token_ids += [t.id for t in round_.kept]
            run.text += "".join(t.text for t in round_.kept)
            if len(run.token_ids) >= run.settings.max_new_tokens:
                run.stop_reason = "length"
            yield round_

    def _text(self, position: int) -> str:
        return self.texts[position % len(self.texts)]

    def _token(self, run: Run, offset: int, outcome: Any, **more: Any) -> Token:
        position = len(run.token_ids) + offset
        top = [Candidate(position, self._text(position), 0.71), Candidate(7, " other", 0.2), Candidate(8, "\n", 0.05)]
        return Token(position, self._text(position), outcome, top_target=top, **more)

    def _plain(self, run: Run) -> Round:
        return Round(len(run.rounds), [], self._token(run, 0, "plain", p=1.0), 0.0, 0.0078, 0.0002)

    def _speculative(self, run: Run, chance: random.Random) -> Round:
        left = run.settings.max_new_tokens - len(run.token_ids) - 1
        length = min(5, left)
        accepted = next((i for i in range(length) if chance.random() > self.acceptance), length)
        drafted = []
        for i in range(length):
            outcome = "accepted" if i < accepted else "rejected" if i == accepted else "ignored"
            token = self._token(run, i, outcome, p=0.83 if outcome == "accepted" else 0.08, q=0.91)
            token.parent = i - 1 if i else None
            token.draw = None if outcome == "ignored" else 0.05 if outcome == "accepted" else 0.41
            if outcome != "accepted":
                token.text = self._text(len(run.token_ids) + i + 9)
            token.top_draft = [Candidate(token.id, token.text, 0.91), Candidate(9, " x", 0.03)]
            drafted.append(token)
        emitted = "plain" if not length else "bonus" if accepted == length else "corrected"
        last = self._token(run, accepted, emitted, p=0.77)
        return Round(len(run.rounds), drafted, last, 0.0009 * length, 0.0091, 0.0003)

    def race(self, lanes: Sequence[Any]) -> Iterator[tuple[int, Round]]:
        going = list(range(len(lanes)))
        try:
            while going:
                index = min(going, key=lambda i: (lanes[i].seconds, i))
                round_ = next(lanes[index].rounds, None)
                if round_ is None:
                    going.remove(index)
                else:
                    lanes[index].seconds = lanes[index].run.engine_seconds
                    yield index, round_
        finally:
            for lane in lanes:
                lane.close()
