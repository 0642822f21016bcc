"""The dynamic tree of a trained head: its nodes are what the head says along each path, and it is lossless."""

import math
from itertools import pairwise

import pytest
import torch
from heads import fused_head, random_head, taught_head
from lookup import BLOCK, LookupRunner, block_law, count_blocks, decode, p_value, table
from test_head_drafting import outputs_afresh
from test_head_lossless import DRAWS, THRESHOLD, TableHead
from tiny import random_prompt, target_of, target_runner

from core.costs.rounds import RoundCosts
from core.decoding import speculative, take_step
from core.drafting.head import BEAMS, MOST_NODES, AdaptiveDepth, HeadTreeDrafter
from core.drafting.length import Fixed
from core.heads.runner import runner_of
from core.records import Round, Run, Token
from core.sampling import Sampling, Uniforms
from core.settings import Settings

FLAT = RoundCosts(lambda n: 1.0 + 1e-6 * n, lambda n: 0.01)
STEEP = RoundCosts(lambda n: float(n), lambda n: 0.01)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def tree_drafter(target, network, kind, sampling, costs=FLAT):
    runner = runner_of(fused_head(network, target_of(kind)), capacity=8)
    return HeadTreeDrafter(runner, target.watch(network.config.aux_layers), sampling, costs)


def grown(depth, costs=FLAT, sampling=Sampling()):  # noqa: B008 (frozen)
    target, network, context = target_runner("llama"), random_head(), random_prompt(20)
    drafter = tree_drafter(target, network, "llama", sampling, costs)
    target.feed(torch.tensor(context[:-1]))
    return drafter, context, drafter.propose(context, depth, torch.empty(0))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_node_is_what_the_head_says_on_its_own_path(depth):
    """Each node's logits are those of its path drafted alone, as a chain."""
    drafter, context, draft = grown(depth)
    runner, head = drafter.runner, drafter.runner.head
    assert len(draft) > depth or depth == 1
    assert all(parent < i for i, parent in enumerate(draft.parents))
    for node in range(len(draft)):
        path, at = [], draft.parents[node]
        while at >= 0:
            path.insert(0, int(draft.tokens[at]))
            at = draft.parents[at]
        output = drafter._refresh(context)
        for token in path:
            output = runner.draft(torch.tensor([token]), output)
        torch.testing.assert_close(draft.logits[node], head.logits(output), **CLOSE)
        assert len(path) < depth


def test_the_likeliest_nodes_are_kept_and_siblings_come_in_order():
    _, _, draft = grown(3)
    assert draft.probs is None and len(draft) <= MOST_NODES
    column = {token: i for i, token in enumerate(draft.ids.tolist())}
    reached = []
    for token, parent, row in zip(draft.tokens.tolist(), draft.parents, draft.logits):
        own = row.log_softmax(-1)[0, column[token]].item()
        reached.append(own + (reached[parent] if parent >= 0 else 0.0))
    assert all(a >= b - 1e-9 for a, b in pairwise(reached))
    for parent in set(draft.parents):
        siblings = [int(draft.tokens[i]) for i, p in enumerate(draft.parents) if p == parent]
        assert len(set(siblings)) == len(siblings) <= BEAMS


def test_no_more_nodes_than_checking_them_is_worth():
    """Where each further token costs as much as a pass, the first node alone is kept; where it is free, all are."""
    assert len(grown(3, STEEP)[2]) == 1
    assert len(grown(3)[2]) == min(MOST_NODES, BEAMS + 2 * BEAMS * BEAMS)
    chances = [math.log(p) for p in (0.6, 0.3, 0.05)]
    drafter = grown(2, RoundCosts(lambda n: 1 + 0.1 * n, lambda n: 0.0))[0]
    rates = [(1 + sum(map(math.exp, chances[:n]))) / (1 + 0.1 * (n + 1)) for n in (1, 2, 3)]
    assert drafter._worth_checking(chances, 2) == 1 + rates.index(max(rates)) == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "llama fused", "qwen3 fused", "llama graph"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.3)], ids=["greedy", "sampled"])
def test_cache_and_features_after_every_round(kind, sampling):
    """Of the target's rows only those on the accepted path enter the head's cache."""
    text = torch.tensor([random_prompt(30)])
    text = target_of(kind).generate(text, do_sample=False, max_new_tokens=30, pad_token_id=0)[0].tolist()
    target, network = target_runner(kind), taught_head(target_of(kind), text, sorted(set(text[::2])))
    drafter = tree_drafter(target, network, kind, sampling)
    numbers, context = Uniforms(1, torch.device("cpu")), text[:30]
    kept = set()
    for depth in (3, 1, 0, 2, 4, 3, 3):
        step = take_step(target, drafter, context, depth, sampling, numbers)
        context = context + step.kept
        kept.add(len(step.kept))
        assert drafter._features.end == target.length == len(context) - 1
        assert drafter.runner.length == drafter._stable
    assert len(kept) > 1 and max(kept) > 1
    output = drafter._refresh(context)
    torch.testing.assert_close(output[0], outputs_afresh(network, target_of(kind), context)[-1], **CLOSE)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_texts_are_transformers_own(depth):
    network = target_of("llama")
    prompt = torch.tensor([random_prompt(33)])
    text = network.generate(prompt, do_sample=False, max_new_tokens=24, pad_token_id=0)[0].tolist()
    for head in (taught_head(network, text, sorted(set(text[1::2]))), random_head()):
        target = target_runner("llama")
        drafter = tree_drafter(target, head, "llama", Sampling())
        run = Run(Settings(max_new_tokens=24), {}, "", text[:33])
        for _ in speculative(target, drafter, run, length=Fixed(depth)):
            pass
        assert run.token_ids == text[33:]


class TableTreeHead(TableHead):
    """The same table, for rows of a tree."""

    def draft(self, ids, outputs, seen=None):
        self.length += len(ids)
        return torch.stack([self._laws[int(o.argmax()) % 3, i] for o, i in zip(outputs, ids.tolist())])


@pytest.mark.parametrize("kind, depth, ids", [("hot", 2, [0, 2, 3]), ("cold", 2, [1, 4]), ("constant", 1, [4, 0])])
def test_joint_law_is_the_targets(kind, depth, ids):
    """Nodes chosen by which tokens they are, judged as point masses: the law is the target's own, by G-test."""
    logits, sampling = table(1), Sampling(0.9, top_k=4)
    target = LookupRunner(logits)
    drafter = HeadTreeDrafter(TableTreeHead(kind, ids), target.watch([0]), sampling, FLAT)
    run = decode(target, drafter, sampling, depth, DRAWS * BLOCK, seed=5)
    assert sum(len(round_.drafted) for round_ in run.rounds) > DRAWS
    assert p_value(count_blocks(run.token_ids), block_law(logits, sampling)) > THRESHOLD


def test_a_depth_stands_if_any_of_its_nodes_does():
    adaptive = AdaptiveDepth(FLAT, 4)
    drafted = [Token(1, "", "rejected"), Token(2, "", "accepted"), Token(3, "", "rejected", parent=1)]
    before = adaptive.acceptance.rates(2)
    adaptive.observe(Round(0, drafted, Token(5, "", "corrected")))
    first, second = adaptive.acceptance.rates(2)
    assert first > before[0] and second < before[1]
