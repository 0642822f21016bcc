"""The trained weights -> ordinary transformers folders, quantised to NF4."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from .model import EPSILON, HEAD
from .settings import Shape
from .tokenizer import load_tokenizer


def describe_shape(shape: Shape, end_of_text: int) -> LlamaConfig:
    """The transformers configuration of a shape."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD,
        max_position_embeddings=shape.context,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def select_model(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """One model's weights out of the pair's: `target.` or `drafts.NAME.` stripped."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def build_model(shape: Shape, weights: dict[str, Tensor], end_of_text: int) -> LlamaForCausalLM:
    """The same model as transformers knows it, in float32."""
    model = LlamaForCausalLM(describe_shape(shape, end_of_text))
    named = {f"model.{name}": value for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(named, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit the shape: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=end_of_text, pad_token_id=end_of_text)
    return model.eval()


def save_full(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write the model in bfloat16 with its tokenizer."""
    if folder.exists():
        shutil.rmtree(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(tokenizer_folder).save_pretrained(folder)


def save_quantised(full: Path, folder: Path) -> None:
    """Quantise a full folder to NF4 and save it. Saved before any forward pass: on a CPU the first one repacks the
    weights in place, after which they no longer save as they were."""
    if folder.exists():
        shutil.rmtree(folder)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(full, quantization_config=how, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in full.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, folder)


def export_pair(checkpoint: Path, tokenizer_folder: Path, shapes: dict[str, Shape], full: Path, output: Path) -> None:
    """`shapes` maps `target` and `draft` to (prefix in the checkpoint, shape); writes full/ and output/ folders."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    end_of_text = load_tokenizer(tokenizer_folder).eos_token_id
    for name, (prefix, shape) in shapes.items():
        save_full(build_model(shape, select_model(state["pair"], prefix), end_of_text), tokenizer_folder, full / name)
        save_quantised(full / name, output / name)


def write_facts(output: Path, facts: dict) -> None:
    """`pocket.json`: what the application needs to know about the pair beyond its two configurations."""
    (output / "pocket.json").write_text(json.dumps(facts, indent=2) + "\n")
