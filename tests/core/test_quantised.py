"""Pairs in 4-bit through the real path: lossless against the quantised target, whatever its shape and however saved."""

import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from test_loading import spoil_config
from test_nf4 import save_nf4
from tiny import make_tokenizer, random_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from core.errors import UserError
from core.lanes import open_lane
from core.loading import load_model, load_pair, precision
from core.loading.model import Model
from core.loading.precision import Format, choose_format, placed
from core.progress import silent
from core.records import Settings
from core.runners.dynamic import DynamicRunner
from core.runners.graph import fused_for, why_not_device
from core.runners.static_layers import StaticNetwork

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROMPT = "the quick brown fox"
NEW = 16
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Whole blocks for bitsandbytes' fused kernel; ODD are not."""
ODD = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 12}
SHAPES = {
    "llama": ("llama", SIZES),
    "padded": ("qwen2", {**SIZES, "vocab": 384}),
    "tied": ("qwen3", {**SIZES, "tie_word_embeddings": True}),
    "odd": ("llama", ODD),
    "mixture of experts": ("mixtral", SIZES),
    "windows": ("gemma3_text", SIZES),
    "convolutions for linears": ("gpt2", {"n_embd": 64}),
}


@pytest.fixture(scope="module")
def words():
    return make_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, words):
    """Folder of a shape in float32, made once."""
    made = {}

    def folder(shape):
        if shape not in made:
            architecture, changes = SHAPES[shape]
            made[shape] = tmp_path_factory.mktemp("model")
            network = random_model(architecture, 5, dtype=torch.float32, **{"vocab": len(words), **changes})
            network.save_pretrained(made[shape], max_shard_size="100KB" if shape == "llama" else "5GB")
            words.save_pretrained(made[shape])
        return made[shape]

    return folder


def written(pair, method, **changes):
    settings = Settings(method=method, max_new_tokens=NEW, ignore_eos=True, **changes)
    with open_lane(pair, PROMPT, settings) as lane:
        for _ in lane:
            pass
    return lane.run


def generated(model):
    """What transformers writes with the same quantised network, kept from rows that are padding."""
    padding = list(range(model.vocab_size, model.config.vocab_size))
    ids = torch.tensor([model.tokenizer.encode(PROMPT)])
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    out = model.network.generate(ids, suppress_tokens=padding, **options)
    return out[0, ids.shape[1] :].tolist()


def assert_generated(model, ids):
    """The greedy ids are transformers' own, up to where its two likeliest logits are closer than its 16-bit rounding:
    ours rounds the residual stream to 32 bits, so a tie may fall the other way."""
    theirs = generated(model)
    if ids == theirs:
        return
    parted = next(i for i, (ours, other) in enumerate(zip(ids, theirs)) if ours != other)
    prompt = model.tokenizer.encode(PROMPT)
    logits = model.network(torch.tensor([prompt + theirs[:parted]])).logits[0, -1].float()
    gap = logits[theirs[parted]] - logits[ids[parted]]
    assert gap <= 2**-6 * logits.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_lossless_against_the_quantised_target(saved, shape):
    """Greedy text of the pair is the quantised target's own, as transformers writes it and as plain decoding does."""
    name = str(saved(shape))
    pair = load_pair(Settings(target=name, draft=str(saved("llama")), precision="nf4", draft_precision="fp32"))
    assert (pair.target.precision, pair.draft.precision) == ("nf4", "fp32")
    fewer = pair.target.weight_bytes() < load_model(name, CPU, "bf16").weight_bytes()
    assert fewer == (shape != "odd")  # the native pass has rows of no whole blocks in 16 bits
    plain = written(pair, "plain")
    speculative = written(pair, "draft", draft_length=3)
    assert speculative.token_ids == plain.token_ids
    assert_generated(pair.target, plain.token_ids)
    if pair.target.runner_kind == "native":  # on CUDA, where its passes are captured
        assert isinstance(fused_for(pair.target.load_again()), StaticNetwork)
    assert {t.outcome for r in speculative.rounds for t in r.drafted} & {"accepted", "rejected"}


def test_sharded_files_are_counted_together(saved):
    folder = saved("llama")
    assert len(list(folder.glob("*.safetensors"))) > 2
    told = []
    load_model(str(folder), CPU, "nf4", progress=told.append)
    first, last = told[0], told[-1]
    assert first.startswith(f"Reading {folder}: ")
    done, total = last.removeprefix(f"Reading {folder}: ").split(" of ")
    assert done == total
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert float(total.split()[0]) == pytest.approx(size / 1000, rel=0.05)


def save_in(source, folder, **quantisation):
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    if quantisation.get("load_in_8bit"):
        options = BitsAndBytesConfig(**quantisation)
        AutoModelForCausalLM.from_pretrained(source, quantization_config=options).save_pretrained(folder)
    else:
        save_nf4(source, folder, double=True)
    return folder


def test_a_checkpoint_saved_in_nf4_is_taken_as_it_is(saved, tmp_path):
    """Automatically, with its own draft in another precision, and lossless."""
    folder = save_in(saved("llama"), tmp_path / "nf4")
    pair = load_pair(Settings(target=str(folder), draft=str(folder), draft_precision="bf16"))
    assert (pair.target.precision, pair.draft.precision) == ("nf4", "bf16")
    plain = written(pair, "plain").token_ids
    assert written(pair, "draft").token_ids == plain
    assert_generated(pair.target, plain)


def test_a_checkpoint_saved_in_int8_is_taken_as_it_is_and_says_so(saved, tmp_path):
    folder = save_in(saved("llama"), tmp_path / "int8", load_in_8bit=True)
    model = load_model(str(folder), CPU, "bf16")
    assert model.precision == "int8"
    assert model.notes == ["The weights were saved in int8 and are taken as they are, not in bf16."]
    pair = load_pair(Settings(target=str(folder), draft=str(saved("llama"))))
    assert written(pair, "draft").token_ids == written(pair, "plain").token_ids


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_formats_that_need_a_package_are_named(saved, tmp_path, method):
    folder = shutil.copytree(saved("llama"), tmp_path / "model")
    spoil_config(quantization_config={"quant_method": method, "bits": 4, "group_size": 64})(folder)
    with pytest.raises(UserError, match=rf"was quantised with {method}, which needs a package") as caught:
        load_model(str(folder), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "version, reason", [(None, "bitsandbytes is not installed"), ("0.49.1", "bitsandbytes 0.49.1 is older than 0.50")]
)
def test_without_bitsandbytes_nf4_becomes_16_bits_and_says_so(saved, monkeypatch, version, reason):
    """Also for weights that were saved in NF4, which are then unpacked."""

    def found(package):
        if version is None:
            raise precision.PackageNotFoundError
        return version

    monkeypatch.setattr(precision, "version", found)
    model = load_model(str(saved("llama")), CPU, "nf4")
    assert model.precision == "bf16"
    (note,) = model.notes
    assert re.match(reason, note)
    assert "three and a half times the memory" in note
    saved_in_nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert not choose_format("auto", CPU, saved_in_nf4).taken_as_saved
    with pytest.raises(UserError, match="these weights were saved in its int8 format"):
        choose_format("auto", CPU, {"load_in_8bit": True})


def test_a_gpu_without_bf16_computes_in_fp16(monkeypatch):
    monkeypatch.setattr("core.loading.precision.sixteen_bits", lambda device: "fp16")
    monkeypatch.setattr("core.loading.precision.nf4_obstacle", lambda device: None)
    assert choose_format("auto", CUDA, None).dtype == torch.float16
    chosen = choose_format("bf16", CUDA, None)
    assert (chosen.precision, chosen.notes) == ("fp16", ["This device has no bf16, so the weights are in fp16."])


def test_an_apple_gpu_takes_16_bits(monkeypatch):
    """Without a word where nobody asked for NF4, with the consequence where somebody did."""
    monkeypatch.setattr("core.loading.precision.sixteen_bits", lambda device: "bf16")
    mps = torch.device("mps")
    assert choose_format("auto", mps, None) == choose_format("bf16", mps, None)
    assert "no 4-bit kernel for this Apple GPU" in choose_format("nf4", mps, None).notes[0]


@pytest.mark.parametrize(
    "needed, free, expected",
    [(10, [20], "one"), (10, [20, 20], "one"), (30, [20, 20], "spread"), (30, [20], None), (39, [20, 20], None)],
)
def test_one_gpu_where_it_fits_else_all_of_them(needed, free, expected):
    assert placed(needed, free) == expected


def test_a_target_over_two_cards_runs_without_graphs(saved, monkeypatch):
    """A CPU stands in for both: accelerate's hooks carry what passes from one part to the next, as they do between
    cards; trees, early exit and a head's features go through them too, and the reason is told."""
    folder = Path(saved("llama"))
    config = AutoConfig.from_pretrained(folder)
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    load = partial(precision.load_network, folder, "m", config, CPU, Format("fp32", torch.float32), "one", silent)
    spread = dispatch_model(load(), dict.fromkeys(parts, "cpu"), force_hooks=True)
    assert hasattr(spread.model.layers[0], "_hf_hook")
    here = torch.nn.Parameter(torch.empty(1))
    two = SimpleNamespace(parameters=lambda: iter([here, torch.nn.Parameter(torch.empty(1, device="meta"))]))
    monkeypatch.setattr("core.loading.model.why_not_device", lambda network: why_not_device(two))
    monkeypatch.setattr("core.loading.model.why_not", lambda network: "its weights are to stay as they are")
    model = Model("m", spread, None, "fp32", frozenset(), 64, config.vocab_size)
    model._capture_passes()
    assert model.runner_kind == "dynamic (the model is spread over 2 devices)"
    whole = DynamicRunner(load(), config.vocab_size)
    ids = torch.arange(12) + 1
    with model.lease() as runner:
        features = [each.watch([1, 2]) for each in (whole, runner)]
        for feed in (lambda r: r.feed(ids[:8]), lambda r: r.feed(ids[8:], [-1, 0, 0, 1]), lambda r: r.keep([0, 2])):
            one, other = feed(whole), feed(runner)
            assert one is None or torch.equal(one, other)
        assert torch.equal(features[0].take(10), features[1].take(10))
        assert torch.equal(whole.view(1).feed(ids[:2]), runner.view(1).feed(ids[:2]))
    model.precision = "int4"
    monkeypatch.setattr(Model, "device", torch.device("cuda"))
    with pytest.raises(UserError, match="in int4: the model is spread over 2 devices; choose nf4 or bf16"):
        model._capture_passes()


def test_memory_that_is_not_there_is_said_before_anything_is_allocated(saved, monkeypatch):
    asked, free = [], [1000]
    monkeypatch.setattr("core.loading.free_by_device", lambda device: list(free))
    settings = Settings(target=str(saved("llama")), precision="fp32")
    with pytest.raises(UserError, match=r"needs \d+ kB of memory for weights alone, and 1\.0 kB are free") as caught:
        load_pair(settings, make_room=asked.append)
    assert "\n" not in str(caught.value)
    assert len(asked) == 1
    assert load_pair(settings, make_room=lambda lacking: free.insert(0, 10**9)).target


def test_running_out_of_memory_while_loading_says_what_was_needed(saved, monkeypatch):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("core.loading.load_network", exhausted)
    with pytest.raises(UserError, match=r"needs \d+ kB of memory for weights alone, and .* are free"):
        load_pair(Settings(target=str(saved("llama")), precision="fp32"))
