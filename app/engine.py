"""Where the page meets the engine: the one file of the page that reaches models (and the one that tests replace)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

from core.records import METHODS, Round, Settings

Progress = Callable[[str], None]
TOPS = 3
"""How many of the likeliest tokens of each model are recorded with a token."""


class Engine:
    """Loaded pairs, and the calls the page makes on them. Pairs are loaded once and shared by all visitors."""

    def __init__(self, settings: Settings, kept: int = 2) -> None:
        self.settings = settings
        self._kept = kept
        self._pairs: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = Lock()

    def load(self, settings: Settings, progress: Progress | None = None) -> Any:
        """The pair these settings name; the longest unused one is let go when a new one comes."""
        from core.loading import load_pair, silent

        key = (settings.target, settings.draft, settings.precision, settings.draft_precision, settings.revision)
        with self._lock:
            if key not in self._pairs:
                while len(self._pairs) >= self._kept:
                    self._pairs.popitem(last=False)
                self._pairs[key] = load_pair(settings, progress or silent)
            self._pairs.move_to_end(key)
            return self._pairs[key]

    def is_loaded(self, settings: Settings) -> bool:
        """Whether a run with these settings can start at once."""
        key = (settings.target, settings.draft, settings.precision, settings.draft_precision, settings.revision)
        return key in self._pairs

    def methods(self, pair: Any) -> dict[str, str | None]:
        """Each method, with the reason why this pair cannot use it (None: it can)."""
        from core.drafting.build import available

        reasons = available(pair)
        return {m: reasons.get(m) for m in METHODS if m in reasons or m == "plain"}

    def open_lane(self, pair: Any, prompt: str, settings: Settings, stop: Callable[[], bool]) -> Any:
        from core.decoding import open_lane

        return open_lane(pair, prompt, settings, stop=stop, tops=TOPS)

    def race(self, lanes: Sequence[Any]) -> Iterator[tuple[int, Round]]:
        from core.decoding import race

        return race(lanes)

    def environment(self, pair: Any) -> dict[str, Any]:
        """What the runs of this pair record about where they ran."""
        from core.environment import describe_environment

        return describe_environment(pair.target, pair.draft)
