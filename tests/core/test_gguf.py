"""A GGUF file as a model: read, unpacked, converted once; and what becomes of files that are broken or mean harm."""

import json
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from transformers import AutoModelForCausalLM
from written_gguf import HALVES, HEADS, LAYERS, WIDTH, make_network, permuted, random_blocks, write_gguf

from core.__main__ import main
from core.disk import folder_for_now
from core.errors import Cancelled, UserError
from core.inspecting.files import preview
from core.lanes import open_lane, race
from core.loading import conversion, load_pair
from core.loading.conversion import (
    cache_folder,
    cache_size,
    clear_cache,
    convert,
    converted,
    origin,
    requantised,
    unpermuted,
)
from core.loading.gguf import Kind, read_header
from core.settings import Settings
from core.text import encode_prompt

IDS = torch.arange(2, 40).reshape(1, -1)
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test converts anew, and nothing of it stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def logits(network):
    with torch.no_grad():
        return network(IDS).logits


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rounded(network):
    """What we keep of quantised weights: the nearest numbers of 16 bits."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    return network


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_the_logits_are_those_of_the_model_that_was_written(tmp_path, family, kind):
    """Floats come back as they were; in Q8_0 each weight is a 127th of its block's largest off at most."""
    network = write_gguf(tmp_path / "m.gguf", family, kind)
    ours = load(convert(tmp_path / "m.gguf"))
    if kind == "Q8_0":
        for name, weight in ours.state_dict().items():
            assert (weight - network.state_dict()[name]).abs().max() < 0.01
        return
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype).float()
        assert torch.equal(ours.state_dict()[name], parameter), name
    assert torch.allclose(logits(ours), logits(network), atol=1e-5)


@pytest.mark.parametrize("kind", [*QUANTISED, *HALVES])
def test_the_logits_are_transformers_own_on_the_unpacked_weights(tmp_path, kind):
    """transformers' reader of GGUF is the oracle: another parser, another table of names."""
    write_gguf(tmp_path / "m.gguf", kind=kind)
    theirs = rounded(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32))
    ours = load(convert(tmp_path / "m.gguf"))
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)
    assert logits(ours).std() > 0.05
    assert origin(convert(tmp_path / "m.gguf")) == kind


@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_other_families_are_read_by_transformers(tmp_path, family):
    """Not families of ours: what is saved gives the logits of what transformers reads."""
    write_gguf(tmp_path / "m.gguf", family, "F32", make_network(family, 300, tie_word_embeddings=family == "gemma2"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.half().float()
    ours = load(convert(tmp_path / "m.gguf"))
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-4)
    assert preview(str(tmp_path / "m.gguf")).config.model_type == family


def test_rows_are_put_back_in_order():
    values = np.arange(WIDTH * 3).reshape(WIDTH, 3)
    assert (unpermuted(permuted(values, HEADS), HEADS) == values).all()
    assert not (permuted(values, HEADS) == values).all()


def test_a_file_is_converted_once(file):
    folder = convert(file)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(file) == folder == converted(file)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    again = file.rename(file.with_name("another-name.gguf"))
    assert converted(again) == folder, "a file is known by its content"
    assert folder.parent == cache_folder() and not list(folder.parent.glob(".making-*"))


def test_what_was_cut_short_in_the_cache_is_converted_anew(file):
    weights = convert(file) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert converted(file) is None
    convert(file)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_what_was_cleaned_out_of_the_cache_is_converted_anew(file, name):
    """By whoever removes files that nobody has read for long, one by one."""
    (convert(file) / name).unlink()
    assert converted(file) is None
    assert (convert(file) / name).is_file()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space left (os error 28)")])
def test_a_disk_that_fills_up_in_the_middle_is_told_in_a_sentence(file, monkeypatch, error):
    """Whether Python's own code meets it or that of a library in Rust."""

    def strike(*_):
        raise error

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", strike)
    with pytest.raises(UserError, match=r"^The disk is too full to convert tiny\.gguf; free some space, or "):
        convert(file)
    assert cache_size() == 0


def test_another_content_is_another_key(file):
    folder = convert(file)
    with file.open("r+b") as stream:
        stream.seek(-8, 2)
        stream.write(b"\x01" * 8)
    assert converted(file) is None
    assert convert(file) != folder


def test_several_at_once_convert_once(file, monkeypatch):
    made = []
    write = conversion._write
    monkeypatch.setattr(conversion, "_write", lambda *given: (made.append(1), write(*given)))
    found = []
    threads = [threading.Thread(target=lambda: found.append(convert(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4 and len(made) == 1


def test_a_conversion_that_is_stopped_leaves_nothing(file):
    with pytest.raises(Cancelled):
        convert(file, stop=lambda: True)
    assert converted(file) is None and cache_size() == 0


def test_progress_is_told_in_bytes(file):
    told = []
    convert(file, told.append)
    assert re.fullmatch(r"Converting tiny.gguf: (\S+ \S+) of \1", told[-1])


def test_the_cache_is_shown_and_cleared(file, capsys):
    convert(file)
    assert cache_size() > 1_000_000
    assert main(["pairs", "--clear-cache"]) == 0
    assert "Freed" in capsys.readouterr().out
    assert cache_size() == 0 and converted(file) is None


def test_a_file_runs_like_a_folder(file):
    pair = load_pair(Settings(target=str(file), method="ngram", precision="fp32"))
    assert pair.target.origin == "F16" and pair.target.runner_kind == "native"
    lane = open_lane(pair, "the quick brown fox", Settings(method="ngram", max_new_tokens=8, chat="off"))
    for _ in race([lane]):
        pass
    assert lane.run.environment["target"]["origin"] == "F16"
    assert lane.run.token_ids
    assert pair.target.stop_ids == {pair.target.tokenizer.eos_token_id}


def test_the_chat_template_and_the_special_tokens_come_along(file):
    target = load_pair(Settings(target=str(file), precision="fp32")).target
    text = target.tokenizer.decode(encode_prompt(target, "fox", Settings()))
    assert text == "<user>fox<a>"
    assert target.tokenizer.encode("<|end|>") == [target.tokenizer.eos_token_id]


def test_a_folder_may_hold_the_file(file):
    assert load_pair(Settings(target=str(file.parent), precision="fp32")).target.layers == LAYERS
    file.with_name("second.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one of them: second.gguf, tiny.gguf"):
        load_pair(Settings(target=str(file.parent)))


def test_a_file_is_known_by_its_first_bytes_too(file):
    """Ollama's blobs are called by their digest."""
    blob = file.rename(file.with_name("sha256-0123"))
    assert load_pair(Settings(target=str(blob), precision="fp32")).target.layers == LAYERS


def test_inspect_reads_the_header_alone(file, capsys, monkeypatch):
    monkeypatch.setattr(conversion, "_write", lambda *given: pytest.fail("converted for an inspection"))
    assert main(["inspect", "--target", str(file), "--device", "cpu", "--precision", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "llama, 2 layers of 256" in out and "in bf16, from F16; on this machine" in out


def test_the_card_is_the_same_before_and_after(file):
    before = preview(str(file))
    convert(file)
    after = preview(str(file))
    assert before.origin == after.origin == "F16"
    assert before.tokenizer.get_vocab() == after.tokenizer.get_vocab()
    assert {k: v for k, v in before.config.to_dict().items() if not k.startswith("_")} == {
        k: v for k, v in after.config.to_dict().items() if not k.startswith("_")
    }


def test_stretched_positions_are_kept(tmp_path):
    """Of Llama 3's formula a file holds the outcome; its parameters are found again, any other is refused."""
    size, theta = WIDTH // HEADS, 500_000.0
    turns = theta ** (-np.arange(0, size, 2) / size)
    smooth = np.clip((8192 * turns / (2 * np.pi) - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    network = make_network("llama", 301, rope_parameters={"rope_type": "default", "rope_theta": theta})
    write_gguf(tmp_path / "m.gguf", network=network, extra={"rope_freqs.weight": factors})
    config = json.loads((convert(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["rope_parameters"] == {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": pytest.approx(8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    clear_cache()
    write_gguf(tmp_path / "n.gguf", network=network, extra={"rope_freqs.weight": factors + 0.5})
    refused(tmp_path / "n.gguf", "factors of its own")


def test_unpacking_is_the_packages(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind="Q6_K")
    kind = GGMLQuantizationType.Q6_K
    expected = dequantize(random_blocks((WIDTH, WIDTH), "Q6_K"), kind)
    ours = load(convert(tmp_path / "m.gguf")).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(ours.numpy(), expected.astype(np.float16).astype(np.float32))


def refused(file, words):
    """One sentence for loading and for the card, and no trace of it in the cache."""
    for attempt in (lambda: load_pair(Settings(target=str(file))), lambda: preview(str(file))):
        with pytest.raises(UserError, match=words) as found:
            attempt()
        sentence = str(found.value)
        assert "\n" not in sentence and len(sentence) < 320 and sentence.endswith(".")
    assert cache_size() == 0


def changed(file, at, content):
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(content)


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: max(5, int(len(content) * share))])
    refused(file, "cut short")


def test_an_empty_file(file):
    file.write_bytes(b"")
    refused(file, "is empty")


def test_a_file_of_another_kind(file):
    changed(file, 0, b"PK\x03\x04")
    refused(file, "does not begin with the word GGUF")


@pytest.mark.parametrize("version, words", [(1, "version 1"), (99, "version 99"), (0x03000000, "byte order")])
def test_another_version(file, version, words):
    changed(file, 4, struct.pack("<I", version))
    refused(file, words)


@pytest.mark.parametrize("at, what", [(8, "tensors"), (16, "settings")])
@pytest.mark.parametrize("count", [10**6, 2**40, 2**63, 2**64 - 1])
def test_absurd_counts(file, at, what, count):
    changed(file, at, struct.pack("<Q", count))
    refused(file, f"holds {count:,} {what}")


def test_an_absurd_list(file):
    content = file.read_bytes()
    at = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    changed(file, at, struct.pack("<Q", 2**60))
    refused(file, "more than fit into it")


@pytest.mark.parametrize("number, words", [(9, "Q8_1, which"), (4, "unknown here"), (10**6, "unknown here")])
def test_an_unknown_quantisation(file, number, words):
    content = file.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    changed(file, at, struct.pack("<I", number))
    refused(file, words)


def test_absurd_dimensions(file):
    content = file.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    changed(file, at, struct.pack("<QQ", 2**40, 2**40))
    refused(file, "shorter than its header says|cut short")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"block_count": 2**31}, "2,147,483,648 layers"),
        ({"block_count": 0}, r"block_count is 0"),
        ({"embedding_length": 512}, "contradict"),
        ({"feed_forward_length": 2**30}, "contradict"),
        ({"attention.head_count": 2**31}, "contradict"),
        ({"attention.head_count_kv": 3}, "contradict"),
        ({"context_length": "long"}, "context_length is long"),
        ({"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "spiral"),
        ({"rope.dimension_count": 8}, "part of each head"),
        ({"expert_count": 8}, "mixture of experts"),
    ],
)
def test_settings_that_its_weights_contradict(tmp_path, settings, words):
    write_gguf(tmp_path / "m.gguf", settings=settings)
    refused(tmp_path / "m.gguf", words)


def test_weights_that_are_missing_or_too_many(tmp_path):
    write_gguf(tmp_path / "m.gguf", without="blk.1.ffn_up.weight")
    refused(tmp_path / "m.gguf", r"blk\.1\.ffn_up\.weight is missing")
    write_gguf(tmp_path / "n.gguf", extra={"blk.0.surprise.weight": np.zeros(4, np.float32)})
    refused(tmp_path / "n.gguf", "no place for")


@pytest.mark.parametrize("architecture", ["rwkv6", "mamba", "bert", "no such thing", "clip"])
def test_an_architecture_that_cannot_be_read(tmp_path, architecture):
    write_gguf(tmp_path / "m.gguf", architecture=architecture)
    refused(tmp_path / "m.gguf", "cannot be read from a GGUF file here|running state|is broken")


def test_a_vocabulary_alone(tmp_path):
    from gguf import GGUFWriter

    out = GGUFWriter(tmp_path / "m.gguf", "llama")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    refused(tmp_path / "m.gguf", "holds no weights")


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "modules": "{{ cycler.__init__.__globals__.os.popen('touch HERE').read() }}",
    "globals": "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "change": "{{ messages.clear() }}",
    "memory": "{{ 'a' * 99999999999999 }}",
    "loop": "{% for i in range(99999999999) %}x{% endfor %}",
    "broken": "{% for m in %}",
    "import": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_that_tries_to_break_out(tmp_path, name, monkeypatch):
    """Filled in within jinja's sandbox, or not at all; with chat off the model itself still runs."""
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "m.gguf", template=ESCAPES[name].replace("HERE", str(tmp_path / "touched")))
    target = load_pair(Settings(target=str(tmp_path / "m.gguf"), precision="fp32")).target
    with pytest.raises(UserError, match=r"chat template of .* cannot be filled in") as found:
        encode_prompt(target, "fox", Settings())
    assert "\n" not in str(found.value)
    assert not (tmp_path / "touched").exists()
    assert encode_prompt(target, "fox", Settings(chat="off"))


def test_a_header_is_small_work(file):
    """Everything a card needs stands in the header: reading it touches none of the weights."""
    header = read_header(file)
    assert header.architecture == "llama" and header.quantisation == "F16"
    assert sum(tensor.bytes for tensor in header.tensors.values()) < file.stat().st_size
    assert min(tensor.start for tensor in header.tensors.values()) > 0


def test_where_the_cache_cannot_be_written_it_is_converted_for_this_process(file, monkeypatch):
    """Into a folder of its own, which goes with a process; /proc takes no folders, whoever asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    made = convert(file)
    assert folder_for_now() in made.parents and (made / "config.json").exists()
    code = "from core.disk import folder_for_now as made; (made() / 'model').mkdir(); print(made())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    folder = Path(ran.stdout.strip())
    assert folder.name.startswith("playground-") and not folder.exists()


def test_what_a_cache_holds_that_cannot_be_written_is_used(file, monkeypatch):
    made = convert(file)
    monkeypatch.setattr(conversion, "writable", lambda folder: False)
    assert conversion.converted(file) == convert(file) == made


def test_the_same_weights_in_another_quantisation(tmp_path, monkeypatch):
    """Matrices of whole blocks are of the kind asked for, all else and every setting as it was; made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    made = requantised(tmp_path / "m.gguf", Kind.Q4_0)
    before, after = (GGUFReader(file) for file in (tmp_path / "m.gguf", made))
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors):
        was, now = (dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new))
        if was.ndim == 1:
            assert (was == now).all()
            continue
        assert new.tensor_type == Kind.Q4_0
        blocks = np.abs(was).reshape(-1, 32).max(-1)
        assert (np.abs(was - now).reshape(-1, 32) <= blocks[:, None] / 8 + 1e-4).all()
    settings, kept = read_header(tmp_path / "m.gguf").settings, read_header(made).settings
    assert {**kept, "general.file_type": None} == {**settings, "general.file_type": None}
    stamp = made.stat().st_mtime_ns
    assert requantised(tmp_path / "m.gguf", Kind.Q4_0) == made and made.stat().st_mtime_ns == stamp
    assert requantised(made, Kind.Q4_0) == made
    assert cache_size() >= made.stat().st_size
