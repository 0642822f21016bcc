"""Text written by the target itself: what a draft meets when it is used."""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from .settings import Recipe
from .windows import Windows

BATCH = 64
TEMPERATURES = (0.0, 1.0, 0.7)  # in turn, a batch each


@torch.no_grad()
def continue_texts(model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """prompts [batch, tokens] -> ids [batch, length], never ending early."""
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, max_length=length, min_length=length, **how)


def sample_texts(model: LlamaForCausalLM, windows: Windows, recipe: Recipe, file: Path) -> Tensor:
    """ids [texts, sampled_length], prompted with beginnings of training windows; kept in `file` and grown on resume."""
    texts = torch.load(file) if file.exists() else torch.empty(0, recipe.sampled_length, dtype=torch.long)
    cursor = {f"{recipe.sampled_prompt}.epoch": 1000, f"{recipe.sampled_prompt}.place": len(texts)}
    torch.manual_seed(recipe.seed + len(texts))
    batch = min(BATCH, recipe.sampled_texts)
    for start in tqdm(range(len(texts), recipe.sampled_texts, batch), unit="batch", desc="sampling"):
        prompts, _ = windows.take(recipe.sampled_prompt, batch, cursor)
        temperature = TEMPERATURES[start // batch % len(TEMPERATURES)]
        found = continue_texts(model, prompts.to(model.device), recipe.sampled_length, temperature)
        texts = torch.cat((texts, found.cpu()))
        torch.save(texts, file)
    return texts
