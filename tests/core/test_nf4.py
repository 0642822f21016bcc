"""Our unpacking of NF4 against bitsandbytes' own."""

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from core.loading.precision import dequantised, unpack


def save_nf4(source, folder, double):
    """Quantise a saved model and save it again, before any forward: on a CPU that would repack the weights."""
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    network = AutoModelForCausalLM.from_pretrained(source, quantization_config=quantisation, dtype=torch.float32)
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize("double", [True, False])
def test_unpacks_as_bitsandbytes_does(pair_folder, tmp_path, double):
    """Every quantised weight, with scales quantised once more or not."""
    network = save_nf4(pair_folder / "target", tmp_path, double)
    tensors = load_file(tmp_path / "model.safetensors")
    quantised = {n: p for n, p in network.named_parameters() if getattr(p, "quant_state", None) is not None}
    assert len(quantised) == 4 * 7  # layers x projections
    for name, parameter in quantised.items():
        expected = dequantize_4bit(parameter.data, parameter.quant_state).float()
        torch.testing.assert_close(unpack(tensors, name), expected, rtol=1e-6, atol=1e-7)


def test_state_dict_has_plain_weights_only(pair_folder, tmp_path):
    """What is left has the names and shapes of the model it was made from."""
    save_nf4(pair_folder / "target", tmp_path, double=True)
    original = load_file(pair_folder / "target" / "model.safetensors")
    state = dequantised(load_file(tmp_path / "model.safetensors"), torch.bfloat16)
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in original.items()}
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
