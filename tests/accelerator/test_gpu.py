"""What only a GPU can show: captured passes are the eager ones, in 4-bit too, and a round waits for the device once."""

import os
import time
import warnings

import pytest
import torch
from tiny import VOCABULARY, random_model, random_prompt
from torch import nn

from core.decoding import take_step
from core.drafting.methods import METHODS
from core.drafting.model import ModelDrafter
from core.lanes import open_lane
from core.measuring.bench import copy_bandwidth
from core.records import first_divergence
from core.runners.architecture import FAMILIES
from core.runners.clock import Clock, off_the_clock
from core.runners.dynamic import DynamicRunner
from core.runners.graph import GraphRunner, fused_for, why_not
from core.runners.host import ids_on
from core.runners.products import int4_obstacle
from core.runners.slots import Slots
from core.runners.static_layers import StaticNetwork
from core.runners.together import Together
from core.sampling import Sampling, Uniforms
from core.settings import Settings

pytestmark = pytest.mark.gpu

if os.environ.get("ACCELERATOR", "cuda") == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; `python -m tests.accelerator` shows it to the tests", allow_module_level=True)

TREE = [-1, 0, 0, 1, 1, 2]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
NEAR_TIE = 0.1
"""In 16 and 4 bits a pass over several tokens rounds otherwise than a pass over one: logits this near may change
places."""


def on(device, architecture, seed=3):
    return random_model(architecture, seed=seed, dtype=torch.float32).to(device)


def fused_on(network):
    """The fused forward, found to answer as transformers' own does on this device."""
    found = fused_for(network)
    assert isinstance(found, StaticNetwork), found
    return found


def needs_cuda(device):
    """For what a CPU run of these tests could not see fail."""
    if device.type != "cuda":
        pytest.skip("only CUDA tells")


def assert_captured(runner, device):
    assert runner.failure is None
    assert device.type != "cuda" or len(runner._captures)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "olmo2"]
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
def test_captured_passes_are_the_dynamic_runner_s(device, architecture, fused):
    """Each number of tokens twice, captured and replayed, over growth, rollbacks, trees, their paths, features and
    early exit: through the fused forward and through transformers' own modules."""
    network = on(device, architecture)
    if fused and architecture not in FAMILIES:
        pytest.skip("has no fused forward")
    own = DynamicRunner(network, VOCABULARY)
    ours = GraphRunner(network, VOCABULARY, capacity=32, fused=fused_on(network) if fused else None)
    features = [runner.watch([1, 2]) for runner in (own, ours)]
    prompt = ids_on(device, random_prompt(60))

    def both(act):
        one, other = act(own), act(ours)
        assert own.length == ours.length
        if one is not None:
            torch.testing.assert_close(other, one, **CLOSE)

    both(lambda runner: runner.feed(prompt[:20], rows=1))
    for repeat in range(3):
        for n in (1, 2, 5, 9):
            both(lambda runner, n=n, repeat=repeat: runner.feed(prompt[repeat : repeat + n]))
            both(lambda runner: runner.truncate(runner.length - 1))
        both(lambda runner, repeat=repeat: runner.feed(prompt[repeat : repeat + len(TREE)], TREE))
        both(lambda runner, path=[[0, 1, 3], [0, 2, 5], [0]][repeat]: runner.keep(path))
        both(lambda runner, repeat=repeat: runner.view(1).feed(prompt[repeat : repeat + 2]))
    torch.testing.assert_close(*(found.take(own.length) for found in features), **CLOSE)
    assert_captured(ours, device)


def test_another_tree_of_the_same_size(device):
    """A captured pass takes the tree it is given, not the one it was captured with."""
    network, prompt = on(device, "llama"), ids_on(device, random_prompt(12))
    own, ours = DynamicRunner(network, VOCABULARY), GraphRunner(network, VOCABULARY)
    for parents in (TREE, [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0], TREE):
        for runner in (own, ours):
            runner.truncate(0)
            runner.feed(prompt[:6])
        torch.testing.assert_close(ours.feed(prompt[6:], parents), own.feed(prompt[6:], parents), **CLOSE)


def test_logits_are_the_caller_s_to_keep(device):
    """Graphs share memory: what a pass returned must survive the passes after it."""
    runner, prompt = GraphRunner(on(device, "llama"), VOCABULARY), ids_on(device, random_prompt(20))
    first = runner.feed(prompt[:3])
    kept = first.clone()
    for n in (1, 2, 3, 4, 3):
        runner.feed(prompt[:n])
    torch.testing.assert_close(first, kept)


def test_runners_of_one_model_do_not_disturb_each_other(device):
    network, prompt = on(device, "llama"), ids_on(device, random_prompt(20))
    alone = GraphRunner(network, VOCABULARY)
    wanted = [alone.feed(prompt[i : i + 2]) for i in range(0, 20, 2)]
    one, other = GraphRunner(network, VOCABULARY), GraphRunner(network, VOCABULARY)
    for i, logits in zip(range(0, 20, 2), wanted):
        torch.testing.assert_close(one.feed(prompt[i : i + 2]), logits, **CLOSE)
        other.feed(prompt.flip(0)[: i + 1])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3"])
def test_texts_in_one_pass_are_answered_as_alone(device, architecture):
    """Five texts, three at a time: chains of several widths, a tree, features, each pass captured and replayed."""
    network = on(device, architecture)
    fused = fused_on(network)
    slots = Slots(network, fused, VOCABULARY, 3)

    def answers(runner, number):
        prompt = ids_on(device, random_prompt(60 + number))
        features = runner.watch([1, 2])
        yield number, runner.feed(prompt[: 5 * number + 2], rows=1)
        for repeat in range(4):
            for n in (1, 4, 2 + number % 3):
                yield number, runner.feed(prompt[repeat : repeat + n])
                runner.truncate(runner.length - 1)
            yield number, runner.feed(prompt[: len(TREE)], TREE)
            runner.keep([0, 2, 5][: 1 + repeat % 3])
        yield number, features.take(runner.length)

    def text(number):
        with slots.lease() as runner:
            yield from answers(runner, number)

    found = [[] for _ in range(5)]
    for number, answer in Together(fused).run(map(text, range(5)), 3):
        found[number].append(answer)
    for number, ours in enumerate(found):
        alone = GraphRunner(network, VOCABULARY, fused=fused)
        for (_, expected), answer in zip(answers(alone, number), ours, strict=True):
            torch.testing.assert_close(answer, expected, **CLOSE)
    assert slots.captures.failure is None
    assert device.type != "cuda" or len(slots.captures)


class Waiting(nn.Module):
    """A layer that asks the device for a value: no graph can be captured of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.sum().item() == x.sum().item() else x


def test_a_pass_that_cannot_be_captured_runs_eagerly(device):
    """The failure costs nothing but speed, neither this pass nor later ones, nor other graphs."""
    network = on(device, "llama")
    reference = DynamicRunner(on(device, "llama"), VOCABULARY)
    network.model.layers[0].mlp.down_proj = Waiting(network.model.layers[0].mlp.down_proj)
    runner, prompt = GraphRunner(network, VOCABULARY), ids_on(device, random_prompt(9))
    for i in range(0, 9, 3):
        torch.testing.assert_close(runner.feed(prompt[i : i + 3]), reference.feed(prompt[i : i + 3]), **CLOSE)
    assert device.type != "cuda" or "cannot be captured" in runner.failure
    healthy = GraphRunner(on(device, "llama"), VOCABULARY)
    healthy.feed(prompt[:2])
    assert_captured(healthy, device)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
@pytest.mark.parametrize("gamma", [1, 8])
def test_a_round_waits_for_the_device_once(device, sampling, gamma):
    """PyTorch itself tells of every call that waits."""
    networks = on(device, "llama"), on(device, "llama", seed=4)
    target, draft = (GraphRunner(network, VOCABULARY, fused=fused_on(network)) for network in networks)
    drafter = ModelDrafter(draft, sampling)
    numbers, context = Uniforms(0, device), random_prompt(20)
    for n in (1, 2):  # what the draft reads in a round: two tokens after one that stood as a whole
        drafter.runner.feed(ids_on(device, random_prompt(n)))
    drafter.runner.truncate(0)

    def step():
        done = take_step(target, drafter, context, gamma, sampling, numbers)
        context.extend(done.kept)

    for _ in range(6):  # every length is captured
        step()
    needs_cuda(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in told if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits


@pytest.mark.parametrize("precision", ["nf4", "int4", "bf16", "fp32"])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "plain" and METHODS[m].network != "head"])
def test_greedy_speculation_writes_what_plain_decoding_writes(device, pairs, precision, method):
    """Up to a near-tie of two logits: in float32 not even that."""
    pair = pairs(precision)

    def run_of(name):
        settings = Settings(method=name, max_new_tokens=48, ignore_eos=True, draft_length=4)
        with open_lane(pair, "the quick brown fox the quick", settings, tops=3) as lane:
            for _ in lane:
                pass
        return lane.run

    plain, speculative = run_of("plain"), run_of(method)
    parting = first_divergence(plain, speculative)
    assert parting is None or parting.logit_gap < (1e-3 if precision == "fp32" else NEAR_TIE)
    if device.type == "cuda":
        assert pair.target.runner_kind == GraphRunner.fused_kind


def test_weights_take_what_they_are_said_to(device, pairs):
    """The bytes counted of a model in 4-bit are the bytes the device gave."""
    needs_cuda(device)
    from core.loading import load_model

    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # makes cuBLAS take its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = load_model("pocket", device, "nf4")
    taken = torch.cuda.memory_allocated() - before
    assert taken == pytest.approx(model.weight_bytes(), rel=0.1)


def test_runs_leave_no_memory_behind(device, pairs):
    """A runner goes back to the pool with what it captured; the tenth run takes no more than the third."""
    needs_cuda(device)
    pair, held = pairs("nf4"), []
    for _ in range(10):
        settings = Settings(max_new_tokens=32, ignore_eos=True, draft_length=3)
        with open_lane(pair, "the quick brown fox", settings) as lane:
            for _ in lane:
                pass
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[2] + (1 << 16)


def test_capturing_is_not_counted_to_a_run(device):
    clock = Clock(device)
    with off_the_clock(device):
        time.sleep(0.5)
    clock.mark()
    (stage,), total = clock.stop() if device.type == "cpu" else (torch.cuda.synchronize(), clock.stop())[1]
    assert abs(stage) < 0.25 and total < 0.25


def test_what_is_captured_is_chosen_by_the_device(device):
    reason = why_not(on(device, "llama"))
    assert reason is None if device.type == "cuda" else "need a CUDA device" in reason


def test_int4_s_kernel_is_right_on_the_device(device):
    assert int4_obstacle(device) is None


def test_copy_bandwidth(device):
    """Bytes both ways: more than any host memory moves, less than any device memory of today."""
    found = copy_bandwidth(device, 1 << (28 if device.type == "cuda" else 22))
    assert found > 0
    if device.type == "cuda":
        assert 5e10 < found < 2e13
