"""Features: a runner's passes also give the hidden states that enter layers, and roll them back with the cache."""

import pytest
import torch
from tiny import KINDS, LAYERS, WIDTH, random_prompt, target_of, target_runner

from core.progress import never
from core.runners import prefill
from core.runners.features import Features

CLOSE = {"rtol": 1e-4, "atol": 5e-5}  # the native pass adds up in another order
TREE = [-1, 0, 0, 1, 1, 2, 3]
BOUNDARIES = (1, 0)
"""Out of order on purpose: rows come in the order asked for."""


def features_of(kind, ids, boundaries=BOUNDARIES):
    """What transformers itself says enters these layers: [len(ids), len(boundaries) * width]."""
    states = target_of(kind)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in boundaries], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_enters_a_layer_is_transformers_own(kind):
    """Fed at once, in chunks or token by token, every token's row is its hidden states."""
    ids = random_prompt(300)
    runner = target_runner(kind)
    features = runner.watch(BOUNDARIES)
    prefill(runner, ids[:280], never)
    for i in range(280, 300):
        runner.feed(torch.tensor(ids[i : i + 1]))
    assert (features.start, features.end) == (0, 300)
    torch.testing.assert_close(features.take(300), features_of(kind, ids), **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "llama fused", "qwen3 fused", "llama graph"])
def test_the_last_boundary_is_before_the_final_norm(kind):
    """The number of layers names what leaves the last one, which transformers' last hidden state is not: that is
    normed."""
    ids = torch.tensor(random_prompt(12))
    runner = target_runner(kind)
    features = runner.watch([LAYERS])
    runner.feed(ids)
    network = target_of(kind)
    decoder = network.base_model
    norm = decoder.ln_f if kind == "gpt2" else decoder.norm
    states = network(ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(norm(features.take(12)), states[-1][0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_gives_each_token_the_row_of_its_own_path(kind):
    text, ids = random_prompt(20), random_prompt(len(TREE))
    runner = target_runner(kind)
    features = runner.watch(BOUNDARIES)
    runner.feed(torch.tensor(text))
    features.take(20)
    runner.feed(torch.tensor(ids), TREE)
    path = [0, 1, 3, 6]
    runner.keep(path)
    assert features.end == 24 == runner.length
    written = text + [ids[i] for i in path]
    torch.testing.assert_close(features.take(24), features_of(kind, written)[20:], **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "llama fused", "llama graph"])
def test_rows_are_rolled_back_with_the_cache(kind):
    """What was fed and taken back leaves no row; what was taken by a reader before is not given twice."""
    text = random_prompt(20)
    runner = target_runner(kind)
    features = runner.watch(BOUNDARIES)
    runner.feed(torch.tensor([*text[:12], 5, 6, 7]))
    runner.truncate(12)
    runner.truncate(14)
    assert features.end == 12
    features.take(9)
    runner.feed(torch.tensor(text[12:]))
    torch.testing.assert_close(features.take(20), features_of(kind, text)[9:], **CLOSE)
    runner.truncate(5)
    assert (features.start, features.end) == (5, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_and_early_exit_goes_on(kind):
    """Watching changes neither the runner's own logits nor those of a view, and ends with the run."""
    ids = torch.tensor(random_prompt(20))
    watched, other = target_runner(kind), target_runner(kind)
    features = watched.watch(BOUNDARIES)
    torch.testing.assert_close(watched.feed(ids), other.feed(ids), **CLOSE)
    view, other_view = watched.view(1), other.view(1)
    torch.testing.assert_close(view.feed(ids[:3]), other_view.feed(ids[:3]), **CLOSE)
    torch.testing.assert_close(watched.feed(ids[:5]), other.feed(ids[:5]), **CLOSE)
    written = [*ids.tolist(), *ids[:5].tolist()]
    torch.testing.assert_close(features.take(25), features_of(kind, written), **CLOSE)
    watched.reset()
    watched.feed(ids)
    assert features.end == 25


@pytest.mark.parametrize("kind", ["llama", "llama graph"])
def test_the_model_itself_is_not_touched(kind):
    def hooks():
        return [[*layer._forward_pre_hooks, *layer._forward_hooks] for layer in target_of(kind).model.layers]

    before, runner = hooks(), target_runner(kind)
    runner.watch([0, LAYERS])
    runner.feed(torch.tensor([1, 2, 3]))
    assert hooks() == before


def test_watching_may_begin_in_the_middle_of_a_text():
    runner = target_runner("llama")
    runner.feed(torch.tensor([1, 2, 3]))
    features = runner.watch([1])
    runner.feed(torch.tensor([4, 5]))
    assert (features.start, features.end) == (3, 5)
    assert features.take(5).shape == (2, WIDTH)


def test_parts_are_cut_wherever_a_roll_back_falls():
    features = Features([0])
    for at in (0, 2, 5):
        features.add(at, torch.arange(at, at + (2 if at == 0 else 3)).float()[:, None])
    features.truncate(4)
    features.add(4, torch.tensor([[40.0], [50.0], [60.0]]))
    features.keep([0, 2])
    assert features.take(6).flatten().tolist() == [0, 1, 2, 3, 40, 60]
