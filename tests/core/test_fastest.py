"""What `auto` means on a GPU: the precision whose products are the fastest there, of those that fit."""

import pytest
import torch
from tiny import random_model

from core.loading import fastest, precision
from core.loading.fastest import choose, time_products
from core.loading.precision import choose_format, product_shapes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture
def config():
    return random_model("llama", 5, dtype=torch.bfloat16, **WIDE).config


def test_shapes_are_those_of_the_layers(config):
    layer = random_model("llama", 5, dtype=torch.bfloat16, **WIDE).model.layers[0]
    found = {name.split(".")[-1]: tuple(p.shape) for name, p in layer.named_parameters() for name in [name[:-7]]}
    assert {name: found[name] for name in product_shapes(config)} == product_shapes(config)


def test_the_fastest_is_taken_and_nearly_as_fast_is_not_worth_bits():
    """Rows of a plain step and of a round count alike: NF4 that unpacks whole weights for the round loses."""
    assert choose({"bf16": (10e-6, 10e-6), "int4": (3e-6, 4e-6), "nf4": (3e-6, 12e-6)}).precision == "int4"
    assert choose({"bf16": (10e-6, 10e-6), "int4": (9.8e-6, 9.9e-6)}).precision == "bf16"
    chosen = choose({"bf16": (74e-6, 75e-6), "nf4": (31e-6, 40e-6)})
    assert chosen.why == (
        "Auto took nf4: a layer's products over 1 and 5 rows take, in microseconds, bf16 74 and 75, nf4 31 and 40."
    )
    assert choose({"nf4": (1e-6, 1e-6)}).why == "Auto took nf4: nothing else fits this GPU."


def test_every_precision_can_be_timed(config):
    shapes = tuple((name, *shape) for name, shape in product_shapes(config).items())
    for each in ("bf16", "int4", "nf4"):
        assert len(seconds := time_products(CPU, shapes, each, 2)) == 2 and min(seconds) > 0


class Gpu:
    """A GPU of so many bytes on which products take what the test says."""

    def __init__(self, monkeypatch, room, seconds, broken=None):
        self.timed = []

        def timing(device, shapes, precision, layers):
            self.timed.append(precision)
            if broken:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB")
            return seconds[precision]

        monkeypatch.setattr(fastest, "_timed", {})
        monkeypatch.setattr(fastest, "_room", lambda device: room)
        monkeypatch.setattr(fastest, "time_products", timing)
        for name in ("int4_obstacle", "nf4_obstacle"):
            monkeypatch.setattr(fastest, name, lambda device: None)
        for module in (fastest, precision):
            monkeypatch.setattr(module, "sixteen_bits", lambda device: "bf16")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


SECONDS = {"bf16": (4e-6, 4e-6), "int4": (1e-6, 2e-6), "nf4": (1e-6, 4e-6)}


def test_what_does_not_fit_is_not_timed_and_nothing_twice(config, monkeypatch):
    """16 bits need room to stay; int4 does with its own, packed product by product; the card knows what a load has
    measured."""
    config = random_model("llama", 5, dtype=torch.bfloat16, num_hidden_layers=12, **WIDE).config
    size = 2 * sum(p.numel() for p in random_model("llama", 5, num_hidden_layers=12, **WIDE).parameters())
    for room, timed, chosen in (
        (10 * size, ["bf16", "int4", "nf4"], "int4"),
        (size, ["int4", "nf4"], "int4"),
        (0.4 * size, ["nf4"], "nf4"),
    ):
        gpu = Gpu(monkeypatch, room, SECONDS)
        assert fastest.fastest_precision(config, CUDA, measure=False) is None
        assert fastest.fastest_precision(config, CUDA, measure=True).precision == chosen
        assert fastest.fastest_precision(config, CUDA, measure=False).precision == chosen
        assert gpu.timed == timed


def test_where_nothing_can_be_timed_the_fewest_bits_are_taken(config, monkeypatch):
    Gpu(monkeypatch, 10**9, SECONDS, broken=True)
    found = fastest.fastest_precision(config, CUDA, measure=True)
    assert (found.precision, found.why) == (
        "nf4",
        "Auto took nf4: products could not be timed here (CUDA out of memory. Tried to allocate).",
    )


def test_only_auto_on_a_gpu_is_measured(config, monkeypatch):
    Gpu(monkeypatch, 10**9, SECONDS)
    assert fastest.fastest_precision(config, CPU, measure=True) is None
    measured = fastest.fastest_precision(config, CUDA, measure=True)
    assert choose_format("auto", CUDA, None, measured=measured).why == measured.why
    assert choose_format("bf16", CUDA, None, measured=measured).precision == "bf16"
    config.quantization_config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert fastest.fastest_precision(config, CUDA, measure=True) is None  # as it was saved
    assert fastest.fastest_precision(config, CUDA, measure=True, bundled=True).precision == "int4"
