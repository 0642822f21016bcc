"""Tiny targets of the families whose MTP layer transformers runs, saved with it as they are published."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import COMMON, make_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

needs_single_layers = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="transformers before 5.20 does not run an MTP layer by itself"
)
AFTER_TWO = [r"model\.layers\.2\."]
"""Where the layer of a target of two layers is; transformers looks for it behind the depths of published models."""
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",
    "num_mtp_layers": 1,
}
MTP_KINDS = {
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "mellum": {"num_experts": 4, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
}
MELLUM = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
    "mtp_block": "mtp.layers.0",
}


def teach(network: nn.Module, mtp: MtpModel, text: list[int], steps: int = 40) -> None:
    """Let the layer learn one text of its target by heart."""
    ids = torch.tensor([text])
    states = network(ids[:, :-2], output_hidden_states=True).hidden_states[-1].detach()
    own = list(mtp.layers.requires_grad_(True).parameters())
    optimiser = torch.optim.Adam(own, 0.02)
    for _ in range(steps):
        output = mtp.forward_layer(0, states, torch.arange(1, len(text) - 1)[None], MtpCache(), input_ids=ids[:, 1:-1])
        loss = F.cross_entropy(network.lm_head(output)[0], ids[0, 2:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    mtp.layers.requires_grad_(False)


def mtp_target(kind: str, vocab: int, dtype: torch.dtype) -> tuple[nn.Module, MtpModel]:
    """A target with random weights and an MTP layer that belongs to it."""
    torch.manual_seed(4)
    options = {**COMMON, "bos_token_id": None, "eos_token_id": None, **EXPERTS, **MTP_KINDS[kind], "vocab_size": vocab}
    if kind == "deepseek_v3":
        del options["head_dim"]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), dtype=dtype).eval()
    mtp = MtpModel(network, 1).to(dtype).eval()
    for module in (network, mtp.layers):
        for parameter in module.requires_grad_(False).parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return network, mtp


def save_with_mtp(network: nn.Module, mtp: MtpModel, folder: Path) -> None:
    """Under the names of the published checkpoints: each expert by itself, and the layer after the target's last one or
    under `mtp.`."""
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{network.config.num_hidden_layers}"
    for name, value in mtp.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        own = {"post_norm": f"{last}.shared_head.norm", "mtp_block": last}
        prefix = MELLUM[part] if network.config.model_type == "mellum" else own.get(part, f"{last}.{part}")
        tensors |= {key: each.clone().contiguous() for key, each in published(f"{prefix}.{rest}", value).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def published(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of transformers as checkpoints have it."""
    stem, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        halves = {"gate_proj": value.chunk(2, 1)[0], "up_proj": value.chunk(2, 1)[1]}
    elif kind == "down_proj":
        halves = {"down_proj": value}
    else:
        return {name: value}
    return {f"{stem}.{i}.{part}.weight": half[i] for part, half in halves.items() for i in range(len(half))}
