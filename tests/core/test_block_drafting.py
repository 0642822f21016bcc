"""Block drafters: exact caches after every round, and the target's law whatever is drafted."""

import copy
from collections import Counter

import pytest
import torch
from blocks import BLOCK_CONFIG, BLOCK_VARIANTS, blocks_afresh, random_block
from heads import random_head, true_features
from lookup import BLOCK, LookupRunner, block_law, count_blocks, decode, p_value, table
from lookup import VOCABULARY as WORDS
from test_head_drafting import embed, outputs_afresh
from test_law import DRAWS, THRESHOLD
from tiny import VOCABULARY, bfloat16_by_default, random_prompt, target_of, target_runner

from core.decoding import take_step
from core.drafting.block import BlockDrafter
from core.explaining.lossless import continuation
from core.heads.block import FusedHead, fits_int4
from core.heads.parallel import BlockHead, BlockRunner, NativeBlockRunner, ParallelRunner
from core.heads.runner import HeadRunner
from core.progress import never
from core.runners import prefill, together
from core.runners.architecture import NativeNetwork
from core.runners.products import GROUP, dequantise, quantise, quantise8
from core.runners.together import Together
from core.sampling import Sampling, Uniforms

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CPU, GREEDY = torch.device("cpu"), Sampling()
KINDS = ("llama", "gemma3_text", "gpt2", "llama fused", "qwen3 fused", "llama graph", "llama native")
PARALLEL = {"mask_id": 2, "block_size": 4, "depth": 2}
PROMPT, NEW = 12, 40


def block_drafter(kind, network, sampling=GREEDY):
    target = target_runner(kind)
    kind_of_runner = NativeBlockRunner if kind.endswith("native") else BlockRunner
    runner = kind_of_runner(BlockHead(network, target_of(kind.split()[0]), VOCABULARY), capacity=8)
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
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "llama graph", "llama native", "gemma3_text native"])
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


@pytest.mark.parametrize("parallel", [False, True])
def test_every_continuation_of_a_text_is_drafted_alike(parallel):
    """Though the hidden states behind the text have been read, and are gone, when the next one is drawn."""
    sampling, context = Sampling(temperature=1.0), random_prompt(30)
    network = random_head(**PARALLEL) if parallel else random_block()
    target, drafter = (parallel_drafter if parallel else block_drafter)("llama", network, sampling)
    prefill(target, context[:-1], never)
    drafter.prefill(context[:-1], never)
    found = []
    for _ in range(3):
        totals = Counter()
        two = continuation(target, drafter, context, 2, sampling, Uniforms(0, CPU), totals)
        found.append((two, totals, drafter._stable))
    assert found == found[:1] * 3
    assert found[0][1]["drafted"] >= 2


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


def features_of(target, network, text):
    return true_features(target, torch.tensor([text]), network.config.aux_layers)[0]


def blocks_of_text(runner, text, features, cuts):
    """Of a text read in pieces that end at `cuts`: the hidden states of the blocks there, and their logits."""
    found, start = [], runner.length
    for end in cuts:
        hidden = runner.advance(torch.tensor(text[start + 1 : end + 1]), features[start:end], runner.head.drafted)
        found.append((hidden, runner.logits(hidden)))
        start = end
    return [torch.cat(each) for each in zip(*found)]


CUTS = (1, 9, 10, 30)


@pytest.mark.parametrize("packed", [False, True], ids=["its own head or none", "the target's head"])
@pytest.mark.parametrize("variant", BLOCK_VARIANTS)
def test_the_native_pass_of_a_block_is_the_network_s_own(variant, packed):
    """With a cache that grows; where the target itself runs natively, logits come with the pass by its matrix."""
    network = random_block(dtype=torch.float32, **BLOCK_VARIANTS[variant])
    target, text = copy.deepcopy(target_of("llama")).float(), random_prompt(32)
    features = features_of(target, network, text)
    if packed:
        NativeNetwork(target)
    head = BlockHead(network, target, VOCABULARY)
    native, eager = NativeBlockRunner(head, capacity=8), BlockRunner(head, capacity=8)
    assert head.native.tells == (packed or network.config.own_head)
    hidden, logits = blocks_of_text(native, text, features, CUTS)
    with bfloat16_by_default():
        again = blocks_of_text(NativeBlockRunner(head), text, features, CUTS)
    assert torch.equal(hidden, again[0]) and torch.equal(logits, again[1])
    expected, _ = blocks_of_text(eager, text, features, CUTS)
    torch.testing.assert_close(hidden, expected, **CLOSE)
    torch.testing.assert_close(logits, head.network_logits(expected), **CLOSE)
    row, previous, states = slice(3, 4), torch.tensor([5]), [None, None]
    for _ in range(2):
        rows = []
        for i, runner in enumerate((native, eager)):
            found, states[i] = runner.after(logits[row], hidden[row], previous, states[i])
            rows.append(found)
        torch.testing.assert_close(*rows, **CLOSE)
        if network.markov_head:
            assert native.favourites.ids == rows[0].argmax(-1)
    if network.config.confidence:
        odds = network.confidence(hidden[row], previous)
        assert native.confidence(hidden[row], previous) == pytest.approx(odds.sigmoid().item(), abs=1e-6)


def in_eight_bits(module, args):
    """What the native pass makes of the activations that enter a product in 4 bits."""
    codes, scales = quantise8(args[0].flatten(0, -2))
    return ((codes.view(*scales.shape, GROUP) * scales[..., None]).view(args[0].shape),)


@pytest.mark.parametrize("variant", ["dflash, reduced", "dspark, gated, reduced"])
def test_a_block_in_four_bits_is_the_network_with_rounded_weights(variant):
    """Every matrix that a pass multiplies by; activations are rounded to 8 bits before, as the native pass does."""
    sizes = {"intermediate_size": 64, "head_dim": 16, "markov_rank": 32 if "dspark" in variant else 0}
    network = random_block(dtype=torch.bfloat16, **{**BLOCK_VARIANTS[variant], **sizes})
    assert fits_int4(network.config) and not fits_int4(BLOCK_CONFIG)
    rounded = copy.deepcopy(network).float()
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in ("markov_head.gate_proj", "confidence_head.proj"):
            module.weight.data = dequantise(*quantise(module.weight.data, GROUP))
            module.register_forward_pre_hook(in_eight_bits)
    target, text = target_of("llama"), random_prompt(32)
    features = features_of(target, network, text)
    native = NativeBlockRunner(BlockHead(network, target, VOCABULARY, int4=True), capacity=8)
    plain = BlockHead(rounded, target, VOCABULARY)
    hidden, logits = blocks_of_text(native, text, features, CUTS)
    expected, _ = blocks_of_text(BlockRunner(plain, capacity=8), text, features.float(), CUTS)
    row, previous = slice(0, 1), torch.tensor([5])
    biased = [head.after(logits[row], hidden[row], previous, None)[0] for head in (native, plain)]
    for ours, theirs in ((hidden, expected), (logits, plain.network_logits(hidden)), biased):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert native.head.weight_bytes() < sum(p.numel() for p in rounded.parameters())


@pytest.mark.parametrize("variant", ["dflash, sliding", "dspark", "dspark, gated, reduced"])
def test_a_drafted_block_does_not_depend_on_what_stands_beside_it(variant, monkeypatch):
    """Bit for bit, and the passes of several texts are one."""
    network = random_block(dtype=torch.float32, **BLOCK_VARIANTS[variant])
    target = copy.deepcopy(target_of("llama")).float()
    NativeNetwork(target)
    head = BlockHead(network, target, VOCABULARY)
    texts = [random_prompt(length) for length in (9, 30, 17)]
    features = [features_of(target, network, text) for text in texts]

    def drafted(text, rows):
        runner = NativeBlockRunner(head, capacity=8)
        hidden, logits = blocks_of_text(runner, text, rows, (1, 2, len(text) - 1))
        row, _ = runner.after(logits[-1:], hidden[-1:], torch.tensor([5]), None)
        return hidden, logits, row

    def told(text, rows):
        yield drafted(text, rows)

    expected = [drafted(*each) for each in zip(texts, features)]
    sizes, right = [], together.run_rows
    monkeypatch.setattr(together, "run_rows", lambda group: (sizes.append(len(group)), right(group)))
    found = list(Together().run(map(told, texts, features), 3))
    assert set(sizes) == {3} and len(sizes) == 6 + (head.native.bias is not None)
    for ours, alone in zip(found, expected):
        assert all(torch.equal(one, other) for one, other in zip(ours, alone))


def test_the_logits_of_p_eagle_come_with_its_pass(monkeypatch):
    """Those of all rows that draft, with what is likeliest by them."""
    _, drafter = parallel_drafter("llama", random_head(dtype=torch.float32, **PARALLEL))
    runner, count, right = drafter.runner, [], together.run_rows
    monkeypatch.setattr(together, "run_rows", lambda group: (count.append(group), right(group)))
    hidden = runner.advance(torch.tensor([3, 4]), torch.randn(2, runner.head.config.feature_width), 3)
    logits, told = runner.logits(hidden), runner.favourites
    assert len(count) == 1 and torch.equal(told.ids, logits.argmax(-1))
    assert torch.equal(logits, runner.head.logits(hidden))


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
