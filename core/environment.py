"""Where a run happened: device, versions, models. Part of every document, so that figures can be compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from core.drafting import Drafter
from core.geometry import describe_geometry
from core.model import Model


def describe_environment(target: Model, draft: Model | None) -> dict[str, Any]:
    """Facts of the machine and of the loaded models; no names of users, hosts or folders beyond what was asked for."""
    return {
        "device": target.device.type,
        "device_name": device_name(target.device),
        "threads": target.threads,
        "versions": {name: found for name in ("torch", "transformers", "bitsandbytes") if (found := _version(name))},
        "python": platform.python_version(),
        "target": _describe_model(target),
        "draft": _describe_model(draft) if draft else None,
    }


def describe_drafter(drafter: Drafter, translated: bool) -> dict[str, Any]:
    """What of a run's drafter its settings do not tell: the exit layer that was chosen, and whether a draft model
    counts in tokens of its own."""
    return {"exit_layer": getattr(getattr(drafter, "runner", None), "layers", None), "translated": translated}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores" if device.type == "cpu" else device.type


def _describe_model(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": type(model.network).__name__,
        "precision": model.precision,
        "runner": model.runner_kind,
        "layers": model.layers,
        "parameters": model.parameter_count(),
        "weight_bytes": model.weight_bytes(),
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "costs": model.costs.to_dict() if model.costs else None,
        "following": model.costs.following if model.costs else None,
        "notes": model.notes,
        "geometry": geometry.to_dict() if (geometry := describe_geometry(model)) else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
