"""An engine without models: rounds from a script, so that the page can be driven fast and exactly."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from fake_sweep import fake_batches, fake_sweep

from app.serving import Engine, Offer
from core.errors import UserError
from core.explaining.lossless import Cell, GreedyCheck, LawCheck, Progress
from core.heads import HeadConfig, HeadNetwork
from core.heads.checkpoint import save_block, save_head
from core.heads.dflash import DFlashConfig, DFlashNetwork
from core.inspecting.acceptance import Acceptance
from core.inspecting.catalogue import Found
from core.records import Candidate, Divergence, Round, Run, Settings, Token
from core.training.kept import Kept, read_progress
from core.training.loop import Standing
from core.training.session import Look, Outlook

CODE = (
    'def merge_sort(items):\n    """Sort a list."""\n    if len(items) <= 1:\n        return items\n    middle = '
    "len(items) // 2\n    left = merge_sort(items[:middle])\n    right = merge_sort(items[middle:])\n    return "
    "merge(left, right)\n\n\n"
)
COSTS = {"1": 0.0078, "2": 0.0080, "4": 0.0085, "6": 0.0091, "9": 0.0102, "16": 0.0130}
SHAPE = {
    "dtype": "bfloat16",
    "runner": "native",
    "attention": "sdpa",
    "position_table": False,
    "head_size": 64,
    "vocabulary": 4096,
    "longest": 2048,
    **dict.fromkeys(("window", "sliding_layers", "experts", "active_experts", "expert_bytes"), 0),
}


def geometry(width: int, layers: int, heads: int, inner: int, read: int) -> dict[str, Any]:
    """A Llama of these sizes, as `core.loading.geometry` describes it."""
    named = {"q_proj": 64 * heads, "k_proj": 128, "v_proj": 128, "o_proj": width}
    inside = [{"name": n, "place": "out" if n == "o_proj" else "in", "out": out} for n, out in named.items()]
    mlp = {"gate_proj": inner, "up_proj": inner, "down_proj": width}
    return {
        **SHAPE,
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": 2,
        "projections": inside + [{"name": n, "place": "mlp", "out": out} for n, out in mlp.items()],
        "read_bytes": read,
        "head_bytes": 2 * width * 4096,
        "cached_bytes": 512 * layers,
    }


ENVIRONMENT = {
    "device": "cpu",
    "device_name": "2 CPU cores",
    "threads": 2,
    "bandwidth": 13.7e9,
    "target": {
        "name": "pocket",
        "precision": "nf4",
        "layers": 16,
        "parameters": 27_000_000,
        "weight_bytes": 26_400_000,
        "vocab_size": 4096,
        "context_length": 2048,
        "costs": COSTS,
        "geometry": geometry(384, 16, 6, 1024, 26_400_000),
    },
    "draft": {
        "name": "pocket-draft",
        "precision": "fp32",
        "parameters": 1_700_000,
        "weight_bytes": 6_800_000,
        "vocab_size": 4096,
        "context_length": 2048,
        "costs": {n: seconds / 9 for n, seconds in COSTS.items()},
        "geometry": geometry(256, 1, 4, 768, 6_800_000),
    },
}


def inspection(settings: Settings, acceptance: Acceptance | None = None) -> dict[str, Any]:
    """What `core.inspecting` finds of a pair, made up: the larger it is by name, the less it fits."""
    large = "large" in (settings.target or "")
    model = {"name": settings.target or "pocket", "layers": 16, "chat": False, "download_bytes": 8_100_000_000 * large}
    forecasts = [{"acceptance": a, "draft_length": 5, "speedup": s} for a, s in ((0.6, 1.6), (0.7, 2.0), (0.8, 2.6))]
    measured, between = None, None
    if acceptance:
        measured, *ends = (
            {"acceptance": rate, "draft_length": 2, "speedup": 1 + rate}
            for rate in (acceptance.rate, *(acceptance.between or ()))
        )
        between = ends or None
    prediction = {
        "basis": "bytes",
        "cost_ratio": 0.07,
        "forecasts": forecasts,
        "measured": measured,
        "between": between,
    }
    return {
        "target": model,
        "acceptance": acceptance and asdict(acceptance),
        "draft": {"name": "draft", "layers": 2, "chat": False, "download_bytes": 0},
        "memory": {"needed": 20_000_000_000 if large else 41_000_000, "free": 12_000_000_000, "fits": "yes"},
        "likeness": {"same": True, "sentence": "They share every token."},
        "bytes_ratio": 0.07,
        "predictions": [prediction],
        "level": "bad" if large else "good",
        "verdict": ["It does not fit.", "They share every token."]
        if large
        else ["It fits.", "They share every token."],
    }


CONTROLS = {
    "method": "draft",
    "draft_length": "auto",
    "tree": "auto",
    "exit_layer": "auto",
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "max_new_tokens": 128,
    "seed": 0,
    "precision": "auto",
}
"""Values of the controls as the page starts."""


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

    def __enter__(self) -> FakeLane:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> FakeLane:
        return self

    def __next__(self) -> Round:
        round_ = next(self.rounds)
        self.seconds = self.run.engine_seconds
        return round_

    def close(self) -> None:
        self.run.stop_reason = self.run.stop_reason or "cancelled"


SHAPE: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "target_hidden_size": 8},
    **{"vocab_size": 8, "draft_vocab_size": 8, "aux_layers": (1,)},
}
"""Of the heads that its trainings leave."""


class FakeSession:
    """A training whose looks are made up: acceptance grows from one to the next."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], pace: float = 0.0) -> None:
        self.folder, self.pace = folder, pace
        self.endless = False
        self.fault: Exception | None = None
        self.ended = Event()
        self.standing = Standing()
        self._plan = plan
        self.looks = list(self._looks())

    @property
    def left(self) -> float | None:
        seconds = self._plan.get("seconds")
        return None if seconds is None else max(0.0, seconds - self.standing.seconds)

    @property
    def done(self) -> float:
        return self.standing.seconds / (self._plan.get("seconds") or 10.0)

    def run(self, stop: Callable[[], bool]) -> Iterator[Look]:
        training = self.folder / "training"
        training.mkdir(parents=True, exist_ok=True)
        try:
            if self.fault:
                raise self.fault
            for look in self.looks:
                time.sleep(0.2 * self.pace)
                self.standing = look.standing
                yield look
            while self.endless and not stop():
                time.sleep(0.01)
            (training / "progress.jsonl").write_text(json.dumps(asdict(self.standing)) + "\n")
            self._export()
            self.standing = replace(self.standing, doing="stopped" if self.endless else "done")
        finally:
            self.ended.set()

    def _export(self) -> None:
        if self._plan.get("kind") in ("dspark", "dflash"):
            block = DFlashConfig(**SHAPE, block_size=5, mask_id=1, sample_from_anchor=self._plan["kind"] == "dspark")
            save_block(DFlashNetwork(block), self.folder, 4)
        else:
            save_head(HeadNetwork(HeadConfig(**SHAPE)), self.folder)

    def _looks(self) -> Iterator[Look]:
        total = self._plan.get("seconds") or 10.0
        for step in range(9):
            first = 0.08 * step
            agreement = [first * 0.6**i for i in range(5)]
            seen = 4000 * step
            at = Standing("learning", total * step / 8, 128, 12_345, 0, seen // 40, seen, 5 - 0.3 * step, agreement)
            yield Look(at)
            if step in (0, 8):
                at = replace(at, reached=agreement[:3], between=[0.5 * first, 0.9 * first])
                yield Look(at, Outlook(0.7 + 0.1 * step, 2), fake_draft(0.1 * step), before=not step)


def fake_draft(acceptance: float) -> Run:
    engine = FakeEngine(pace=0, acceptance=acceptance)
    run = Run(Settings(draft_length=3, max_new_tokens=48), ENVIRONMENT, "x = 1\n", [1, 2, 3])
    for _ in engine._rounds(run, lambda: False):
        pass
    return run


class FakeEngine(Engine):
    """Speaks `texts` over and over; `pace` is how much of the pretended engine time really passes, `halts_at` the share
    of a sweep or a check after which it waits to be stopped."""

    def __init__(self, texts: Sequence[str] = tuple(pieces(CODE)), pace: float = 1.0, acceptance: float = 0.78) -> None:
        super().__init__(Settings("pocket", draft_length=5))
        self.texts = list(texts)
        self.pace = pace
        self.halts_at = 1.0
        self.acceptance = acceptance
        self.heads = Path("/nowhere")
        self.bundled: Path | None = None
        self.plans: list[Mapping[str, Any]] = []
        self.trained: list[tuple[Path, bool]] = []
        self.looks: dict[str, list[dict[str, Any]]] = {}
        self.forgotten: list[Path] = []

    def load(self, settings: Settings, progress: Callable[[str], None] | None = None) -> Any:
        return SimpleNamespace(target=None, draft=None, head=None)

    def is_loaded(self, settings: Settings) -> bool:
        return True

    def loaded(self, settings: Settings) -> Any:
        return self.load(settings)

    def unload(self) -> int:
        return 33_000_000

    def found(self) -> list[Found]:
        return []

    def bundled_head(self, settings: Settings) -> Path | None:
        return self.bundled

    def kept_head(self, settings: Settings) -> tuple[Kept | None, Path]:
        folder = self.heads / "pocket"
        lines = read_progress(folder / "training")
        kept = Kept(folder, lines[-1], True) if lines else None
        return kept, folder

    def looks_by_kind(self, settings: Settings) -> dict[str, list[dict[str, Any]]]:
        return self.looks

    def training(
        self, pair: Any, settings: Settings, plan: Mapping[str, Any], resume: bool, progress: Any = None
    ) -> FakeSession:
        kept, folder = self.kept_head(settings)
        if resume and kept is None:
            raise UserError("There is no training for pocket to resume; start one.")
        self.trained.append((folder, resume))
        self.plans.append(plan)
        return FakeSession(folder, plan, self.pace)

    def forget(self, draft: Path) -> None:
        self.forgotten.append(draft)

    def example(self) -> tuple[dict[str, Any], str] | None:
        return None

    def hint(self) -> str | None:
        return None

    def offers(self) -> list[Offer]:
        return [
            Offer("small-pair", "owner/small", "owner/tiny", 0, False, "Small, and here already.", True, True),
            Offer("large-pair", "owner/large", "owner/small", 24, True, "Large and gated.", False, False),
        ]

    def drafts(self, settings: Settings) -> list[tuple[str, float]]:
        return [("owner/tiny", 2.1), ("owner/<b>small</b>", 1.4)]

    def inspect(self, settings: Settings, acceptance: Acceptance | None = None) -> dict[str, Any]:
        if settings.target == "owner/missing":
            raise UserError("The Hub has no model 'owner/missing' that you may see; check the spelling.")
        return inspection(settings, acceptance)

    def predict_on(
        self, gpus: Sequence[str], settings: Settings, acceptance: Acceptance | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        compared = f"{gpus[0]} writes 1.5× as fast as {gpus[1]}: fake." if len(gpus) > 1 else None
        return [self._predicted(gpu, acceptance) for gpu in gpus], compared

    def _predicted(self, gpu: str, acceptance: Acceptance | None) -> dict[str, Any]:
        alphas = (0.7,) if acceptance is None else (0.7, acceptance.rate)
        gains = [{"acceptance": alpha, "draft_length": 4, "speedup": 1 + alpha} for alpha in alphas]
        small, large = (
            {"needed": n * 1e9, "fits": n < 12, "longest": 15_872 * (n < 12), "tokens_per_second": 500 / n}
            for n in (7, 18)
        )
        return {
            "card": {"name": gpu, "memory": 12, "bandwidth": 504, "compute": 58.3},
            "context": 2048,
            "acceptance": acceptance and asdict(acceptance),
            "outlooks": [
                {"precision": name, "bound": "bandwidth", "gains": gains, **each}
                for name, each in (("nf4", small), ("bf16", large))
            ],
            "go": True,
            "sentence": "Go: about 71 tokens/s plainly in nf4.",
            "sources": {"kernels of a layer": "assumed: 15 µs"},
        }

    def methods(self, pair: Any) -> dict[str, str | None]:
        return {"draft": None, "ngram": None, "early-exit": "the target was not trained for it", "plain": None}

    def environment(self, pair: Any) -> dict[str, Any]:
        return ENVIRONMENT

    def check_law(
        self, pair: Any, run: Any, prompt: str, settings: Settings, n: int, stop: Callable[[], bool], broken: bool
    ) -> Iterator[Any]:
        done = 0
        while done < n and not stop():
            halted = done >= self.halts_at * n
            time.sleep(0.02 if halted else 0.02 * self.pace)
            done = done if halted else min(n, done + 100)
            yield Progress(done, n)
        half, p = done / 2, 1e-9 if broken else 0.43
        cells = [Cell((1, 2), half, int(half) + 3), Cell((), half, done - int(half) - 3)]
        yield LawCheck(done, 40, cells, 0.6, 1, p, 0, 2 * done, done // 3)

    def check_greedy(
        self, pair: Any, prompts: Sequence[str], settings: Settings, stop: Callable[[], bool]
    ) -> Iterator[Any]:
        yield Progress(len(prompts), len(prompts))
        yield GreedyCheck(len(prompts), len(prompts) - 1, 500, [(1, Divergence(7, " a", " b", 0.01))])

    def token_texts(self, pair: Any, ids: Sequence[int]) -> list[str]:
        return [self._text(token) for token in ids]

    def open_lane(self, pair: Any, prompt: str, settings: Settings, stop: Callable[[], bool], tops: int = 3) -> Any:
        if not prompt.strip():
            raise UserError("The prompt is empty; write something to continue.")
        if "explode" in prompt:
            raise RuntimeError("a fault of ours")
        run = Run(settings, ENVIRONMENT, prompt, [1, 2, 3])
        return FakeLane(run, self._rounds(run, stop))

    def sweep(self, pair: Any, *plan: Any) -> Any:
        return fake_sweep(ENVIRONMENT, self.acceptance, self.pace, *plan, halts_at=self.halts_at)

    def batches(self, pair: Any, prompts: Any, variants: Any, sizes: Any, repeats: int, stop: Any) -> Any:
        return fake_batches(ENVIRONMENT, variants, sizes, stop)

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
                round_ = next(lanes[index], None)
                if round_ is None:
                    going.remove(index)
                else:
                    yield index, round_
        finally:
            for lane in lanes:
                lane.close()
