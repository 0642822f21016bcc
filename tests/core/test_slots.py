"""Several texts in the slots of one static cache: each comes out as alone, whatever the others do, captured or not."""

import copy
from dataclasses import replace
from threading import Lock

import pytest
import torch
from heads import fused_head, taught_head
from test_graph import CLOSE, TREE, static_of
from test_together import METHODS, TEXTS, alone, at_once, gone_in_the_middle, settings_of
from tiny import VOCABULARY, random_prompt, target_of
from transformers import AutoModelForCausalLM

from core.costs import CostTable
from core.decoding import take_step
from core.drafting.build import whole_costs
from core.drafting.head import HeadDrafter
from core.errors import UserError
from core.heads.graph import GraphHeadRunner
from core.lanes import decode_together, finish_together, open_lane
from core.measuring import batches as measuring
from core.measuring.sweep import finish
from core.progress import never
from core.runners import prefill
from core.runners.capture import Captures
from core.runners.graph import GraphRunner
from core.runners.slots import Slots
from core.runners.static_cache import StaticStore
from core.runners.static_layers import StaticNetwork
from core.runners.together import Together
from core.sampling import Sampling, Uniforms
from core.text import Prompt

ROUNDS = [("feed", 4), ("feed", 1), ("feed", 3), ("feed", 4), ("tree", TREE, [0, 1])]
STEPS = [
    [("feed", 3), ("feed", 1), ("tree", TREE, [0, 2, 5]), ("feed", 7), ("view", 2), *ROUNDS, ("feed", 9), ("feed", 2)],
    [("feed", 1), ("feed", 5), ("feed", 1), *ROUNDS, ("tree", [-1, 0, 0], [0, 2]), ("feed", 8)],
    [("feed", 40), *ROUNDS, ("feed", 2), ("feed", 300), *ROUNDS, ("feed", 2), ("feed", 4), ("feed", 1), ("view", 3)],
    [("feed", 17), ("view", 3), ("feed", 3), *ROUNDS, ("feed", 1)],
    [("feed", 20), *ROUNDS, ("feed", 4), ("tree", [-1, 0, 1, 1], [0, 1, 3]), *ROUNDS, ("feed", 1), ("feed", 6)],
]
"""What each of five texts feeds, a pass after the other; after each a token is taken back. They end at different
times, one grows past what the store has room for, and some have trees where others have chains."""


def answers(runner, number, watched):
    """What a runner answers, pass by pass, and at last the features."""
    ids = torch.tensor(random_prompt(400 + number))
    features = runner.watch([1, 2]) if watched else None
    for at, (kind, fed, *path) in enumerate(STEPS[number]):
        if kind == "view":
            yield number, runner.view(1).feed(ids[at : at + fed])
        elif kind == "tree":
            yield number, runner.feed(ids[at : at + len(fed)], fed)
            runner.keep(*path)
        else:
            yield number, runner.feed(ids[at : at + fed], rows=fed if fed < 18 else 1)
            runner.truncate(runner.length - 1)
    if features:
        yield number, features.take(runner.length)


def slots_of(architecture, count=3):
    network = target_of(architecture)
    return Slots(network, static_of(network), VOCABULARY, count)


def differing(architecture, slots, at_once=3, watched=False, room=0):
    """The first text and pass whose answer is not the one that the text gets alone; None: none."""

    def text(number):
        with slots.lease(room) as runner:
            yield from answers(runner, number, watched and number % 2)

    found = [[] for _ in STEPS]
    for number, answer in Together(slots.fused).run(map(text, range(len(STEPS))), at_once):
        found[number].append(answer)
    for number, ours in enumerate(found):
        text_alone = GraphRunner(target_of(architecture), VOCABULARY, eager=True, fused=slots.fused)
        right = answers(text_alone, number, watched and number % 2)
        for at, ((_, own), other) in enumerate(zip(right, ours, strict=True)):
            if own.shape != other.shape or not torch.allclose(own, other, **CLOSE):
                return number, at
    return None


@pytest.mark.parametrize("architecture, watched", [("llama", False), ("gemma3_text", True), ("qwen3", False)])
@pytest.mark.parametrize("at_once", [2, 3, 5])
def test_each_text_is_answered_as_alone(architecture, watched, at_once):
    """With and without sliding windows, watched and not; three at a time of five, so that slots are taken again."""
    assert differing(architecture, slots_of(architecture, at_once), at_once, watched) is None


@pytest.mark.parametrize("architecture, watched", [("llama", True), ("gemma3_text", False)])
def test_a_recorded_pass_is_as_good_as_a_new_one(architecture, watched, captured_here):
    """Recorded with some texts in it, replayed with others, at other lengths and with other trees."""
    slots = slots_of(architecture)
    assert differing(architecture, slots, 3, watched, room=900) is None
    assert slots.captures.failure is None and len(slots.captures) > 6
    slots.reserve(2000)
    assert len(slots.captures) == 0
    assert differing(architecture, slots, 3, watched) is None


def told(slots, group, texts, width):
    """As it is; what the host knows of where rows begin is noted."""
    ids, slots.known, behind = RIGHT["_placed"](slots, group, texts, width)
    return ids, slots.known, behind


def stale(slots, what, reach, first, rows, ids, where, *tree):
    """A mutant: where rows begin is a number of the host, and so of the pass that was recorded."""
    where = where * 0 + slots.known if rows == ids.numel() else where
    return RIGHT["_pass"](slots, what, reach, first, rows, ids, where, *tree)


def shifted(slots, group, texts, width):
    """A mutant: the rows of a text are put into another's slot."""
    ids, where, behind = RIGHT["_placed"](slots, group, texts, width)
    where[1], behind[1] = where[1].roll(1), behind[1].roll(1)
    return ids, where, behind


def over_idle(slots, group, texts, width):
    """A mutant: what fills an idle slot is put where its text is."""
    ids, where, behind = RIGHT["_placed"](slots, group, texts, width)
    for slot in set(range(texts)) - {rows.slot for rows in group}:
        where[1, slot] = behind[1, slot] = slot * slots.store.capacity
    return ids, where, behind


def unmasked(store, inputs):
    """A mutant: each row sees the one behind it too, and the last of a text a surplus one."""
    return RIGHT["additive"](store, replace(inputs, start=inputs.start + 1))


RIGHT = {"_pass": Slots._pass, "_placed": Slots._placed, "additive": StaticStore.additive}


@pytest.mark.parametrize(
    "mutant",
    [
        ((Slots, "_placed", told), (Slots, "_pass", stale)),
        ((Slots, "_placed", shifted),),
        ((Slots, "_placed", over_idle),),
        ((StaticStore, "additive", unmasked),),
        ((Captures, "forget", lambda self: None),),
    ],
    ids=["a length is stale", "another slot", "over an idle slot", "a surplus row is seen", "replayed after growth"],
)
def test_mutants_are_caught(mutant, captured_here, monkeypatch):
    """What the tests above would not see is not tested by them."""
    for changed in mutant:
        monkeypatch.setattr(*changed)
    slots = slots_of("llama")

    def caught():
        try:
            return differing("llama", slots) or slots.captures.failure
        except IndexError as error:  # past the end of what was there before
            return error

    before = caught()
    slots.reserve(2000)
    assert before or caught()


@pytest.fixture(scope="module")
def graphs(pair, pair_folder):
    """The tiny pair with passes as a GPU captures them."""

    def on_graphs(model, folder):
        found = copy.copy(model)
        found.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        found.runner_kind, found._fused = GraphRunner.fused_kind, StaticNetwork(found.network)
        found.costs, found._idle, found._lock = None, [], Lock()
        found.exits, found.grown, found.at_once = {}, {}, {}
        return found

    target, draft = on_graphs(pair.target, pair_folder / "target"), on_graphs(pair.draft, pair_folder / "draft")
    return replace(pair, target=target, draft=draft, sampling={})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_each_text_is_the_one_it_gives_alone(graphs, method, temperature):
    """To the last token, greedy and drawn with the same seed: in float32, no two of these logits are so near that a
    pass over other rows could turn them round."""
    more = {"tree": "2x1"} if method == "tree" else {"draft_length": 3}
    expected = alone(graphs, method, temperature, **more)
    assert at_once(graphs, method, temperature, 3, **more) == expected
    assert [len(ids) for ids in expected.values()] == [tokens for _, tokens in TEXTS]


def test_a_store_that_grows_in_the_middle_loses_nothing(graphs, monkeypatch):
    """Again and again, under texts that go on; the last prompt is read in pieces."""
    monkeypatch.setattr("core.runners.static_cache.capacity_for", lambda length, limit: length)
    prompts = "short", "b c d", "four", "abc one two three of the many texts " * 5
    texts = [(prompt, settings_of("draft", 24, draft_length=3)) for prompt in prompts]
    pair = afresh(graphs)
    expected = [finished(pair, *text).token_ids for text in texts]
    with pair.target.slots(3) as slots:
        moved, grow = [], slots.store._move
    monkeypatch.setattr(slots.store, "_move", lambda capacity: [moved.append(capacity), grow(capacity)])
    assert [run.token_ids for run in finish_together(pair, texts, 3)] == expected
    assert len(moved) > 1 and moved == sorted(moved)


def afresh(pair):
    """The same without runners and slots kept for later."""
    found = replace(pair, target=copy.copy(pair.target), draft=copy.copy(pair.draft))
    for model in (found.target, found.draft):
        model._slots, model._idle = None, []
    return found


def finished(pair, prompt, settings):
    with open_lane(pair, prompt, settings) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize("method", ["plain", "draft", "early-exit"])
def test_passes_are_shared(graphs, method, monkeypatch):
    """Four texts take hardly more passes than the longest alone, and each is judged with those that are there."""
    settings = settings_of(method, 24, draft_length=2)
    finish_together(graphs, [(TEXTS[0][0], settings)] * 2, 2)  # what rounds cost is measured once, before
    shared, right = [], Slots.run
    monkeypatch.setattr(Slots, "run", lambda slots, group: [shared.append(len(group)), right(slots, group)])
    told = list(decode_together(graphs, [(TEXTS[0][0], settings)] * 4, 4))
    turns = [each.turn for each in told]
    rounds = len(told[-1].run.rounds)
    assert len(shared) >= rounds and set(shared) == {4}
    assert [turns.count(turn) for turn in sorted(set(turns))] == [4] * rounds


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_a_head_reads_the_features_of_its_own_text(sampling):
    """Four texts of a target with a trained head, whose drafts are made one after the other."""
    network = target_of("llama")
    taught = network.generate(torch.tensor([random_prompt(30)]), do_sample=False, max_new_tokens=40, pad_token_id=0)
    head = fused_head(taught_head(network, taught[0].tolist(), sorted(set(taught[0].tolist()))), network)
    slots = slots_of("llama")

    def written(target, number):
        drafter = HeadDrafter(GraphHeadRunner(head), target.watch(head.layers), sampling)
        context = random_prompt(30)[number:]
        numbers = Uniforms(number, torch.device("cpu"))
        prefill(target, context[:-1], never)
        drafter.prefill(context[:-1], never)
        for gamma in [3, 4, 0, 2, 3][number:] * 2:
            step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
            context += step.kept
            yield number, step.verdict.drafted, step.kept

    def text(number):
        with slots.lease() as runner:
            yield from written(runner, number)

    found = sorted(Together(slots.fused).run(map(text, range(4)), 3), key=lambda told: told[0])
    runners = [GraphRunner(network, VOCABULARY, fused=slots.fused) for _ in range(4)]
    assert found == [told for number, runner in enumerate(runners) for told in written(runner, number)]
    assert any(len(kept) > 1 for _, _, kept in found)


def test_methods_go_side_by_side(graphs):
    """Each text with a method of its own, some of which draw from trees: the ones they give alone."""
    texts = [
        (prompt, settings_of(method, tokens, 1.0, draft_length=3, tree="2x1"))
        for method, (prompt, tokens) in zip(("tree", "plain", "draft", "early-exit", "ngram"), TEXTS)
    ]
    runs = finish_together(graphs, texts, 4)
    assert [run.token_ids for run in runs] == [finished(graphs, *text).token_ids for text in texts]


def test_what_goes_away_in_the_middle_ends_all(graphs):
    """And gives every slot back; the next texts are as if nothing had been."""
    gone_in_the_middle(graphs)
    for model in (graphs.target, graphs.draft):
        with model.slots(3) as slots:
            assert len(slots._free) == slots.count
    assert at_once(graphs, "draft", 0.0, 2) == alone(graphs, "draft", 0.0)


def test_a_slot_forgets_even_what_is_not_a_number():
    """A masked position weighs nothing, but nothing times NaN is NaN: the next text must not meet it."""
    slots = slots_of("llama")
    with slots.lease() as runner:
        runner.feed(torch.tensor(random_prompt(5)))
        with torch.inference_mode():
            for block in slots.store._blocks:
                block[:, :, : slots.store.capacity] = torch.nan
    with slots.lease() as runner:
        assert runner.feed(torch.tensor([1, 2])).isfinite().all()


def test_what_several_texts_have_no_memory_for_is_said(graphs, monkeypatch):
    """In a sentence; a text alone is still written."""

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair = afresh(graphs)
    texts = [("fine", settings_of("plain", 8))] * 2
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "reserve", full)
        with pytest.raises(UserError, match=r"no memory for 2 texts of \d+ tokens at once"):
            finish_together(pair, texts, 2)
    assert finished(pair, *texts[0]).token_ids == finish_together(pair, texts, 2)[0].token_ids


def test_a_failed_capture_loses_no_text(graphs, captured_here, monkeypatch):
    """They go on eagerly, and the reason is kept: the next take turns."""
    pair = afresh(graphs)
    expected = alone(graphs, "plain", 0.0)
    whole_costs(pair, settings_of("plain", 8), 3)
    assert pair.target.shares
    monkeypatch.setattr("core.runners.capture.record", lambda *args: 1 / 0)
    assert at_once(pair, "plain", 0.0, 3) == expected
    assert "its passes cannot be captured: division by zero" in pair.target.runner_kind
    assert not pair.target.shares
    assert at_once(pair, "plain", 0.0, 3) == expected


def test_many_texts_are_measured(graphs, monkeypatch):
    """As passes of so many are run; said to be shared, and what is not."""
    monkeypatch.setattr(measuring, "TOKENS", 6)
    prompts = [Prompt(name=text, kind="x", text=text) for text, _ in TEXTS]
    document = finish(
        measuring.batches(graphs, prompts, {"draft": settings_of("draft", 12, draft_length=2)}, (1, 3), repeats=1)
    )
    assert document["shared"] and document["apart"] == []
    assert [row["texts"] for row in document["rows"]] == [1, 1, 3, 3] and document["rows"][-1]["predicted"] > 0
    for model in (graphs.target, graphs.draft):
        assert sorted(model.at_once[3].seconds) == [3, 9, 15]
    costs = whole_costs(graphs, settings_of("draft", 12), 3)
    assert costs.target(2) == CostTable({**graphs.target.costs.seconds, **graphs.target.at_once[3].seconds})(6)
