"""The check of a runner against transformers' own forward: faults that the first tokens of a text do not show."""

import os
import shutil

import pytest
import torch
from tiny import KINDS, VOCABULARY, random_model, target_of, target_runner

from core.loading import load_model
from core.loading.model import Model
from core.runners import static_cache
from core.runners.architecture import NativeNetwork
from core.runners.dynamic import DynamicRunner, unlike
from core.runners.graph import fused_for, why_not_static
from core.runners.native import NativeRunner
from core.runners.program import Turning
from core.runners.static_layers import StaticNetwork

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes(kind):
    assert unlike(DynamicRunner(target_of(kind), VOCABULARY), target_runner(kind), VOCABULARY) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_passes(dtype):
    """In every precision; and what is chosen for a new model is the native pass, but for fp16."""
    network = random_model("llama", 5, dtype=dtype)
    assert isinstance(fused_for(network), StaticNetwork)
    kind = Model("m", network, None, "", frozenset(), 64, VOCABULARY).runner_kind
    assert kind == ("dynamic (there is no native pass for fp16)" if dtype == torch.float16 else "native")


class AtZero(NativeRunner):
    """Forgets where the pass starts: right for the first tokens alone."""

    def __init__(self, network, vocab_size, capacity=64):
        super().__init__(network, vocab_size, capacity=64)

    def _pass(self, program, first, last, ids, start, *more, **others):
        right = self._cache.turnings
        shifted = [torch.cat([table[:1].expand(start, -1), table]) for table in self._cache.tables[0][:2]]
        self._cache.turnings = (Turning * 1)(Turning(*(table.data_ptr() for table in shifted), 0))
        try:
            return super()._pass(program, first, last, ids, start, *more, **others)
        finally:
            self._cache.turnings = right


class BlindToTrees(NativeRunner):
    """Takes a tree for a chain."""

    def feed(self, ids, parents=None, *, rows=None):
        return super().feed(ids, rows=rows)


class KeepsTheFirst(NativeRunner):
    """Of a tree it keeps the first nodes, whatever the path."""

    def keep(self, path):
        super().keep(range(len(path)))


class NeverForgets(NativeRunner):
    def truncate(self, length):
        pass


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (AtZero, "a second chunk of a prompt"),
        (NeverForgets, "tokens after a roll back"),
        (BlindToTrees, "a tree"),
        (KeepsTheFirst, "the text after a tree"),
    ],
)
def test_faults_past_the_first_tokens_are_found(fault, where, monkeypatch):
    """And the model then runs on transformers' own forward, with the reason in words."""
    monkeypatch.setattr("core.loading.model.NativeRunner", fault)
    network = random_model("llama", 5, dtype=torch.float32)
    model = Model("m", network, None, "fp32", frozenset(), 64, VOCABULARY)
    assert model.runner_kind == f"dynamic (the native pass changes the model's answers, at {where})"
    with model.lease() as runner:
        assert isinstance(runner, DynamicRunner)


def test_a_small_error_is_found():
    """A thousandth of every logit, in float32: far above rounding."""

    class Off(NativeRunner):
        def feed(self, ids, parents=None, *, rows=None):
            return super().feed(ids, parents, rows=rows) * 1.001

    network = random_model("llama", 5, dtype=torch.float32)
    ours = Off(NativeNetwork(network), VOCABULARY)
    assert unlike(DynamicRunner(network, VOCABULARY), ours, VOCABULARY) == "the first tokens of a text"


def test_a_static_cache_that_misplaces_a_second_feed_is_refused(monkeypatch):
    """As every pass from position 0 would be right."""
    run = static_cache.run_pass

    def at_zero(network, store, inputs, rows):
        inputs.depth = inputs.depth - (inputs.start if inputs.within is None else 0)
        return run(network, store, inputs, rows)

    monkeypatch.setattr("core.runners.graph.run_pass", at_zero)
    assert why_not_static(target_of("llama")) == (
        "a static cache changes the model's answers, at a second chunk of a prompt"
    )


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """How often the check was made, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return unlike(*arguments)

    monkeypatch.setattr("core.loading.model.unlike", counted)
    return calls


def test_a_check_that_was_passed_is_not_made_again(asked, pair_folder, tmp_path):
    """Until the weights, or the precision they are run in, are others."""
    folder = tmp_path / "model"
    shutil.copytree(pair_folder / "target", folder)
    for _ in range(2):
        assert load_model(str(folder), CPU, "fp32").runner_kind == NativeRunner.kind
    assert len(asked) == 1
    load_model(str(folder), CPU, "bf16")
    assert len(asked) == 2
    weights = next(folder.glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    load_model(str(folder), CPU, "fp32")
    assert len(asked) == 3


def test_a_check_that_failed_is_made_every_time(asked, pair_folder, monkeypatch):
    monkeypatch.setattr("core.loading.model.NativeRunner", NeverForgets)
    for _ in range(2):
        model = load_model(str(pair_folder / "target"), CPU, "fp32")
        assert model.runner_kind.startswith("dynamic (the native pass changes")
    assert len(asked) == 2


def test_where_nothing_can_be_kept_the_check_is_made_every_time(asked, pair_folder, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert load_model(str(pair_folder / "target"), CPU, "fp32").runner_kind == NativeRunner.kind
    assert len(asked) == 2
