"""The recipe from scratch, tiny: sources of this machine -> corpus, tokenizer, training, folders transformers loads."""

import json
import math
import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from assets.pocket.recipe import corpus
from assets.pocket.recipe.export import build_model, select_model
from assets.pocket.recipe.heldout import choose_prompts
from assets.pocket.recipe.model import Llama
from assets.pocket.recipe.quantise import list_matrices, round_to_nf4, shipped_weights
from assets.pocket.recipe.schedule import choose_length, scale_rate
from assets.pocket.recipe.settings import Recipe, Shape
from assets.pocket.recipe.stages import Stages
from assets.pocket.recipe.tokenizer import load_tokenizer
from assets.pocket.recipe.train import CHECKPOINT, LOG
from assets.pocket.recipe.windows import encode_corpus

TINY = Recipe(
    target=Shape(width=128, layers=4, heads=2, kv_heads=1, mlp=256, vocabulary=2048),
    drafts={"draft1": Shape(width=64, layers=1, heads=1, kv_heads=1, mlp=128, vocabulary=2048)},
    exit_layer=1,
    tokens=36_000,
    batch_tokens=1024,
    short_sequence=128,
    sequence=256,
    long_sequences=(512, 1024),
    warmup_tokens=4_000,
    evaluate_every=10,
    held_out_windows=8,
    finish_tokens=4_000,
    sampled_texts=4,
    sampled_prompt=16,
    sampled_length=33,
)


@cache
def encode_once(file, tokenizer_file):
    """Every stage encodes the same texts with the same tokenizer, which took longer than training on them."""
    return encode_corpus(file, load_tokenizer(tokenizer_file.parent))


@pytest.fixture(scope="module")
def stages(tmp_path_factory, request):
    """A tiny recipe that has run up to its export, on a corpus of a few packages and a few of the standard library's
    modules."""
    patch = pytest.MonkeyPatch()
    patch.setattr(corpus, "PACKAGES", ("click", "h11", "packaging", "uvicorn"))
    patch.setattr(corpus, "PARTS", ())
    modules = [each for each in corpus.list_files() if each[0] == corpus.STDLIB and each[1] == each[2].parent]
    files = [each for each in corpus.list_files() if each[0] != corpus.STDLIB] + modules[::4]
    patch.setattr(corpus, "list_files", lambda: files)
    patch.setattr(
        "assets.pocket.recipe.stages.encode_corpus",
        lambda file, _: encode_once(file.resolve(), (file.parents[1] / "tokenizer" / "tokenizer.json").resolve()),
    )
    folder = tmp_path_factory.mktemp("pocket")
    made = Stages(TINY, folder / "work", folder / "out", torch.device("cpu"), compiled=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    for stage in (made.corpus, made.tokenizer, made.train, made.finish, made.export):
        stage()
    yield made
    torch.set_num_threads(threads)
    patch.undo()


def read_log(stages: Stages) -> list[dict]:
    return [json.loads(line) for line in (stages.work / LOG).read_text().splitlines()]


def test_training_learns(stages):
    losses = [entry["loss"] for entry in read_log(stages) if "tokens" in entry]
    assert losses[0] > 0.9 * math.log(TINY.target.vocabulary) and losses[-1] < losses[0] - 1.5


def test_drafters_follow_the_target(stages):
    scores = [entry["held_out"] for entry in read_log(stages) if "held_out" in entry]
    assert scores[-1]["target"]["nats"] < scores[0]["target"]["nats"]
    for drafter in ("exit", "draft1"):
        assert 0.3 < scores[-1][drafter]["overlap"] <= 1


def test_training_resumes_where_it_stopped(stages, tmp_path):
    """Ten steps at once, and five then five in a new process's place, end in the same weights."""
    for folder in ("corpus", "tokenizer"):
        for place in ("once", "twice"):
            (tmp_path / place).mkdir(exist_ok=True)
            (tmp_path / place / folder).symlink_to(stages.work / folder)
    run = {
        place: Stages(TINY, tmp_path / place, tmp_path, torch.device("cpu"), compiled=False)
        for place in ("once", "twice")
    }
    run["once"].train(steps=6)
    run["twice"].train(steps=3)
    run["twice"].train(steps=6)
    first, second = (torch.load(tmp_path / place / CHECKPOINT, weights_only=True) for place in ("once", "twice"))
    assert first["progress"]["cursor"] == second["progress"]["cursor"]
    for name, value in first["pair"].items():
        torch.testing.assert_close(value, second["pair"][name], rtol=0, atol=1e-5)


def test_tokenizer_round_trips_any_text(stages):
    tokenizer = load_tokenizer(stages.work / "tokenizer")
    dice = random.Random(0)
    texts = ["", " ", "\n\n  \n", "\tx\r\ny", "def f():\n    return 'é漢🙂'\n", "a   b", "\x00\x7f", "<|endoftext"]
    texts += [
        "".join(chr(dice.choice((dice.randrange(32, 127), dice.randrange(0x3000)))) for _ in range(40))
        for _ in range(200)
    ]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) <= TINY.target.vocabulary


def test_newlines_stand_alone(stages):
    tokenizer = load_tokenizer(stages.work / "tokenizer")
    pieces = [tokenizer.decode([i]) for i in tokenizer.get_vocab().values()]
    assert [piece for piece in pieces if "\n" in piece] == ["\n"]
    head = tokenizer("def f(x):\n").input_ids
    whole = tokenizer("def f(x):\n        return x\n").input_ids
    assert whole[: len(head)] == head
    assert tokenizer.decode([whole[len(head)]]) == "        "


def test_nothing_held_out_was_trained_on(stages):
    training = corpus.read_corpus(stages.work / "corpus" / "training.jsonl")
    held_out = corpus.read_corpus(stages.work / "corpus" / "held_out.jsonl")
    assert {"h11", "uvicorn"} <= {d.package for d in held_out}
    assert not {"h11", "uvicorn"} & {d.package for d in training}
    known = set().union(*(corpus.shingle(d.text) for d in training))
    for document in held_out:
        shingles = corpus.shingle(document.text)
        assert len(shingles & known) <= 0.05 * len(shingles)


def test_copies_are_dropped():
    text = "\n".join(f"value_{i} = compute({i})" for i in range(40))
    documents = [corpus.Document("a", "x.py", text), corpus.Document("b", "y.py", "import os\n" + text)]
    assert corpus.drop_copies(documents, set(), 0.3) == documents[:1]


@pytest.mark.parametrize("name", ["target", "draft1"])
def test_export_loads_as_an_ordinary_model(stages, name):
    folder = stages.work / "nf4" / name
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert isinstance(model, LlamaForCausalLM) and model.is_loaded_in_4bit
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer("<|endoftext|>").input_ids[0]
    found = model.generate(**tokenizer("def f(x):\n", return_tensors="pt"), max_new_tokens=8)
    assert found.shape[1] > tokenizer("def f(x):\n", return_tensors="pt").input_ids.shape[1]


def test_transformers_computes_the_same(stages):
    state = torch.load(stages.work / CHECKPOINT, weights_only=True)
    weights = select_model(state["pair"], "target.")
    ours = Llama(TINY.target)
    ours.load_state_dict(weights)
    ids = torch.randint(0, TINY.target.vocabulary, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = build_model(TINY.target, weights, 0)(ids).logits
        torch.testing.assert_close(ours.unembed(ours(ids, (), torch.float32)[-1]), expected, rtol=0, atol=1e-3)


def test_nf4_rounding_is_that_of_bitsandbytes():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=False)
    torch.testing.assert_close(round_to_nf4(weight), dequantize_4bit(packed, state), rtol=0, atol=1e-6)


def test_shipped_weights_come_and_go():
    model = Llama(TINY.drafts["draft1"])
    before = [p.detach().clone() for p in list_matrices(model)]
    with shipped_weights(model, active=True, compiled=False):
        for p, value in zip(list_matrices(model), before, strict=True):
            assert torch.equal(p, round_to_nf4(value))
    assert all(torch.equal(p, value) for p, value in zip(list_matrices(model), before, strict=True))


def test_schedule_rises_stays_and_falls():
    recipe = Recipe(tokens=10_000_000)
    rates = [scale_rate(recipe, done) for done in (0, 1_000_000, 7_000_000, 8_750_000, 10_000_000)]
    assert rates[0] < 0.05 and rates[1:] == [1.0, 1.0, pytest.approx(0.5), 0.0]
    assert [choose_length(recipe, done, 0) for done in (0, 5_000_000, 9_000_000)] == [256, 512, 1024]


def test_held_out_prompts_end_where_a_line_does(stages):
    prompts = choose_prompts(corpus.read_corpus(stages.work / "corpus" / "held_out.jsonl"), 5)
    assert len(prompts) == len(set(prompts)) == 5
    assert all(prompt.endswith("\n") and prompt.startswith(("def ", "class ", "async def ", "@")) for prompt in prompts)
