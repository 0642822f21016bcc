"""Muon for the hidden matrices, AdamW for embeddings and norms."""

import torch
from torch import nn


def build_optimisers(model: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Each optimiser's group remembers its full rate under `peak`; `set_rate` scales it."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def set_rate(optimisers: list[torch.optim.Optimizer], scale: float) -> None:
    """Set every rate to `scale` of its peak."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = scale * group["peak"]
