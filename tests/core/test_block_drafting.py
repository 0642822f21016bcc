"""Block drafters: exact caches after every round, and the target's law whatever is drafted."""

import pytest
import torch
from blocks import BLOCK_VARIANTS, blocks_afresh, random_block
from heads import random_head
from lookup import BLOCK, LookupRunner, block_law, count_blocks, decode, p_value, table
from lookup import VOCABULARY as WORDS
from test_head_drafting import embed, outputs_afresh
from test_law import DRAWS, THRESHOLD
from tiny import VOCABULARY, random_prompt, target_of, target_runner

from core.decoding import take_step
from core.drafting.block import BlockDrafter
from core.heads.block import FusedHead
from core.heads.parallel import BlockHead, BlockRunner, ParallelRunner
from core.heads.runner import HeadRunner
from core.progress import never
from core.runners import prefill
from core.sampling import Sampling, Uniforms

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CPU, GREEDY = torch.device("cpu"), Sampling()
KINDS = ("llama", "gemma3_text", "gpt2", "llama fused", "qwen3 fused", "llama graph")
PARALLEL = {"mask_id": 2, "block_size": 4, "depth": 2}
PROMPT, NEW = 12, 40


def block_drafter(kind, network, sampling=GREEDY):
    target = target_runner(kind)
    runner = BlockRunner(BlockHead(network, target_of(kind.split()[0]), VOCABULARY), capacity=8)
    return target, BlockDrafter(runner, target.watch(network.config.aux_layers), sampling)


def parallel_drafter(kind, network, sampling=GREEDY):
    target = target_runner(kind)
    fused = FusedHead(network, target_of(kind.split()[0]).get_input_embeddings().weight, VOCABULARY)
    runner = ParallelRunner(HeadRunner(fused, capacity=8))
    return target, BlockDrafter(runner, target.watch(network.config.aux_layers), sampling)


def rounds(target, drafter, sampling, gammas=(3, 1, 0, 0, 3, 2, 3, 3)):
    """The text after rounds of several lengths, with plain ones between."""
    numbers, context = Uniforms(2, CPU), random_prompt(30)
    prefill(target, context[:-1], never)
    drafter.prefill(context[:-1], never)
    for gamma in gammas:
        context += take_step(target, drafter if gamma else None, context, gamma, sampling, numbers).kept
        assert drafter._features.end == target.length == len(context) - 1
    return context


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", BLOCK_VARIANTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "llama graph"])
def test_a_block_after_every_round_is_one_made_afresh(kind, variant, sampling):
    """From keys and values that came round by round, in a cache that had to grow; no row of a block is left in it."""
    network = random_block(**BLOCK_VARIANTS[variant])
    target, drafter = block_drafter(kind, network, sampling)
    context = rounds(target, drafter, sampling)
    found = drafter._advance(context, network.config.drafted)
    assert drafter.runner.length == drafter._stable == len(context) - 1
    expected = blocks_afresh(network, target_of(kind.split()[0]), context, [len(context) - 1])[0]
    torch.testing.assert_close(found, expected[network.config.first :], **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "qwen3 fused"])
def test_p_eagle_after_every_round_is_a_pass_afresh(kind):
    """Rows of the text with its features, then masks; two layers, which all rows pass."""
    network = random_head(**PARALLEL)
    target, drafter = parallel_drafter(kind, network)
    context = rounds(target, drafter, Sampling())
    found = drafter._advance(context, 4)
    assert drafter.runner.length == drafter._stable == len(context) - 1
    model = target_of(kind.split()[0])
    _, past = network_rows(network, model, context)
    masks = embed(network, model, torch.full((1, 3), 2))
    unknown = network.join(network.mask_hidden.expand(1, 3, -1))
    output, _ = network(masks, unknown, torch.arange(3) + len(context) - 1, past)
    torch.testing.assert_close(found[1:], output[0], **CLOSE)
    torch.testing.assert_close(found[0], outputs_afresh(network, model, context)[-1], **CLOSE)


def network_rows(network, model, context):
    from heads import true_features

    ids = torch.tensor([context])
    states = true_features(model, ids[:, :-1], network.config.aux_layers)
    return network(embed(network, model, ids[:, 1:]), network.join(states), torch.arange(len(context) - 1))


def test_text_that_is_taken_back_is_read_again():
    network = random_block()
    target, drafter = block_drafter("llama", network)
    context = random_prompt(30)
    target.feed(torch.tensor(context[:19]))
    drafter.propose(context[:20], 3, torch.empty(0))
    target.truncate(11)
    drafter.truncate(11)
    assert drafter.runner.length == 11 and not len(drafter.propose(context[:20], 3, torch.empty(0)))
    target.feed(torch.tensor(context[11:25]))
    found = drafter._advance(context[:26], 3)
    torch.testing.assert_close(found, blocks_afresh(network, target_of("llama"), context[:26], [25])[0, 1:], **CLOSE)
    target.truncate(0)
    drafter.reset()
    target.feed(torch.tensor(context[:8]))
    found = drafter._advance(context[:9], 3)
    torch.testing.assert_close(found, blocks_afresh(network, target_of("llama"), context[:9], [8])[0, 1:], **CLOSE)


class TableBlock:
    """A block whose laws follow from the newest token, its feature and, `biased`, the token before each row."""

    device = CPU
    drafted = 3

    def __init__(self, spread: float, ids: list[int], biased: bool) -> None:
        self.head, self.target_ids, self.length = self, torch.tensor(ids), 0
        generator = torch.Generator().manual_seed(7)
        self._laws = spread * torch.randn(3, WORDS, 3, len(ids), generator=generator)
        self._bias = 2.0 * biased * torch.randn(WORDS, len(ids), generator=generator)

    def read(self, ids, features):
        self.length += len(ids)
        return features

    def advance(self, ids, features, width):
        self.length += len(ids)
        return self._laws[int(features[-1].argmax()) % 3, ids[-1], :width]

    def logits(self, hidden):
        return hidden

    def after(self, row, hidden, previous, state):
        return row + self._bias[previous], None

    def confidence(self, hidden, previous):
        return None

    def truncate(self, length):
        self.length = min(self.length, length)

    def on_target(self, rows, fill):
        return torch.full((len(rows), WORDS), fill).index_copy_(1, self.target_ids, rows)


ALL = list(range(WORDS))
LAWS = [
    (0.3, 3, Sampling(1.3, top_k=3), [1, 4], True),
    (4.0, 3, Sampling(0.8, top_k=4, top_p=0.9, min_p=0.1), [0, 2, 3], True),
    (2.0, 2, Sampling(1.0), ALL, True),
]


def fit(drafter_of, spread, gamma, sampling, ids, biased):
    logits = table(1)
    target = LookupRunner(logits)
    drafter = drafter_of(TableBlock(spread, ids, biased), target.watch([0]), sampling)
    run = decode(target, drafter, sampling, gamma, DRAWS * BLOCK, seed=5)
    assert sum(len(round_.drafted) for round_ in run.rounds) > DRAWS
    return p_value(count_blocks(run.token_ids), block_law(logits, sampling))


@pytest.mark.parametrize("case", LAWS, ids=str)
def test_joint_law_is_the_targets(case):
    assert fit(BlockDrafter, *case) > THRESHOLD


class ForgetsTheBias(BlockDrafter):
    """Tells the law without the bias by the token before, which is not what it drew from."""

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        base = self.runner.logits(self.runner._laws[int(self._seen) % 3, context[-1], : len(draft)])
        draft.probs = self.runner.on_target(self._sampling.probabilities(base), 0.0)
        return draft

    def _advance(self, context, length):
        hidden = super()._advance(context, length)
        laws = self.runner._laws[:, context[-1], :length]
        self._seen = next(i for i in range(3) if torch.equal(laws[i], hidden))
        return hidden


class OfTheWholeVocabulary(BlockDrafter):
    """Spreads a reduced vocabulary's law over all tokens."""

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        draft.probs = 0.7 * draft.probs + 0.3 / WORDS
        return draft


@pytest.mark.parametrize("mutant, case", [(ForgetsTheBias, LAWS[2]), (OfTheWholeVocabulary, LAWS[0])])
def test_a_law_that_is_not_the_one_drawn_from_is_caught(mutant, case):
    assert fit(mutant, *case) < THRESHOLD
