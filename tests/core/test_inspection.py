"""Looking at a pair before it is loaded: tokens, memory, gain and a verdict; local folders, a stand-in hub, a cache."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from stand_in_hub import stand_in_hub
from tiny import PADDED, make_tokenizer, random_model
from transformers import AutoConfig, PreTrainedTokenizerFast

from core import inspecting as inspection
from core.__main__ import main
from core.costs.rounds import RoundCosts, expected_tokens
from core.errors import UserError
from core.inspecting import inspect_pair
from core.inspecting.acceptance import Acceptance
from core.inspecting.devices import predict
from core.inspecting.files import Preview, catalogue_config, preview, size_up
from core.inspecting.likeness import compare_vocabularies
from core.inspecting.offers import drafts_for, inspection_card, offers
from core.loading import load_model, load_pair
from core.loading.hub import fetch
from core.loading.memory import Free
from core.records import Settings

CPU = torch.device("cpu")
OTHER_WORDS = "zyx wvu tsr qpo " * 20


def save(folder, architecture="llama", vocab=PADDED, tokenizer=None, **changes):
    """A small model with a tokenizer, in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16} if architecture != "gpt2" else {}
    network = random_model(architecture, 5, vocab=vocab, dtype=torch.float32, **{**sizes, **changes})
    network.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def target(pair_folder):
    return str(pair_folder / "target")


@pytest.fixture
def draft(pair_folder):
    return str(pair_folder / "draft")


def said(found):
    return "\n".join(found.verdict)


def test_a_pair_of_folders(target, draft):
    found = inspect_pair(target, draft, precision="fp32", device="cpu")
    assert (found.target.layers, found.draft.layers, found.layers_ratio) == (4, 1, 0.25)
    assert found.target.cached and found.target.download_bytes == 0 and not found.target.chat
    assert found.likeness.same and "each with the same id" in found.likeness.sentence
    assert 0 < found.bytes_ratio < 1
    (prediction,) = found.predictions
    assert (prediction.basis, prediction.cost_ratio) == ("bytes", found.bytes_ratio)
    assert [forecast.acceptance for forecast in prediction.forecasts] == [0.6, 0.7, 0.8]
    assert sorted(forecast.speedup for forecast in prediction.forecasts) == [f.speedup for f in prediction.forecasts]
    assert (found.acceptance, prediction.measured) == (None, None)
    assert "If 70% of the drafts were accepted" in said(found) and "Leviathan" in said(found)
    assert json.loads(json.dumps(found.to_dict()))["memory"]["fits"] == "yes"


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_the_bundled_pair_takes_what_is_said(precision):
    """Saved in NF4: as it is, or unpacked."""
    found = inspect_pair("pocket", precision=precision, device="cpu")
    pair = load_pair(Settings("pocket", precision=precision, device="cpu"))
    for card, model in ((found.target, pair.target), (found.draft, pair.draft)):
        assert card.weight_bytes == pytest.approx(model.weight_bytes(), rel=0.1)
        assert card.parameters == model.parameter_count()
        assert (card.layers, card.precision) == (model.layers, model.precision)
    assert found.pair == "pocket"


def test_memory_is_weights_caches_and_workspace(target, draft):
    short, long = (inspect_pair(target, draft, precision="fp32", context=n).memory for n in (100, 200))
    assert long.weights == short.weights
    assert long.caches == 2 * short.caches
    per_token = 2 * 4 * (2 * 16) * 2 * 4 + (2 * 16) * 2 * 4  # two lanes of four layers, a draft of one; keys and values
    assert short.caches == 100 * per_token
    assert short.needed == short.weights + short.caches + short.workspace


def test_what_was_measured_of_a_pair_leads_its_card(target, draft):
    """Acceptance as its files or a run have it, and costs as they were timed here, go before what is usual."""
    pocket = inspect_pair("pocket", device="cpu")
    measured = pocket.predictions[0].measured
    assert measured.acceptance == pocket.acceptance.rate and pocket.acceptance.where in said(pocket)
    assert "usual" not in said(pocket) and "as measured on code" in inspection_card(pocket)
    costs = RoundCosts(lambda rows: 1.0 + 0.1 * rows, lambda rows: 0.2)
    found = inspect_pair(target, draft, acceptance=Acceptance(0.3, "in a test"), costs=costs)
    first, second = found.predictions
    assert (first.basis, second.basis) == ("measured", "bytes")
    length = first.measured.draft_length
    assert first.measured.speedup == costs.speed_up(expected_tokens(0.3, length), length)
    assert "At the 30% accepted that were measured in a test" in said(found)


def test_padded_vocabularies_are_named(target, tmp_path):
    other = save(tmp_path, vocab=512, num_hidden_layers=1)
    found = inspect_pair(target, other, precision="fp32")
    assert found.likeness.same
    assert f"pad it to {PADDED} and 512 rows" in found.likeness.sentence


def test_the_same_size_is_not_the_same_tokenizer(tmp_path):
    words = OTHER_WORDS, OTHER_WORDS[::-1]
    ours, theirs = (
        save(tmp_path / w[:3], tokenizer=make_tokenizer(w), num_hidden_layers=2 - i) for i, w in enumerate(words)
    )
    found = inspect_pair(ours, theirs, precision="fp32")
    assert found.likeness.same is False
    assert found.likeness.target_tokens == found.likeness.draft_tokens
    assert 0.5 < found.likeness.shared < 1
    assert "Different tokenizers of the same size" in said(found)
    assert found.predictions  # it can draft, translated
    assert found.level == "caution"


def test_too_few_tokens_in_common_cannot_draft(target, tmp_path, monkeypatch):
    other = save(tmp_path, tokenizer=make_tokenizer(OTHER_WORDS), num_hidden_layers=1)
    monkeypatch.setattr("core.inspecting.likeness.LEAST_SHARED", 1.1)
    found = inspect_pair(target, other, precision="fp32")
    assert (found.level, found.predictions) == ("bad", ())
    assert "too few to draft with" in found.verdict[0]


def test_special_tokens_by_role(target, tmp_path):
    """The vocabularies are equal and the roles are not: the target's ends the text."""
    backend = make_tokenizer().backend_tokenizer
    other = save(tmp_path, tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|end|>"))
    found = inspect_pair(target, other, precision="fp32")
    assert found.likeness.same
    assert found.likeness.roles == {"bos": (None, "<|end|>"), "eos": ("<|end|>", None)}


def test_more_layers_than_the_target(target, tmp_path):
    other = save(tmp_path, num_hidden_layers=6, hidden_size=32, head_dim=8)
    assert "This draft has more layers than its target (6 against 4): expect a slowdown without CUDA graphs." in said(
        inspect_pair(target, other, precision="fp32")
    )


def test_what_costs_a_step_depends_on_the_device():
    """SmolLM2: the small draft has more layers. By bytes it gains much, by launches nothing."""
    names = "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
    ours, theirs = (size_up(Preview(name, catalogue_config(name)), CPU, "bf16") for name in names)
    (on_cpu,), (graphs, eager), (apple,) = (
        predict(ours, theirs, torch.device(place)) for place in ("cpu", "cuda", "mps")
    )
    assert (on_cpu.basis, graphs.basis, eager.basis, apple.basis) == ("bytes", "bytes", "layers", "layers")
    assert graphs.cost_ratio == on_cpu.cost_ratio < 0.1
    assert eager.cost_ratio == apple.cost_ratio == 30 / 24
    assert graphs.at(0.8).speedup > 2
    assert (eager.at(0.8).draft_length, eager.at(0.8).speedup) == (0, 1.0)


def test_the_target_as_its_own_draft(target):
    found = inspect_pair(target, target, precision="fp32")
    assert found.level == "caution"
    assert "The draft is the target itself" in said(found)


def test_a_target_alone(target):
    found = inspect_pair(target, precision="fp32")
    assert (found.draft, found.likeness, found.predictions, found.layers_ratio) == (None, None, (), None)
    assert "n-grams or with its own first layers" in said(found)


@pytest.mark.parametrize(
    "free, fits, sentence",
    [
        (None, "unknown", "this system does not tell"),
        (1, "no", "does not fit. Choose nf4"),
        (0.95, "tight", "only just"),
    ],
)
def test_against_what_is_free(target, draft, monkeypatch, free, fits, sentence):
    needed = inspect_pair(target, draft, precision="fp32").memory.needed
    free = None if free is None else 1000 if free == 1 else round(needed / free)
    monkeypatch.setattr(inspection, "free_memory", lambda device: Free(free, free))
    found = inspect_pair(target, draft, precision="fp32")
    assert found.memory.fits == fits
    assert sentence in said(found)
    assert found.level == ("bad" if fits == "no" else "caution")


def test_what_is_given_back_first_counts_as_free(target, draft, monkeypatch):
    needed = inspect_pair(target, draft, precision="fp32").memory.needed
    monkeypatch.setattr(inspection, "free_memory", lambda device: Free(needed // 2, 2 * needed))
    assert inspect_pair(target, draft, precision="fp32").memory.fits == "no"
    assert inspect_pair(target, draft, precision="fp32", held=needed).memory.fits == "yes"


def test_files_that_do_not_belong_to_their_config(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    found = inspect_pair(str(folder), precision="fp32")
    assert found.level == "bad"
    assert "they do not belong together" in found.verdict[0]


def test_widths_that_no_4_bit_kernel_takes_are_not_refused(tmp_path):
    """Loading has such weights unpacked at every pass, or kept in 16 bits."""
    folder = save(tmp_path, "gpt2", n_embd=40)
    found = inspect_pair(folder, precision="nf4")
    assert found.level != "bad" and found.target.precision == "nf4"
    with load_model(folder, torch.device("cpu"), "nf4").lease() as runner:
        assert runner.feed(torch.tensor([1, 2])).isfinite().all()


def test_experts_and_windows_are_told(tmp_path):
    moe, windows = save(tmp_path / "moe", "mixtral"), save(tmp_path / "windows", "gemma3_text", num_hidden_layers=4)
    found = inspect_pair(moe, precision="nf4")
    assert found.target.expert_bytes > 0.5 * found.target.weight_bytes
    assert found.target.routed and "wakes more experts" in said(found)
    assert "stay in 16 bits: 4-bit loading quantises linear layers only" in said(found)
    assert "wakes more experts" not in said(inspect_pair(windows, precision="fp32"))
    assert "layers see the last tokens only; their keys are all kept" in said(inspect_pair(windows, precision="fp32"))


def test_chat_and_context_of_a_draft(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    chat = save(tmp_path / "chat", tokenizer=tokenizer)
    base = save(tmp_path / "base", num_hidden_layers=1, max_position_embeddings=128)
    found = inspect_pair(chat, base, precision="fp32", context=400)
    assert (found.target.chat, found.draft.chat) == (True, False)
    assert "The target is a chat model and the draft is not" in said(found)
    assert "The draft reads at most 128 tokens; past them the target goes on alone." in said(found)


def test_what_cannot_be_decoded_is_refused(tmp_path):
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be rolled back when a draft is rejected"):
        inspect_pair(str(tmp_path))


def broken_header(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "config.json").write_text("{not json"), r"cannot be (read|loaded)"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no \.safetensors weights"),
        (broken_header, r"is no safetensors file"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), r"tokenizer of .* cannot be read"),
    ],
)
def test_spoiled_folders(target, tmp_path, spoil, sentence):
    folder = shutil.copytree(target, tmp_path / "model")
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        inspect_pair(str(folder))
    assert "\n" not in str(caught.value)


# On the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in hub with the client pointed at it, and an empty cache."""
    with stand_in_hub() as server:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, huggingface_hub.file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        for name, value in (
            ("HF_HUB_OFFLINE", False),
            ("ENDPOINT", server.address),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_TOKEN_PATH", str(tmp_path / "no-token")),
        ):
            monkeypatch.setattr(constants, name, value)
        yield server


@pytest.fixture
def published(hub, target, draft, tmp_path):
    """Two models of one vocabulary on the hub, and one of another, in shards."""
    sharded = tmp_path / "sharded"
    random_model("llama", 5, vocab=PADDED, dtype=torch.float32).save_pretrained(sharded, max_shard_size="50KB")
    make_tokenizer(OTHER_WORDS).save_pretrained(sharded)
    hub.repositories |= {"some/target": Path(target), "some/draft": Path(draft), "some/other": sharded}
    return hub


def test_nothing_is_downloaded_but_headers(published, target, draft):
    """The same card as of the folders, and how much a download would be."""
    found = inspect_pair("some/target", "some/draft", precision="fp32")
    assert found.target.weight_bytes == inspect_pair(target, draft, precision="fp32").target.weight_bytes
    assert found.target.download_bytes == preview(target).stored_bytes
    assert not found.target.cached
    assert found.likeness.same
    asked = published.file_requests("model.safetensors")
    assert asked and all(re.fullmatch(r"bytes=\d+-\d+", each or "") for each in asked)


def test_shards_on_the_hub(published):
    files = list(published.repositories["some/other"].glob("*.safetensors"))
    assert len(files) > 1
    found = preview("some/other")
    assert found.headers == preview(str(published.repositories["some/other"])).headers


def test_gated_missing_and_out_of_reach(published, monkeypatch):
    published.gated.add("some/target")
    with pytest.raises(UserError, match="some/target is gated: accept its terms"):
        inspect_pair("some/target")
    with pytest.raises(UserError, match="The Hub has no model 'no/such'"):
        inspect_pair("no/such")
    with pytest.raises(UserError, match=r"The Hub has no model 'Qwen/Qwen3-4BB'.* The catalogue has Qwen/Qwen3-4B\."):
        inspect_pair("Qwen/Qwen3-4BB")
    with pytest.raises(UserError, match="has no revision 'v9'"):
        inspect_pair("some/draft", revision="v9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not in the local cache and the Hub cannot be reached"):
        inspect_pair("some/other")


def test_a_model_of_the_catalogue_is_told_from_there(published):
    """Gated, missing here or out of reach: its shapes are known, and what is in the way is said."""
    published.gated.add("Qwen/Qwen3-4B")
    published.repositories["Qwen/Qwen3-4B"] = published.repositories["some/target"]
    found = inspect_pair("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", precision="nf4")
    assert found.target.catalogued and found.draft.catalogued
    assert (found.target.layers, found.draft.layers) == (36, 28)
    assert found.likeness.same and "as the catalogue says" in found.likeness.sentence
    assert "is gated: accept its terms" in said(found)
    assert found.target.download_bytes is None
    assert found.pair == "qwen3-4b"


def test_the_small_files_are_enough_offline(published, monkeypatch):
    """Once looked at, a model can be looked at again without a network; it is not taken for downloaded."""
    first = inspect_pair("some/target", precision="fp32")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = inspect_pair("some/target", precision="fp32")
    assert again.target.weight_bytes == first.target.weight_bytes
    assert (again.target.cached, again.target.download_bytes) == (False, None)


def test_drafts_for_a_target(published, monkeypatch, tmp_path):
    """From the cache: smaller models with the same tokens, the one with most to gain first."""
    save(tmp_path / "tiny", num_hidden_layers=1, hidden_size=32, head_dim=8, intermediate_size=32)
    save(tmp_path / "big", num_hidden_layers=9)
    broken = Path(save(tmp_path / "broken", num_hidden_layers=1))
    (broken / "config.json").write_text('{"model_type": "nonesuch"}')
    published.repositories |= {f"some/{name}": tmp_path / name for name in ("tiny", "big", "broken")}
    for name in published.repositories:
        fetch(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = drafts_for("some/target", precision="fp32")
    assert [draft.draft for draft in found] == ["some/tiny", "some/draft"]
    assert found[0].speedup > found[1].speedup > 1
    assert all((draft.source, draft.cached) == ("cache", True) for draft in found)


def test_drafts_of_the_catalogue():
    found = drafts_for("Qwen/Qwen3-32B", precision="nf4")
    names = [draft.draft for draft in found]
    assert names[0] == "Qwen/Qwen3-0.6B"
    assert "Qwen/Qwen3-30B-A3B" not in names  # larger in memory than the target
    assert not any("Coder" in name for name in names)  # other tokens
    assert [draft.speedup for draft in found] == sorted((draft.speedup for draft in found), reverse=True)


def test_offers_against_this_machine(monkeypatch):
    monkeypatch.setattr(inspection, "free_memory", lambda device: Free(8 * 10**9, 16 * 10**9))
    found = {offer.pair.name: offer for offer in offers("cpu", "nf4")}
    assert found["pocket"].cached and found["pocket"].fits == "yes"
    assert found["qwen3-4b"].fits == "yes" and found["qwen3-32b"].fits == "no"
    assert found["layerskip-8b"].draft_layers is None


# On the command line


def run(capsys, *arguments):
    try:
        status = main(arguments)
    except SystemExit as left:
        status = left.code
    return status, *capsys.readouterr()


def test_inspect_as_a_command(capsys, monkeypatch, target, draft, tmp_path):
    monkeypatch.setattr(inspection, "free_memory", lambda device: Free(8 * 10**9, 16 * 10**9))
    models = ("inspect", "--target", target, "--draft", draft, "--precision", "fp32", "--context", "300")
    status, out, _ = run(capsys, *models, "--json", str(tmp_path / "card.json"))
    document = json.loads((tmp_path / "card.json").read_text())
    assert status == 0
    for label in ("target", "draft", "tokens", "memory", "predicted", "verdict"):
        assert re.search(rf"^{label} ", out, re.MULTILINE)
    assert (document["schema"], document["context"], document["drafts"]) == (1, 300, [])
    status, out, _ = run(capsys, *models, "--json", "-")
    assert json.loads(out)["verdict"] == document["verdict"]


def test_inspect_of_the_bundled_pair(capsys):
    status, out, _ = run(capsys, "inspect", "--target", "pocket")
    assert status == 0
    assert "pocket target: llama, 16 layers of 384" in out


def test_pairs_as_a_command(capsys, tmp_path):
    status, out, _ = run(capsys, "pairs", "--json", str(tmp_path / "pairs.json"))
    document = json.loads((tmp_path / "pairs.json").read_text())
    assert status == 0
    assert document["pairs"][0]["name"] == "pocket"
    assert {"target", "draft", "why", "gated", "needed", "fits", "cached"} <= set(document["pairs"][0])
    assert "Qwen/Qwen3-4B + Qwen/Qwen3-0.6B" in out
    assert "gated" in out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--target", "nobody/nothing"], "not in the local cache and the Hub cannot be reached"),
        (["--target", "./nowhere"], "There is no folder './nowhere'"),
        (["--precision", "int3"], "There is no precision 'int3'"),
        (["--context", "0"], "at least 1 token, not 0"),
        (["--context", "many"], "invalid int value"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, sentence):
    status, out, err = run(capsys, "inspect", *arguments)
    assert (status, out) == (2, "")
    assert sentence in err.splitlines()[-1]


def test_likeness_without_files():
    """Of models that cannot be read, what the catalogue knows; of others nothing."""
    qwen, llama = (Preview(n, catalogue_config(n)) for n in ("Qwen/Qwen3-4B", "meta-llama/Llama-3.2-1B-Instruct"))
    assert compare_vocabularies(qwen, llama).same is False
    stranger = Preview("some/one", llama.config)
    assert compare_vocabularies(qwen, stranger).same is None
