"""Training a head on what its target writes: rows aligned as in drafting, learning that shows, resuming as if nothing
had been."""

import functools
import itertools
import json
import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import random_model

from core import generate
from core.__main__ import main
from core.costs.rounds import acceptance_rate
from core.drafting import build
from core.errors import UserError
from core.heads import HeadConfig, HeadNetwork, Shape
from core.heads.checkpoint import describe_head, load_weights, save_block, save_head
from core.heads.dflash import DFlashConfig, DFlashNetwork
from core.loading import load_model
from core.loading.head import Head, load_head
from core.loading.model import Model
from core.loading.pair import Pair
from core.progress import never
from core.records import accepted_by_position, summarise
from core.settings import Settings
from core.training import aux_layers, config_for, frequent_ids, kind_of, loop, new_head
from core.training.blocks import Blocks, draw_anchors
from core.training.dialogues import (
    FIRST_BLOCK,
    Dialogue,
    as_line,
    block_size,
    block_start,
    draw,
    is_held_out,
    read_dialogues,
    sample,
    user_turn,
    write_block,
)
from core.training.export import export
from core.training.kept import kept_for, looks_by_kind, new_folder
from core.training.learning import DraftLoss, agreements, loss_of, steps_ahead
from core.training.loop import Plan, Trainer
from core.training.pool import KEPT, Batch, Pool, grouped, one_by_one, side_by_side
from core.training.session import SHOWN_LENGTH, SHOWN_TOKENS, Session
from core.training.unroll import Unroll, rows_that_count

CHAT = (
    "{% for m in messages %}<user>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def target(tokenizer):
    """A chain of words more than a model: the next token hangs on the last one alone, so a head can learn it soon."""
    network = random_model(
        "llama", 3, vocab=300, dtype=torch.float32, num_hidden_layers=4, hidden_size=32, max_position_embeddings=256
    )
    for layer in network.base_model.layers:
        layer.self_attn.o_proj.weight.mul_(0.02)
        layer.mlp.down_proj.weight.mul_(0.02)
    ends = frozenset({tokenizer.eos_token_id})
    return Model("tiny", network, tokenizer, "fp32", ends, 256, 300)


@pytest.fixture
def short(monkeypatch):
    """Answers of a few tokens: the loop is what is tested."""
    shorten(monkeypatch)


def shorten(patch):
    patch.setattr("core.training.dialogues.ANSWER_TOKENS", 24)
    patch.setattr("core.training.dialogues.OPENING_TOKENS", 6)
    patch.setattr(loop, "ROWS", 256)
    patch.setattr(loop, "ROWS_AT_ONCE", 128)


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Of a kind: a training that is done, where its head was exported to, and how it stood from look to look."""

    @functools.cache
    def of_kind(kind):
        folder = tmp_path_factory.mktemp("trained")
        with pytest.MonkeyPatch.context() as patch:
            shorten(patch)
            trainer = Trainer(target, folder, Plan(tokens=40_000, kind=kind))
            standings = run_to_end(trainer, ticking())
            export(trainer, folder)
        return trainer, folder, standings

    return of_kind


def pool_of(target, folder, dialogues, kind="eagle3"):
    config = config_for(target, kind)
    pool = Pool(folder, config.feature_width, config.draft_vocab_size)
    ids = torch.arange(config.draft_vocab_size)
    pool.write(dialogues)
    while len(pool) < len(pool.texts):
        pool.read(target, config.aux_layers, ids)
    return pool, new_head(target, config, ids, 0)


@pytest.fixture
def some(target, tmp_path):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 300, (n,), generator=generator).tolist() for n in (9, 14, 20)]
    return pool_of(target, tmp_path / "some", [Dialogue(ids, 4, 0.0) for ids in texts])


def embedding(target):
    return target.network.get_input_embeddings().weight


def test_rows_of_a_batch_are_what_drafting_would_see(target, some):
    """Every unrolled row against the head fed as a drafter feeds it: true rows up to it, then its own outputs."""
    pool, head = some
    layers = config_for(target).aux_layers
    batch = pool.batch(pool.entries, 3, torch.device("cpu"))
    outputs = Unroll(head)(embedding(target), batch, 3)
    for step, output in enumerate(outputs):
        rows = rows_that_count(batch, step).tolist()
        assert rows
        for got, row in zip(output, rows):
            entry, t = pool.entries[row // batch.features.shape[1]], row % batch.features.shape[1]
            assert entry.start - 2 <= t and t + 2 + step < len(entry.ids)
            ids = torch.tensor([entry.ids])
            states = target.network(ids, output_hidden_states=True).hidden_states
            features = torch.cat([states[i] for i in layers], -1)[:, : t + 1].bfloat16().float()
            tokens = embedding(target)[ids[:, 1 : t + 2]]
            hidden, past = head(tokens, head.join(features), torch.arange(t + 1))
            for i in range(step):
                tokens = embedding(target)[ids[:, t + 2 + i : t + 3 + i]]
                fed = head.feed_back(hidden[:, -1:])
                hidden, new = head(tokens, fed, torch.tensor([t + 1 + i]), past)
                past = [tuple(torch.cat(pair, 2) for pair in zip(past[0], new[0]))]
            torch.testing.assert_close(got, head.norm(hidden[0, -1]), atol=1e-4, rtol=1e-4)


def test_teacher_is_the_targets_distribution_two_tokens_on(target, some):
    pool, _ = some
    batch = pool.batch(pool.entries, 3, torch.device("cpu"))
    for b, entry in enumerate(pool.entries):
        probs = target.network(torch.tensor([entry.ids])).logits[0].softmax(-1)
        for t in range(entry.start - 2, entry.rows - 1):
            assert batch.tokens[b, t] == entry.ids[t + 1]
            assert batch.best[b, t] == probs[t + 1].argmax()
            torch.testing.assert_close(batch.probs[b, t], probs[t + 1].topk(KEPT).values, atol=1e-3, rtol=1e-3)
        assert batch.counted[b].sum() == entry.rows - entry.start + 1  # the whole answer


def test_texts_are_read_alike_by_the_passes_that_decode(pair_folder):
    target = load_model(str(pair_folder / "target"), torch.device("cpu"), "fp32")
    assert target.exact_rows
    texts = [Dialogue(list(range(5, 5 + n)), start, 0.0) for n, start in ((9, 1), (30, 12), (14, 13))]
    found, right = (read(target, texts, (0, 1, 2)) for read in (one_by_one, side_by_side))
    for text, (features, logits), (whole, expected) in zip(texts, found, right, strict=True):
        assert len(features) == text.rows and len(logits) == text.answer
        torch.testing.assert_close(features, whole, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_loss_and_its_gradient_are_those_of_autograd(share):
    torch.manual_seed(0)
    states, table = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 20))
    ids = torch.stack([torch.randperm(20)[:4] for _ in range(5)])
    p = torch.rand(5, 4, dtype=torch.float64) / 4
    loss, overlap = DraftLoss.apply(states, table, ids, p, share)
    loss.backward()
    ours = states.grad.clone(), table.grad.clone()
    states.grad = table.grad = None
    q = (states @ table.t()).softmax(-1)
    whole = torch.zeros_like(q).scatter(1, ids, p)
    apart = (whole - q).abs().sum()
    theirs = ((1 - share) * -(p * q.log().gather(1, ids)).sum() + share * apart) / 5
    theirs.backward()
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(overlap, torch.minimum(whole, q).sum(-1))
    torch.testing.assert_close(ours, (states.grad, table.grad))


@pytest.fixture(params=["eagle3", "dspark", "dflash"])
def kind(request):
    return request.param


def of_kind(target, folder, kind):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 300, (n,), generator=generator).tolist() for n in (9, 14, 20)]
    return pool_of(target, folder, [Dialogue(ids, 4, 0.0) for ids in texts], kind)


def test_loss_reaches_every_weight(target, tmp_path, kind):
    pool, head = of_kind(target, tmp_path, kind)
    if kind == "dspark":  # its bias begins at nothing, and so does what is behind it
        torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    loss_of(head, embedding(target), pool.batch(pool.entries, steps_ahead(head), torch.device("cpu")))[0].backward()
    assert not [name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum()]


@pytest.mark.parametrize("kind", ["dspark", "dflash"], indirect=True)
def test_packed_blocks_are_what_one_block_at_a_time_would_be(target, tmp_path, kind):
    """Many anchors of several texts in a pass, against each alone at the end of the text so far."""
    pool, head = of_kind(target, tmp_path, kind)
    batch = pool.batch(pool.entries, steps_ahead(head), torch.device("cpu"))
    rows, there = draw_anchors(batch, 4, torch.Generator().manual_seed(1))
    states, flat, odds = Blocks(head)(embedding(target), batch, rows, there)
    config, layers, checked = head.config, head.config.aux_layers, 0
    width = batch.features.shape[1]
    for k, (got, of, sure) in enumerate(zip(states, flat, odds)):
        for state, row, log_odds in zip(got, of.tolist(), sure):
            entry, t = pool.entries[row // width], row % width
            ids = torch.tensor([entry.ids])
            assert entry.start - 2 <= t and t + 2 + k < len(entry.ids)
            seen = target.network(ids, output_hidden_states=True).hidden_states
            features = torch.cat([seen[i] for i in layers], -1)[:, : t + 1].bfloat16().float()
            past = head.keys_values(head.inject(features), head.rotation(torch.arange(t + 1), features))
            block = torch.full((1, config.block_size), config.mask_id)
            block[0, 0] = entry.ids[t + 1]  # the anchor
            at = head.rotation(torch.arange(t + 1, t + 1 + config.block_size), features)

            def behind(layer, keys, values, past=past):
                return torch.cat([past[layer][0], keys], 2), torch.cat([past[layer][1], values], 2)

            hidden = head(embedding(target)[block], at, behind, [None])[0, config.first + k]
            expected = hidden
            if kind == "dspark":
                before = ids[0, t + 1 + k]
                expected = torch.cat([hidden, head.markov_head.step(hidden, before)[0]])
                torch.testing.assert_close(log_odds, head.confidence(hidden, before), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked > 3 * config.drafted


def test_anchors_are_of_rows_that_count(some):
    pool, _ = some
    batch = pool.batch(pool.entries, 3, torch.device("cpu"))
    for chance in (None, torch.Generator().manual_seed(0)):
        rows, there = draw_anchors(batch, 5, chance)
        assert batch.counted.gather(1, rows)[there].all() and there.sum(1).tolist() == [5, 5, 5]
        assert all(len(set(text.tolist())) == 5 for text in rows)
    rows, there = draw_anchors(batch, 100, None)
    assert there.sum() == batch.counted.sum()


def test_agreement_counts_drafts_right_so_far(target, some, monkeypatch):
    """A head that always says the likeliest token of the first step: right there, and afterwards only by chance."""
    pool, head = some
    batch = pool.batch(pool.entries, 2, torch.device("cpu"))
    rows = rows_that_count(batch, 0)
    best = batch.best[:, : batch.features.shape[1]].flatten()[rows]
    said = [torch.nn.functional.one_hot(best, 300).float(), torch.zeros(len(rows_that_count(batch, 1)), 300)]
    monkeypatch.setattr("core.training.learning.positions", lambda head: 2)
    monkeypatch.setattr("core.training.unroll.Unroll.forward", lambda self, *_: said)
    head.lm_head.weight = torch.nn.Parameter(torch.eye(300))
    ((shares, overlap),) = agreements(head, embedding(target), iter([batch]))
    first = batch.best[:, 1 : 1 + batch.features.shape[1]].flatten()[rows_that_count(batch, 1)]
    assert shares == [1.0, pytest.approx(int((first == 0).sum()) / len(first))]
    assert 0 < overlap < 1
    said[1] = torch.nn.functional.one_hot(first, 300).float()
    ((shares, _),) = agreements(head, embedding(target), iter([batch]))
    assert shares == [1.0, 1.0], "where an answer ends nothing is refused"


def run_to_end(trainer, clock=lambda: 0.0):
    return list(trainer.run(clock=clock))


def ticking():
    """A clock by which every question takes a second."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


@pytest.mark.xdist_group("trained head")
def test_a_trained_head_agrees_more_than_an_untrained_one(trained, kind):
    *_, standings = trained(kind)
    learning = [s for s in standings if s.loss is not None]
    first, last = next(s for s in learning if s.agreement), standings[-1]
    assert last.doing == "done" and last.visits >= 40_000
    assert last.loss < 0.8 * learning[0].loss
    assert last.agreement[0] > first.agreement[0] + 0.1
    assert last.tokens_per_pass == pytest.approx(1 + sum(last.agreement))
    assert last.answer_tokens > standings[0].answer_tokens == 0


@pytest.mark.parametrize("kind", ["eagle3", "dspark"], indirect=True)
def test_resumed_training_is_the_same_training(target, tmp_path, short, kind):
    whole = Trainer(target, tmp_path / "whole", Plan(tokens=9_000, kind=kind))
    run_to_end(whole)
    part = Trainer(target, tmp_path / "part", Plan(tokens=9_000, kind=kind))
    list(part.run(stop=lambda: part.standing.visits > 4_000, clock=lambda: 0.0))
    assert 0 < part.standing.visits < 9_000
    rest = Trainer(target, tmp_path / "part", Plan(tokens=9_000), resume=True)
    assert rest.standing.visits == part.standing.visits
    run_to_end(rest)
    assert rest.standing.steps == whole.standing.steps
    for mine, theirs in zip(rest.head.state_dict().values(), whole.head.state_dict().values()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seconds", [60.0, 0.5])
def test_a_head_comes_out_of_any_time(target, tmp_path, short, monkeypatch, seconds):
    """Whole texts would take all of the time: prompts and answers are cut, and the rest makes a head; in no time at all
    it is one step."""
    now = [0.0]
    monkeypatch.setattr(Trainer, "_count", lambda self, tokens: now.__setitem__(0, now[0] + 1.5))  # a token's seconds
    monkeypatch.setattr("core.training.dialogues.LEAST_ANSWER", 3)
    trainer = Trainer(target, tmp_path / "head", Plan(seconds=seconds))
    step = trainer._step
    monkeypatch.setattr(trainer, "_step", lambda: (now.__setitem__(0, now[0] + 2.0), step()))
    *_, last = trainer.run(clock=lambda: now[0])
    assert (last.doing, len(trainer._pool.texts)) == ("done", FIRST_BLOCK)
    assert last.steps >= 10 if seconds > 1 else last.steps == 1
    assert max(entry.dialogue.answer for entry in trainer._pool.entries) < 24
    assert last.seconds < 64
    export(trainer, tmp_path / "head")


def test_texts_of_a_file_come_first(target, tmp_path, short):
    """The head learns from them at once, in turn with reading; none is written before all are read, and what the file
    holds out is what is looked at."""
    given = [d for i in range(2) for d in write_block(target, i, 3, None, never)]
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(as_line(d) for d in given))
    trainer = Trainer(target, tmp_path / "head", Plan(tokens=8_000, dialogues=file))
    standings = list(trainer.run(clock=lambda: 0.0))
    assert trainer._pool.texts[: len(given)] == given
    held = [entry.dialogue for entry in trainer._pool.held_out()]
    assert held[:1] and all(d in held for d in given if d.held_out and d.answer > 2)
    first = next(s for s in standings if s.visits)
    assert first.dialogues < len(given), "not all was read before the first step"
    writing = [s.dialogues for s in standings if s.writing]
    assert not writing or min(writing) >= len(given)
    again = Trainer(target, tmp_path / "head", Plan(tokens=8_000), resume=True)
    assert again._pool.texts == trainer._pool.texts


@pytest.mark.xdist_group("trained head")
def test_a_trained_head_is_gone_on_from(target, tmp_path, short, trained):
    """It drafts as well as before from its first step on, its vocabulary and layers its own."""
    old, folder, _ = trained("eagle3")
    new = Trainer(target, tmp_path / "new", Plan(tokens=6_000, head=folder))
    standings = run_to_end(new)
    assert torch.equal(new.head.d2t, old.head.d2t)
    first = next(s for s in standings if s.agreement)
    assert first.agreement[0] > old.history[0].agreement[0] + 0.1
    assert standings[-1].agreement[0] > first.agreement[0] - 0.03
    again = Trainer(target, tmp_path / "new", Plan(tokens=6_000), resume=True)
    assert all(torch.equal(a, b) for a, b in zip(again.untrained().parameters(), new.untrained().parameters()))


BAD_DIALOGUES = {
    "no lines of JSON": (b"what is this", "not a file of dialogues"),
    "a list": (b"[1, 2]\n", "not a file of dialogues"),
    "numbers past all bounds": (b'{"ids": [Infinity, 2], "p": 1}\n', "not a file of dialogues"),
    "too deep": (b"[" * 100_000, "not a file of dialogues"),
    "half a gzip": (b"\x1f\x8b\x08\x00", "not a file of dialogues"),
    "ids of another vocabulary": (b'{"ids": [1, 2, 300, 4], "p": 1}\n', "Dialogue 1 .* do not fit"),
    "no answer": (b'{"ids": [1, 2], "p": 2}\n', "Dialogue 1 .* do not fit"),
    "too few": (b'{"ids": [1, 2, 3, 4], "p": 1}\n', "no dialogues to learn from"),
}


@pytest.mark.parametrize("name", BAD_DIALOGUES)
def test_what_is_no_file_of_dialogues_gets_a_sentence(target, tmp_path, name):
    content, said = BAD_DIALOGUES[name]
    file = tmp_path / "dialogues"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_dialogues(file, target)
    with pytest.raises(UserError, match="cannot be read"):
        read_dialogues(tmp_path / "nowhere", target)


def test_a_resumed_training_keeps_its_prompts_and_its_looks(target, tmp_path, short):
    trainer = Trainer(target, tmp_path, Plan(tokens=3_000, prompts=["the quick", "brown fox"]))
    run_to_end(trainer)
    again = Trainer(target, tmp_path, Plan(tokens=3_000), resume=True)
    assert again.plan.prompts == ["the quick", "brown fox"]
    assert again.history == trainer.history
    assert again.history[0].visits == 0 and again.history[-1].visits == trainer.standing.visits
    again.go_on()
    assert again.plan.tokens == 3_000 + trainer.standing.visits
    assert run_to_end(again)[-1].doing == "done" and again.standing.visits >= again.plan.tokens


def test_who_looks_while_a_training_begins_again_sees_it_whole(target, tmp_path, short, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = new_folder("t")
    run_to_end(Trainer(target, folder, Plan(tokens=3_000)))
    before, write, seen = looks_by_kind("t"), Path.write_text, []

    def look_halfway(file, text, **options):
        write(file, "", **options)
        seen.append((looks_by_kind("t"), kept_for("t").standing))
        return write(file, text, **options)

    monkeypatch.setattr(Path, "write_text", look_halfway)
    Trainer(target, folder, Plan(tokens=3_000), resume=True)
    assert len(seen) == 2 and all(look == (before, before["eagle3"][-1]) for look in seen)


@pytest.mark.parametrize("stem", ["plan", "target", "draft_ids", "state"])
def test_a_training_that_is_killed_in_the_middle_of_a_file_goes_on(target, tmp_path, short, monkeypatch, stem):
    class KilledError(BaseException):
        pass

    def half(write):
        def begun(*given, **options):
            file = next(each for each in given if isinstance(each, Path))
            if file.stem == stem:
                file.write_bytes(b"{")
                raise KilledError
            return write(*given, **options)

        return begun

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half(Path.write_text))
        patch.setattr(torch, "save", half(torch.save))
        with pytest.raises(KilledError):
            run_to_end(Trainer(target, tmp_path, Plan(tokens=2_000)))
    again = Trainer(target, tmp_path, Plan(tokens=2_000), resume=True)
    assert run_to_end(again)[-1].doing == "done"


def test_looks_at_a_head_that_was_not_saved_are_forgotten_with_it(target, tmp_path, short, monkeypatch):
    killed = Trainer(target, tmp_path, Plan(tokens=6_000))
    monkeypatch.setattr(killed, "save", lambda: None)
    going = killed.run(clock=ticking())
    while len(killed.history) < 3:
        next(going)
    going.close()
    with (tmp_path / "training" / "progress.jsonl").open("a") as file:
        file.write('{"doing": "lea')
    again = Trainer(target, tmp_path, Plan(tokens=6_000), resume=True)
    run_to_end(again, ticking())
    assert Trainer(target, tmp_path, Plan(tokens=6_000), resume=True).history == again.history
    assert [look.visits for look in again.history] == sorted({look.visits for look in again.history})


def test_a_full_disk_is_said_and_costs_only_what_was_not_saved(target, tmp_path, short, monkeypatch):
    monkeypatch.setattr(loop, "EPOCHS", 3)
    part = Trainer(target, tmp_path, Plan(tokens=8_000))
    list(part.run(stop=lambda: part.standing.visits > 200, clock=lambda: 0.0))
    full = Trainer(target, tmp_path, Plan(tokens=8_000), resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("core.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match="free there; free some space and resume"):
            run_to_end(full)
    again = Trainer(target, tmp_path, Plan(tokens=8_000), resume=True)
    assert again.standing.visits == part.standing.visits < full.standing.visits
    assert run_to_end(again)[-1].doing == "done"


def test_a_disk_too_full_for_the_head_is_said(target, tmp_path, short, monkeypatch):
    trainer = Trainer(target, tmp_path, Plan(tokens=500))
    run_to_end(trainer)
    export(trainer, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(tensors, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("core.heads.checkpoint.save_file", full)
    with pytest.raises(UserError, match="is full; free some space and resume"):
        export(trainer, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["eagle3", "dspark"], indirect=True)
def test_a_session_tells_what_a_race_will_show(target, tmp_path, short, kind, monkeypatch):
    """Whoever drafts, a greedy answer is the target's own; what is promised follows from costs that are measured once,
    and the acceptance that is told is that of the exported head on the prompts that were shown. As many threads as the
    target's passes gain from are taken for those alone."""
    measured = []
    for place, name in ((Head, "time_passes"), (build, "time_sampling")):
        timed = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, n=name, timed=timed: measured.append(n) or timed(*given))
    threads = [8]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr("core.training.session.ALL_THREADS", 8)
    pair = Pair(target)
    prompts = ["the quick", "brown fox", "it jumps over"]
    watched = Session(target, pair, tmp_path, Plan(tokens=20_000, prompts=prompts, kind=kind))
    looks = []
    for look in watched.run(clock=ticking()):
        looks.append(look)
        assert threads[-1] == 8
    samples = [look for look in looks if look.sample]
    assert [look.before for look in samples[:2]] == [True, False] and not any(look.before for look in samples[1:])
    assert len({tuple(look.sample.token_ids) for look in samples}) == 1
    assert watched._prompts() == prompts
    words, ids = prompts[0], target.tokenizer.encode(prompts[0])
    answer = sample(target, [ids], [0.0], SHOWN_TOKENS, target.stop_ids, torch.Generator(), never)
    assert samples[0].sample.token_ids == answer[0] and samples[0].sample.prompt == words
    accepted = [look.standing.acceptance for look in samples]
    assert accepted[-1] > accepted[0]
    costs = watched._measured()
    assert sorted(measured) == ["time_passes", "time_sampling"] and 1 in threads
    reached = samples[-1].standing.reached
    assert samples[-1].outlook.speed_up >= costs.speed_up(1 + sum(reached), len(reached)) - 1e-9
    assert [look.standing.visits for look in looks if not look.sample] == [s.visits for s in watched.trainer.history]

    written = json.loads((tmp_path / "config.json").read_text())["measured"]
    assert written["acceptance_rate"] == pytest.approx(accepted[-1], abs=1e-4)
    raced = Pair(target, head=load_head("head", tmp_path, target, "fp32"))
    runs = []
    for words in prompts:
        method = "head" if kind == "eagle3" else "block"
        settings = Settings(method=method, draft_length=SHOWN_LENGTH, max_new_tokens=SHOWN_TOKENS)
        runs.append(generate(raced, words, settings))
    rounds = [round_ for run in runs for round_ in run.rounds]
    assert acceptance_rate(accepted_by_position(rounds)) == pytest.approx(accepted[-1], abs=0.02)  # it is in 16 bits
    rates = [summarise(run).acceptance_rate for run in runs]
    assert written["between"] == pytest.approx([min(rates), max(rates)], abs=0.05), "a race is on one of the prompts"

    later = Session(target, pair, tmp_path, Plan(tokens=10_000), resume=True)
    known = [look.standing for look in later.run(stop=lambda: True, clock=lambda: 0.0)]
    assert known == watched.trainer.history


def test_folders_of_heads_by_target(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    root = tmp_path / "speculative-decoding-playground" / "heads"
    assert kept_for("owner/Some Model") is None
    assert new_folder("owner/Some Model") == root / "some-model"
    for name in ("some-model", "some-model-2"):
        (root / name / "training").mkdir(parents=True)
    (root / "some-model" / "training" / "progress.jsonl").write_text('{"visits": 7}\n{"vis')
    os.utime(root / "some-model-2" / "training", (0, 0))
    kept = kept_for("/models/some-model")
    assert (kept.folder, kept.standing, kept.exported) == (root / "some-model", {"visits": 7}, False)
    assert new_folder("/models/some-model.gguf") == root / "some-model-3"


def test_kinds_are_beside_each_other_where_their_texts_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    root = tmp_path / "speculative-decoding-playground" / "heads"
    assert looks_by_kind("t") == {}
    none = {"prompts": None, "head": None}
    plans = [
        none | {"kind": "eagle3"},
        none | {"kind": "eagle3"},  # the newer one of its kind
        none | {"kind": "dflash", "prompts": ["own"]},
        none | {"kind": "eagle3", "head": "/a/head"},
        none | {"kind": "dspark"},
    ]
    for i, plan in enumerate(plans):
        training = root / ("t" if i == 0 else f"t-{i + 1}") / "training"
        training.mkdir(parents=True)
        (training / "plan.json").write_text(json.dumps(plan))
        (training / "progress.jsonl").write_text(json.dumps({"visits": i}) + "\n")
        for file in training.iterdir():
            os.utime(file, (i, i))
    assert looks_by_kind("t") == {"eagle3": [{"visits": 1}], "dspark": [{"visits": 4}]}


def test_an_interruption_anywhere_leaves_whole_portions(target, tmp_path, short):
    blocks = [write_block(target, i, 0, None, never) for i in range(2)]
    config, ids = config_for(target), torch.arange(300)

    def opened():
        return Pool(tmp_path, config.feature_width, config.draft_vocab_size, rows=64)

    pool = opened()
    pool.write(blocks[0])
    pool.read(target, config.aux_layers, ids)
    whole = pool.portion(0)
    assert 0 < whole == len(pool) < len(pool.texts) == FIRST_BLOCK
    before = pool.batch(pool.entries, 1, torch.device("cpu"))
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write(as_line(blocks[1][0]) + '{"ids": [1, 2')
    width = 2 * config.feature_width
    with (tmp_path / "features.bin").open("ab") as file:
        file.write(bytes(width * pool.texts[whole].rows + 3))
    again = opened()
    assert (len(again), len(again.texts), again.writes) == (whole, FIRST_BLOCK, 1)
    again.write(blocks[1])
    while len(again) < len(again.texts):
        again.read(target, config.aux_layers, ids)
    after = again.batch(again.entries[:whole], 1, torch.device("cpu"))
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in Batch.__dataclass_fields__)
    assert again.entries[FIRST_BLOCK].ids == blocks[1][0].ids


def test_blocks_are_the_same_for_a_seed(target, short):
    one, same, other = (write_block(target, i, 5, None, never) for i in (1, 1, 2))
    assert one == same != other


def test_rows_of_a_batch_do_not_see_each_other_when_sampled(target):
    """Prompts of many lengths at once give, greedily, what each gives alone."""
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
    heat, generator = [0.0] * 3, torch.Generator()
    together = sample(target, prompts, heat, 12, target.stop_ids, generator, never)
    alone = [sample(target, [prompt], [0.0], 12, target.stop_ids, generator, never)[0] for prompt in prompts]
    assert together == alone


def test_draws_follow_their_temperature():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(30_000, 1)
    heat = torch.tensor([0.0, 1.0, 0.5]).repeat(10_000)
    drawn = draw(logits, heat, 1.0, torch.Generator().manual_seed(0))
    assert (drawn[::3] == 0).all()
    for rows, law in ((drawn[1::3], [0.5, 0.3, 0.2]), (drawn[2::3], [25 / 38, 9 / 38, 4 / 38])):
        counts = torch.bincount(rows, minlength=3)
        chi = sum((counts[i] - 10_000 * p) ** 2 / (10_000 * p) for i, p in enumerate(law))
        assert chi < 18.4  # 1e-4 with two degrees of freedom
    assert set(draw(logits, torch.ones(30_000), 0.5, torch.Generator()).tolist()) == {0}


def test_a_chat_model_writes_its_own_user_turns(target, monkeypatch, short):
    monkeypatch.setattr(target.tokenizer, "chat_template", CHAT)
    before, after = user_turn(target)
    decode = target.tokenizer.decode
    assert (decode(before), decode(after)) == ("<user>", "<|end|><bot>")
    monkeypatch.setattr(
        "core.training.dialogues.sample", lambda target, prompts, *_: [[7, 8, after[0]] for _ in prompts]
    )
    (first, *_) = write_block(target, 0, 0, None, never)
    assert first.ids[: first.start] == [*before, 7, 8, *after]


def test_given_prompts_are_answered_at_every_temperature(target, short):
    blocks = [write_block(target, i, 0, ["the quick", "brown fox"], never) for i in range(2)]
    asked = {tuple(d.ids[: d.start]) for block in blocks for d in block}
    assert asked == {tuple(target.tokenizer.encode(text)) for text in ("the quick", "brown fox")}
    assert {(tuple(d.ids[: d.start]), d.temperature) for d in blocks[0]} == {(a, t) for a in asked for t in (0.6, 1)}
    assert [d.held_out for b in blocks for d in b] == [is_held_out(i % 2) for i in range(2 * FIRST_BLOCK)]


def test_no_held_out_text_is_learnt(target, monkeypatch, short):
    """Greedy answers to one prompt are one text, whoever asked it, and where time made the target ask it again."""
    monkeypatch.setattr(target.tokenizer, "chat_template", CHAT)
    for prompts in (["a", "b", "c"], None):
        dialogues = [d for i in range(5) for d in write_block(target, i, 0, prompts, never, enough=lambda: True)]
        held, learnt = ({tuple(d.ids) for d in dialogues if d.held_out is out} for out in (True, False))
        assert held and learnt and not held & learnt
    alone = [d for i in range(5) for d in write_block(target, i, 0, ["a"], never)]
    assert {d.held_out for d in alone} == {True, False}


def test_blocks_grow_and_leave_no_gap():
    assert [block_start(i + 1) - block_start(i) for i in range(8)] == [block_size(i) for i in range(8)]
    assert block_size(0) < block_size(7)


def test_layers_of_shallow_and_deep_targets():
    assert [aux_layers(n) for n in (30, 16, 7)] == [(2, 15, 27), (2, 8, 13), (2, 3, 4)]
    for n in range(1, 7):
        layers = aux_layers(n)
        assert list(layers) == sorted(set(layers)) and layers[-1] < n and len(layers) == min(n, 3)


def test_frequent_ids_count_and_break_ties_by_number():
    assert frequent_ids([[7, 7, 3], [3, 9]], 10, 4).tolist() == [0, 3, 7, 9]


def test_grouping_keeps_every_row_and_the_limit():
    lengths = [3, 4, 4, 9, 10, 30]
    groups = grouped(lengths, 20)
    assert [i for group in groups for i in group] == list(range(6))
    assert all(len(group) == 1 or len(group) * lengths[group[-1]] <= 20 for group in groups)


def test_the_exported_head_is_the_trained_one(target, tmp_path, short, kind):
    trainer = Trainer(target, tmp_path, Plan(tokens=1_000, kind=kind))
    run_to_end(trainer)
    export(trainer, tmp_path)
    described = describe_head(tmp_path, "head")
    config = described.config(described.candidates(4)[0])
    assert config == trainer.config
    loaded = load_weights(tmp_path, "head", config, torch.bfloat16, torch.device("cpu"))
    for name, weight in trainer.head.state_dict().items():
        if not name.startswith("rotary"):
            assert torch.equal(loaded.state_dict()[name], weight.bfloat16() if weight.is_floating_point() else weight)
    names = {"eagle3": "LlamaForCausalLMEagle3", "dspark": "Qwen3DSparkModel", "dflash": "DFlashDraftModel"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [names[kind]]
    card = (tmp_path / "README.md").read_text()
    assert f"{trainer.standing.visits:,} answer tokens were learnt" in card
    length = 3 if kind == "eagle3" else trainer.config.drafted
    assert f'{{"method": "{kind}", "model": "THIS_FOLDER", "num_speculative_tokens": {length}}}' in card


def test_a_head_starts_from_the_targets_weights_however_they_lie(pair_folder):
    """Passes on a CPU fuse weights and lay them out anew; a head takes over the numbers all the same."""
    kept = load_file(pair_folder / "target" / "model.safetensors")
    target = load_model(str(pair_folder / "target"), torch.device("cpu"), "bf16")
    config = config_for(target)
    ids = torch.arange(config.draft_vocab_size)
    head = new_head(target, config, ids, 0)
    last = "model.layers.3.self_attn."
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = kept[f"{last}{name}.weight"].bfloat16().float()
        assert torch.equal(getattr(head.midlayer.self_attn, name).weight[:, config.hidden_size :], theirs)
    assert torch.equal(head.midlayer.self_attn.o_proj.weight, kept[f"{last}o_proj.weight"].bfloat16().float())
    assert torch.equal(head.lm_head.weight, kept["lm_head.weight"][ids].bfloat16().float())


def test_folders_are_not_mixed_up(target, tmp_path, tokenizer, short):
    with pytest.raises(UserError, match="no training to resume"):
        Trainer(target, tmp_path, Plan(), resume=True)
    Trainer(target, tmp_path, Plan())
    with pytest.raises(UserError, match="--resume"):
        Trainer(target, tmp_path, Plan())
    other = random_model("llama", 3, vocab=300, dtype=torch.float32, num_hidden_layers=4, hidden_size=64)
    with pytest.raises(UserError, match="another target"):
        Trainer(Model("other", other, tokenizer, "fp32", frozenset(), 256, 300), tmp_path, Plan(), resume=True)


@pytest.mark.parametrize("beginning", [{"resume": True}, {}])
def test_a_head_stays_of_its_kind(target, tmp_path, short, beginning):
    first = Trainer(target, tmp_path / "first", Plan(tokens=500, kind="dspark"))
    run_to_end(first)
    export(first, tmp_path / "first")
    out = tmp_path / ("first" if beginning else "second")
    head = None if beginning else tmp_path / "first"
    with pytest.raises(UserError, match="of the kind dspark; it cannot become dflash"):
        Trainer(target, out, Plan(tokens=1_000, head=head, kind="dflash"), **beginning)
    trainer = Trainer(target, out, Plan(tokens=1_000, head=head), **beginning)
    assert (kind_of(trainer.config), trainer.plan.kind) == ("dspark", "dspark")
    assert run_to_end(trainer)[-1].visits >= 1_000


BORROWING = {
    "P-EAGLE": (HeadConfig, {"mask_id": 1, "block_size": 3}, "guesses in parallel"),
    "DFlash": (DFlashConfig, {"mask_id": 1, "block_size": 3, "draft_vocab_size": 300}, "no plain output layer"),
}


@pytest.mark.parametrize("name", BORROWING)
def test_a_head_that_the_loop_cannot_train_gets_a_sentence(target, tmp_path, name):
    make, changes, said = BORROWING[name]
    shape = {field.name: getattr(config_for(target), field.name) for field in fields(Shape)}
    config = make(**shape | changes)
    if make is HeadConfig:
        save_head(HeadNetwork(config), tmp_path / "head")
    else:
        save_block(DFlashNetwork(config), tmp_path / "head", target.layers)
    with pytest.raises(UserError, match=said):
        Trainer(target, tmp_path / "out", Plan(head=tmp_path / "head"))
    assert not (tmp_path / "out").exists()


def test_a_target_of_another_kind_is_refused(tokenizer, tmp_path):
    network = random_model("gpt2", 0, vocab=300, dtype=torch.float32)
    with pytest.raises(UserError, match="Llama's or Qwen's kind"):
        Trainer(Model("odd", network, tokenizer, "fp32", frozenset(), 256, 300), tmp_path, Plan())


@pytest.fixture
def train(capsys, pair_folder, tmp_path):
    def run(*arguments):
        try:
            out = ["--out", str(tmp_path / "head"), "--device", "cpu"]
            status = main(["train-head", "--target", str(pair_folder / "target"), *out, *arguments])
        except SystemExit as left:
            status = left.code
        return status, capsys.readouterr().err

    return run


def test_the_command_trains_and_resumes(train, tmp_path, short):
    status, told = train("--tokens", "2000")
    assert status == 0 and "tokens a pass" in told, told
    assert (tmp_path / "head" / "model.safetensors").exists()
    assert train("--tokens", "3000")[0] == 2
    assert train("--tokens", "3000", "--resume")[0] == 0


HOSTILE = {
    "empty": (b"", "no prompts"),
    "blank": (b" \n\n\t\n", "no prompts"),
    "not text": (b"\xff\xfe\x00\x81", "not a file of prompts"),
    "longer than the model reads": (b"word " * 4000, "leaves no room"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_prompts_file_gets_one_sentence(train, tmp_path, name):
    content, said = HOSTILE[name]
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    status, told = train("--tokens", "2000", "--prompts", str(file))
    last = told.strip().splitlines()[-1]
    assert status == 2 and said in last and "Traceback" not in told


@pytest.mark.parametrize(
    "arguments", [("--hours", "0"), ("--hours", "nan"), ("--tokens", "0"), ("--prompts", "nowhere")]
)
def test_bad_arguments_get_one_line(train, arguments):
    status, told = train(*arguments)
    assert status == 2 and len(told.strip().splitlines()) == 1
