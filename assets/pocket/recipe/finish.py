"""The draft-only phase: the target is frozen as it ships; the drafts learn its law on its own text and the corpus."""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from .export import build_model
from .losses import EXIT, compare_with_target, measure_logits
from .optimisers import build_optimisers, set_rate
from .quantise import list_matrices, round_to_nf4, shipped_weights
from .sample import sample_texts
from .train import CHECKPOINT, LOG, Trainer, score_pair, write_log
from .windows import Windows

FINISHED = "finished.pt"


def follow_target(target: Tensor, drafters: dict[str, Tensor]) -> Tensor:
    """Cross-entropy and total variation against the target, summed over the drafts."""
    total = torch.zeros((), device=target.device)
    for name, logits in drafters.items():
        if name != EXIT:
            entropy, variation = compare_with_target(target, logits)
            total = total + entropy + 2 * variation
    return total


def freeze_target(trainer: Trainer) -> None:
    """Give the target the weights it ships with, for good."""
    with torch.no_grad():
        for matrix in list_matrices(trainer.pair.target):
            matrix.copy_(round_to_nf4(matrix))
    trainer.pair.target.requires_grad_(False)


def take_batch(trainer: Trainer, texts: Tensor, step: int) -> Tensor:
    """ids [rows, tokens]: the target's own texts and corpus windows in turn, `batch_tokens` at a time."""
    recipe = trainer.recipe
    if step % 2:
        ids, _ = trainer.windows.take(recipe.sequence, max(1, recipe.batch_tokens // recipe.sequence), trainer.cursor)
        return ids
    rows = max(1, recipe.batch_tokens // texts.shape[1])
    first = step // 2 * rows
    return texts[torch.arange(first, first + rows) % len(texts)]


def finish_drafts(trainer: Trainer, held_out: Windows, tokenizer_end: int, work: Path) -> None:
    """Load the joint phase's checkpoint, train the drafts on, write `finished.pt`."""
    recipe, device = trainer.recipe, trainer.device
    trainer.resume()
    freeze_target(trainer)
    weights = trainer.pair.target.state_dict()
    writer = build_model(recipe.target, weights, tokenizer_end).to(device, torch.bfloat16)
    texts = sample_texts(writer, trainer.windows, recipe, work / "sampled.pt")
    texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(recipe.seed))]
    rates = (recipe.muon_rate * recipe.finish_rate, recipe.adam_rate * recipe.finish_rate)
    optimisers = build_optimisers(trainer.pair.drafts, *rates, recipe.weight_decay)
    follow = torch.compile(follow_target, dynamic=False) if trainer.compiled else follow_target
    done, step = 0, 0
    with tqdm(total=recipe.finish_tokens, unit="tok", unit_scale=True, mininterval=10, desc="drafts") as bar:
        while done < recipe.finish_tokens:
            ids = take_batch(trainer, texts, step).to(device)
            set_rate(optimisers, min(1.0, (step + 1) / 20) * (1 - done / recipe.finish_tokens))
            with shipped_weights(trainer.pair.drafts, True, trainer.compiled):
                target, drafters = measure_logits(trainer.pair, ids, recipe.exit_layer, torch.bfloat16)
                loss = follow(target, drafters)
                loss.backward()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            done, step = done + ids.numel(), step + 1
            bar.update(ids.numel())
            if step % recipe.evaluate_every == 0 or done >= recipe.finish_tokens:
                with shipped_weights(trainer.pair.drafts, True, trainer.compiled):
                    scores = score_pair(trainer.pair, held_out, recipe, device)
                bar.write(f"{done:,} tokens: {scores}")
                write_log(work / LOG, {"finish_tokens": done, "loss": loss.item(), "held_out": scores})
    state = torch.load(work / CHECKPOINT, map_location="cpu", weights_only=True)
    state["pair"] |= {f"drafts.{name}": value.cpu() for name, value in trainer.pair.drafts.state_dict().items()}
    torch.save({**state, "finish": {"tokens": done, "texts": len(texts)}}, work / FINISHED)
