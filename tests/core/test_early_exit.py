"""Which layer early exit leaves after, where nobody says."""

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.costs import CostTable
from core.drafting.build import build_drafter
from core.drafting.model import exit_layer, measure_exit_layer
from core.errors import UserError
from core.loading.model import Model
from core.records import Round, Settings, Token
from core.runners.dynamic import DynamicRunner


@pytest.fixture
def idle_after(pair, pair_folder):
    """Makes a model of the pair's target with every layer past so many made to change nothing."""

    def make(layers):
        network = AutoModelForCausalLM.from_pretrained(pair_folder / "target").eval().requires_grad_(False)
        for layer in network.model.layers[layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model = Model("target", network, pair.target.tokenizer, "fp32", frozenset(), 256, pair.target.vocab_size)
        model.costs = CostTable({1: 1.0, 16: 1.1})
        return model

    return make


@pytest.fixture
def timed(monkeypatch):
    """Sets what is timed of an exit: seconds of a drafted token by its layers, and of checking n tokens."""

    def set_times(drafting, checking=lambda layers, n: 1.0):
        def time_exit(runner, layers, context, repeats, lengths):
            verify = CostTable({n: 1.0 if n == 1 else checking(layers, n) for n in lengths})
            return verify, CostTable({1: drafting(layers)}, drafting(layers))

        monkeypatch.setattr("core.drafting.model.time_exit", time_exit)
        monkeypatch.setattr("core.loading.model.time_exit", time_exit)

    set_times(lambda layers: layers / 4)
    return set_times


def test_the_exit_that_agrees_is_chosen(idle_after, timed):
    """Of four layers the last two do nothing: leaving after two agrees always, after one seldom."""
    assert measure_exit_layer(idle_after(2)) == (2, 1.0)


def test_the_cheaper_of_two_that_agree(idle_after, timed):
    """If everything past the first layer does nothing, the first is as good and costs half."""
    target = idle_after(1)
    assert exit_layer(target, None) == 1
    assert target.exit_layer == 1  # measured once


def test_what_is_timed_decides_not_the_share_of_layers(idle_after, timed):
    """Both exits agree, and the later one is the cheaper: its pass costs the same, most of it the head, and leaves
    less to the full pass, which resumes from it."""
    target = idle_after(1)
    timed(lambda layers: 0.3, lambda layers, n: 1.0 - layers / 4)
    assert exit_layer(target, None) == 2


@pytest.mark.parametrize("drafting, first", [(2.0, 0), (0.01, 16)])
def test_the_draft_length_follows_what_is_timed(pair, timed, monkeypatch, drafting, first):
    """A view that costs two passes, head and all, is not drafted from; one that costs nearly nothing as long as can
    be."""
    monkeypatch.setattr(pair.target, "exits", {})
    timed(lambda layers: drafting)
    settings = Settings(method="early-exit", exit_layer=1)
    with ExitStack() as resources, pair.target.lease() as runner:
        _, controller = build_drafter(pair, runner, settings, resources)
    for _ in range(20):
        accepted = Token(1, "", "accepted")
        controller.observe(Round(0, [accepted], Token(1, "", "bonus")) if first else Round(0, [], None))
    assert controller.next([]) == first


@pytest.mark.parametrize("agreement, first", [(0.0, 0), (1.0, 16)])
def test_an_exit_that_never_agrees_is_only_probed(pair, timed, monkeypatch, agreement, first):
    """What was measured when the layer was chosen is where the acceptance rate starts: a run whose exit is hopeless
    begins with plain steps instead of learning that first."""
    timed(lambda layers: 0.2)
    monkeypatch.setattr(pair.target, "exits", {})
    monkeypatch.setattr(pair.target, "exit_layer", None)
    monkeypatch.setattr("core.drafting.model.measure_exit_layer", lambda target: (1, agreement))
    with ExitStack() as resources, pair.target.lease() as runner:
        _, controller = build_drafter(pair, runner, Settings(method="early-exit"), resources)
    assert controller.next([]) == first


def test_the_one_asked_for(idle_after):
    """Any layer but the last may be asked for; nothing is measured then."""
    target = idle_after(4)
    assert exit_layer(target, 3) == 3
    assert target.exit_layer is None
    with pytest.raises(UserError, match="between 1 and 3"):
        exit_layer(target, 4)


def test_the_view_is_the_whole_model_where_the_rest_is_idle(idle_after):
    """What the measurement stands on: exit logits equal the full ones when later layers change nothing."""
    target = idle_after(2)
    runner = DynamicRunner(target.network, target.vocab_size)
    ids = torch.arange(1, 12)
    whole = runner.feed(ids)
    runner.reset()
    torch.testing.assert_close(runner.view(2).feed(ids), whole)
