"""Precision int4: what is quantised, how exactly, and that rows stand alone."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny import make_tokenizer, random_model
from torch import nn

from core.errors import UserError
from core.inspecting.files import preview, size_up
from core.loading import load_model, load_pair
from core.loading.model import published_count
from core.loading.precision import choose_format
from core.records import Settings
from core.runners.architecture import NativeNetwork
from core.runners.graph import fused_for, why_not_static
from core.runners.native import NativeRunner
from core.runners.products import (
    Int4,
    Packed,
    Share,
    dequantise,
    group_for,
    in_pairs,
    int4_obstacle,
    pack,
    quantise,
    quantise8,
)
from core.runners.static_layers import StaticNetwork, bring_in_int4
from core.sampling import likeliest

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "gemma3_text")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a tiny model with widths that are whole groups, made once per architecture."""
    made = {}

    def folder(architecture, **changes):
        key = architecture, *changes.items()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            random_model(architecture, 5, vocab=320, dtype=torch.bfloat16, **{**WIDE, **changes}).save_pretrained(
                made[key]
            )
            make_tokenizer().save_pretrained(made[key])
        return str(made[key])

    return folder


def test_weights_on_the_grid_come_back():
    """What was quantised to sixteen steps before, with a scale bf16 can hold, is not changed."""
    codes = torch.randint(0, 16, (32, 96), generator=torch.Generator().manual_seed(1))
    codes[:, ::32], codes[:, 1::32] = 0, 15  # each group uses its whole range
    weight = 0.25 * codes - 1.5
    found, scales = quantise(weight, 32)
    assert torch.equal(found, codes.int())
    assert torch.equal(dequantise(found, scales), weight)


def test_error_is_within_half_a_step():
    """Of random weights none is further off than half a step of its group and what bf16 rounds of scale and zero."""
    weight = normal(64, 128)
    codes, scales = quantise(weight, 32)
    step = scales.transpose(0, 1)[..., 0].float().repeat_interleave(32, dim=1)
    assert ((dequantise(codes, scales) - weight).abs() <= 0.6 * step).all()
    assert (codes.min(), codes.max()) == (0, 15)


@pytest.mark.parametrize("bias", [None, normal(96).bfloat16()], ids=["plain", "bias"])
def test_kernel_multiplies_with_the_quantised_weight(bias):
    weight, x = normal(96, 64).bfloat16(), normal(5, 64, seed=1).bfloat16()
    expected = F.linear(x.double(), dequantise(*quantise(weight, 32)).double(), None if bias is None else bias.double())
    torch.testing.assert_close(Int4(weight, bias)(x).double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("product", ["int4", "bf16", "fp32"])
def test_layers_go_on_as_shares_of_their_product(product):
    """Three layers become one product; each still gives its own part, from one copy of the weights."""
    dtype = torch.float32 if product == "fp32" else torch.bfloat16
    owner = nn.ModuleDict({name: nn.Linear(64, rows, dtype=dtype) for name, rows in zip("qkv", (64, 30, 32))})
    x = normal(2, 3, 64).to(dtype)
    before = torch.cat([owner[name](x) for name in "qkv"], dim=-1)
    pack(owner.requires_grad_(False), "qkv", 4 if product == "int4" else 16)
    assert isinstance(owner["q"], Share) and not list(owner.parameters())
    found = torch.cat([owner[name](x) for name in "qkv"], dim=-1)
    within = {"int4": 0.3, "bf16": 0.02, "fp32": 1e-5}[product]
    torch.testing.assert_close(found, before, rtol=within / 10, atol=within)


@pytest.mark.parametrize("kind", ["int4", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1536, 576), (64, 1536), (8192, 64)])
def test_a_row_does_not_depend_on_the_rows_beside_it(shape, kind):
    """The law of what is written would else depend on what is drafted: each row of a product over many is, to the
    last bit, what it is alone."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    linear.weight.data = normal(*shape).to(dtype)
    product = Packed([linear.requires_grad_(False)], {"int4": 4, "int8": 8}.get(kind, 16))
    x = normal(17, shape[1], seed=2)
    alone = torch.cat([product(row[None]) for row in x])
    for n in (*range(1, 10), 12, 16, 17):
        assert torch.equal(product(x[:n]), alone[:n])
    assert torch.equal(product(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_rounds_activations_to_eight_bits_by_groups_and_nothing_else(bits):
    """Against exact sums over the same codes and the activations as they are rounded."""
    linear = nn.Linear(96, 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.data = normal(48, 96).bfloat16()
    weight = dequantise(*quantise(linear.weight, 32)).double()
    if bits == 8:
        codes, scales = quantise8(linear.weight)
        weight = (codes.view(48, 3, 32).double() * scales[..., None]).view(48, 96)
        assert (weight - linear.weight).abs().max() <= 0.51 * scales.max()
    x = normal(5, 96, seed=1)
    groups = x.double().view(5, 3, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).view(5, 96)
    torch.testing.assert_close(Packed([linear], bits)(x).double(), rounded @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fused_forward_is_transformers_own_over_the_same_codes(architecture):
    """The network's layers share the quantised weights, so transformers' forward is the oracle in int4 too."""
    network = random_model(architecture, 7, vocab=64, dtype=torch.float32, **WIDE)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.3)
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(3))
    runner = NativeRunner(NativeNetwork(network, int4=True), 64, capacity=8)
    rows = torch.cat([runner.feed(ids[:7]), runner.feed(ids[7:8]), runner.feed(ids[8:])])
    oracle = network(ids[None]).logits[0]
    assert (rows - oracle).norm() < 0.01 * oracle.norm()  # where rounding takes an activation to the other neighbour
    other = random_model(architecture, 7, vocab=64, dtype=torch.bfloat16, **WIDE)
    assert (
        why_not_static(other, StaticNetwork(other, int4=True)) is None
    )  # over the products of a GPU, on a static cache


def test_the_fused_forward_of_static_caches_quantises_too():
    network = random_model("qwen3", 7, vocab=64, dtype=torch.bfloat16, **WIDE)
    assert isinstance(fused_for(network, int4=True), StaticNetwork)
    assert isinstance(network.model.layers[0].mlp.up_proj.product, Int4)


@pytest.mark.parametrize("tied", [True, False])
def test_on_a_gpu_one_product_at_a_time_is_there_in_16_bits(tied, monkeypatch):
    """Of each product the layers are gone when the next is packed; what comes out is what packing all at once makes. A
    stand-in for the device: the weights that arrive there are counted."""
    network, whole = (
        random_model("llama", 7, vocab=64, dtype=torch.bfloat16, num_hidden_layers=3, tie_word_embeddings=tied, **WIDE)
        for _ in range(2)
    )
    arrived, most = [], [0]
    move = torch.nn.Module.to

    def to(module, device):
        moved = move(module, device)
        if isinstance(module, torch.nn.Linear):
            arrived.append(weakref.ref(module))
        most[0] = max(most[0], sum(linear() is not None for linear in arrived))
        return moved

    counted = published_count(network)
    monkeypatch.setattr(torch.nn.Module, "to", to)
    bring_in_int4(network, CPU)
    assert published_count(network) == counted
    assert len(arrived) == 3 * 7 + 1 and most[0] == 3
    ids = torch.arange(9)[None]
    StaticNetwork(whole, int4=True)
    assert torch.equal(network(ids).logits, whole(ids).logits)
    assert isinstance(network.lm_head.product, Int4) and network.get_input_embeddings().weight.shape == (64, 64)
    assert isinstance(fused_for(network, int4=True), StaticNetwork)


def test_codes_do_not_depend_on_how_many_rows_are_quantised_at_a_time(monkeypatch):
    weight = normal(48, 64)
    codes, scales = quantise(weight, 32)
    monkeypatch.setattr("core.runners.products.AT_ONCE", 640)
    again = quantise(weight, 32)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_pair_in_int4_is_lossless(saved):
    """Greedy speculation writes what plain decoding writes."""
    from core.lanes import open_lane

    pair = load_pair(Settings(target=saved("llama"), draft=saved("qwen3"), precision="int4"))
    assert (pair.target.precision, pair.target.runner_kind) == ("int4", "native")
    texts = []
    for method in ("plain", "draft"):
        lane = open_lane(pair, "the quick brown fox", Settings(method=method, max_new_tokens=24, ignore_eos=True))
        for _ in lane:
            pass
        texts.append(lane.run.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", [*FAMILIES, "mistral"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["int4", "bf16"])
def test_memory_is_what_was_told(saved, architecture, tied, precision):
    folder = saved(architecture, tie_word_embeddings=tied)
    model = load_model(folder, CPU, precision)
    assert size_up(preview(folder), CPU, precision).weights.total == pytest.approx(model.weight_bytes(), rel=0.03)
    assert model.parameter_count() == load_model(folder, CPU, "fp32").parameter_count()


@pytest.mark.parametrize(
    "architecture, width, reason",
    [
        ("gemma2", 64, "there is no fused forward for gemma2 models"),
        ("llama", 48, "its kernel cannot take a weight of 128 x 48"),
    ],
)
def test_where_int4_cannot_be_had_a_sentence_says_why(saved, architecture, width, reason):
    name = saved(architecture, hidden_size=width)
    with pytest.raises(UserError, match=f"cannot be had in int4: {reason}; choose nf4 or bf16"):
        load_model(name, CPU, "int4")
    with pytest.raises(UserError, match=f"cannot be had in int4: {reason}; choose nf4 or bf16"):
        size_up(preview(name), CPU, "int4")


def test_a_device_must_show_that_its_kernel_is_right(monkeypatch):
    """A product there is held against the weight that the codes stand for."""
    assert int4_obstacle(CPU) is None
    with pytest.raises(UserError, match="cannot be had on this device: its kernels are for CPUs and CUDA"):
        choose_format("int4", torch.device("mps"), None)
    monkeypatch.setattr(Packed, "forward", lambda self, x: 1.1 * F.linear(x, torch.ones(64, 128, dtype=x.dtype)))
    assert "wrong numbers" in int4_obstacle.__wrapped__(CPU)


def test_codes_in_pairs():
    codes, _ = quantise(normal(16, 64), 32)
    pairs = in_pairs(codes)
    assert torch.equal(torch.stack([pairs >> 4, pairs & 15], -1).view(16, 64), codes.to(torch.uint8))


def test_odd_shapes_have_no_group():
    assert (group_for(64, 96), group_for(24, 64), group_for(64, 48)) == (32, None, None)


@pytest.mark.parametrize("columns", [5, 320, 2501, 4100])
def test_a_pass_tells_what_is_likeliest(columns):
    """The first of equal logits among those that count, how sure it is, and what is no number before all, as found by
    looking at each of them."""

    def runner_with(factor=1.0):
        network = random_model("llama", 7, vocab=4112, dtype=torch.float32, tie_word_embeddings=False, **WIDE)
        head = network.lm_head.weight.data
        head[[7, 2400, 4099]] = head[3].clone()  # four tokens that are always as likely
        head[4105] *= 100
        head[4] *= factor
        runner = NativeRunner(NativeNetwork(network), columns)
        runner.shares = True
        return runner

    runner, favourites = runner_with(), set()
    for n in (1, 2, 5, 64):
        logits, found = runner.feed(torch.arange(n) % 5), runner.favourites
        largest, ids = likeliest(logits)
        favourites |= set(ids.tolist())
        assert torch.equal(found.ids, ids) and torch.equal(found.largest, largest)
        torch.testing.assert_close(found.shares, logits.softmax(-1).amax(-1), rtol=1e-5, atol=0)
    assert not favourites & {7, 2400, 4099}
    runner.feed(torch.arange(65) % 5)
    assert runner.favourites is None, "so many rows are looked at by whoever asks"
    for factor in (torch.inf, torch.nan):
        runner = runner_with(factor=factor)
        largest, ids = likeliest(runner.feed(torch.arange(3)))
        assert torch.equal(runner.favourites.ids, ids) and not largest.isfinite().all()
        torch.testing.assert_close(runner.favourites.largest, largest, equal_nan=True)
