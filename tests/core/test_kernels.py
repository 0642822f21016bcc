"""Our own kernels: each is its twin in PyTorch's operations, and rows stand alone; where they cannot be had, the fused
forward does the same without."""

import pytest
import torch
import torch.nn.functional as F
from tiny import random_model

from core.runners import architecture, kernels, products
from core.runners.architecture import FusedNetwork
from core.runners.fused import FusedRunner, rotation
from core.runners.kernels import compiled_library, has_kernels
from core.runners.layers import Norm, normalise
from core.runners.products import dequantise, in_words, quantise

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
needs_kernels = pytest.mark.skipif(not has_kernels(), reason="no AVX512-BF16 or no C++ compiler here")
ours = torch.ops.playground


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_kernels
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (160, 64)])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 19])
def test_multiply_into(shape, rows):
    codes, scales = quantise(normal(*shape), 32)
    x, out = normal(rows, shape[1], seed=1).bfloat16(), torch.empty(rows, shape[0])
    ours.multiply_into(x, *in_words(codes, scales), out)
    torch.testing.assert_close(out.double(), x.double() @ dequantise(codes, scales).double().t(), rtol=1e-5, atol=1e-4)


@needs_kernels
def test_normalise():
    x, norm = 3 * normal(5, 48), Norm(normal(48, seed=1), torch.tensor([0.02]))
    expected, out = torch.empty(5, 48), torch.empty(5, 48, dtype=torch.bfloat16)
    ours.normalise(x, norm.weight, norm.floor, out)
    torch.testing.assert_close(out.float(), normalise(x, norm, expected), rtol=2**-8, atol=1e-6)


@needs_kernels
def test_silu_times():
    both = torch.cat([torch.linspace(-200, 200, 96).expand(3, -1), normal(3, 96)], 1)
    out = torch.empty(3, 96, dtype=torch.bfloat16)
    ours.silu_times(both, out)
    torch.testing.assert_close(out.float(), F.silu(both[:, :96]) * both[:, 96:], rtol=2**-8, atol=1e-6)


def attended(rows, cache, mask, begin, start, size):
    """Output and cache after our kernel attended; `rows` and `cache` are left as they are."""
    kind = architecture.Attending(None, 10000.0 ** (-torch.arange(0, size, 2) / size), 1.0)
    cos, sin = (part[start : start + len(rows)] for part in rotation(kind, 64, torch.float32))
    heads = rows.shape[1] - 2 * cache.shape[1]
    cache, out = cache.clone(), torch.empty(len(rows), heads * size, dtype=torch.bfloat16)
    turned = rows.clone()
    ours.attend(turned, cos, sin, cache, mask, begin, start, 0.3, out)
    swapped = torch.cat(rows.chunk(2, -1)[::-1], -1)
    expected = rows * cos + swapped * sin.roll(size // 2, -1)
    torch.testing.assert_close(turned[:, : heads + 2], expected[:, : heads + 2], rtol=1e-5, atol=1e-5)
    return turned, cache, out


@needs_kernels
@pytest.mark.parametrize("size", [16, 64, 80])
@pytest.mark.parametrize("begin", [0, 9])
def test_attend(size, begin):
    """As PyTorch attends to the same cache; a row alone comes to the same bits as with others behind it."""
    heads, key_heads, start, n = 6, 2, 21, 4
    rows, cache = normal(n, heads + 2 * key_heads, size), normal(2, key_heads, 64, size, seed=1).bfloat16()
    end = start + n
    mask = torch.full((n, end - begin), -torch.inf).triu(start + 1 - begin).bfloat16()
    turned, held, out = attended(rows, cache, mask, begin, start, size)
    queries = turned[:, :heads].view(1, n, heads, size).transpose(1, 2)
    keys, values = (part[:, begin:end].float().repeat_interleave(heads // key_heads, 0)[None] for part in held)
    expected = F.scaled_dot_product_attention(queries, keys, values, mask.float(), scale=0.3)
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1).reshape(n, -1), rtol=2**-7, atol=2**-7)
    assert torch.equal(held[1, :, start:end], rows[:, -key_heads:].transpose(0, 1).bfloat16())
    assert torch.equal(held[0, :, start:end], turned[:, heads:-key_heads].transpose(0, 1).bfloat16())
    assert torch.equal(held[:, :, :start], cache[:, :, :start])
    *_, alone = attended(rows[:1], cache, torch.empty(0).bfloat16(), begin, start, size)
    assert torch.equal(alone, out[:1])


@needs_kernels
@pytest.mark.parametrize("architecture_", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("int4", [True, False])
def test_the_fused_forward_is_the_same_without(architecture_, int4, monkeypatch):
    ids = torch.randint(0, 64, (44,), generator=torch.Generator().manual_seed(3))

    def logits():
        network = random_model(architecture_, 7, vocab=64, dtype=torch.bfloat16, **WIDE)
        runner = FusedRunner(FusedNetwork(network, int4), 64, capacity=8)
        assert runner._net.as_written.kernels is architecture.has_kernels()
        chunks = [runner.feed(part) for part in ids.split([34, 1, 1, 8])]
        return torch.cat([*chunks, runner.feed(ids[:4], [-1, 0, -1, 2])]).float()

    with_kernels = logits()
    for module in (products, architecture):
        monkeypatch.setattr(module, "has_kernels", lambda: False)
    assert (with_kernels - logits()).norm() < 0.03 * with_kernels.norm()


@pytest.mark.parametrize("has", [True, False])
def test_the_layers_are_scripted(has, monkeypatch):
    """What TorchScript refuses would run as Python, in silence and slower."""
    if not has:
        for module in (products, architecture):
            monkeypatch.setattr(module, "has_kernels", lambda: False)
    network = random_model("llama", 7, vocab=64, dtype=torch.bfloat16, **WIDE)
    assert isinstance(FusedNetwork(network, int4=True).layers, torch.jit.ScriptModule)


def test_without_a_compiler_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError):
        compiled_library()
    assert not has_kernels.__wrapped__()


def test_a_compiler_that_fails_is_nobodys_trouble(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert not has_kernels.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))
