"""Many texts at once: each comes out as it does alone, whatever the others do; passes are shared; costs are of all."""

from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from tiny import VOCABULARY, random_model, random_prompt

from core.costs import CostTable
from core.costs.rounds import RoundCosts
from core.drafting.build import whole_costs
from core.drafting.length import Adaptive, Growing
from core.errors import UserError
from core.lanes import decode_together, finish_together, open_lane
from core.loading import model
from core.loading.memory import Free, cache_bytes
from core.measuring import batches as measuring
from core.measuring.batches import batch_table, batches, describe
from core.measuring.sweep import finish
from core.records import Settings
from core.runners import together
from core.runners.architecture import NativeNetwork
from core.runners.native import NativeRunner
from core.runners.together import Rows, Together
from core.sampling import MOST_DRAFTED
from core.text import Prompt, encode_prompt
from core.training.dialogues import sample

METHODS = ("plain", "draft", "ngram", "ngram+draft", "early-exit", "tree")
TEXTS = [
    ("one one one one", 30),
    ("Of a pass over the rows of many texts", 7),
    ("z", 19),
    ("abc abc abc abc abc abc", 24),
    ("the quick brown", 11),
]
"""Prompts and how many tokens each is to have: they end at different times."""


def settings_of(method: str, tokens: int, temperature: float = 0.0, **more) -> Settings:
    return Settings(
        method=method, max_new_tokens=tokens, temperature=temperature, seed=tokens, chat="off", ignore_eos=True, **more
    )


def alone(pair, method, temperature, **more):
    found = {}
    for prompt, tokens in TEXTS:
        with open_lane(pair, prompt, settings_of(method, tokens, temperature, **more)) as lane:
            for _ in lane:
                pass
        found[prompt] = lane.run.token_ids
    return found


def at_once(pair, method, temperature, size, **more):
    texts = [(prompt, settings_of(method, tokens, temperature, **more)) for prompt, tokens in TEXTS]
    return {run.prompt: run.token_ids for run in finish_together(pair, texts, size)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_each_text_is_the_one_it_gives_alone(pair, method, temperature):
    """To the last token, greedy and drawn with the same seed, so that its law is the target's too; three at a time of
    five, so that a text that has ended is followed by another beside two that go on."""
    more = {"tree": "2x1"} if method == "tree" else {"draft_length": 3}
    expected = alone(pair, method, temperature, **more)
    assert at_once(pair, method, temperature, 3, **more) == expected
    assert [len(ids) for ids in expected.values()] == [tokens for _, tokens in TEXTS]


def test_a_row_of_another_text_would_be_noticed(pair, monkeypatch):
    """Were all rows put into the first text's cache, texts would differ."""
    right = Rows.place
    monkeypatch.setattr(Rows, "place", lambda self, rows, cells, slot: right(self, rows, cells, 0))
    assert at_once(pair, "draft", 0.0, 3, draft_length=3) != alone(pair, "draft", 0.0, draft_length=3)


@pytest.mark.parametrize("method", ["plain", "draft", "early-exit"])
def test_passes_are_shared(pair, method, monkeypatch):
    """Four texts take hardly more passes than the longest alone, and each is judged with those that are there."""
    settings = settings_of(method, 24, draft_length=2)
    finish_together(pair, [(TEXTS[0][0], settings)], 4)  # what rounds cost is measured once, before
    passes = []
    right = together.run_rows

    def counted(group):
        passes.append(len(group))
        right(group)

    monkeypatch.setattr(together, "run_rows", counted)
    with open_lane(pair, TEXTS[0][0], settings) as lane:
        rounds = len(list(lane))
    single = len(passes)
    passes.clear()
    turns = [told.turn for told in decode_together(pair, [(TEXTS[0][0], settings)] * 4, 4)]
    assert passes == [4] * single
    assert [turns.count(turn) for turn in sorted(set(turns))] == [4] * rounds


def test_what_is_timed_in_the_middle_of_a_text_runs_alone(pair, monkeypatch):
    """Where each drafts as it does alone, what a longer text costs is measured as alone: the others' rows, and the wait
    for them, would be taken for its own."""
    timing, beside = [], []
    right, time_here = together.run_rows, model.time_here

    def noted(group):
        beside.extend(len(group) for _ in timing)
        right(group)

    def timed(runner):
        timing.append(runner)
        found = time_here(runner)
        timing.clear()
        return found

    monkeypatch.setattr(together, "run_rows", noted)
    monkeypatch.setattr(model, "time_here", timed)
    monkeypatch.setattr(Growing, "START", 8)
    mine = replace(pair, target=replace(pair.target, grown={}))
    texts = [(prompt, settings_of("draft", 24)) for prompt, _ in TEXTS[:3]]
    runs = finish_together(mine, texts, 3, as_alone=True)
    assert mine.target.grown and set(beside) == {1}
    assert [len(run.token_ids) for run in runs] == [24] * 3


def gone_in_the_middle(pair):
    """Begin with three texts at once, and go away."""
    texts = [(prompt, settings_of("draft", tokens)) for prompt, tokens in TEXTS]
    events = decode_together(pair, texts, 3)
    runs = {told.text: told.run for told in islice(events, 7)}
    events.close()
    assert {run.stop_reason for run in runs.values()} == {"cancelled"}


def test_what_goes_away_in_the_middle_ends_all(pair):
    """And gives every cache back; the next texts are as if nothing had been."""
    gone_in_the_middle(pair)
    assert at_once(pair, "draft", 0.0, 2) == alone(pair, "draft", 0.0)


def test_stop_ends_all(pair):
    asked = []

    def stop():
        asked.append(None)
        return len(asked) > 20

    texts = ((prompt, settings_of("plain", 40)) for prompt, _ in cycle(TEXTS))
    reasons = {run.stop_reason for run in finish_together(pair, list(islice(texts, 8)), 4, stop)}
    assert reasons == {"cancelled"}


def test_what_one_text_cannot_do_is_said(pair):
    """In its own sentence; the others end, and nothing is left waiting."""
    texts = [("fine", settings_of("plain", 20)), ("x", settings_of("plain", 10_000))]
    with pytest.raises(UserError, match="ask for at most"):
        list(decode_together(pair, texts, 2))
    assert at_once(pair, "plain", 0.0, 3) == alone(pair, "plain", 0.0)


def test_a_pass_that_fails_is_told_in_the_words_of_a_text(pair, monkeypatch):
    def failing(group):
        raise RuntimeError("CUDA out of memory")

    texts = [("fine", settings_of("plain", 20)), ("two", settings_of("plain", 20))]
    events = decode_together(pair, texts, 2)
    next(events)
    monkeypatch.setattr(together, "run_rows", failing)
    with pytest.raises(UserError, match="memory of this device ran out"):
        list(events)


@pytest.mark.parametrize(("precision", "dtype"), [("int4", torch.bfloat16), ("bf16", torch.bfloat16)])
def test_rows_of_several_texts_come_to_what_they_do_alone(precision, dtype):
    """Bit for bit: a prompt of which the last row is wanted, a chain and a tree, in one pass."""
    network = random_model("llama", 5, dtype=dtype)
    fused = NativeNetwork(network, precision == "int4")
    asked = [(random_prompt(9), None, 1), (random_prompt(3), None, 3), (random_prompt(4), [-1, 0, 0, 1], 4)]

    def feed(runner, ids, parents, rows):
        runner.feed(torch.tensor(random_prompt(5)))
        return runner.feed(torch.tensor(ids), parents, rows=rows).clone()

    expected = [feed(NativeRunner(fused, VOCABULARY), *each) for each in asked]

    def text(each):
        yield feed(NativeRunner(fused, VOCABULARY), *each)

    found = list(Together(fused).run(map(text, asked), 3))
    assert all(torch.equal(one, other) for one, other in zip(expected, found))


COSTS = RoundCosts(
    CostTable({1: 1.0, 8: 1.2, 64: 8.0}), CostTable({1: 0.1, 64: 0.8}), 0.08, overhead=0.02, judging=0.01
)


def test_costs_at_once_are_of_all_rows():
    of_four = COSTS.at_once(4)
    assert of_four.plain == COSTS.target(4) + 4 * 0.02
    assert of_four.chain(2) == pytest.approx(
        COSTS.draft(4) + (COSTS.draft(4) - 0.02) + COSTS.target(12) + 4 * (2 * 0.01 + 0.02)
    )
    assert COSTS.at_once(1).chain(5) == pytest.approx(COSTS.chain(5))
    apart = COSTS.at_once(4, shared=False)
    assert apart.chain(1) - apart.checked(1) == pytest.approx(4 * COSTS.draft(1))
    in_turn = COSTS.at_once(4, shared=False, judged=False)
    assert [in_turn.chain(k) for k in (0, 1, 3)] == pytest.approx([4 * COSTS.chain(k) for k in (0, 1, 3)])


def test_what_pays_for_one_text_may_not_for_many():
    """The same drafter: `auto` drafts alone, and next to nothing beside so many that arithmetic is what takes time."""
    assert Adaptive(COSTS, prior=0.7).next([1]) > 0
    assert Adaptive(COSTS.at_once(16), prior=0.7).next([1]) == 0


def test_many_texts_are_measured(pair, monkeypatch):
    """A row for each size and method, shares of plain at the same size; what was predicted beside."""
    monkeypatch.setattr(measuring, "TOKENS", 6)
    prompts = [Prompt(name=text, kind="x", text=text) for text, _ in TEXTS]
    variants = {"draft": settings_of("draft", 12, draft_length=2)}
    document = finish(batches(pair, prompts, variants, (1, 3), repeats=1))
    assert [(row["texts"], row["name"]) for row in document["rows"]] == [
        (size, name) for size in (1, 3) for name in ("plain", "draft")
    ]
    assert document["shared"]
    plain, drafting = document["rows"][2:]
    assert plain["ratio_to_plain"]["median"] == 1
    assert plain["mean_drafted"] == 0
    assert drafting["mean_drafted"] > 1
    assert drafting["predicted"] > 0
    assert batch_table(document).count("\n") == 6


def test_sizes_and_methods_that_cannot_be_measured_are_refused(pair):
    for sizes in ((), (0, 2), (65,)):
        with pytest.raises(UserError, match="Texts at once"):
            next(batches(pair, [], {"draft": settings_of("draft", 12)}, sizes))
    with pytest.raises(UserError, match="is off"):
        next(batches(pair, [], {"head": settings_of("head", 12)}, (1,)))


def test_a_round_before_which_a_prompt_is_read_does_not_count(pair):
    """By the target or the drafter, one text alone or several; texts of a single round cannot be counted."""
    prompts = [Prompt(name=text, kind="x", text=text) for text, _ in TEXTS]
    for size in (1, 3):
        rounds = measuring.look(pair, prompts, settings_of("draft", 12, draft_length=2), size).rounds
        assert rounds and all(round_.index for round_ in rounds)
        with pytest.raises(UserError, match="ask for more new tokens"):
            measuring.look(pair, prompts, settings_of("plain", 1), size)


def test_texts_whose_caches_do_not_fit_are_refused_first(pair, monkeypatch):
    """By as many as are asked for at most, draft and target."""
    models, prompts = (pair.target, pair.draft), [Prompt(name="x", kind="x", text="the quick brown")]
    room = len(encode_prompt(pair.target, "the quick brown", settings_of("draft", 12))) + 32 + MOST_DRAFTED
    each = sum(cache_bytes(model.config, room, model.network.dtype) for model in models)
    for free, fits in ((3 * each, True), (3 * each - 1, False)):
        monkeypatch.setattr(measuring, "free_memory", lambda device, free=free: Free(free, None))
        steps = batches(pair, prompts, {"draft": settings_of("draft", 12)}, (1, 3))
        if fits:
            next(steps)
        else:
            with pytest.raises(UserError, match=r"3 texts at once keep about .* ask for fewer"):
                next(steps)


def level(texts, ratio, predicted, drafted=2.0):
    return {
        "texts": texts,
        "name": "head",
        "ratio_to_plain": {"median": ratio},
        "predicted": predicted,
        "mean_drafted": drafted,
    }


def test_the_answer_is_a_sentence():
    rows = [level(1, 1.5, 1.6), level(4, 1.1, 1.05), level(8, 0.8, 0.9)]
    document = {"rows": rows, "loses_from": {"head": 8}, "shared": True}
    assert describe(document, "head") == (
        "head: 1.50× plain with one text; 0.80× with 8 at once; from 8 at once on it loses; the costs of passes "
        "predict a loss from 8 on."
    )
    rows[-1] = level(8, 0.97, 1.0, drafted=0.02)
    assert "from 8 at once on it drafts next to nothing" in describe(document, "head")
    assert "take turns" in describe(document | {"shared": False}, "head")
    assert "for one text after the other" in describe(document | {"apart": ["head"]}, "head")


def test_texts_of_a_target_whose_passes_are_not_shared_take_turns(pair):
    """On transformers' own forward: round by round, and the same texts."""
    expected = alone(pair, "draft", 0.0, draft_length=2)
    target = replace(pair.target)
    target.fall_back("for a test")
    turns = replace(pair, target=target)
    assert at_once(turns, "draft", 0.0, 3, draft_length=2) == expected
    plain = whole_costs(turns, settings_of("plain", 8))
    assert whole_costs(turns, settings_of("plain", 8), 3).plain == pytest.approx(3 * plain.plain)


def test_texts_to_learn_from_are_the_same_in_slots_of_their_own(pair):
    """As by transformers' own cache of one length: the likeliest tokens of each, ended or not."""
    target = replace(pair.target)
    prompts, heat = [random_prompt(n) for n in (3, 9, 1, 6)], [0.0] * 4
    ends = frozenset(range(0, 90))

    def written():
        generator = torch.Generator().manual_seed(1)
        return sample(target, prompts, heat, 12, ends, generator, lambda: False)

    in_slots = written()
    target.fall_back("for a test")
    assert not target.exact_rows
    assert written() == in_slots
    assert len({len(ids) for ids in in_slots}) > 1
