"""transformers' own generation on the same weights, timed as we time ourselves: decoding apart from prefill."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from core.clock import synchronise
from core.loading.pair import Pair
from core.records import Settings
from core.text import encode_prompt

PEERS = ("transformers generate", "transformers assisted")


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


def run_peer(pair: Pair, name: str, prompt: str, settings: Settings) -> float:
    """Tokens per second of `generate`, plain or assisted by the pair's draft at the same constant draft length."""
    target: Any = pair.target.network
    ids = torch.tensor([encode_prompt(pair.target, prompt, settings)], device=pair.target.device)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": settings.temperature > 0,
        "eos_token_id": None if settings.ignore_eos else sorted(pair.target.stop_ids) or None,
        "pad_token_id": 0,
    }
    if settings.temperature > 0:
        options |= {"temperature": settings.temperature, "top_k": settings.top_k or None, "top_p": settings.top_p}
    if name == "transformers assisted":
        assert pair.draft is not None
        assistant: Any = pair.draft.network
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
