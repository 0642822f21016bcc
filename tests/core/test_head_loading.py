"""A head as the draft of a pair: recognised, checked against its target, found where it is bundled, run, recorded."""

import json
import math
from pathlib import Path

import pytest
import torch
from heads import random_head
from tiny import CONTEXT, PADDED, make_tokenizer, random_model

import core.loading.head
from core.costs import MEASURED_LENGTHS, CostTable
from core.drafting.build import available
from core.errors import UserError
from core.heads.checkpoint import bytes_in_memory, read_config, save_head
from core.inspecting import inspect_pair
from core.inspecting.devices import find_card, predict_on
from core.lanes import open_lane, repeat
from core.loading import load_pair, read_source
from core.loading.head import identify
from core.loading.precision import SLACK
from core.measuring.sweep import finish, sweep
from core.records import run_from_dict
from core.runners.library import native_obstacle
from core.settings import Settings
from core.text import Prompt

WORDS = list(range(256))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    network = random_model("llama", 7, PADDED, torch.float32, max_position_embeddings=CONTEXT, num_hidden_layers=6)
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def head(tmp_path):
    return made(tmp_path / "head")


def made(folder, **changes):
    network = random_head(**{"vocab_size": PADDED, "ids": WORDS, "aux_layers": (2, 3, 4), **changes})
    save_head(network, folder, torch.float32)
    return str(folder)


def settings(target, draft=None, **changes):
    return Settings(target, draft, device="cpu", precision="fp32", chat="off", max_new_tokens=12, **changes)


def run(pair, wanted):
    with open_lane(pair, "the quick brown fox", wanted, tops=2) as lane:
        for _ in lane:
            pass
        return lane.run


def test_a_folder_with_a_head_is_a_draft(target, head):
    """`--draft` takes it; the default method `draft` means it; the run records it and is the target's own text."""
    wanted = settings(target, head, draft_length=3)
    pair = load_pair(wanted)
    assert pair.draft is None and pair.head is not None and pair.head.layers == (2, 3, 4)
    assert available(pair)["head"] is None and "method is head" in available(pair)["draft"]
    found = run(pair, wanted)
    assert found.settings.method == "head"
    assert found.environment["head"]["name"] == head
    assert found.environment["head"]["layers"] == [2, 3, 4]
    drafted = [token for round_ in found.rounds for token in round_.drafted]
    assert drafted and all(token.top_draft[0].id == token.id for token in drafted)
    assert found.token_ids == run(pair, settings(target, method="plain")).token_ids


def test_room_is_sought_for_the_head_too(target, head, monkeypatch):
    """As much as its weights and what passes read of them take at most; with a byte less nothing is loaded."""
    sought = bytes_in_memory(Path(head), head, torch.float32)
    loaded = load_pair(settings(target, head)).head
    assert loaded.precision == "fp32" and 0 < loaded.weight_bytes() <= sought
    needed = read_source(target, torch.device("cpu"), "fp32", None, "target").bytes + sought
    free = [math.ceil(needed * SLACK)]
    monkeypatch.setattr("core.loading.free_by_device", lambda device: list(free))
    assert load_pair(settings(target, head)).head
    free[0] -= 2
    with pytest.raises(UserError, match="and its trained head need"):
        load_pair(settings(target, head))


def test_the_length_is_found_by_measured_costs(target, head):
    pair = load_pair(settings(target, head))
    found = run(pair, settings(target, head, method="head", temperature=1.0))
    assert pair.head.costs.read(2) > 0 and pair.head.costs.draft(1) > 0
    assert len(found.token_ids) == 12 or found.stop_reason == "eos"


def test_a_head_s_draft_length_can_be_swept(target, head):
    chosen = settings(target, head, method="head")
    document = finish(sweep(load_pair(chosen), [Prompt("fox", "the quick brown fox")], chosen, [2], [0.0]))
    assert [point["draft_length"] for point in document["points"]] == [2, "auto"]
    assert document["points"][0]["mean_drafted"] > 1 and document["best"][0]["batches"]


@pytest.mark.parametrize("method", ["head", "head-tree", "ngram+head"])
def test_a_run_with_a_head_is_repeated_under_other_costs(target, head, method):
    """Depth and number of nodes are the document's, whatever a pass over several tokens costs now."""
    wanted = settings(target, head, method=method, temperature=1.0, ignore_eos=True)
    pair = load_pair(wanted)
    pair.target.costs = CostTable({n: 1 + 0.001 * n for n in MEASURED_LENGTHS})
    then = run_from_dict(run(pair, wanted).to_dict())
    pair.target.costs = CostTable({n: float(n) for n in MEASURED_LENGTHS})
    other = run(pair, wanted)
    now, difference = repeat(pair, then)
    assert difference is None
    assert [len(r.drafted) for r in now.rounds] == [len(r.drafted) for r in then.rounds]
    assert [len(r.drafted) for r in other.rounds] != [len(r.drafted) for r in then.rounds]


def test_padding_cannot_be_proposed(target, tmp_path):
    """Ids of the target's matrix past its tokenizer's are no tokens."""
    pair = load_pair(settings(target, made(tmp_path, ids=list(range(200, PADDED)))))
    assert int(pair.head.fused.target_ids.max()) < pair.target.vocab_size < PADDED
    logits = pair.head.fused.logits(torch.ones(1, pair.head.fused.config.hidden_size))
    assert logits.shape == (1, len(pair.head.fused.target_ids))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"target_hidden_size": 48, "own_embedding": True}, "another target: one of hidden size 48 and 384 tokens"),
        ({"vocab_size": 300}, "another target: one of hidden size 32 and 300 tokens"),
        ({"aux_layers": (2, 5, 9)}, "reads 3 layers that .* with its 6 layers has not"),
    ],
)
def test_a_head_for_another_target_is_refused(target, tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        load_pair(settings(target, made(tmp_path, **changes)))


def test_without_a_head_the_method_says_so(target):
    pair = load_pair(settings(target))
    assert available(pair)["head"] == "no trained head of the target is loaded"
    with pytest.raises(UserError, match="no trained head"):
        open_lane(pair, "a", settings(target, method="head"))


def test_a_bundled_head_is_found_by_its_target(target, tmp_path, monkeypatch):
    """By shape and tokens, whatever the folder is called; another target's is left alone."""
    monkeypatch.setattr(core.loading.head, "BUNDLED", tmp_path)
    pair = load_pair(settings(target))
    assert pair.head is None
    network = random_head(vocab_size=PADDED, ids=WORDS, aux_layers=(2, 3, 4))
    identity = identify(pair.target.config, pair.target.tokenizer)
    save_head(network, tmp_path / "other", target={**identity, "tokenizer": "another"})
    assert load_pair(settings(target)).head is None and inspect_pair(target, precision="fp32").draft is None
    save_head(network, tmp_path / "mine", target={**identity, "name": "someone/model"})
    pair, found = load_pair(settings(target)), inspect_pair(target, precision="fp32")
    assert pair.head.name == found.draft.name == "mine" and found.predictions
    assert any(outlook.gains for outlook in predict_on(find_card("RTX 4070"), target, None).outlooks)
    assert run(pair, settings(target)).settings.method == "ngram+head"


def test_how_layers_are_counted_is_settled_by_measurement(target, head, monkeypatch):
    """Where the config leaves it open, the count that agrees more often is taken, and the notes say so."""
    config = read_config(core.loading.head.Path(head))
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    (core.loading.head.Path(head) / "config.json").write_text(json.dumps(config))
    pair = load_pair(settings(target, head))
    first, second = (
        core.loading.head.measure_agreement(pair.head.fused, pair.target, i) for i in ((2, 3, 4), (3, 4, 5))
    )
    assert pair.head.layers == ((2, 3, 4) if first >= second else (3, 4, 5))
    assert "leaves open" in pair.head.notes[0]
    right = {(2, 3, 4): 0.1, (3, 4, 5): 0.4}
    monkeypatch.setattr(core.loading.head, "measure_agreement", lambda head, target, layers: right[layers])
    pair = load_pair(settings(target, head))
    assert pair.head.layers == (3, 4, 5)
    assert "10% with 2, 3, 4 and 40% with 3, 4, 5" in pair.head.notes[0]


@pytest.mark.parametrize("width, precision", [(48, "fp32"), (64, "int4")])
def test_a_head_is_inspected_before_it_is_loaded(target, tmp_path, width, precision):
    """Sizes from its headers, in 4 bits where the kernel takes its shapes; what it reads and proposes; and a head for
    another target is refused there too."""
    head = made(tmp_path / "head", intermediate_size=width)
    found = inspect_pair(target, head, device="cpu", precision="fp32")
    pair = load_pair(settings(target, head))
    assert found.draft.precision == pair.head.precision == ("fp32" if native_obstacle() else precision)
    asked = load_pair(settings(target, head, draft_precision="bf16")).head
    assert asked.precision == "bf16" == inspect_pair(target, head, device="cpu", draft_precision="bf16").draft.precision
    with pytest.raises(UserError, match="cannot be had in nf4 here; choose auto, bf16 or fp32"):
        load_pair(settings(target, head, draft_precision="nf4"))
    assert (found.draft.model_type, found.draft.layers) == ("EAGLE-3 head", 1)
    assert found.draft.parameters == pair.head.parameter_count()
    assert found.draft.weight_bytes == pair.head.weight_bytes()
    assert found.likeness.sentence.startswith("A trained head: it reads what enters layers 2, 3, 4 and proposes 256 of")
    file = Path(head) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target": {"name": "owner/tuned"}}))
    told = inspect_pair(target, head, device="cpu", precision="fp32").likeness.sentence
    assert told.startswith("A trained head of owner/tuned: it reads"), "one that it runs with may be another"
    assert found.predictions and found.level != "bad"
    other = inspect_pair(target, made(tmp_path / "other", vocab_size=300), device="cpu", precision="fp32")
    assert other.level == "bad" and "a head for another target" in other.verdict[0]
    json.dumps(found.to_dict())
