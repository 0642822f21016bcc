"""Faults, and where they strike: what the visitor reads, what is freed, and that the next run is as ever.

python -m pytest tests/robustness/test_faults.py -v        # one line a fault and place
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.playground.race import queued_race
from app.serving import Engine
from app.serving.device import Device
from app.serving.turns import OUR_FAULT, guarded
from core.errors import UserError
from core.records import Run, Settings

PROMPT = "def make(folder):\n    return "
EXHAUSTED = "The memory of this device ran out"


class World:
    """An engine with a pair, its device, and what a run of it should come to."""

    def __init__(self, saved: tuple[Path, Path]) -> None:
        self.settings = Settings(
            target=str(saved[0]), draft=str(saved[1]), precision="fp32", device="cpu", draft_length=3, max_new_tokens=24
        )
        self.device = Device()
        self.engine = Engine(self.settings)
        self.pair = self.engine.load(self.settings)
        self.expected = self.tokens()

    def events(self, prompt: str = PROMPT, **changes: Any) -> tuple[list[dict[str, Any]], list[Run]]:
        runs: list[Run] = []
        settings = replace(self.settings, **changes)
        never = lambda: False  # noqa: E731
        return list(guarded(queued_race(self.device, self.engine, prompt, settings, never, runs))), runs

    def tokens(self) -> list[list[int]]:
        events, runs = self.events()
        assert not errors(events)
        return [run.token_ids for run in runs]

    def assert_unharmed(self) -> None:
        """Nobody holds the device, every kept runner is empty, and the same run gives the same tokens."""
        with self.device.turn() as turn:
            assert turn.wait(0)
        for model in (self.pair.target, self.pair.draft):
            assert all(runner.length == 0 for runner in model._idle)
        assert self.tokens() == self.expected


@pytest.fixture(scope="module")
def world(saved_pair: tuple[Path, Path]) -> World:
    return World(saved_pair)


def errors(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["e"] == "error"]


def raising(error: BaseException) -> Callable[..., Any]:
    def strike(*_: Any, **__: Any) -> Any:
        raise error

    return strike


def nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([3]), float("nan"))


FAULTS: dict[str, tuple[Any, str]] = {
    "out of memory (GPU)": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), EXHAUSTED),
    "out of memory (CPU)": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), EXHAUSTED),
    "model raises": (ValueError("index 7 is out of range"), OUR_FAULT),
    "NaN logits": (nan, "logits that are not numbers"),
}
PLACES = {
    "target, prefill": ("target", 0),
    "target, first round": ("target", 1),
    "target, mid-run": ("target", 6),
    "draft, prefill": ("draft", 0),
    "draft, mid-run": ("draft", 9),
}


def strike_at(monkeypatch: pytest.MonkeyPatch, world: World, role: str, call: int, fault: Any) -> None:
    """Let the given pass of a model go wrong: raise, or spoil its logits."""
    model = getattr(world.pair, role)
    kind = type(model._new_runner())
    feed, calls = kind.feed, iter(range(10**9))

    def struck(runner: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        mine = runner._net is model._fused
        if mine and next(calls) == call:
            if callable(fault):
                return fault(feed(runner, *arguments, **options))
            raise fault
        return feed(runner, *arguments, **options)

    monkeypatch.setattr(kind, "feed", struck)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (fault, place)
        for fault, (what, _) in FAULTS.items()
        for place in PLACES
        if not (callable(what) and "prefill" in place)  # nobody looks at the logits of a prefill
    ],
)
def test_a_fault_in_a_run(monkeypatch: pytest.MonkeyPatch, world: World, fault: str, place: str) -> None:
    what, sentence = FAULTS[fault]
    with monkeypatch.context() as patch:
        strike_at(patch, world, *PLACES[place], what)
        events, runs = world.events(temperature=1.0 if callable(what) else 0.0)
    found = errors(events)
    assert len(found) == 1
    assert sentence in found[0]
    assert events[-1] == {"e": "done"}
    assert all(run.stop_reason == "cancelled" for run in runs if len(run.token_ids) < 24)
    world.assert_unharmed()


def test_a_greedy_draft_of_nan_is_a_bad_guess_and_no_more(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    with monkeypatch.context() as patch:
        strike_at(patch, world, *PLACES["draft, mid-run"], nan)
        events, runs = world.events()
    assert not errors(events)
    assert [run.token_ids for run in runs] == world.expected


def broken(folder: Path, tmp: Path, change: Callable[[Path], None]) -> str:
    copy = tmp / "broken"
    shutil.copytree(folder, copy)
    change(copy)
    return str(copy)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights truncated": (truncate, "cannot be read"),
    "weights are noise": (corrupt, "cannot be read"),
    "weights of another shape": (other_shapes, "do not fit its config"),
    "weights missing": (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors weights"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{not json"), "JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "cannot be"),
    "config missing": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config of no known kind": (
        lambda f: (f / "config.json").write_text('{"model_type": "unheard-of"}'),
        "cannot be loaded",
    ),
    "tokenizer missing": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer"),
    "tokenizer is not JSON": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be"),
    "a folder that is not there": (lambda f: shutil.rmtree(f), "There is no folder"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("fault", FILES)
def test_a_fault_in_a_load(world: World, saved_pair: tuple[Path, Path], tmp_path: Path, fault: str, role: str) -> None:
    change, words = FILES[fault]
    source = saved_pair[role == "draft"]
    events, runs = world.events(**{role: broken(source, tmp_path, change)})
    found = errors(events)
    assert len(found) == 1
    assert words in found[0]
    assert "Traceback" not in found[0]
    assert "\n" not in found[0]
    assert runs == []
    assert world.engine.is_loaded(world.settings)
    world.assert_unharmed()


NAMES = [
    "~nobody-of-this-name/model",
    "a" * 5000,
    "/" + "b" * 300,
    "\x00",
    "a\nb",
    ".",
    "..",
    "/",
    "~",
    "\ud800",
    "/dev/null",
]


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_a_name_that_is_none(world: World, name: str, role: str) -> None:
    """Whatever somebody types for a model is a sentence, on its card and in a run."""
    (found,) = errors(world.events(**{role: name})[0])
    assert found != OUR_FAULT
    assert len(found) < 500
    with pytest.raises(UserError):
        world.engine.inspect(replace(world.settings, **{role: name}))
    world.engine.kept_head(replace(world.settings, **{role: name}))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["GPU", "CPU"])
def test_out_of_memory_in_a_load(monkeypatch: pytest.MonkeyPatch, world: World, error: BaseException) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("core.loading.AutoModelForCausalLM.from_pretrained", raising(error))
        events, _ = world.events(precision="bf16")
    (sentence,) = errors(events)
    assert "memory" in sentence
    assert sentence != OUR_FAULT
    assert world.engine.is_loaded(world.settings)
    world.assert_unharmed()


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_reader_that_goes_away(world: World, after: int) -> None:
    runs: list[Run] = []
    going: Iterator[Any] = guarded(queued_race(world.device, world.engine, PROMPT, world.settings, lambda: False, runs))
    for _ in range(after):
        next(going)
    going.close()  # type: ignore[attr-defined]
    world.assert_unharmed()
