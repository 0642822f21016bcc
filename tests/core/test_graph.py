"""The static cache, eagerly on a CPU: the same passes a GPU captures, held against the dynamic runner.

`test_caches.py`, `test_greedy.py` and `test_law.py` run over it too; here is what is its own.
"""

import copy
from functools import cache

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, random_model, random_prompt, target_of
from torch.utils._python_dispatch import TorchDispatchMode

from core.decoding import take_step
from core.drafting.model import ModelDrafter
from core.drafting.tree import TreeDrafter
from core.loading.model import Model
from core.runners.architecture import FAMILIES
from core.runners.capture import Captures
from core.runners.dynamic import DynamicRunner
from core.runners.graph import GraphRunner, why_not, why_not_static
from core.runners.host import in_one_transfer, lists_on_host
from core.runners.static_cache import Inputs, tree_inputs
from core.runners.static_layers import StaticNetwork
from core.runners.waits import WaitsRefused
from core.runners.widths import LONGEST, ROOM, SHORTEST_REACH, USUAL
from core.sampling import MOST_DRAFTED, Sampling, Uniforms

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TREE = [-1, 0, 0, 1, 1, 2]
WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique", "is_nonzero")
"""Operations whose result the host has to wait for on a device (`.item()`, `bool()` and indexing by a scalar tensor are
the first)."""


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device; on a CPU nothing waits, but the same calls are made."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def pair_of(drafting, sampling):
    """A target on a static cache, and a drafter of another model or of the target's own first layer."""
    target = GraphRunner(target_of("llama"), VOCABULARY)
    if drafting == "early exit":
        return target, ModelDrafter(target.view(1), sampling)
    draft = GraphRunner(random_model("llama", seed=9), VOCABULARY)
    return target, ModelDrafter(draft, sampling)


def waits_of_a_round(target, drafter, gamma, sampling, monkeypatch):
    context, numbers = random_prompt(20), Uniforms(0, torch.device("cpu"))
    first = take_step(target, drafter, context, 2, sampling, numbers)  # both caches hold the text but for its end
    context += first.kept
    with monkeypatch.context() as patch, Waits(patch) as waits:
        patch.setattr("core.verification.lists_on_host", in_one_transfer)  # as for a device
        take_step(target, drafter, context, gamma, sampling, numbers)
    return waits.count


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.8, 20, 0.9, 0.01)], ids=str)
@pytest.mark.parametrize("drafting", ["model", "early exit"])
@pytest.mark.parametrize("gamma", [1, 4, 12])
def test_the_host_waits_once_a_round(drafting, sampling, gamma, monkeypatch):
    """However long the draft: tokens, laws and verdict stay on the device until the round's one transfer."""
    target, drafter = pair_of(drafting, sampling)
    assert waits_of_a_round(target, drafter, gamma, sampling, monkeypatch) == 1


def test_the_host_waits_once_a_plain_step(monkeypatch):
    target, _ = pair_of("model", Sampling())
    assert waits_of_a_round(target, None, 0, Sampling(1.0), monkeypatch) == 1


@pytest.mark.parametrize("shape", [(2, 1), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_the_host_waits_once_a_tree(shape, sampling, monkeypatch):
    monkeypatch.setattr("core.verification.walks_on_host", lambda p: False)  # as for a device
    target, drafter = pair_of("model", sampling)
    tree = TreeDrafter(drafter.runner, sampling, lambda: shape, replacement=True)
    assert waits_of_a_round(target, tree, len(shape), sampling, monkeypatch) == 1


def test_one_transfer_brings_what_is_there():
    """Ids up to 2**24 come back as they are, although all travel as float32."""
    vectors = torch.tensor([0, 1, 2**24]), torch.tensor([0.1, 1.0]), torch.tensor([5]), torch.empty(0)
    assert in_one_transfer(*vectors) == lists_on_host(*vectors) == [vector.tolist() for vector in vectors]
    assert [type(x) for (x, *_) in in_one_transfer(*vectors[:3])] == [int, float, int]


def test_waiting_would_be_noticed(monkeypatch):
    """The counter sees each of the ways by which a host asks a device for a value."""
    tensor, index = torch.arange(4.0), torch.tensor(2)
    asked = {
        "tolist": lambda: tensor.tolist(),
        "item": lambda: tensor.sum().item(),
        "bool": lambda: bool(tensor[0] > 0),
        "index": lambda: tensor[index],
        "cpu": lambda: tensor.cpu(),
    }
    for ask in asked.values():
        with monkeypatch.context() as patch, Waits(patch) as waits:
            ask()
        assert waits.count == 1


@cache
def static_of(network):
    return StaticNetwork(network)


def test_a_pass_that_would_wait_is_refused_before_its_capture():
    """Also where the wait is inside another operation; a pass of ours does nothing of the kind."""
    network, ids = target_of("llama"), torch.tensor(random_prompt(5))
    values = torch.arange(4.0)
    asked = (values.sum().item, lambda: bool(values[0] > 0), lambda: values[values > 1], values.unique)
    for ask in (*asked, lambda: values.to("meta")):
        with torch.inference_mode(), WaitsRefused("cpu"), pytest.raises(RuntimeError, match="makes the host wait"):
            ask()
    for fused in (static_of(network), None):
        runner = GraphRunner(network, VOCABULARY, fused=fused)
        runner.feed(ids)
        tree = [each[None] for each in tree_inputs(tuple(TREE[:5]), 5, runner.device)]
        forward, start = runner._forwards[None], torch.tensor([5])
        inputs = Inputs(ids[None], start, start, 20, *tree)
        with torch.inference_mode():
            (expected,) = forward(runner._store, inputs, 5)
            with WaitsRefused("cpu"):
                (logits,) = forward(runner._store, inputs, 5)
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    "architecture, fused",
    [*((each, False) for each in ARCHITECTURES), *((each, True) for each in ARCHITECTURES if each in FAMILIES)],
)
def test_same_logits_as_the_dynamic_runner(architecture, fused):
    """A prompt past the first capacity and the attention window, a rollback, a tree, its path, and on."""
    network = target_of(architecture)
    own = DynamicRunner(network, VOCABULARY)
    ours = GraphRunner(network, VOCABULARY, capacity=8, fused=static_of(network) if fused else None)
    features = [runner.watch([0, 2, 1]) for runner in (own, ours)]
    prompt = torch.tensor(random_prompt(30))
    ids = prompt[: len(TREE)]

    def both(act):
        one, other = act(own), act(ours)
        assert own.length == ours.length
        if one is not None:
            torch.testing.assert_close(other, one, **CLOSE)

    both(lambda runner: runner.feed(prompt))
    both(lambda runner: runner.truncate(21))
    both(lambda runner: runner.feed(prompt[:5], rows=2))
    both(lambda runner: runner.feed(ids, TREE))
    both(lambda runner: runner.keep([0, 2, 5]))
    both(lambda runner: runner.feed(prompt[:1]))
    torch.testing.assert_close(*(found.take(own.length) for found in features), **CLOSE)
    both(lambda runner: runner.view(1).feed(prompt[:3]))


def test_a_cache_grows_by_steps_and_has_room_at_the_end_of_a_context():
    """What was held before the move is still held; at the model's limit a draft, a tree and the surplus rows of a
    padded pass still fit, and nothing moves again."""
    network, ids = target_of("llama"), torch.tensor(random_prompt(660))
    runner = GraphRunner(network, VOCABULARY, capacity=8, limit=600)
    runner.feed(ids[:9])
    assert runner._store.capacity == SHORTEST_REACH + ROOM
    runner.feed(ids[9:520], rows=1)
    held = runner._store.capacity
    assert held == 600 + ROOM
    for end in (600, 601):
        runner.feed(ids[runner.length : end], rows=1)
        for n in (17, 66, MOST_DRAFTED):
            runner.feed(ids[:n], range(-1, n - 1))
            runner.truncate(end)
    logits = runner.feed(ids[601:602])
    assert runner._store.capacity == held
    torch.testing.assert_close(logits, DynamicRunner(network, VOCABULARY).feed(ids[:602], rows=1), **CLOSE)


def test_a_run_makes_room_once(captured_here):
    """What is captured then lives as long as the run: nothing moves under it."""
    network, ids = target_of("llama"), torch.tensor(random_prompt(40))
    runner = GraphRunner(network, VOCABULARY, capacity=8)
    runner.reserve(40)
    runner.feed(ids[:20], rows=1)
    runner.feed(ids[20:21])
    held = dict(runner._captures._held)
    for at in range(21, 40):
        runner.feed(ids[at : at + 1])
    assert len(held) == 1 and dict(runner._captures._held) == held
    runner.feed(ids[:3])
    assert len(runner._captures) == 2
    (shared,) = runner._captures._outputs.values()  # what memory estimates count, however many are captured
    assert shared.shape == (LONGEST, VOCABULARY)
    model = Model("m", copy.deepcopy(network), None, "fp32", frozenset(), 64, VOCABULARY)
    model.runner_kind, model._fused = GraphRunner.kind, None
    with model.lease(50) as leased:
        assert leased._store.capacity >= 50 + ROOM
    with model.lease(1000) as leased:
        assert leased._store.capacity >= 64 + ROOM


def test_a_runner_that_grew_beyond_the_usual_is_not_kept():
    model = Model("m", copy.deepcopy(target_of("llama")), None, "fp32", frozenset(), 100_000, VOCABULARY)
    model.runner_kind, model._fused = GraphRunner.kind, None
    for room, kept in ((USUAL, 1), (USUAL + ROOM + 1, 0), (10, 1)):
        with model.lease(room):
            assert not model._idle
        assert len(model._idle) == kept


def test_reset_forgets_even_what_is_not_a_number():
    """A masked position weighs nothing, but nothing times NaN is NaN: the next run must not meet it."""
    runner = GraphRunner(target_of("llama"), VOCABULARY)
    runner.feed(torch.tensor(random_prompt(5)))
    with torch.inference_mode():
        for block in runner._store._blocks:
            block.fill_(torch.nan)
    runner.reset()
    assert runner.feed(torch.tensor([1, 2])).isfinite().all()


def test_what_a_static_cache_cannot_do_is_said_in_words():
    """Off CUDA nothing is captured; a model that answers differently, or not at all, over a static cache is refused."""
    assert why_not(target_of("llama")) == "CUDA graphs need a CUDA device, not cpu"
    assert why_not_static(target_of("gpt2")) is None
    chunked = random_model("llama", seed=1)
    chunked.config.layer_types = ["chunked_attention"] * 2
    assert why_not_static(chunked) == "the model has chunked attention layers"
    changing = random_model("llama", seed=1)
    changing.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "kind dynamic, which change with the length of the text" in why_not_static(changing)


def test_a_failed_capture_loses_neither_run_nor_result(captured_here, monkeypatch):
    """The pass runs eagerly instead, the reason is kept, and the model leases dynamic runners from then on."""

    def fail(*args):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("core.runners.capture.record", fail)
    network, ids = copy.deepcopy(target_of("llama")), torch.tensor(random_prompt(6))
    model = Model("m", network, None, "fp32", frozenset(), 64, VOCABULARY)
    model.runner_kind, model._fused = GraphRunner.kind, None
    with model.lease() as runner:
        assert isinstance(runner, GraphRunner)
        logits = runner.feed(ids)
        torch.testing.assert_close(logits, DynamicRunner(network, VOCABULARY).feed(ids), **CLOSE)
    assert (
        model.runner_kind == "dynamic (its passes cannot be captured: operation not permitted when stream is capturing)"
    )
    with model.lease() as runner:
        assert isinstance(runner, DynamicRunner)


def test_which_passes_are_captured(captured_here):
    """What rounds feed, padded to few widths, and large trees; what is left over of a prompt and very long ones not."""
    runner = GraphRunner(target_of("llama"), VOCABULARY, capacity=1024)

    def captured_by(n, **options):
        before = len(runner._captures)
        runner.truncate(0)
        runner.feed(torch.ones(n, dtype=torch.long), **options)
        return len(runner._captures) - before

    assert [captured_by(n) for n in (1, 2, 7, 8, 9, 12, 17)] == [1, 1, 1, 0, 1, 0, 1]
    assert captured_by(7, parents=[*TREE, 0]) == 1 and captured_by(8, parents=[-1] * 8) == 0
    assert captured_by(5, rows=1) == 1 and captured_by(6, rows=1) == 1
    assert [captured_by(n, rows=1) for n in (18, 66, 256)] == [0, 0, 0]
    assert [captured_by(n) for n in (64, 66, 67)] == [1, 0, 0]


STEPS = (
    ("feed", 20, 1),
    *(("feed", n, n) for n in (1, 3, 7, 1, 9)),
    ("tree", TREE, [0, 2, 5]),
    ("feed", 3, 3),
    ("tree", [-1, 0, 1, 2, 3, 4, 0], [0, 1, 2]),
    ("feed", 7, 7),
    ("tree", [-1, 0, 0, 0, 0, 0, 3], [0, 3, 6]),
    ("feed", 9, 9),
    ("view", 2, 2),
    ("feed", 11, 11),
    ("view", 2, 2),
)
"""Each width at several lengths of the text, with several trees; between them a token is taken back."""


def apart_from_the_dynamic_runner(network, ours, steps=STEPS, watched=False, text=60):
    """The first of these steps after which a runner answers otherwise than transformers' own forward; None: none."""
    own = DynamicRunner(network, VOCABULARY)
    features = [runner.watch([1, 2]) for runner in (own, ours)] if watched else []
    ids = torch.tensor(random_prompt(text))
    for at, (kind, fed, then) in enumerate(steps):
        answers = []
        for runner in (own, ours):
            if kind == "view":
                answers.append(runner.view(1).feed(ids[at : at + fed]))
            elif kind == "tree":
                answers.append(runner.feed(ids[at : at + len(fed)], fed))
                runner.keep(then)
            else:
                answers.append(runner.feed(ids[at : at + fed], rows=then))
                runner.truncate(runner.length - 1)
        if own.length != ours.length or not torch.allclose(*answers, **CLOSE):
            return at
    if watched:
        torch.testing.assert_close(*(found.take(own.length) for found in features), **CLOSE)
    return None


@pytest.mark.parametrize(
    "architecture, watched, fused",
    [
        ("llama", False, False),
        ("llama", True, True),
        ("gemma3_text", True, False),
        ("gemma3_text", True, True),
        ("gpt2", False, False),
    ],
)
def test_a_recorded_pass_is_as_good_as_a_new_one(architecture, watched, fused, captured_here):
    """Recorded at one length, tree and text, replayed at others: positions, masks and slots follow the inputs, and so
    do the features; surplus rows of a padded pass change nothing."""
    network = target_of(architecture)
    ours = GraphRunner(network, VOCABULARY, capacity=16, fused=static_of(network) if fused else None)
    assert apart_from_the_dynamic_runner(network, ours, watched=watched) is None
    assert ours.failure is None and len(ours._captures) >= 6
    ours.reset()
    ours.reserve(1000)
    assert len(ours._captures) == 0
    assert apart_from_the_dynamic_runner(network, ours, text=61) is None


def seen_by_all(parents, width, device):
    """A mutant: surplus rows are seen."""
    depth, within = tree_inputs(parents, width, device)
    within = within.clone()
    within[:, len(parents) :] = True
    return depth, within


@pytest.mark.parametrize("mutant", ["a surplus row is seen", "a graph is replayed after growth", "a start is stale"])
def test_mutants_of_the_graph_runner_are_caught(mutant, captured_here, monkeypatch):
    """What the test above would not see is not tested by it."""
    network = target_of("llama")
    ours = GraphRunner(network, VOCABULARY)
    if mutant == "a surplus row is seen":
        monkeypatch.setattr("core.runners.graph.tree_inputs", seen_by_all)
    elif mutant == "a graph is replayed after growth":
        monkeypatch.setattr(Captures, "forget", lambda self: None)
        assert apart_from_the_dynamic_runner(network, ours) is None
        ours.reset()
        ours.reserve(1000)
    else:
        whole = ours._pass

        def stale(what, reach, ids, start, *rest, rows=None):
            return whole(what, reach, ids, start * 0 + ours.length, *rest, rows=rows)

        monkeypatch.setattr(ours, "_pass", stale)
    assert apart_from_the_dynamic_runner(network, ours, text=61) is not None
