"""The stages of the recipe, each from the files of the one before to its own."""

import json
import os
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from core.loading import load_model, load_pair
from core.records import Settings

from . import corpus, tokenizer
from .bits import measure_bits
from .card import read_results, write_card
from .evaluate import (
    FASTEST,
    NEW_TOKENS,
    bench_pair,
    bench_precisions,
    choose_precision,
    complete,
    find_best,
    print_bench,
    write_results,
)
from .export import export_pair, write_facts
from .finish import FINISHED, finish_drafts
from .heldout import choose_prompts
from .settings import HELD_OUT_PACKAGES, Recipe, Shape
from .train import CHECKPOINT, LOG, Trainer, train_pair
from .windows import Windows, encode_corpus

PROMPTS = Path(__file__).parents[2] / "prompts" / "prompts.toml"
STAGES = ("corpus", "tokenizer", "train", "finish", "export", "evaluate", "bench", "card")


class Stages:
    """A recipe at work in a folder; `output` receives the finished pair."""

    def __init__(self, recipe: Recipe, work: Path, output: Path, device: torch.device, compiled: bool) -> None:
        self.recipe, self.work, self.output, self.device, self.compiled = recipe, work, output, device, compiled
        work.mkdir(parents=True, exist_ok=True)

    def corpus(self) -> None:
        """Python sources -> corpus/."""
        if not (self.work / "corpus" / "sources.json").exists():
            corpus.write_corpus(self.work / "corpus")

    def tokenizer(self) -> None:
        """corpus/ -> tokenizer/."""
        if not (self.work / "tokenizer" / "tokenizer.json").exists():
            texts = (document.text for document in corpus.read_corpus(self.work / "corpus" / "training.jsonl"))
            tokenizer.train_tokenizer(texts, self.recipe.target.vocabulary).save_pretrained(self.work / "tokenizer")

    def read_windows(self, half: str) -> Windows:
        """The training or the held-out text, encoded."""
        tok = tokenizer.load_tokenizer(self.work / "tokenizer")
        return Windows(encode_corpus(self.work / "corpus" / f"{half}.jsonl", tok), tok, self.recipe.seed)

    def train(self, steps: int | None = None) -> None:
        """The joint phase -> checkpoint.pt."""
        trainer = Trainer(self.recipe, self.work, self.read_windows("training"), self.device, self.compiled)
        train_pair(trainer, self.read_windows("held_out"), steps)

    def finish(self) -> None:
        """The draft-only phase -> finished.pt."""
        trainer = Trainer(self.recipe, self.work, self.read_windows("training"), self.device, self.compiled)
        end_of_text = tokenizer.load_tokenizer(self.work / "tokenizer").eos_token_id
        finish_drafts(trainer, self.read_windows("held_out"), end_of_text, self.work)

    def export(self) -> None:
        """The newest weights -> full/ and nf4/, the target and every candidate draft."""
        checkpoint = self.work / FINISHED
        checkpoint = checkpoint if checkpoint.exists() else self.work / CHECKPOINT
        shapes: dict[str, tuple[str, Shape]] = {"target": ("target.", self.recipe.target)}
        shapes |= {name: (f"drafts.{name}.", shape) for name, shape in self.recipe.drafts.items()}
        export_pair(checkpoint, self.work / "tokenizer", shapes, self.work / "full", self.work / "nf4")

    def choose_draft(self, prompts: list[str], precision: str = FASTEST) -> str:
        """The candidate with which speculation is fastest."""
        speeds = {}
        for name in self.recipe.drafts:
            settings = Settings(
                target=str(self.work / "nf4" / "target"), draft=str(self.work / "nf4" / name), precision=precision,
                device="cpu", chat="off", max_new_tokens=NEW_TOKENS, ignore_eos=True,
            )  # fmt: skip
            pair = load_pair(settings)
            rows = [row for t in (0.0, 1.0) for row in bench_pair(pair, prompts, replace(settings, temperature=t))]
            print(f"\n{name}\n{print_bench({precision: rows})}", flush=True)
            speeds[name] = sum(find_best(rows, t, ("draft",))["tokens_per_second"] for t in (0.0, 1.0))
        return max(speeds, key=speeds.get)

    def held_out_prompts(self, count: int) -> list[str]:
        """Those of a benchmark."""
        return choose_prompts(corpus.read_corpus(self.work / "corpus" / "held_out.jsonl"), count)

    def evaluate(self, prompts: int = 8) -> None:
        """Choose the draft, put the pair in its place -> output/ and evaluation.json."""
        texts = self.held_out_prompts(prompts)
        chosen = self.choose_draft(texts[: max(2, len(texts) // 2)])
        for name, source in (("target", "target"), ("draft", chosen)):
            shutil.copytree(self.work / "nf4" / source, self.output / name, dirs_exist_ok=True)
        facts = self.describe(chosen)
        samples = self.write_samples(self.output / "target")
        write_results(
            self.work / "evaluation.json", {"bits": self.measure_bits(chosen), "samples": samples, "facts": facts}
        )
        trained = {"trained_tokens": facts["trained_tokens"], "seed": self.recipe.seed}
        write_facts(self.output, {"exit_layer": self.recipe.exit_layer, **trained})

    def bench(self, prompts: int = 8) -> None:
        """What speculation brings the pair in its place -> bench.json."""
        texts = self.held_out_prompts(prompts)
        bench = bench_precisions(self.output / "target", self.output / "draft", texts)
        precision = choose_precision(bench)
        results = {"bench": bench, "precision": precision, "prompts": len(texts), "new_tokens": NEW_TOKENS}
        write_results(self.work / "bench.json", results)
        reached = find_best(bench[precision], 0.0, ("draft",))["acceptance_rate"]
        where = "on code held out of its training, greedy"
        facts = json.loads((self.output / "pocket.json").read_text())
        write_facts(self.output, {**facts, "measured": {"acceptance_rate": round(reached, 2), "where": where}})
        print(print_bench(bench))

    def measure_bits(self, chosen: str) -> dict[str, dict[str, float]]:
        """Bits per byte of target and draft, before and after quantisation, computed in float32."""
        windows, tok = self.read_windows("held_out"), tokenizer.load_tokenizer(self.work / "tokenizer")
        rows = {}
        for label, kind in (("before quantising", "full"), ("NF4", "nf4")):
            for role, name in (("target", "target"), ("draft", chosen)):
                model = load_model(str(self.work / kind / name), torch.device("cpu"), "fp32", None, role)
                rows[f"{role}, {label}"] = measure_bits(model.network, windows, tok)
        return rows

    def write_samples(self, target: Path, precision: str = FASTEST, count: int = 5) -> list[str]:
        """The first of the bundled prompts and what the target makes of them."""
        settings = Settings(
            target=str(target), method="plain", temperature=0.7, precision=precision, device="cpu", chat="off",
            max_new_tokens=NEW_TOKENS,
        )  # fmt: skip
        pair = load_pair(settings)
        prompts = [entry["text"] for entry in tomllib.loads(PROMPTS.read_text())["prompt"][:count]]
        return [prompt + complete(pair, prompt, settings).text for prompt in prompts]

    def describe(self, chosen: str) -> dict:
        """What the card says of how the pair was made."""
        entries = [json.loads(line) for line in (self.work / LOG).read_text().splitlines()]
        joint = [e for e in entries if "tokens" in e]
        finish = [e for e in entries if "finish_tokens" in e]
        scored = [e for e in entries if "held_out" in e][-1]["held_out"]
        corpus_tokens = len(self.read_windows("training").tokens)
        shapes = {"target": self.recipe.target, "draft": self.recipe.drafts[chosen]}
        facts = {
            f"{role}_shape": f"{s.layers} × {s.width}, {s.heads}/{s.kv_heads}, {s.mlp}" for role, s in shapes.items()
        }
        return facts | {
            "target_parameters": f"{count_parameters(self.recipe.target) / 1e6:.1f} M",
            "draft_parameters": f"{count_parameters(self.recipe.drafts[chosen]) / 1e6:.1f} M",
            "hardware": describe_hardware(self.device),
            "hours": joint[-1]["cpu_seconds"] / 3600,
            "tokens": f"{joint[-1]['tokens']:,}",
            "trained_tokens": joint[-1]["tokens"],
            "epochs": joint[-1]["tokens"] / corpus_tokens,
            "corpus_tokens": f"{corpus_tokens:,} tokens",
            "exit_layer": self.recipe.exit_layer,
            "finish_tokens": f"{finish[-1]['finish_tokens']:,}" if finish else "no",
            "chosen": chosen,
            "held_out_packages": ", ".join(HELD_OUT_PACKAGES),
            "held_out": "; ".join(
                f"{name} " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()) for name, figures in scored.items()
            ),
        }

    def card(self) -> None:
        """evaluation.json, bench.json -> output/README.md."""
        sources = json.loads((self.work / "corpus" / "sources.json").read_text())
        results = [read_results(self.work / name) for name in ("evaluation.json", "bench.json")]
        write_card(self.output / "README.md", {**results[0], **results[1]}, sources)


def count_parameters(shape: Shape) -> int:
    """Parameters with tied embeddings counted once."""
    attention = shape.width * 64 * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.width * shape.mlp + 2 * shape.width
    return shape.layers * layer + shape.vocabulary * shape.width + shape.width


def describe_hardware(device: torch.device) -> str:
    """In words, for the card."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({torch.backends.cpu.get_cpu_capability()})"
