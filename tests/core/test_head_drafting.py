"""A trained head's cache and features are exact after every round, and its passes are those of its network."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from heads import CONFIG, REDUCED, VARIANTS, fused_head, random_head, taught_head, true_features
from tiny import VOCABULARY, bfloat16_by_default, random_prompt, target_of, target_runner

from core.costs.rounds import RoundCosts, free
from core.decoding import record, speculative, take_step
from core.drafting.head import HeadDrafter
from core.drafting.length import Fixed
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.explaining.lossless import continuation
from core.heads.block import FusedHead, fits_int4
from core.heads.graph import GraphHeadRunner
from core.heads.runner import HeadRunner, runner_of
from core.progress import never
from core.records import Run, Settings
from core.runners import PREFILL_CHUNK, prefill
from core.runners.clock import PassTimer
from core.runners.features import Features
from core.runners.products import GROUP, dequantise, quantise
from core.sampling import Sampling, Uniforms

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""The native pass adds up in float32, whatever the weights are in."""
CPU = torch.device("cpu")
KINDS = ("llama", "gemma3_text", "gpt2", "llama fused", "qwen3 fused", "llama graph", "gpt2 graph")


def outputs_afresh(network, target, context):
    """What the head says after a text, computed at once from transformers' own hidden states: the output [n, hidden]
    for every token but the first."""
    ids = torch.tensor([context])
    states = true_features(target, ids[:, :-1], network.config.aux_layers)
    output, _ = network(embed(network, target, ids[:, 1:]), network.join(states), torch.arange(len(context) - 1))
    return output[0]


def embed(network, target, ids):
    """Unscaled: Gemma multiplies its own, which the head's norm all but undoes."""
    table = network.embed_tokens if network.config.own_embedding else target.get_input_embeddings()
    return torch.nn.functional.embedding(ids, table.weight)


def drafter_for(target, network, kind, sampling):
    runner = runner_of(fused_head(network, target_of(kind)), capacity=8)
    return HeadDrafter(runner, target.watch(network.config.aux_layers), sampling)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_is_the_network_s_own_pass(variant):
    """In one piece or several, growing its cache on the way."""
    network = random_head(**VARIANTS[variant])
    target, text = target_of("llama"), random_prompt(30)
    expected = outputs_afresh(network, target, text)
    features = true_features(target, torch.tensor([text[:-1]]), network.config.aux_layers)[0]
    runner = runner_of(fused_head(network, target), capacity=8)
    ids = torch.tensor(text[1:])
    found = [runner.read(ids[a:b], features[a:b]) for a, b in ((0, 7), (7, 8), (8, 29))]
    torch.testing.assert_close(torch.cat(found), expected, **CLOSE)
    torch.testing.assert_close(runner.head.logits(found[-1]), network.logits(expected[8:]), **CLOSE)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"other width"}))
def test_the_native_pass_of_a_head_is_the_network_s_own(variant):
    """Reading in pieces, drafting on as a chain and as a tree, with the cache growing; rows alike to the last bit
    however they are cut."""
    network = random_head(dtype=torch.float32, **VARIANTS[variant])
    target, text = copy.deepcopy(target_of("llama")).float(), random_prompt(30)
    features = true_features(target, torch.tensor([text[:-1]]), network.config.aux_layers)[0]
    head = fused_head(network, target)
    native, eager = HeadRunner(head, capacity=8), GraphHeadRunner(head)
    ids = torch.tensor(text[1:])
    found = torch.cat([native.read(ids[a:b], features[a:b]) for a, b in ((0, 7), (7, 8), (8, 29))])
    assert torch.equal(found, HeadRunner(head).read(ids, features))
    logits = head.logits(found)
    with bfloat16_by_default():
        assert torch.equal(found, HeadRunner(head, capacity=8).read(ids, features))
        assert torch.equal(logits, head.logits(found))
    expected = eager.read(ids, features)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(expected), head.network_logits(expected), rtol=1e-4, atol=1e-4)
    step = torch.tensor([3])
    further = [runner.draft(step, expected[-1:]) for runner in (native, eager)]
    torch.testing.assert_close(*further, rtol=1e-4, atol=1e-4)
    own = torch.eye(2, dtype=torch.bool)
    for seen in (own, torch.cat([own[[0, 0]], own], 1)):  # and two children of the first
        level = [runner.draft(torch.tensor([5, 8]), expected[-2:], seen) for runner in (native, eager)]
        torch.testing.assert_close(*level, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [REDUCED, REDUCED[:-3]], ids=["16 rows", "filled up"])
def test_four_bits_are_the_network_with_rounded_weights(ids):
    """Every matrix, to what 8 bits make of the activations; also where the kernel wants more rows of a vocabulary than
    it has."""
    network = random_head(dtype=torch.bfloat16, ids=ids, intermediate_size=64, vocab_size=VOCABULARY)
    assert fits_int4(network.config) and not fits_int4(CONFIG)
    rounded = copy.deepcopy(network).float()
    for parameter in rounded.parameters():
        if parameter.dim() > 1:
            parameter.data = dequantise(*quantise(parameter.data, GROUP))
    target, text = target_of("llama"), random_prompt(12)
    features = true_features(target, torch.tensor([text[:-1]]), network.config.aux_layers)
    embedded = embed(network, target, torch.tensor([text[1:]])).float()
    expected, _ = rounded(embedded, rounded.join(features.float()), torch.arange(11))
    head = FusedHead(network, target.get_input_embeddings().weight, VOCABULARY, int4=True)
    found = HeadRunner(head, capacity=4).read(torch.tensor(text[1:]), features[0])
    logits = rounded.logits(expected)[0]
    for ours, theirs in ((found, expected[0]), (head.logits(expected[0]), logits)):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()
    assert head.weight_bytes() < sum(p.numel() for p in rounded.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_on_is_the_network_s_recurrent_pass(variant):
    """Each row sees the text and its own chain, and takes the head's own output in place of features."""
    network = random_head(**VARIANTS[variant])
    target, text, chain = target_of("llama"), random_prompt(20), [3, 8, 22]
    features = true_features(target, torch.tensor([text[:-1]]), network.config.aux_layers)
    output, past = network(embed(network, target, torch.tensor([text[1:]])), network.join(features), torch.arange(19))
    expected = []
    output = output[:, -1:]
    for i, token in enumerate(chain):
        output, made = network(
            embed(network, target, torch.tensor([[token]])), network.feed_back(output), torch.tensor([19 + i]), past
        )
        past = [(torch.cat([k, x], 2), torch.cat([v, y], 2)) for (k, v), (x, y) in zip(past, made)]
        expected.append(output[0])
    runner = runner_of(fused_head(network, target), capacity=8)
    output = runner.read(torch.tensor(text[1:]), features[0])[-1:]
    for token, row in zip(chain, expected):
        output = runner.draft(torch.tensor([token]), output)
        torch.testing.assert_close(output, row, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_cache_and_features_after_every_round(kind, sampling):
    """Rounds of several lengths, with plain ones between: the head's stable rows and its newest output are those of a
    fresh pass over the committed text."""
    text = random_prompt(30)
    text = (
        target_of(kind).generate(torch.tensor([text]), do_sample=False, max_new_tokens=30, pad_token_id=0)[0].tolist()
    )
    target, network = target_runner(kind), taught_head(target_of(kind), text, sorted(set(text[::2])))
    drafter = drafter_for(target, network, kind, sampling)
    numbers, context = Uniforms(2, CPU), random_prompt(30)
    prefill(target, context[:-1], never)
    drafter.prefill(context[:-1], never)
    assert drafter.runner.length == 28
    lengths, behind, costs = set(), 0, RoundCosts(free, rereads=True)
    for gamma in (4, 1, 0, 0, 3, 6, 2, 5, 5, 5):
        unread = drafter._features.end - drafter._features.start
        assert unread == 1 + behind, "what costs foretell is what a head reads anew"
        step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
        behind = costs.missed(record(step, 0, sampling, frozenset()), behind)
        lengths.add(len(step.kept))
        context = context + step.kept
        assert drafter._features.end == target.length == len(context) - 1
        if gamma:
            assert drafter.runner.length == drafter._stable
    assert len(lengths) > 1  # some drafts were accepted, in part or whole
    output = drafter._refresh(context)
    assert drafter.runner.length == len(context) - 1
    expected = outputs_afresh(network, target_of(kind), context)
    torch.testing.assert_close(output[0], expected[-1], **CLOSE)


def test_the_law_of_a_reduced_vocabulary_is_zero_outside_it():
    """q over the target's tokens: the head's own sampled law, moved; what was drawn has probability."""
    sampling = Sampling(temperature=0.7, top_p=0.9)
    target, network = target_runner("llama"), random_head()
    drafter = drafter_for(target, network, "llama", sampling)
    context = random_prompt(12)
    target.feed(torch.tensor(context[:-1]))
    draft = drafter.propose(context, 4, torch.rand(4, generator=torch.Generator().manual_seed(0)))
    outside = sorted(set(range(VOCABULARY)) - set(network.draft_ids.tolist()))
    assert not draft.probs[:, outside].any()
    torch.testing.assert_close(draft.probs.sum(1), torch.ones(4))
    own = sampling.probabilities(torch.cat(draft.logits))
    torch.testing.assert_close(draft.probs[:, draft.ids], own)
    assert (draft.probs.gather(1, draft.tokens[:, None]) > 0).all()


def test_passes_of_a_head_are_bare_passes(monkeypatch):
    """What counts is a pass over features or over its own output, and the logits behind one that did not bring them: by
    a clock that each of them moves by a second, three drafted tokens take three."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("core.runners.clock.time", SimpleNamespace(perf_counter=lambda: clock.now))
    target, context = target_runner("llama"), random_prompt(12)
    drafter = drafter_for(target, random_head(), "llama", Sampling())
    target.feed(torch.tensor(context[:-1]))
    programs = drafter.runner.head.native
    passes_of, logits = drafter.runner._passes, programs.logits

    def slow(work):
        def one_pass(*args):
            clock.now += 1
            return work(*args)

        return one_pass

    drafter.runner._passes, programs.logits = slow(passes_of), slow(logits)
    with PassTimer(CPU) as passes:
        drafter.propose(context, 3, torch.empty(0))
        assert clock.now == 3
        drafter.propose(context, 3, torch.empty(0))
    assert passes.seconds() == clock.now == 3 + 3


def test_nothing_of_a_prompt_survives_a_reset():
    """A drafter and runner that are used again draft like new ones."""
    sampling, network = Sampling(), random_head()
    target = target_runner("llama")
    drafter = drafter_for(target, network, "llama", sampling)
    first, second = random_prompt(20), random_prompt(13)
    target.feed(torch.tensor(first[:-1]))
    drafter.propose(first, 3, torch.empty(0))
    target.truncate(0)
    drafter.reset()
    target.feed(torch.tensor(second[:-1]))
    again = drafter.propose(second, 3, torch.empty(0))
    fresh = target_runner("llama")
    other = drafter_for(fresh, network, "llama", sampling)
    fresh.feed(torch.tensor(second[:-1]))
    assert again.tokens.tolist() == other.propose(second, 3, torch.empty(0)).tokens.tolist()


def test_a_drafter_that_joins_in_the_middle_of_a_text():
    """It reads from there on; and where text it has read is taken back, it begins anew."""
    sampling, network = Sampling(), random_head()
    target, context = target_runner("llama"), random_prompt(30)
    target.feed(torch.tensor(context[:10]))
    drafter = drafter_for(target, network, "llama", sampling)
    target.feed(torch.tensor(context[10:19]))
    assert len(drafter.propose(context[:20], 2, torch.empty(0))) == 2
    assert drafter.runner.length == 10 and drafter._stable == 9
    target.truncate(5)
    drafter.truncate(5)
    assert len(drafter.propose(context[:20], 2, torch.empty(0))) == 0  # the target has not fed that text
    target.feed(torch.tensor(context[5:19]))
    assert len(drafter.propose(context[:20], 2, torch.empty(0))) == 2
    assert drafter._stable == 14


@pytest.mark.parametrize("behind_ngrams", [False, True])
def test_every_continuation_of_a_text_is_drafted_alike(behind_ngrams):
    """Though the hidden states behind the text have been read, and are gone, when the next one is drawn."""
    target, context = target_runner("llama"), random_prompt(30)
    head = drafter_for(target, random_head(), "llama", Sampling(1.0))
    drafter = CombinedDrafter(NgramDrafter(CPU), head, lambda: "model") if behind_ngrams else head
    prefill(target, context[:-1], never)
    drafter.prefill(context[:-1], never)
    found = []
    for _ in range(3):
        totals = Counter()
        two = continuation(target, drafter, context, 2, Sampling(1.0), Uniforms(0, CPU), totals)
        found.append((two, totals, head._stable))
    assert found == found[:1] * 3
    assert found[0][1]["drafted"] >= 2


@pytest.mark.parametrize("behind_ngrams", [False, True])
def test_hidden_states_of_a_long_prompt_are_never_all_there(monkeypatch, behind_ngrams):
    """The head reads a prompt chunk by chunk behind its target, also where n-grams are asked before it; what it then
    drafts is what it drafts having read the prompt at once."""
    network, prompt = random_head(), random_prompt(600)
    most, add = [0], Features.add

    def watched(self, at, rows):
        add(self, at, rows)
        most[0] = max(most[0], self.end - self.start)

    monkeypatch.setattr(Features, "add", watched)
    target = target_runner("llama")
    drafter = drafter_for(target, network, "llama", Sampling())
    if behind_ngrams:
        drafter = CombinedDrafter(NgramDrafter(CPU), drafter, lambda: "model")
    run = Run(Settings(max_new_tokens=5), {}, "", prompt)
    (first, *_) = speculative(target, drafter, run, length=Fixed(3))
    assert most[0] <= PREFILL_CHUNK + 1 and run.draft_prefill_seconds > 0
    whole = target_runner("llama")
    other = drafter_for(whole, network, "llama", Sampling())
    prefill(whole, prompt[:-1], never)
    other.prefill(prompt[:-1], never)
    assert [token.id for token in first.drafted] == other.propose(prompt, 3, torch.empty(0)).tokens.tolist()
