"""Where the page meets the engine: the one file of the page that reaches models (and the one that tests replace)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from core.drafting.methods import METHODS
from core.errors import Cancelled, UserError
from core.progress import Progress, Stop, never, silent
from core.records import Round, Run
from core.settings import POCKET_NAME, SMOLLM2_NAME, Settings

if TYPE_CHECKING:
    from core.inspecting.acceptance import Acceptance
    from core.inspecting.catalogue import Found
    from core.text import Prompt
    from core.training.kept import Kept

Remote = Callable[[str, Settings, Stop, list[Run]], Iterator[dict[str, Any]]]
"""(prompt, settings, stop, runs) -> the events of a race; appends to `runs`."""
TOPS = 3
"""How many of the likeliest tokens of each model are recorded with a token."""


@dataclass(frozen=True)
class Offer:
    """A pair of the catalogue as this machine sees it. `fits`: it is meant for a device like this one or a smaller one;
    `cached`: no download is needed."""

    name: str
    target: str
    draft: str | None
    memory_gb: int
    gated: bool
    why: str
    fits: bool
    cached: bool


MEASURING = 5.0
"""Seconds that a card waits for passes to be timed; a visitor who runs at once keeps them from it."""


class Engine:
    """Loaded pairs, and the calls the page makes on them. Pairs are loaded once and shared by all visitors."""

    def __init__(self, settings: Settings, kept: int = 2) -> None:
        self.settings = settings
        self.public = False
        """Whether strangers use it: they may load what is offered, and nothing else."""
        self.chat = False
        """Whether the pair of the start answers messages, and does not go on with a text."""
        self.instead: str | None = None
        """Why the bundled pair runs in place of the default one, and what to do about it."""
        self.remote: Remote | None = None
        """Where races run, if not in this process (app/serving/spaces.py)."""
        self.measured = Event()
        """Not set while the passes of the start's pair are still to be timed: what its card promises goes by them."""
        self.measured.set()
        self._kept = kept
        self._pairs: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = Lock()
        self._loading = Lock()

    def fetch(self, settings: Settings, progress: Progress = silent, stop: Stop = never) -> None:
        """Bring the files of a pair to this machine. Needs no turn on the device; raises Cancelled after `stop`, and
        UserError before anything large is downloaded for a pair that does not fit."""
        from core.loading import fetch_pair
        from core.loading.hub import as_path
        from core.loading.pair import at_hand

        self.admit(settings)
        named = [name for name in (settings.target, settings.draft) if name]
        if not all(as_path(name).exists() or at_hand(name) for name in named):
            progress("Looking whether the models fit into memory…")
            try:
                found = self.inspect(settings)
            except UserError:  # the download has better words for it
                found = None
            if found and found["memory"]["fits"] == "no":
                raise UserError(f"Nothing was downloaded. {found['verdict'][0]}")
        fetch_pair(settings, progress, stop)

    def load(
        self, settings: Settings, progress: Progress | None = None, stop: Stop = never, measure: bool = True
    ) -> Any:
        """The pair these settings name. One load at a time; pairs nobody used for longest are let go where memory is
        short, and beyond `kept` (a GPU keeps one). A load that fails leaves the others as they are. Without `measure`,
        nothing is timed (core.loading.load_pair)."""
        from core.loading import load_pair

        if (pair := self.loaded(settings)) is not None:
            return pair
        self.admit(settings)
        with self._loading:
            if (pair := self.loaded(settings)) is not None:
                return pair
            pair = load_pair(settings, progress or silent, stop, self._make_room, measure=measure)
            if stop():
                del pair
                self._release()
                raise Cancelled("Stopped; the models that had just been loaded are freed.")
            with self._lock:
                self._pairs[self._key(settings)] = pair
            self._keep(1 if pair.target.device.type == "cuda" else self._kept)
            return pair

    def loaded(self, settings: Settings) -> Any | None:
        """The pair of these settings if it is in memory."""
        with self._lock:
            pair = self._pairs.get(self._key(settings))
            if pair is not None:
                self._pairs.move_to_end(self._key(settings))
            return pair

    def is_loaded(self, settings: Settings) -> bool:
        """Whether a run with these settings can start at once."""
        return self._key(settings) in self._pairs

    def unload(self) -> int:
        """Let go of every pair; how many bytes of weights that were. The device must be ours."""
        return self._keep(0)

    def admit(self, settings: Settings) -> None:
        """Refuse what a public page does not offer, wherever it was asked for."""
        if not self.public:
            return
        from core.inspecting.catalogue import allowed

        own = (self.settings.target, self.settings.draft, self.settings.revision)
        if (settings.target, settings.draft, settings.revision) == own:
            return
        names = {settings.target, settings.draft} - {None, POCKET_NAME, self.settings.target, self.settings.draft}
        if settings.revision is not None or not all(allowed(name, None) for name in names):
            raise UserError("This page is public: it runs the pairs it offers, and loads no other models or revisions.")

    def offers(self) -> list[Offer]:
        """The pairs of the catalogue but the bundled one: what is here already, then what fits, then the rest."""
        from core.inspecting.catalogue import catalogue
        from core.loading import resolve_device
        from core.loading.memory import free_memory
        from core.loading.pair import at_hand

        device = resolve_device(self.settings.device)
        total = (free_memory(device).total or 0) if device.type != "cpu" else 0
        found = [
            Offer(
                pair.name,
                pair.target,
                pair.draft,
                pair.memory_gb,
                pair.gated,
                pair.why,
                fits=pair.memory_gb * 0.95e9 <= total,  # what is sold as 8 GB shows a little less
                cached=all(at_hand(name) for name in pair.ids),
            )
            for pair in catalogue()
            if pair.target != POCKET_NAME
        ]
        return sorted(found, key=lambda offer: (not offer.cached, not offer.fits, offer.memory_gb))

    def found(self) -> list[Found]:
        """Models that other programs keep on this machine; none for strangers."""
        from core.inspecting.catalogue import found_here

        return [] if self.public else found_here()

    def example(self) -> tuple[dict[str, Any], str] | None:
        """A race of the pair of the start that was recorded before, and where; None where there is none."""
        from app.playground.example import example_of

        return example_of(self.settings)

    def hint(self) -> str | None:
        """How to get the chat model, where the bundled pair runs because it is not there, or could not be had."""
        from core.loading.pair import HOW_TO_GET_IT, at_hand

        if self.instead:
            return self.instead
        return HOW_TO_GET_IT if self.settings.target == POCKET_NAME and not at_hand(SMOLLM2_NAME) else None

    def inspect(self, settings: Settings, acceptance: Acceptance | None = None) -> dict[str, Any]:
        """The card of a pair, as `python -m core inspect --json` writes it; nothing is downloaded but small files.
        `acceptance` is what was measured of the pair, if it was; nothing is predicted where the method leaves its draft
        aside."""
        from core.drafting.build import known_costs
        from core.inspecting import inspect_pair

        self.admit(settings)
        pair = self.loaded(settings)
        if pair is not None:
            self.measured.wait(MEASURING)
        return inspect_pair(
            settings.target,
            settings.draft,
            precision=settings.precision,
            draft_precision=settings.draft_precision,
            device=settings.device,
            revision=settings.revision,
            held=self._held(),
            acceptance=acceptance,
            costs=known_costs(pair) if pair is not None else None,
            drafts=METHODS[settings.method].network in ("draft", "head"),
        ).to_dict()

    def drafts(self, settings: Settings) -> list[tuple[str, float]]:
        """Drafts with the target's own tokens, of the catalogue and the local cache, with the speed-up predicted for
        each, the best first."""
        from core.inspecting.offers import drafts_for

        self.admit(settings)
        found = drafts_for(
            settings.target or POCKET_NAME,
            device=settings.device,
            precision=settings.precision,
            revision=settings.revision,
        )
        return [(suggestion.draft, suggestion.speedup) for suggestion in found]

    def gpus(self) -> list[str]:
        """Names of the cards that `predict_on` knows."""
        from core.inspecting.devices import cards

        return [card.name for card in cards()]

    def predict_on(
        self, gpus: Sequence[str], settings: Settings, acceptance: Acceptance | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """What a pair would do on one or two cards that are not here, as `inspect --device-like` writes it, and the
        sentence that compares two; `acceptance` is what was measured of the pair, if it was."""
        from core.inspecting.devices import compare, find_card, predict_on

        self.admit(settings)
        named = settings.target, settings.draft
        found = [
            predict_on(find_card(gpu), *named, acceptance=acceptance, revision=settings.revision) for gpu in gpus[:2]
        ]
        return [each.to_dict() for each in found], compare(*found) if len(found) == 2 else None

    @staticmethod
    def _key(settings: Settings) -> tuple[Any, ...]:
        named = (settings.target, settings.draft, settings.revision)
        return (*named, settings.precision, settings.draft_precision, settings.device)

    def _held(self) -> int:
        """Bytes of weights in memory, which a pair that comes may take over."""
        with self._lock:
            return sum(map(weight_bytes, self._pairs.values()))

    def _make_room(self, lacking: int) -> None:
        """Let go of pairs, the longest unused first, until so many bytes of weights are gone."""
        while lacking > 0 and self._pairs:
            lacking -= self._keep(len(self._pairs) - 1)

    def _keep(self, count: int) -> int:
        """Let go of all but the `count` pairs used last; the bytes of their weights."""
        freed = 0
        with self._lock:
            while len(self._pairs) > count:
                _, pair = self._pairs.popitem(last=False)
                freed += weight_bytes(pair)
                del pair
        if freed:
            self._release()
        return freed

    @staticmethod
    def _release() -> None:
        from core.errors import release_memory

        release_memory()

    def methods(self, pair: Any) -> dict[str, str | None]:
        """Each method, with the reason why this pair cannot use it (None: it can)."""
        from core.drafting.build import available

        return available(pair)

    def open_lane(self, pair: Any, prompt: str, settings: Settings, stop: Stop, tops: int = TOPS) -> Any:
        from core.lanes import open_lane

        return open_lane(pair, prompt, settings, stop=stop, tops=tops)

    def race(self, lanes: Sequence[Any]) -> Iterator[tuple[int, Round]]:
        from core.lanes import race

        return race(lanes)

    def sweep(
        self,
        pair: Any,
        prompts: Sequence[Prompt],
        settings: Settings,
        lengths: Sequence[int],
        temperatures: Sequence[float],
        repeats: int,
        stop: Stop,
    ) -> Generator[Any, None, dict[str, Any]]:
        """Steps (`done`, `total`, `label`) of a sweep, which returns its document."""
        from core.measuring.sweep import sweep

        return sweep(pair, prompts, settings, lengths, temperatures, repeats, stop)

    def batches(
        self,
        pair: Any,
        prompts: Sequence[Prompt],
        variants: dict[str, Settings],
        sizes: Sequence[int],
        repeats: int,
        stop: Stop,
    ) -> Generator[Any, None, dict[str, Any]]:
        """The same of many texts at once."""
        from core.measuring.batches import batches

        return batches(pair, prompts, variants, sizes, repeats, stop)

    def kept_head(self, settings: Settings) -> tuple[Kept | None, Path]:
        """The head for the target of these settings that was last trained on this machine, and where the next would
        be."""
        from core.training.kept import kept_for, new_folder

        name = settings.target or POCKET_NAME
        return kept_for(name), new_folder(name)

    def looks_by_kind(self, settings: Settings) -> dict[str, list[dict[str, Any]]]:
        """How new heads of each kind have learnt to follow the target of these settings, on the same texts."""
        from core.training.kept import looks_by_kind

        return looks_by_kind(settings.target or POCKET_NAME)

    def bundled_head(self, settings: Settings) -> Path | None:
        """The folder of the head that is bundled for the target of these settings, as far as is known before it is
        loaded."""
        from core.loading.head import bundled_head
        from core.loading.pair import SMOLLM2_HEAD

        if settings.target == SMOLLM2_NAME:
            return SMOLLM2_HEAD
        pair = self.loaded(settings)
        return pair and bundled_head(pair.target.config, pair.target.tokenizer)

    def training(
        self,
        pair: Any,
        settings: Settings,
        plan: Mapping[str, Any],
        resume: bool,
        progress: Progress = silent,
    ) -> Any:
        """A `core.training.session.Session` for the target of a loaded pair, ready to run: the one last worked on, or
        one in a folder of its own. `plan`: tokens, seconds, prompts and the head it goes on from. Passes over many
        texts at once are slow in 4 bits, so such a target is loaded in 16 beside."""
        from core.loading import load_model
        from core.training.loop import Plan
        from core.training.session import Session

        kept, folder = self.kept_head(settings)
        if resume:
            if kept is None:
                raise UserError(f"There is no training for {pair.target.name} to resume; start one.")
            folder = kept.folder
        target = pair.target
        if target.precision in ("nf4", "int4"):
            name, device = settings.target or POCKET_NAME, target.device
            target = load_model(name, device, "bf16", settings.revision, "target", progress, self._make_room)
        return Session(target, pair, folder, Plan(**plan), resume)

    def forget(self, draft: Path) -> None:
        """Let go of pairs with a draft that has changed on the disk."""
        with self._lock:
            for key in [key for key in self._pairs if key[1] == str(draft)]:
                del self._pairs[key]
        self._release()

    def check_law(
        self, pair: Any, run: Run | None, prompt: str, settings: Settings, n: int, stop: Stop, broken: bool
    ) -> Iterator[Any]:
        """Progress and then the result of `core.explaining.lossless.check_law`."""
        from core.explaining.lossless import check_law

        return check_law(pair, run, prompt, settings, n, stop, broken)

    def check_greedy(self, pair: Any, prompts: Sequence[str], settings: Settings, stop: Stop) -> Iterator[Any]:
        """Progress and then the result of `core.explaining.lossless.check_greedy`."""
        from core.explaining.lossless import check_greedy

        return check_greedy(pair, prompts, settings, stop)

    def token_texts(self, pair: Any, ids: Sequence[int]) -> list[str]:
        """Each of these tokens of the target by itself."""
        from core.text import Detokenizer

        text = Detokenizer(pair.target.tokenizer, [])
        return [text.alone(token) for token in ids]

    def environment(self, pair: Any) -> dict[str, Any]:
        """What the runs of this pair record about where they ran."""
        from core.lanes import describe_environment

        return describe_environment(pair.target, pair.draft, pair.head)


def weight_bytes(pair: Any) -> int:
    return sum(model.weight_bytes() for model in (pair.target, pair.draft, pair.head) if model)
