"""Memory told from a config alone, against what loading then takes: many shapes, every precision."""

import shutil

import pytest
import torch
from test_nf4 import save_nf4
from tiny import ARCHITECTURES, COMMON, make_tokenizer, random_model
from transformers import AutoConfig

from core.errors import UserError
from core.inspecting.files import preview, size_up
from core.loading import load_model, memory
from core.loading.memory import (
    NF4,
    NODE_BYTES,
    NODES_OF_A_LAYER,
    cache_bytes,
    captured_bytes,
    quantised_weights,
    skeleton,
    weights,
    workspace_bytes,
)
from core.runners.graph import GraphRunner
from core.runners.widths import LONGEST, ROUND, WIDTHS, capacity_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDE = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
SHAPES = {
    "llama": ("llama", WIDE),
    "deep, narrow": ("llama", {**WIDE, "num_hidden_layers": 12, "intermediate_size": 192}),
    "tied": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "padded vocabulary": ("llama", {**WIDE, "vocab": 1024}),
    "biases": ("qwen2", WIDE),
    "one key head": ("gemma3_text", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "fused projections": ("phi3", WIDE),
    "transposed layers": ("gpt2", {"n_embd": 128}),
    "odd widths": ("gpt2", {"n_embd": 120}),
    "experts": ("mixtral", WIDE),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a shape, saved once in float32."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            architecture, changes = SHAPES[name]
            options = {"vocab": 320, "dtype": torch.float32, **changes}
            folder = folders[name] = tmp_path_factory.mktemp("shape")
            random_model(architecture, 3, **options).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
        return folders[name]

    return folder_of


def estimated(folder, precision):
    return size_up(preview(str(folder)), CPU, precision).weights


def taken(folder, precision):
    """Bytes of the loaded model, after a pass: that is when bitsandbytes repacks 4-bit weights on a CPU."""
    model = load_model(str(folder), CPU, precision)
    with model.lease() as runner:
        runner.feed(torch.tensor([1, 2]))
    return model.weight_bytes()


@pytest.mark.parametrize("precision", ["nf4", "bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_what_loading_takes(saved, shape, precision):
    folder = saved(shape)
    assert estimated(folder, precision).total == pytest.approx(taken(folder, precision), rel=0.03)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("precision", ["auto", "nf4", "bf16"])
def test_a_quantised_checkpoint_as_it_is_or_unpacked(saved, tmp_path, double, precision):
    save_nf4(saved("llama"), tmp_path, double)
    make_tokenizer().save_pretrained(tmp_path)
    assert estimated(tmp_path, precision).total == pytest.approx(taken(tmp_path, precision), rel=0.03)


def test_shards_are_one_model(saved, tmp_path):
    shutil.copytree(saved("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    random_model("llama", 3, vocab=320, dtype=torch.float32, **WIDE).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert estimated(tmp_path, "fp32") == estimated(saved("llama"), "fp32")
    whole = preview(str(saved("llama")))
    assert preview(str(tmp_path)).headers == whole.headers
    assert whole.stored_bytes == pytest.approx(estimated(saved("llama"), "fp32").total, rel=0.01)


def config_of(architecture, vocab=320, **changes):
    return AutoConfig.for_model(
        architecture, **{**COMMON, **ARCHITECTURES[architecture], "vocab_size": vocab, **changes}
    )


def test_experts_stay_in_16_bits():
    """They are 3-D weights, no linear layers; a token asks two of four."""
    config = config_of("mixtral", **WIDE)
    found = weights(skeleton(config), torch.bfloat16, NF4())
    layer = 4 * (2 * 320 * 128 + 128 * 320) * 2
    assert found.experts == 2 * layer
    assert found.total - found.read == pytest.approx(layer + 320 * 128 * 2, rel=0.01)  # half the experts, the embedding
    assert weights(skeleton(config), torch.bfloat16).experts == 0  # nothing is unusual in bf16


def test_a_tied_head_is_counted_once_and_read_whole():
    tied, untied = (weights(skeleton(config_of("llama", tie_word_embeddings=t)), torch.bfloat16) for t in (True, False))
    table = 320 * 32 * 2
    assert untied.total - tied.total == table
    assert tied.read == tied.total
    assert untied.read == untied.total - table
    assert untied.parameters - untied.active_parameters == 320 * 32


def test_what_4_bit_leaves_alone():
    names = quantised_weights(skeleton(config_of("llama")))
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert not any("norm" in name or "embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("architecture, kv_heads", [("llama", 2), ("gpt2", 4), ("gemma2", 2)])
def test_caches_are_what_a_run_keeps(architecture, kv_heads):
    """Key heads, not query heads; sliding-window layers keep everything here."""
    from transformers import DynamicCache

    network = random_model(architecture, 3)
    cache = DynamicCache()
    with torch.inference_mode():
        network(torch.arange(40)[None], past_key_values=cache)
    kept = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert cache_bytes(network.config, 40, torch.float64) == kept
    assert cache.layers[0].keys.shape[1] == kv_heads


def test_workspace_grows_with_the_vocabulary_and_4_bit_unpacks_a_weight():
    small, large = (skeleton(config_of("llama", vocab=vocab, **WIDE)) for vocab in (320, 100_000))
    room = {n: workspace_bytes(n, 512, torch.bfloat16, CPU) for n in (small, large)}
    assert room[large] > 10 * room[small]
    unpacked = workspace_bytes(small, 512, torch.bfloat16, CPU, NF4()) - room[small]
    assert unpacked == 2 * 128 * 320


def test_captured_passes_hold_what_was_told():
    """The logits of the widest of them twice, as they are made and where all leave theirs; nothing but on CUDA."""
    small, large = (skeleton(config_of("llama", vocab=vocab, **WIDE)) for vocab in (320, 100_000))
    assert captured_bytes(small, 512, torch.float32, CPU, None) == 0
    told = [captured_bytes(n, 512, torch.bfloat16, torch.device("cuda"), None) for n in (small, large)]
    assert told[1] - told[0] == 2 * LONGEST * (100_000 - 320) * 2
    config = small.config
    more = captured_bytes(small, 1024, torch.bfloat16, torch.device("cuda"), None) - told[0]
    graphs = sum(width <= ROUND for width in WIDTHS)
    nodes = graphs * NODES_OF_A_LAYER * config.num_hidden_layers * NODE_BYTES
    assert more >= nodes  # a reach more is met, and all widths are captured for it
    held = GraphRunner(random_model("llama", 3), 64, limit=2048)
    held.reserve(1100)
    taken = sum(block.numel() * block.element_size() for block in held._store._blocks)
    assert taken == cache_bytes(held._network.config, capacity_for(1100, 2048), torch.float64)


PUBLISHED = {
    "llama": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        {"num_key_value_heads": 8, "vocab_size": 128256},
        8_030_261_248,
    ),
    "qwen3": (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
        596_049_920,
    ),
}


def test_a_long_context_is_planned():
    """Llama 3.1 8B in NF4 with two lanes of 32,768 tokens, their captured passes and the work of a round fits a card of
    24 GB, and is mostly weights and caches."""
    shape, more, _ = PUBLISHED["llama"]
    network = skeleton(AutoConfig.for_model("llama", **shape, **more, max_position_embeddings=131072))
    told = {
        "weights": weights(network, torch.bfloat16, NF4()).total,
        "caches": 2 * cache_bytes(network.config, 32768, torch.bfloat16),
        "captures": 2 * captured_bytes(network, 32768, torch.bfloat16, CUDA, NF4()),
        "workspace": workspace_bytes(network, 32768, torch.bfloat16, CUDA, NF4()),
    }
    assert sum(told.values()) < 0.9 * 24 * 10**9
    assert told["captures"] + told["workspace"] < 0.2 * sum(told.values())


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_parameter_counts(architecture):
    """Llama 3.1 8B and Qwen3 0.6B, to the parameter, without storage for one of them."""
    shape, more, count = PUBLISHED[architecture]
    network = skeleton(AutoConfig.for_model(architecture, **shape, **more))
    assert {p.device.type for p in network.parameters()} == {"meta"}
    assert weights(network, torch.bfloat16).parameters == count


def test_free_memory_is_the_smaller_of_the_machine_and_its_container(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert memory.container_memory(tmp_path) == memory.Free(700_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.container_memory(tmp_path) == memory.Free(None, None)
    machine = memory.Free(10, 20)
    assert memory.smaller(machine, memory.Free(None, None)) == machine
    assert memory.smaller(machine, memory.Free(5, 50)).free == 5
    found = memory.free_memory(CPU)
    assert 0 < found.free <= found.total


def test_no_network_can_be_built_from_nonsense(saved, tmp_path):
    shutil.copytree(saved("llama"), tmp_path, dirs_exist_ok=True)
    config = (tmp_path / "config.json").read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 0')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match="cannot be loaded"):
        size_up(preview(str(tmp_path)), CPU)
