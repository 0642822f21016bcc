"""Folders into models: every precision, and one clear sentence for everything a person can get wrong."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_nf4 import save_nf4
from tiny import make_tokenizer, random_model
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import UserError
from core.inspecting import inspect_pair
from core.inspecting.files import preview
from core.loading import hub, load_model, load_pair, refuse_unsupported
from core.records import Settings

CPU = torch.device("cpu")
IDS = torch.tensor([1, 2, 3, 4])


def logits_of(folder, precision="fp32"):
    with load_model(str(folder), CPU, precision).lease() as runner:
        return runner.feed(IDS).float()


@pytest.fixture
def folder(pair_folder, tmp_path):
    """A copy of the target to spoil."""
    return shutil.copytree(pair_folder / "target", tmp_path / "model")


@pytest.mark.parametrize("precision, tolerance", [("fp32", 0.05), ("bf16", 0.2), ("fp16", 0.1), ("nf4", 0.6)])
def test_precision(pair_folder, precision, tolerance):
    """Each precision computes the model's law, to its rounding; the vocabulary is cut to the tokenizer's."""
    model = load_model(str(pair_folder / "target"), CPU, precision)
    network = AutoModelForCausalLM.from_pretrained(pair_folder / "target", dtype=torch.float32)
    exact = network(IDS[None]).logits[0, :, : model.vocab_size].softmax(-1)
    assert model.precision == precision
    assert model.vocab_size == len(model.tokenizer) < network.config.vocab_size
    with model.lease() as runner:
        law = runner.feed(IDS).float().softmax(-1)
    assert (law - exact).abs().sum(-1).mean() / 2 < tolerance  # total variation


def test_costs_are_measured_at_once_or_when_they_are_asked_for(pair_folder):
    settings = Settings(target=str(pair_folder / "target"), draft=str(pair_folder / "draft"), device="cpu")
    pair = load_pair(settings, measure=False)
    assert pair.target.costs is None and pair.draft.costs is None
    pair.measure_costs()
    assert pair.target.costs and pair.draft.costs
    assert load_pair(settings).target.costs


def test_auto_is_four_bits_on_a_cpu_with_a_native_pass(pair_folder, monkeypatch):
    assert load_model(str(pair_folder / "draft"), CPU).precision == "int4"
    monkeypatch.setattr("core.loading.precision.int4_obstacle", lambda device: "there is no compiler")
    assert load_model(str(pair_folder / "draft"), CPU).precision == "bf16"


def test_prequantised_folder(pair_folder, folder):
    """Saved in NF4: loaded as it is, or unpacked to the same weights in another precision."""
    tokenizer = load_model(str(folder), CPU, "fp32").tokenizer
    shutil.rmtree(folder)
    save_nf4(pair_folder / "target", folder, double=True)
    tokenizer.save_pretrained(folder)
    packed, unpacked = logits_of(folder, "nf4"), logits_of(folder, "fp32")
    assert load_model(str(folder), CPU, "nf4").weight_bytes() < load_model(str(folder), CPU, "bf16").weight_bytes()
    difference = (packed.softmax(-1) - unpacked.softmax(-1)).abs().sum(-1) / 2
    assert difference.mean() < 0.1


def test_sharded_weights(pair_folder, folder):
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(pair_folder / "target").save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits_of(folder), logits_of(pair_folder / "target"))


@pytest.mark.parametrize("prequantised", [False, True])
def test_tied_embeddings(tmp_path, tokenizer, prequantised):
    """The head is the embedding, also where packed weights are unpacked by hand."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    network = random_model("llama", 3, vocab=320, dtype=torch.float32, tie_word_embeddings=True, **sizes)
    network.save_pretrained(tmp_path)
    if prequantised:
        save_nf4(tmp_path, tmp_path, double=True)
    tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), CPU, "fp32")
    embedding = network.get_input_embeddings().weight
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(model.network.get_output_embeddings()(hidden), hidden @ embedding.t())
    torch.testing.assert_close(model.network.get_input_embeddings().weight, embedding)


def test_stop_ids_come_from_all_places(folder, tokenizer):
    """Generation config (one or several), config and tokenizer."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(str(folder), CPU, "fp32").stop_ids == {5, 6, tokenizer.eos_token_id}


def spoil_config(**changes):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def broken_json(folder):
    (folder / "config.json").write_text("{not json")


def corrupted(folder):
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage garbage")


def cut_short(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def lacks_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("[]")


def broken_generation_config(folder):
    (folder / "generation_config.json").write_text("{not json")


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SPOILED = [
    (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    (lambda f: (f / "model.safetensors").unlink(), r"has no \.safetensors weights"),
    (only_pickle, r"weights only as pickle files"),
    (broken_json, r"cannot be read|cannot be loaded"),
    (corrupted, r"cannot be read"),
    (cut_short, r"cannot be read"),
    (lacks_a_weight, r"model\.layers\.2\.mlp\.up_proj\.weight"),
    (missing_shard, r"cannot be (read|loaded)"),
    (no_tokenizer, r"tokenizer"),
    (broken_tokenizer, r"cannot be (read|loaded)"),
    (spoil_config(model_type="nonesuch"), r"cannot be loaded: .*nonesuch"),
    (spoil_config(hidden_size=96), r"weights do not fit its config"),
    (spoil_config(layer_types=["full_attention"]), r"cannot be loaded"),
    (spoil_config(pad_token_id=10**6), r"cannot be loaded"),
    (spoil_config(num_key_value_heads=0), r"cannot be loaded"),
    (spoil_config(num_hidden_layers=0), r"cannot be loaded"),
    (broken_generation_config, r"cannot be read"),
    (spoil_config(model_type="t5", is_encoder_decoder=True), r"encoder-decoder"),
    (spoil_config(model_type="nonesuch", auto_map={"AutoConfig": "evil.Config"}), r"cannot be (read|loaded)"),
]


@pytest.mark.parametrize("spoil, sentence", SPOILED)
def test_spoiled_folder(folder, spoil, sentence):
    """One line that says what is wrong with which model."""
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        load_model(str(folder), CPU, "fp32")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "entry", [{"num_key_value_heads": 0}, {"pad_token_id": 10**6}, {"use_sliding_window": True, "sliding_window": "x"}]
)
def test_a_config_that_cannot_be_is_told_before_anything_is_loaded(folder, entry):
    spoil_config(**entry)(folder)
    with pytest.raises(UserError, match="cannot be loaded"):
        inspect_pair(str(folder), device="cpu")


def test_weights_that_were_cut_short_are_told_before_they_are_loaded(folder):
    cut_short(folder)
    with pytest.raises(UserError, match="shorter than its header says"):
        inspect_pair(str(folder), device="cpu")


def test_a_model_larger_than_the_memory_is_a_sentence_for_whoever_loads_it_alone(folder, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 256000000000 bytes.")

    monkeypatch.setattr("core.loading.load_network", no_memory)
    with pytest.raises(UserError, match="of memory for weights alone"):
        load_model(str(folder), CPU, "fp32")


def test_code_of_a_repository_is_never_run(folder):
    """A folder that brings Python files is refused without importing them."""
    spoil_config(model_type="nonesuch", auto_map={"AutoConfig": "evil.Config"})(folder)
    witness = folder / "witness"
    (folder / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(UserError):
        load_model(str(folder), CPU, "fp32")
    assert not witness.exists()


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("./nowhere", r"There is no folder './nowhere'"),
        ("/nowhere/at/all", r"There is no folder"),
        ("one/two/three", r"There is no folder"),
        ("not an id!", r"neither a folder nor a Hub id"),
        ("nobody/nothing", r"not in the local cache and the Hub cannot be reached"),
        ("", r"name of a model is empty"),
    ],
)
def test_names_that_lead_nowhere(name, sentence, monkeypatch):
    """Missing folders, malformed ids, and ids without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=sentence):
        load_model(name, CPU)


def test_unknown_precision(pair_folder):
    with pytest.raises(
        UserError, match="There is no precision 'int3'; choose one of auto, nf4, int4, bf16, fp16, fp32"
    ):
        load_model(str(pair_folder / "target"), CPU, "int3")


@pytest.mark.parametrize("device", ["cuda", "mps", "tpu"])
def test_device_that_is_not_there(pair_folder, device):
    with pytest.raises(UserError, match=r"device|GPU"):
        load_pair(Settings(target=str(pair_folder / "target"), device=device))


def test_equal_size_is_not_the_same_vocabulary(pair_folder, folder):
    """As many tokens, with other meanings: never fed to each other as they are."""
    make_tokenizer("zyx wvu tsr qpo " * 20).save_pretrained(folder)
    target = str(pair_folder / "target")
    pair = load_pair(Settings(target=target, draft=str(folder), precision="fp32", device="cpu"))
    assert pair.translation is not None
    assert load_pair(Settings(target=target, draft=target, precision="fp32", device="cpu")).translation is None


STATEFUL = ("mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "jamba", "bamba", "zamba2", "rwkv", "qwen3_next")


@pytest.mark.parametrize("model_type", STATEFUL)
def test_states_that_cannot_be_rolled_back_are_refused(model_type):
    """Recurrent and linear-attention layers keep no entry per token to take back."""
    with pytest.raises(UserError, match="cannot be rolled back when a draft is rejected"):
        refuse_unsupported(AutoConfig.for_model(model_type), "the model")


@pytest.mark.parametrize("model_type, sentence", [("t5", "encoder-decoder"), ("vit", "not one that generates text")])
def test_models_of_another_kind_are_refused(model_type, sentence):
    with pytest.raises(UserError, match=sentence):
        refuse_unsupported(AutoConfig.for_model(model_type), "the model")


ENDLESS = [
    {"num_hidden_layers": 2_000},
    {"num_hidden_layers": 10**400},
    {"n_layer": 1e300},
    {"text_config": {"num_hidden_layers": 10**9}},
]


@pytest.mark.parametrize("entry", ENDLESS, ids=str)
def test_a_config_of_more_layers_than_any_model_has_is_refused_before_one_is_made(entry, tmp_path):
    """Inspected or loaded."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 16, "hidden_size": 4} | entry)
    )
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for look in (preview, partial(load_model, device=torch.device("cpu"))):
        with pytest.raises(UserError, match="more than 1,000 layers"):
            look(str(tmp_path))


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_no_network_is_one_sentence(monkeypatch, library):
    """Whatever HTTP library the Hub's client uses, a host that cannot be reached is not a fault of ours."""
    unreachable = pytest.importorskip(library).ConnectError("Name or service not known")

    def fail(*_, **__):
        raise unreachable

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub.HfApi, "model_info", fail)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(UserError, match="cannot be reached"):
        hub.fetch("nobody/nothing")
