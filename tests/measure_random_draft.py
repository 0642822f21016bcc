"""What a draft that does not match costs: the bundled target with a draft of random weights, draft length auto.

    python -m tests.measure_random_draft [--repeats 3] [--tokens 128] [--json F]

Auto should find out within a few rounds and decode nearly plainly: never below 0.95 of plain decoding. Prints the bench
table at both temperatures; exit status 1 where a median falls below.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from core.loading import POCKET, load_pair
from core.measuring.bench import bench
from core.measuring.report import table
from core.records import Settings
from core.text import read_prompts

LEAST = 0.95


def save_random_draft(folder: Path, seed: int = 0) -> None:
    """A draft of the bundled one's shape and tokenizer that has learnt nothing."""
    found = AutoConfig.from_pretrained(POCKET / "draft").to_dict()
    found.pop("quantization_config", None)
    config = AutoConfig.for_model(**found)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(POCKET / "draft").save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    documents = {}
    with TemporaryDirectory() as folder:
        save_random_draft(Path(folder))
        pair = load_pair(Settings(target=str(POCKET / "target"), draft=folder))
        prompts = [prompt.text for prompt in read_prompts()]
        for temperature in (0.0, 1.0):
            settings = Settings(max_new_tokens=chosen.tokens, temperature=temperature, ignore_eos=True)
            documents[f"temperature {temperature:g}"] = bench(pair, prompts, {"draft": settings}, chosen.repeats)
    for name, document in documents.items():
        print(f"{name}\n{table(document)}\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(documents) + "\n")
    ratios = [document["methods"][1]["ratio_to_plain"]["median"] for document in documents.values()]
    print(f"lowest median: {min(ratios):.3f} of plain, wanted at least {LEAST}")
    return int(min(ratios) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
