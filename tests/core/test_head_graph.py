"""A head's captured passes and chains, with stand-ins for graphs, held against its eager ones."""

import pytest
import torch
from heads import VARIANTS, fused_head, random_head, taught_head
from tiny import random_prompt, target_of, target_runner

from core.costs.rounds import RoundCosts
from core.decoding import take_step
from core.drafting.head import HeadDrafter, HeadTreeDrafter
from core.heads.graph import GraphHeadRunner
from core.heads.runner import HeadRunner, runner_of, time_head
from core.loading.head import Head
from core.progress import never
from core.runners import capture, prefill
from core.runners.capture import GAVE_OTHER_NUMBERS
from core.runners.widths import reach_for
from core.sampling import Sampling, Uniforms

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""The native pass, which they are held against, adds up in float32."""
CPU = torch.device("cpu")
SAMPLINGS = [Sampling(), Sampling(temperature=1.0), Sampling(0.8, 12, 0.9, 0.01)]


def head_of(**changes):
    return fused_head(random_head(**changes), target_of("llama"))


@pytest.fixture
def replays(captured_here, monkeypatch):
    """How many graphs were replayed."""
    record, counted = capture.record, [0]

    def counting(*args):
        graph = record(*args)
        replay = graph.replay

        def once():
            counted[0] += 1
            replay()

        graph.replay = once
        return graph

    monkeypatch.setattr(capture, "record", counting)
    return counted


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_passes_are_the_eager_ones(variant, captured_here):
    """In pieces of several widths, past a reach and a growth, with recurrent rows between; each width is captured once
    for a reach."""
    head = head_of(**VARIANTS[variant])
    own, ours = runner_of(head, capacity=8), GraphHeadRunner(head, capacity=8)
    text = torch.tensor(random_prompt(340))
    features = torch.randn(340, head.config.feature_width, dtype=torch.float64)
    at = 0
    for n in (3, 7, 8, 250, 5, 7):
        outputs = [runner.read(text[at : at + n], features[at : at + n])[-2:] for runner in (own, ours)]
        torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
        at += n
        for k in (1, 2):
            outputs = [runner.draft(text[k : k + len(rows)], rows) for runner, rows in zip((own, ours), outputs)]
            torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
        assert own.length == ours.length
        for runner in (own, ours):
            runner.truncate(at)
    assert ours.failure is None
    assert 0 < len(ours._captures) < 12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_chains_in_one_replay_are_those_of_single_passes(sampling, captured_here):
    """Rounds of two lengths whose drafts stand whole, in part or not at all, with plain ones between: the same tokens
    from the same laws."""
    text = random_prompt(30)
    text = target_of("llama").generate(torch.tensor([text]), do_sample=False, max_new_tokens=40, pad_token_id=0)
    text = text[0].tolist()
    head = fused_head(taught_head(target_of("llama"), text, sorted(set(text[::2]))), target_of("llama"))
    runs = []
    for runner in (HeadRunner(head), GraphHeadRunner(head)):
        target = target_runner("llama")
        drafter = HeadDrafter(runner, target.watch(head.layers), sampling)
        numbers, context, steps = Uniforms(2, CPU), random_prompt(30), []
        prefill(target, context[:-1], never)
        drafter.prefill(context[:-1], never)
        for gamma in (4, 4, 0, 4, 2, 0, 0, 4, 2, 4, 4, 4):
            step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
            context = context + step.kept
            steps.append((step.kept, step.draft))
        runs.append(steps)
    assert len({len(kept) for kept, _ in runs[0]}) > 1
    for (kept, own), (written, ours) in zip(*runs):
        assert kept == written and own.tokens.tolist() == ours.tokens.tolist()
        if own.probs is not None:
            torch.testing.assert_close(ours.probs, own.probs, rtol=1e-4, atol=1e-6)
        for a, b in zip(own.logits, ours.logits):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert runner.failure is None and len(runner._captures)


def test_a_round_is_three_replays(replays):
    """One for the draft, one for the check and one for the verdict, whose numbers are the round's one wait."""
    head = head_of()
    target, context = target_runner("llama graph"), random_prompt(30)
    target.reserve(100)
    drafter = HeadDrafter(GraphHeadRunner(head), target.watch(head.layers), Sampling(1.0))
    numbers, counted = Uniforms(0, CPU), []
    for _ in range(8):
        replays[0] = 0
        held = [(len(each), each.failure) for each in (drafter.runner._captures, target._captures)]
        context = context + take_step(target, drafter, context, 5, Sampling(1.0), numbers).kept
        counted.append(replays[0])
        if held == [(len(each), None) for each in (drafter.runner._captures, target._captures)] and len(counted) > 1:
            assert replays[0] == 3
    assert counted.count(3) >= 4


def test_trees_are_the_same(captured_here):
    """Levels of four rows, each over its ancestors."""
    head = head_of(spread=1.0)
    drafts = []
    for runner in (HeadRunner(head), GraphHeadRunner(head)):
        target, context = target_runner("llama"), random_prompt(20)
        costs = RoundCosts(lambda n: 1.0, lambda n: 0.01)
        drafter = HeadTreeDrafter(runner, target.watch(head.layers), Sampling(), costs)
        target.feed(torch.tensor(context[:-1]))
        drafts.append(drafter.propose(context, 4, torch.empty(0)))
    own, ours = drafts
    assert own.tokens.tolist() == ours.tokens.tolist() and own.parents == ours.parents
    assert runner.failure is None and len(runner._captures)


@pytest.mark.parametrize("mutant", [None, "a stale count", "a surplus row is read"])
def test_a_chain_goes_on_from_the_last_row_that_was_read(mutant, captured_here, monkeypatch):
    """Seven rows are padded to eight: neither the width nor the surplus row must be taken for them."""
    head, work, one = head_of(), GraphHeadRunner._chain_work, GraphHeadRunner._pass

    def stale(self, reach, length, choose, reads, ids, rows, uniforms, start, count):
        return work(self, reach, length, choose, reads, ids, rows, uniforms, start, count * 0 + len(ids))

    def unmasked(self, reach, ids, inputs, start, at, visible=None):
        visible = self._order[:reach] <= at[:, None] + (len(ids) == 1)
        return one(self, reach, ids, inputs, start, at, visible)

    if mutant:
        name, wrong = {"a stale count": ("_chain_work", stale)}.get(mutant, ("_pass", unmasked))
        monkeypatch.setattr(GraphHeadRunner, name, wrong)
    ids, features = torch.tensor(random_prompt(7)), torch.randn(7, head.config.feature_width, dtype=torch.float64)
    runner, own = GraphHeadRunner(head), HeadRunner(head)
    runner.read(ids.repeat(2), features.repeat(2, 1))  # what lies behind the text from an earlier round
    runner.truncate(0)
    found = runner.chain(ids, features, 2, Sampling().choose, Sampling(), torch.empty(2)).logits
    output = own.read(ids, features)[-1:]
    rows = [head.logits(output)]
    token = head.target_ids[rows[0].argmax(-1)]
    rows.append(head.logits(own.draft(token, output)))
    assert torch.allclose(found, torch.cat(rows), **CLOSE) == (mutant is None)


def test_a_stale_start_is_found_as_a_chain_is_captured(captured_here, monkeypatch):
    head, baked = head_of(), []
    one = GraphHeadRunner._pass

    def stale(self, reach, ids, inputs, start, at, visible=None):
        return one(self, reach, ids, inputs, start * 0 + baked[0], at * 0 + baked[0] + self._order[: len(ids)], visible)

    runner = GraphHeadRunner(head)
    baked.append(0)
    monkeypatch.setattr(GraphHeadRunner, "_pass", stale)
    on_device = capture.Captures._on_device

    def told(self, given):
        baked[0] = next((x for x in given if isinstance(x, int)), 0)
        return on_device(self, given)

    monkeypatch.setattr(capture.Captures, "_on_device", told)
    ids, features = torch.tensor(random_prompt(7)), torch.randn(7, head.config.feature_width, dtype=torch.float64)
    torch.testing.assert_close(runner.read(ids, features), HeadRunner(head).read(ids, features), **CLOSE)
    assert runner.failure == GAVE_OTHER_NUMBERS


def test_every_length_of_a_reach_is_one_graph(captured_here):
    head = head_of()
    runner = GraphHeadRunner(head)
    features = torch.randn(1, head.config.feature_width, dtype=torch.float64)
    runner.reserve(700)
    for length in range(0, 600, 25):
        runner.length = length
        runner.chain(torch.tensor([3]), features, 4, Sampling().choose, Sampling(), torch.empty(4))
    assert len(runner._captures) == len({reach_for(length + 5) for length in range(0, 600, 25)}) == 3


def test_a_head_s_runner_is_kept_with_what_it_captured(captured_here, monkeypatch):
    """And why it goes on without graphs is noted once."""
    monkeypatch.setattr("core.loading.head.runner_of", GraphHeadRunner)
    held = Head("head", head_of(), "fp32")
    features = torch.randn(1, held.fused.config.feature_width, dtype=torch.float64)
    with held.lease(100) as runner:
        runner.read(torch.tensor([3]), features)
    with held.lease(100) as again:
        assert again is runner and again.length == 0 and len(again._captures) == 1
    with held.lease(9000) as grown:
        assert grown is runner
    with held.lease() as fresh:
        assert fresh is not runner
    monkeypatch.setattr(capture, "record", lambda *args: 1 / 0)
    for _ in range(2):
        with held.lease() as failing:
            failing.read(torch.tensor([3, 4]), features.expand(2, -1))
    assert held.notes == ["The head drafts without CUDA graphs: its passes cannot be captured: division by zero."]


def test_a_captured_head_s_costs_are_those_of_chains(captured_here):
    target = target_runner("llama")
    costs = time_head(target, GraphHeadRunner(head_of()), 20, 1)
    assert all(seconds > 0 for seconds in costs.read.seconds.values()) and costs.draft(4) > 0
