"""Id or folder -> Model on a device, in the precision asked for. Safetensors only, never code from a repository."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from core.errors import UserError
from core.hub import fetch
from core.model import Model
from core.nf4 import dequantised
from core.pairs import Pair, same_tokens
from core.records import Settings
from core.vocabulary import translate

POCKET = Path(__file__).parent.parent / "assets" / "pocket"
POCKET_NAME = "pocket"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS = ("auto", "nf4", *DTYPES)
Progress = Callable[[str], None]

transformers_logging.disable_progress_bar()  # progress is ours to show
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # tells of a kernel it does without


def silent(message: str) -> None:
    pass


def load_pair(settings: Settings, progress: Progress = silent) -> Pair:
    """The target and, where one is named, the draft of these settings; with no target, the bundled pair."""
    device = resolve_device(settings.device)
    target_name, draft_name = settings.target, settings.draft
    if target_name is None:
        target_name, draft_name = POCKET_NAME, draft_name or POCKET_NAME
    target = load_model(target_name, device, settings.precision, settings.revision, "target", progress)
    target.choose_threads()
    if draft_name is None:
        target.measure_costs()
        return Pair(target)
    precision = settings.precision if settings.draft_precision == "auto" else settings.draft_precision
    draft = load_model(draft_name, device, precision, None, "draft", progress)
    translation = None if same_tokens(target, draft) else translate(target, draft)
    for model in (target, draft):
        progress(f"Measuring what a pass of {model.name} costs here")
        model.measure_costs()
    return Pair(target, draft, translation)


def load_model(
    name: str,
    device: torch.device,
    precision: str = "auto",
    revision: str | None = None,
    role: str = "target",
    progress: Progress = silent,
) -> Model:
    """Load one model. Raises UserError with one sentence for whatever a person can mend."""
    if precision not in PRECISIONS:
        raise UserError(f"There is no precision {precision!r}; choose one of {', '.join(PRECISIONS)}.")
    bundled = name == POCKET_NAME
    progress(f"Loading {name} ({role})")
    folder = POCKET / role if bundled else fetch(name, revision)
    label = f"{POCKET_NAME} {role}" if bundled else name
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsupported(config, label)
        precision = resolve_precision(precision, device, config, bundled)
        network = _load_network(folder, config, device, precision)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UserError:
        raise
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise UserError(f"{label} cannot be read: {_first_sentence(error)}") from error
    except (ValueError, LookupError, ImportError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{label} cannot be loaded: {_first_sentence(error)}") from error
    network.eval().requires_grad_(False)
    return Model(
        name=label,
        network=network,
        tokenizer=tokenizer,
        precision=precision,
        stop_ids=_stop_ids(folder, tokenizer, config),
        context_length=getattr(config, "max_position_embeddings", None) or 2048,
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config(decoder=True).vocab_size),
    )


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device not in ("cpu", "cuda", "mps"):
        raise UserError(f"There is no device {device!r}; choose auto, cpu, cuda or mps.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is available to this PyTorch; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("No Apple GPU is available to this PyTorch; use --device cpu or auto.")
    return torch.device(device)


def resolve_precision(precision: str, device: torch.device, config: Any, bundled: bool) -> str:
    """What `auto` means here: NF4 on CUDA; on a CPU what the bundled pair's benchmark found for it, bf16 for others."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "nf4"
    if device.type == "cpu" and bundled:
        return _pocket_precision()
    return "bf16"


def _pocket_precision() -> str:
    wanted = json.loads((POCKET / "pocket.json").read_text())["default_precision"]["cpu"]
    return wanted if wanted != "nf4" or _fast_nf4_on_cpu() else "bf16"


def _fast_nf4_on_cpu() -> bool:
    """bitsandbytes has a fused CPU kernel only for AVX512-BF16; elsewhere it unpacks the weights at every call."""
    capabilities = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "")()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "AVX512" in capabilities and "avx512_bf16" in flags


def refuse_unsupported(config: Any, name: str) -> None:
    """Speculation takes tokens back, so every layer's cache must be able to forget its newest entries exactly."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; speculative decoding here needs a decoder-only one.")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{name} is a {config.model_type} model, which is not one that generates text from text.")
    layers = DynamicCache(config=config).layers
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    stateful = getattr(AutoModelForCausalLM._model_mapping[type(config)], "_is_stateful", False)
    if kinds or stateful:
        raise UserError(
            f"{name} ({config.model_type}) keeps a running state instead of one cache entry per token (recurrent or "
            "linear attention), and a state cannot be rolled back when a draft is rejected; choose a model whose "
            "layers all use attention."
        )


def _load_network(folder: Path, config: Any, device: torch.device, precision: str) -> nn.Module:
    saved = getattr(config, "quantization_config", None)
    if saved is not None and _is_nf4(saved) and precision in DTYPES:
        return _load_unpacked(folder, config, device, DTYPES[precision])
    options: dict[str, Any] = {"dtype": DTYPES.get(precision, _compute_dtype(device))}
    if precision == "nf4" and saved is None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=_compute_dtype(device),
        )
    if precision == "nf4" and device.type == "cuda":
        options["device_map"] = {"": device.index or 0}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # counted below instead
        output_loading_info=True,
        **options,
    )
    network, found = loaded
    # What a file lacks would be filled with random numbers, without a word.
    if absent := sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]):
        raise ValueError(f"its weights do not fit its config ({absent[0]})")
    return network if precision == "nf4" else nn.Module.to(network, device)


def _load_unpacked(folder: Path, config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = network.load_state_dict(dequantised(tensors, dtype), strict=False)
    tied = set(network.all_tied_weights_keys or ())
    if unexpected or set(missing) - tied:
        raise ValueError(f"its weights do not fit its config ({[*unexpected, *missing][0]})")
    network.tie_weights()
    return network.to(device)


def _is_nf4(saved: Any) -> bool:
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    return saved.get("load_in_4bit", False) and saved.get("bnb_4bit_quant_type") == "nf4"


def _compute_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def _stop_ids(folder: Path, tokenizer: Any, config: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config (one or several), the config and the tokenizer."""
    saved = (
        GenerationConfig.from_pretrained(folder).eos_token_id if (folder / "generation_config.json").is_file() else None
    )
    found: set[int] = set()
    for ids in (saved, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _first_sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
