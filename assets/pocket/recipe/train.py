"""The joint phase: the target learns the text, its drafters learn the target, all in one pass over the corpus."""

import json
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from .losses import EXIT, compare_with_target, learn_text, measure_logits, score_drafter
from .model import Pair
from .optimisers import build_optimisers, set_rate
from .quantise import shipped_weights
from .schedule import choose_length, is_decaying, is_quantising, scale_rate
from .settings import Recipe
from .windows import Windows

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


def combine_losses(target: Tensor, drafters: dict[str, Tensor], labels: Tensor, exit_weight: float, late: float):
    """(sum to differentiate, the target's own loss). `late` in 0..1 mixes in the total variation."""
    text = learn_text(target, labels)
    total = text
    for name, logits in drafters.items():
        entropy, variation = compare_with_target(target, logits)
        loss = entropy + 2 * late * variation
        if name == EXIT:
            loss = exit_weight * 0.5 * (loss + learn_text(logits, labels))
        total = total + loss
    return total, text.detach()


class Trainer:
    """Everything a checkpoint holds, and the step that advances it."""

    def __init__(self, recipe: Recipe, work: Path, windows: Windows, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.work, self.windows, self.device = recipe, work, windows, device
        self.pair = Pair(recipe.target, recipe.drafts).to(device)
        self.optimisers = build_optimisers(self.pair, recipe.muon_rate, recipe.adam_rate, recipe.weight_decay)
        self.compiled = compiled
        self.combine = torch.compile(combine_losses, dynamic=False) if compiled else combine_losses
        if compiled:
            self.pair.compile_layers()
        self.done, self.step, self.seconds = 0, 0, 0.0
        self.cursor: dict[str, int] = {}

    def advance(self) -> float:
        """One optimiser step on `batch_tokens` tokens; the target's loss in nats a token."""
        length = choose_length(self.recipe, self.done, self.step)
        ids, labels = self.windows.take(length, max(1, self.recipe.batch_tokens // length), self.cursor)
        ids, labels = ids.to(self.device), labels.to(self.device)
        set_rate(self.optimisers, scale_rate(self.recipe, self.done))
        late = torch.tensor(float(is_decaying(self.recipe, self.done)), device=self.device)
        with shipped_weights(self.pair, is_quantising(self.recipe, self.done), self.compiled):
            target, drafters = measure_logits(self.pair, ids, self.recipe.exit_layer, torch.bfloat16)
            total, text = self.combine(target, drafters, labels, self.recipe.exit_weight, late)
            total.backward()
        torch.nn.utils.clip_grad_norm_(self.pair.parameters(), 5.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.done += ids.numel()
        self.step += 1
        return text.item()

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it: a crash leaves one of the two."""
        state = {
            "pair": self.pair.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": {"done": self.done, "step": self.step, "seconds": self.seconds, "cursor": self.cursor},
            "recipe": asdict(self.recipe),
        }
        torch.save(state, self.work / f"{CHECKPOINT}.new")
        (self.work / f"{CHECKPOINT}.new").replace(self.work / CHECKPOINT)

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one. Rates and budget are this run's, not the checkpoint's."""
        file = self.work / CHECKPOINT
        if not file.exists():
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.pair.load_state_dict(state["pair"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            kept = [(group["peak"], group["weight_decay"]) for group in optimiser.param_groups]
            optimiser.load_state_dict(saved)
            for group, (peak, decay) in zip(optimiser.param_groups, kept, strict=True):
                group.update(peak=peak, weight_decay=decay)
        progress = state["progress"]
        self.done, self.step, self.seconds = progress["done"], progress["step"], progress["seconds"]
        self.cursor = progress["cursor"]


@torch.no_grad()
def score_pair(pair: Pair, held_out: Windows, recipe: Recipe, device: torch.device, batch: int = 8) -> dict[str, dict]:
    """Means over the same held-out windows each time: nats a token, and for drafters overlap and agreement."""
    cursor: dict[str, int] = {}
    sums: dict[str, dict[str, float]] = {}
    batches = max(1, recipe.held_out_windows // batch)
    for _ in range(batches):
        ids, labels = (part.to(device) for part in held_out.take(recipe.sequence, batch, cursor))
        target, drafters = measure_logits(pair, ids, recipe.exit_layer, torch.bfloat16)
        scores = {"target": {"nats": learn_text(target, labels).item()}}
        scores |= {name: score_drafter(target, logits, labels) for name, logits in drafters.items()}
        for name, figures in scores.items():
            for figure, value in figures.items():
                entry = sums.setdefault(name, {})
                entry[figure] = entry.get(figure, 0.0) + value / batches
    return sums


def write_log(file: Path, entry: dict) -> None:
    """Append one line of JSON."""
    with file.open("a") as out:
        out.write(json.dumps(entry) + "\n")


def train_pair(trainer: Trainer, held_out: Windows, steps: int | None = None) -> None:
    """Train until the budget is spent (or `steps` are done), with checkpoints by the clock and on SIGTERM."""
    stopping = []
    previous = signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    recipe, log = trainer.recipe, trainer.work / LOG
    trainer.resume()
    saved = time.monotonic()
    with tqdm(total=recipe.tokens, initial=trainer.done, unit="tok", unit_scale=True, mininterval=10) as bar:
        while trainer.done < recipe.tokens and not stopping and (steps is None or trainer.step < steps):
            before, start = trainer.done, time.process_time()
            loss = trainer.advance()
            trainer.seconds += time.process_time() - start
            bar.update(trainer.done - before)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            entry = {"step": trainer.step, "tokens": trainer.done, "loss": loss, "cpu_seconds": trainer.seconds}
            if trainer.step % recipe.evaluate_every == 0:
                with shipped_weights(trainer.pair, is_quantising(recipe, trainer.done), trainer.compiled):
                    scores = score_pair(trainer.pair, held_out, recipe, trainer.device)
                entry["held_out"] = scores
                bar.write(f"{trainer.done:,} tokens: " + json.dumps(scores))
            write_log(log, entry)
            if time.monotonic() - saved > recipe.checkpoint_seconds:
                trainer.save()
                saved = time.monotonic()
    trainer.save()
    signal.signal(signal.SIGTERM, previous)
