"""Other engines on the same weights, timed as we time ourselves: decoding apart from prefill.

transformers' own generation, plain and assisted by the pair's draft, and llama.cpp (optional package xllamacpp) on a
GGUF file, in its own best format too, plain and with each n-gram speculation it brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from core.errors import UserError
from core.loading.conversion import requantised
from core.loading.gguf import Kind, read_header
from core.loading.model import Model
from core.loading.pair import Pair
from core.progress import Progress, silent
from core.records import Settings
from core.runners.clock import synchronise
from core.runners.products import Share
from core.text import encode_prompt

Peer = Callable[[str, Settings], float]
"""Tokens per second of decoding a prompt under these settings."""


class FirstStep(StoppingCriteria):
    """Notes when the first step ended and how long the sequence was then; stops nothing."""

    def __init__(self) -> None:
        self.at = 0.0
        self.length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if not self.length:
            synchronise(input_ids.device)
            self.at, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def transformers_peers(pair: Pair) -> dict[str, Peer]:
    """`generate`, plain and, where the pair has a draft, assisted; in bf16 where the pair is in int4, which is ours."""
    target, draft = network_for(pair.target), pair.draft and network_for(pair.draft)
    suffix = " (bf16)" if pair.target.precision == "int4" else ""
    peers: dict[str, Peer] = {f"transformers generate{suffix}": lambda *run: _generate(pair, target, None, *run)}
    if draft is not None:
        peers[f"transformers assisted{suffix}"] = lambda *run: _generate(pair, target, draft, *run)
    return peers


def network_for(model: Model) -> nn.Module:
    """The network as transformers itself has it: loaded again where ours laid its weights out for other kernels."""
    laid_out = any(isinstance(module, Share) for module in model.network.modules())
    return model.load_again() if laid_out and model.load_again else model.network


def _generate(pair: Pair, target: Any, assistant: Any, prompt: str, settings: Settings) -> float:
    """Tokens per second of `generate`, plain or assisted at the same constant draft length."""
    ids = torch.tensor([encode_prompt(pair.target, prompt, settings)], device=pair.target.device)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.temperature > 0,
        "eos_token_id": None if settings.ignore_eos else sorted(pair.target.stop_ids) or None,
        "pad_token_id": 0,
    }
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_k": settings.top_k or None, "top_p": settings.top_p}
        options["min_p"] = settings.min_p or None
    if assistant is not None:
        length = settings.draft_length if settings.draft_length != "auto" else 5
        assistant.generation_config.num_assistant_tokens = length
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    first = FirstStep()
    torch.manual_seed(settings.seed)
    with torch.inference_mode():
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([first]), **options
        )
    synchronise(ids.device)
    seconds = time.perf_counter() - first.at
    return (output.shape[1] - first.length) / seconds if output.shape[1] > first.length else 0.0


SPECULATION = ("NONE", "NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_MOD", "NGRAM_CACHE")
"""What it brings that needs no draft model."""
BEST = Kind.Q4_0
"""Its fastest format on CPUs: repacked at load for kernels of its own."""


def llama_peers(
    pair: Pair, gguf: str | Path | None, context: int = 2048, progress: Progress = silent
) -> dict[str, Peer]:
    """llama.cpp on a GGUF file of the pair's target, as it is and with the same weights in its best 4-bit format, on as
    many threads as ours, plain and with each of its speculations at their own settings. Raises UserError where package
    or file are missing."""
    try:
        package: Any = import_module("xllamacpp")
    except ImportError:
        raise UserError(
            "llama.cpp is measured through a package that is not installed (pip install xllamacpp)."
        ) from None
    if gguf is None:
        raise UserError("llama.cpp reads GGUF files: name the target's with --gguf FILE.")
    if not Path(gguf).is_file():
        raise UserError(f"There is no GGUF file {gguf}.")
    files = {read_header(file).quantisation: file for file in (Path(gguf), requantised(Path(gguf), BEST, progress))}
    return {
        f"llama.cpp {quantisation}{'' if kind == 'NONE' else ' ' + kind.lower().replace('_', '-')}": _llama(
            package, pair, str(file), kind, context
        )
        for quantisation, file in files.items()
        for kind in SPECULATION
        if hasattr(package.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")
    }


def _llama(package: Any, pair: Pair, gguf: str, kind: str, context: int) -> Peer:
    options = package.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = gguf, context, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = pair.target.threads
    options.ui, options.verbosity = False, -1
    options.speculative.types = [getattr(package.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    server = package.Server(options)

    def run(prompt: str, settings: Settings) -> float:
        asked = {
            "prompt": encode_prompt(pair.target, prompt, settings),
            "n_predict": settings.max_new_tokens,
            "ignore_eos": settings.ignore_eos,
            "cache_prompt": False,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "seed": settings.seed,
        }
        timings = server.handle_completions(asked)["timings"]
        # The first token comes out of the prefill.
        return 1000 * (timings["predicted_n"] - 1) / timings["predicted_ms"] if timings["predicted_n"] > 1 else 0.0

    return run
