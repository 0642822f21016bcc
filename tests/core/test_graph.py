"""The static cache, eagerly on a CPU: the same passes a GPU captures, held against the dynamic runner.

`test_caches.py`, `test_greedy.py` and `test_law.py` run over it too; here is what is its own.
"""

from functools import cache

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, random_model, random_prompt, target_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from core.decoding import take_step
from core.drafting.model import ModelDrafter
from core.drafting.tree import TreeDrafter
from core.loading.model import Model
from core.runners.architecture import FAMILIES
from core.runners.dynamic import DynamicRunner
from core.runners.graph import LONGEST_CAPTURED, GraphRunner, why_not, why_not_static, write
from core.runners.host import in_one_transfer, lists_on_host
from core.runners.static_cache import Inputs
from core.runners.static_layers import StaticNetwork
from core.runners.waits import WaitsRefused
from core.sampling import Sampling, Uniforms

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
        forward, inputs = runner._passes[None]._forward, Inputs(ids, TREE[:5])
        with torch.inference_mode():
            expected, _ = forward(runner._store, inputs, 5)
            with WaitsRefused("cpu"):
                logits, _ = forward(runner._store, inputs, 5)
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


def test_capacity_doubles_up_to_the_limit():
    """As many tokens as ever fit, never many more; what was held before the move is still held."""
    network, ids = target_of("llama"), torch.tensor(random_prompt(40))
    runner = GraphRunner(network, VOCABULARY, capacity=8, limit=20)
    for at in range(20):
        logits = runner.feed(ids[at : at + 1])
    assert runner._store.capacity == 20
    torch.testing.assert_close(logits[-1], DynamicRunner(network, VOCABULARY).feed(ids[:20])[-1], **CLOSE)
    free = GraphRunner(network, VOCABULARY, capacity=8)
    free.feed(ids[:9])
    assert free._store.capacity == 16


def test_a_run_makes_room_once(traced):
    """What is captured then lives as long as the run: nothing moves under it."""
    network, ids = target_of("llama"), torch.tensor(random_prompt(40))
    runner = traced(network, capacity=8)
    runner.reserve(40)
    runner.feed(ids[:20], rows=1)
    runner.feed(ids[20:21])
    held = dict(runner._passes[None]._captured)
    for at in range(21, 40):
        runner.feed(ids[at : at + 1])
    assert len(held) == 1 and runner._passes[None]._captured == held
    runner.feed(ids[:3])
    assert len(runner._passes[None]._captured) == 2
    (shared,) = runner._passes[None]._outputs  # what memory estimates count, however many are captured
    assert shared.shape == (LONGEST_CAPTURED, VOCABULARY)
    model = Model("m", network, None, "fp32", frozenset(), 64, VOCABULARY)
    model.runner_kind, model._fused = GraphRunner.kind, None
    with model.lease(50) as leased:
        assert leased._store.capacity >= 50
    with model.lease(1000) as leased:
        assert leased._store.capacity >= 64


def test_reach_follows_the_text_in_few_steps():
    """Attention reads what the text needs, in powers of two, so that few graphs serve all lengths."""
    store = GraphRunner(target_of("llama"), VOCABULARY, capacity=5000)._store
    assert {store.reach_for(length) for length in range(1, 257)} == {256}
    assert [store.reach_for(length) for length in (257, 512, 513, 4096, 4097)] == [512, 512, 1024, 4096, 5000]


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


class NoStream:
    def __init__(self, device):
        pass


def test_a_failed_capture_loses_neither_run_nor_result(monkeypatch):
    """The pass runs eagerly instead, the reason is kept, and the model leases dynamic runners from then on."""
    import core.runners.graph

    def fail(*args):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(core.runners.graph, "Captured", fail)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    network, ids = target_of("llama"), torch.tensor(random_prompt(6))
    model = Model("m", network, None, "fp32", frozenset(), 64, VOCABULARY)
    model.runner_kind, model._fused = GraphRunner.kind, None
    with model.lease() as runner:
        assert isinstance(runner, GraphRunner)
        for passes in runner._passes.values():
            passes._eager = False
        logits = runner.feed(ids)
        torch.testing.assert_close(logits, DynamicRunner(network, VOCABULARY).feed(ids), **CLOSE)
    assert (
        model.runner_kind == "dynamic (its passes cannot be captured: operation not permitted when stream is capturing)"
    )
    with model.lease() as runner:
        assert isinstance(runner, DynamicRunner)


def test_which_passes_are_captured(monkeypatch):
    """What rounds feed at once, long passes and what is left over of a prompt when they come again, very long ones
    never; and so many that memory is not theirs alone."""
    import core.runners.graph

    passes = GraphRunner(target_of("llama"), VOCABULARY)._passes[None]
    passes._eager = False
    assert passes._worth_capturing((17, 256, False), 17)
    assert passes._worth_capturing((2, 256, False), 1)
    for key, rows in (((30, 256, True), 30), ((9, 256, False), 1)):
        assert not passes._worth_capturing(key, rows)
        assert passes._worth_capturing(key, rows)
    assert not any(passes._worth_capturing((256, 256, False), 256) for _ in range(3))
    monkeypatch.setattr(core.runners.graph, "MOST_CAPTURED", 1)
    passes._captured[4, 256, False] = None
    assert passes._worth_capturing((4, 256, False), 4) and not passes._worth_capturing((5, 256, False), 5)


class Traced:
    """Stands in for a CUDA graph on a CPU: the operations of one pass, recorded once with every number of the host
    baked in, and run again on the same tensors. What a pass asks of the host anew would be missing from it."""

    def __init__(self, forward, store, inputs, outputs, stream, pool):
        self._inputs, self._outputs = inputs, outputs
        self._graph = make_fx(lambda: write(forward(store, inputs, len(inputs.ids)), outputs))()

    def replay(self, ids, parents):
        self._inputs.set(ids, parents)
        self._graph()
        return self._outputs[0], self._outputs[1] if len(self._outputs) > 1 else None


@pytest.fixture
def traced(monkeypatch):
    import core.runners.graph

    monkeypatch.setattr(core.runners.graph, "Captured", Traced)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def runner(network, **options):
        made = GraphRunner(network, VOCABULARY, **options)
        made._eager = False
        made._passes = {None: made._new_passes(None)}
        return made

    return runner


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
def test_a_recorded_pass_is_as_good_as_a_new_one(architecture, watched, fused, traced):
    """Recorded at one length, tree and text, replayed at others: positions, masks and slots follow the buffers, and so
    do the features."""
    network = target_of(architecture)
    own = DynamicRunner(network, VOCABULARY)
    ours = traced(network, capacity=16, fused=static_of(network) if fused else None)
    features = [runner.watch([1, 2]) for runner in (own, ours)] if watched else []
    prompt = torch.tensor(random_prompt(60))
    trees = [TREE, [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]

    def both(act):
        one, other = act(own), act(ours)
        assert own.length == ours.length
        if one is not None:
            torch.testing.assert_close(other, one, **CLOSE)

    both(lambda runner: runner.feed(prompt[:20], rows=1))
    for repeat, parents in enumerate(trees):
        for n in (1, 3):
            both(lambda runner, n=n, at=repeat: runner.feed(prompt[at : at + n]))
            both(lambda runner: runner.truncate(runner.length - 1))
        both(lambda runner, at=repeat, parents=parents: runner.feed(prompt[at : at + len(parents)], parents))
        both(lambda runner, path=[[0, 2, 5], [0, 1, 2], [0, 3]][repeat]: runner.keep(path))
        both(lambda runner, at=repeat: runner.view(1).feed(prompt[at : at + 2]))
    if watched:
        torch.testing.assert_close(*(found.take(own.length) for found in features), **CLOSE)
    assert ours.failure is None
    assert sum(len(passes._captured) for passes in ours._passes.values()) >= 3
