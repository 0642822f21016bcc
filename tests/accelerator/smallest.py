"""The smallest things that can fail on a new card, one after the other, so that a failure names its cause: a product of
each precision, a capture, attention in parts, a draw, one layer, one head."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.errors import first_line
from core.heads import HeadConfig, HeadNetwork
from core.heads.block import FusedHead
from core.heads.graph import GraphHeadRunner
from core.loading.fastest import Products
from core.loading.precision import nf4_obstacle
from core.measuring.bench import copy_bandwidth
from core.runners.attention import time_attention
from core.runners.capture import Captures, apart
from core.runners.clock import synchronise
from core.runners.dynamic import DynamicRunner, unlike
from core.runners.graph import GraphRunner, fused_for
from core.runners.products import int4_obstacle
from core.sampling import Sampling, draw
from core.verification import judge
from tests.accelerator.models import SMALL, TARGET, build

Found = dict[str, Any]
Step = Callable[[torch.device, bool], Found]
CLOSE = {"fp32": 1e-3, "bf16": 0.02, "int4": 0.2, "nf4": 0.2}
"""How far a product may lie from that of the weight's floats: rounding of activations, or of weights to 4 bits."""
HEAD = HeadConfig(  # EAGLE-3's for Llama 3.1 8B
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    draft_vocab_size=32000,
    target_hidden_size=4096,
    aux_layers=(2, 16, 29),
)


def product_in(precision: str) -> Step:
    def step(device: torch.device, small: bool) -> Found:
        """Five rows with a weight of 1,024 x 1,024 (small: 128), against float64 on the host."""
        size = 128 if small else 1024
        obstacle = {"int4": int4_obstacle, "nf4": nf4_obstacle}.get(precision, lambda device: None)(device)
        if obstacle:
            return {"skipped": obstacle}
        torch.manual_seed(0)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        x = torch.randn(5, size, dtype=dtype, device=device)
        torch.manual_seed(1)
        linear: Any = Products(tuple((name, size, size) for name in NAMES), device, precision)
        linear.to(dtype) if precision == "fp32" else None
        torch.manual_seed(1)
        weight = 0.02 * torch.randn(size, size, dtype=torch.bfloat16, device=device)
        found = linear.q_proj(x)
        away = apart(found.cpu(), x.cpu().double() @ weight.cpu().double().t())
        assert away < CLOSE[precision], f"the product is {away:.3f} of its norm away from the right one"
        return {"apart": away}

    return step


NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def copying(device: torch.device, small: bool) -> Found:
    """The memory's bandwidth, which all bounds are made of."""
    return {"bytes_per_second": copy_bandwidth(device, 1 << (20 if small else 30))}


def capturing(device: torch.device, small: bool) -> Found:
    """A product as a graph, replayed with other inputs; the number of the host it is given must not be baked in."""
    captures = Captures(device)
    weight = torch.randn(64, 64, device=device)

    def work(x: Tensor, start: Tensor) -> tuple[Tensor]:
        return (x @ weight + start,)

    for start in range(3):
        x = torch.randn(4, 64, device=device)
        found = captures("product", work, (x, start), (x, start + 9))[0]
        assert torch.allclose(found, x @ weight + start, rtol=1e-2, atol=1e-2), "a replay gives other numbers"
    return captured_by(captures, device)


def attending(device: torch.device, small: bool) -> Found:
    """Attention of few rows over a long cache, whole and in parts (a split that differs raises)."""
    timed = time_attention(8, 4, 128, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    reach = 2048 if small else 16384
    return {f"microseconds in {parts}": 1e6 * timed(reach, parts) for parts in ((1, 4) if small else (1, 4, 8, 16))}


def drawing(device: torch.device, small: bool) -> Found:
    """The sampler chain, a draw and the verdict on a chain, over a large vocabulary: the same as on the host."""
    from core.drafting import Draft

    torch.manual_seed(0)
    vocabulary = 1000 if small else 128256
    logits, uniforms = torch.randn(5, vocabulary) * 3, torch.rand(9)
    sampling = Sampling(0.8, 50, 0.9, 0.02)
    q = sampling.probabilities(logits[:4])
    draft = draw(q, uniforms[:4])
    here = judge(logits, Draft(draft, q), sampling, uniforms[4:])
    there = judge(logits.to(device), Draft(draft.to(device), q.to(device)), sampling, uniforms[4:].to(device))
    assert (here.path, here.token) == (there.path, there.token), "the device's verdict is another"
    return {"accepted": len(here.path)}


def layer(fused: bool) -> Step:
    def step(device: torch.device, small: bool) -> Found:
        """One layer of the large target's shape, captured, against transformers' own forward."""
        torch.manual_seed(0)
        network = one_layer(device, small)
        own = DynamicRunner(network, network.config.vocab_size)
        found = fused_for(network) if fused else None
        if isinstance(found, str):
            raise AssertionError(found)
        ours = GraphRunner(network, network.config.vocab_size, fused=found)
        where = unlike(own, ours, network.config.vocab_size)
        assert where is None, f"its answers part from transformers', at {where}"
        assert ours.failure is None, ours.failure
        return captured_by(ours._captures, device)

    return step


def one_layer(device: torch.device, small: bool) -> Any:
    shape = TARGET | (SMALL if small else {}) | {"num_hidden_layers": 1}
    return build(shape, "bf16", device)


def heading(device: torch.device, small: bool) -> Found:
    """A head of the large target's shape: a chain in one replay, and what a drafted token takes beside the bound, its
    bytes over the measured bandwidth."""
    head = random_head(device, small)
    runner, config = GraphHeadRunner(head), head.config
    ids = torch.arange(3, device=device)
    features = torch.randn(3, config.feature_width, dtype=head.dtype, device=device)
    uniforms = torch.full((8,), 0.5, device=device)
    seconds = {}
    for length in (1, 2, 4, 8):
        taken = []
        for _ in range(8):
            runner.truncate(100)
            synchronise(device)
            start = time.perf_counter()
            runner.chain(ids, features, length, likeliest, "likeliest", uniforms)
            synchronise(device)
            taken.append(time.perf_counter() - start)
        seconds[length] = sorted(taken)[len(taken) // 2]
    assert runner.failure is None, runner.failure
    step = (seconds[8] - seconds[1]) / 7
    read = sum(p.numel() * p.element_size() for name, p in head.network.named_parameters() if not name.startswith("fc"))
    bound = read / copy_bandwidth(device, 1 << (20 if small else 30))
    found = {"milliseconds by length": {n: 1000 * s for n, s in seconds.items()}, "a token": 1000 * step}
    return found | {"bound": 1000 * bound, **captured_by(runner._captures, device)}


def likeliest(row: Tensor, uniform: Tensor) -> tuple[Tensor, None]:
    return row.max(-1).indices, None


def random_head(device: torch.device, small: bool) -> FusedHead:
    tiny: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
    tiny |= {"vocab_size": 512, "draft_vocab_size": 128, "target_hidden_size": 64}
    config = replace(HEAD, **tiny) if small else HEAD
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        network = HeadNetwork(config).to(dtype).eval().requires_grad_(False)
        table = 0.02 * torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    network.rotary = network.rotary.float()
    return FusedHead(network, table, config.vocab_size)


def captured_by(captures: Captures, device: torch.device) -> Found:
    assert device.type != "cuda" or len(captures), "nothing was captured"
    return {"graphs": len(captures)}


STEPS: tuple[tuple[str, str, Step], ...] = (
    ("a product in fp32", "PyTorch and its driver (python -m torch.utils.collect_env)", product_in("fp32")),
    ("a product in bf16", "whether the card has bf16 (from Ampere on); fp16 needs none", product_in("bf16")),
    ("a product in NF4", "python -m bitsandbytes", product_in("nf4")),
    ("a product in int4", "torch._weight_int4pack_mm on this card; nf4 does without", product_in("int4")),
    ("copying", "other programs on the card (nvidia-smi)", copying),
    ("a capture", "core/runners/capture.py: record() alone, then Captures", capturing),
    ("attention in parts", "core/runners/attention.py: _with_sums(), and the shape of its sums", attending),
    ("a draw and a verdict", "core/sampling.py: draw(), then core/verification.py: verify_chain()", drawing),
    ("a layer of transformers' modules, captured", "core/runners/static_cache.py", layer(fused=False)),
    ("a fused layer, captured", "core/runners/static_layers.py", layer(fused=True)),
    ("a head's chain, captured", "core/heads/graph.py", heading),
)
"""Name, what to look at where it fails, and the step."""


def measure(device: torch.device, small: bool, leave: Callable[[Found], None], say: Callable[[str], None]) -> Found:
    """Every step with what it found or why it failed; the document is left after each, so that one that ends the
    process is known by what is missing."""
    document: Found = {}
    for name, look, step in STEPS:
        say(f"{name} …")
        start = time.perf_counter()
        try:
            document[name] = {"ok": True, **step(device, small)}
        except Exception as error:  # whatever a new card raises; the next step may still tell something
            document[name] = {"ok": False, "error": first_line(error, 300), "look_at": look}
            say(f"FAILED: {first_line(error, 300)}. Look at: {look}")
        document[name]["seconds"] = round(time.perf_counter() - start, 2)
        leave(document)
    return document
