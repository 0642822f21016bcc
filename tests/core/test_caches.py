"""Caches are exact: after any round a runner answers as if it had been fed the committed text and nothing else."""

import pytest
import torch
from lookup import CPU
from tiny import (
    FUSED,
    KINDS,
    VOCABULARY,
    draft_runner,
    fused_of,
    random_model,
    random_prompt,
    target_of,
    target_runner,
)

from core.decoding import take_step
from core.drafting.model import ModelDrafter
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.tree import TreeDrafter
from core.loading.model import Model
from core.progress import never
from core.runners.dynamic import DynamicRunner
from core.runners.native import NativeRunner
from core.runners.widths import USUAL
from core.sampling import Sampling, Uniforms

SAMPLING = Sampling(temperature=1.0)
TREE = [-1, 0, 0, 1, 1, 2, 3]
"""The newest committed token, its two children, two and one grandchildren, and one below those."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Weights are float64; some models compute attention weights in float32 all the same."""
PATHS = [[0, 1, 3, 6], [0, 1, 4], [0, 2, 5]]


def probe(cache, context):
    """What a runner says next, having caught up with the context; leaves it as it was."""
    held = cache.length
    logits = cache.feed(torch.tensor(context[held:]))
    cache.truncate(held)
    return logits[-1]


def assert_exact(cache, fresh, context):
    assert cache.length < len(context)
    torch.testing.assert_close(probe(cache, context), probe(fresh, context), **CLOSE)


def advance(target, drafter, context, gamma, numbers):
    step = take_step(target, drafter, context, gamma, SAMPLING, numbers)
    return context + step.kept


@pytest.mark.parametrize("kind", KINDS)
def test_target_and_draft_after_every_round(kind):
    """Rounds of several lengths, accepted whole, in part or not at all: both caches hold the committed text."""
    target, drafter = target_runner(kind), ModelDrafter(draft_runner(kind), SAMPLING)
    numbers = Uniforms(1, torch.device("cpu"))
    context = random_prompt(30)
    for gamma in (4, 1, 3, 6, 2):
        context = advance(target, drafter, context, gamma, numbers)
        assert target.length == len(context) - 1
        assert len(context) - 2 <= drafter.runner.length <= len(context) - 1
        assert_exact(target, target_runner(kind), context)
        assert_exact(drafter.runner, draft_runner(kind), context)


@pytest.mark.parametrize("kind", KINDS)
def test_early_exit_view_after_every_round(kind):
    """The view writes into the target's first layers, ahead of it; neither disturbs the other."""
    target = target_runner(kind)
    drafter = ModelDrafter(target.view(1), SAMPLING)
    numbers = Uniforms(2, torch.device("cpu"))
    context = random_prompt(30)
    for gamma in (4, 1, 3, 6, 2):
        context = advance(target, drafter, context, gamma, numbers)
        assert_exact(target, target_runner(kind), context)
        assert_exact(drafter.runner, target_runner(kind).view(1), context)


@pytest.mark.parametrize("kind", KINDS)
def test_tree_after_every_round(kind):
    """Of each tree the target keeps the accepted path, the draft only the text before it."""
    target = target_runner(kind)
    drafter = TreeDrafter(draft_runner(kind), SAMPLING, lambda: (3, 2, 1))
    numbers = Uniforms(4, torch.device("cpu"))
    context = random_prompt(30)
    for depth in (3, 1, 2, 3, 3):
        context = advance(target, drafter, context, depth, numbers)
        assert target.length == len(context) - 1
        assert_exact(target, target_runner(kind), context)
        assert_exact(drafter.runner, draft_runner(kind), context)


@pytest.mark.parametrize("shape", [(2, 1), (1, 1)])
def test_what_a_tree_has_read_of_the_prompt_stands(shape):
    """Rolled back to the text it stands at, as the check of the law does between its samples: nothing is read again."""
    drafter = TreeDrafter(draft_runner("llama"), SAMPLING, lambda: shape)
    prompt = random_prompt(50)
    drafter.prefill(prompt[:49], never)
    for _ in range(2):
        drafter.truncate(49)
        assert drafter.runner.length == 49
        drafter.propose(prompt, 2, torch.rand(8))


@pytest.mark.parametrize("kind", ["llama", "llama fused", "gemma3_text", "gpt2"])
def test_method_switched_in_the_middle_of_a_text(kind):
    """Drafters take turns on one target: each catches up on whatever was written without it."""
    target = target_runner(kind)
    model = ModelDrafter(draft_runner(kind), SAMPLING)
    early = ModelDrafter(target.view(1), SAMPLING)
    ngram = NgramDrafter(CPU, shortest=1)
    tree = TreeDrafter(draft_runner(kind), SAMPLING, lambda: (2, 2))
    combined = CombinedDrafter(NgramDrafter(CPU), ModelDrafter(draft_runner(kind), SAMPLING))
    numbers = Uniforms(3, torch.device("cpu"))
    context = random_prompt(30)
    turns = [model, early, None, ngram, early, tree, model, combined, None, tree, tree, early, model, combined, early]
    for drafter in turns:
        context = advance(target, drafter, context, 3, numbers)
        assert_exact(target, target_runner(kind), context)
    assert_exact(model.runner, draft_runner(kind), context)
    assert_exact(tree.runner, draft_runner(kind), context)
    assert_exact(combined.cache, draft_runner(kind), context)
    assert_exact(early.runner, target_runner(kind).view(1), context)


@pytest.mark.parametrize("kind", ["llama", "llama fused"])
def test_truncate_is_absolute_and_idempotent(kind):
    """`truncate(n)` states the length; saying it twice, or saying more than there is, changes nothing."""
    cache, text = target_runner(kind), random_prompt(12)
    cache.feed(torch.tensor(text))
    cache.truncate(7)
    cache.truncate(7)
    cache.truncate(10)
    assert cache.length == 7
    assert_exact(cache, target_runner(kind), text)
    cache.truncate(0)
    assert cache.length == 0
    assert_exact(cache, target_runner(kind), text)


@pytest.mark.parametrize("kind", ["llama", "llama fused"])
def test_view_truncates_only_its_layers(kind):
    """Rolling the view back past the target's length would be the target's loss: it keeps what it had fed."""
    text = random_prompt(12)
    target = target_runner(kind)
    view = target.view(1)
    target.feed(torch.tensor(text[:8]))
    view.feed(torch.tensor(text[8:]))
    assert (view.length, target.length) == (12, 8)
    view.truncate(8)
    assert (view.length, target.length) == (8, 8)
    assert_exact(target, target_runner(kind), text)


@pytest.mark.parametrize("kind", ["llama", "llama fused"])
def test_reset_leaves_nothing_of_the_last_prompt(kind):
    """A runner from the pool answers like a new one."""
    used = target_runner(kind)
    used.feed(torch.tensor(random_prompt(20)))
    used.reset()
    assert used.length == 0
    assert_exact(used, target_runner(kind), random_prompt(9))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_last_ones(kind):
    """`rows=r` computes only the last r rows of logits; they are the same."""
    ids = torch.tensor(random_prompt(9))
    whole, last = target_runner(kind).feed(ids), target_runner(kind).feed(ids, rows=3)
    assert whole.shape == (9, VOCABULARY)
    torch.testing.assert_close(last, whole[-3:], **CLOSE)


@pytest.mark.parametrize("make", [DynamicRunner, lambda network, size: NativeRunner(fused_of(network), size)])
def test_padded_vocabulary_is_cut_off(make):
    """Ids past the real vocabulary do not exist, for the runner and for its early-exit view."""
    cache = make(target_of("llama fused"), VOCABULARY - 5)
    assert cache.feed(torch.tensor([1, 2])).shape == (2, VOCABULARY - 5)
    assert cache.view(1).feed(torch.tensor([3])).shape == (1, VOCABULARY - 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("committed", [3, 30])
def test_tree_is_each_of_its_paths(kind, committed):
    """Fed with parents, every token answers as if its own path had been fed alone; 30 tokens pass the window of 16."""
    cache, text = target_runner(kind), random_prompt(committed)
    cache.feed(torch.tensor(text))
    ids = torch.tensor(random_prompt(len(TREE)))
    tree = cache.feed(ids, parents=TREE)
    assert cache.length == committed + len(TREE)
    for path in PATHS:
        alone = target_runner(kind)
        alone.feed(torch.tensor(text))
        torch.testing.assert_close(tree[path], alone.feed(ids[path]), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [*PATHS, [0]], ids=str)
def test_keep_compacts_a_tree_to_one_path(kind, path):
    """After `keep` the cache is that of the path's text."""
    cache, text = target_runner(kind), random_prompt(30)
    cache.feed(torch.tensor(text))
    ids = torch.tensor(random_prompt(len(TREE)))
    cache.feed(ids, parents=TREE)
    cache.keep(path)
    written = text + ids[path].tolist()
    assert cache.length == len(written)
    assert_exact(cache, target_runner(kind), [*written, 5])


@pytest.mark.parametrize("kind", ["llama", "llama fused"])
def test_shared_configuration_is_not_touched(kind):
    """Views and runners leave the model's own configuration and layers as they are."""
    network = target_of(kind)
    before = network.config.to_dict()
    target_runner(kind).view(1).feed(torch.tensor([1, 2, 3]))
    assert network.config.to_dict() == before
    assert len(network.model.layers) == network.config.num_hidden_layers == 2


@pytest.mark.parametrize("kind", FUSED)
def test_fused_forward_is_transformers_own(kind):
    """The same logits as the model's own forward, which still works on the fused weights."""
    ids = torch.tensor([random_prompt(40)])
    fused = target_runner(kind).feed(ids[0]).double()  # the native pass adds up in float32
    torch.testing.assert_close(fused, target_of(kind)(ids).logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused, target_of(kind.split()[0])(ids).logits[0], rtol=1e-4, atol=1e-4)


def test_of_a_tree_only_what_lies_behind_the_root_is_moved():
    """A cache of gigabytes is not copied for a path of three tokens: what lies before it stays where it is."""
    runner = target_runner("llama")
    runner.feed(torch.tensor(random_prompt(30)))
    runner.feed(torch.arange(7), TREE)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in runner._cache.layers]
    runner.keep(PATHS[0])
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in runner._cache.layers] == before
    assert {layer.keys.shape[2] for layer in runner._cache.layers} == {34}


def test_idle_runners_give_back_what_is_larger_than_usual(tokenizer):
    """A long text leaves no cache of its size behind, whatever kind of runner read it."""
    network = random_model("llama", 3, dtype=torch.float32, max_position_embeddings=2 * USUAL)
    model = Model("tiny", network, tokenizer, "fp32", frozenset(), 2 * USUAL, VOCABULARY)
    for length, kept in ((20, 1), (USUAL + 1, 0), (20, 1)):
        with model.lease() as runner:
            for at in range(0, length, 1024):
                runner.feed(torch.ones(min(1024, length - at), dtype=torch.long), rows=1)
        assert len(model._idle) == kept
