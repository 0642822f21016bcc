"""The model card, written from what the stages measured."""

import json
from pathlib import Path

from .evaluate import PRECISIONS, TEMPERATURES, find_best, print_bench

GOALS = (
    ("draft, greedy: acceptance", "draft", 0.0, "acceptance_rate", 0.70),
    ("draft, temperature 1: acceptance", "draft", 1.0, "acceptance_rate", 0.60),
    ("early exit, greedy: acceptance", "early-exit", 0.0, "acceptance_rate", 0.50),
    ("early exit, temperature 1: acceptance", "early-exit", 1.0, "acceptance_rate", 0.50),
    ("draft, greedy: speed ÷ plain", "draft", 0.0, "ratio_to_plain", 1.80),
    ("draft, temperature 1: speed ÷ plain", "draft", 1.0, "ratio_to_plain", 1.80),
)

HEAD = """# The pocket pair

A target of {target_parameters} and a draft of {draft_parameters} parameters that write Python: small enough to come with
this repository, real enough that a draft guesses its target. They exist to show speculative decoding without a network
or a GPU, not to write programs: what they write looks like Python and seldom means anything.

| | target | draft |
| --- | --- | --- |
| layers × width, query/key-value heads, MLP | {target_shape} | {draft_shape} |
| shipped as | NF4 (double-quantised), embeddings bf16 | NF4 (double-quantised), embeddings bf16 |

Both are `LlamaForCausalLM` with tied embeddings, a context of 2,048 and one byte-level BPE tokenizer of 4,096 tokens, in
which a newline is never part of a longer token. `pocket.json` holds what the two configurations do not say: the layer
early exit was trained for, and the share of drafts accepted below.

## How they were made

    python -m assets.pocket.recipe --work SOME_FOLDER

makes them again, on a CPU or on CUDA: corpus, tokenizer, training, draft-only training, export, evaluation, benchmark, this card.
Stages and a cut-off training resume. The corpus is what is installed, so other versions of the packages give other text.

- **Hardware and time**: {hardware}; {hours:.1f} processor-hours of joint training.
- **Joint training**: {tokens} tokens ({epochs:.1f} passes over {corpus_tokens}), the target on the text with an auxiliary loss
  on the exit after layer {exit_layer}, two candidate drafts on the target's own distribution. Muon for matrices, AdamW for
  embeddings; short sequences first, 1,024 and 2,048 at the end. The last fifth trains through NF4 rounding.
- **Draft-only training**: {finish_tokens} tokens, half of them text the finished target wrote.
- The exported draft is `{chosen}`, the faster of the candidates in the benchmark below.

## Figures on held-out text

Held out are whole packages ({held_out_packages}) and one file in forty of the others; no held-out file has a near-copy in
training. Bits per byte by position in the context:

{bits}

Nats a token over the same held-out windows at the end of training: {held_out}.

### Speculation

{prompts} prompts cut from held-out files, {new_tokens} new tokens each, engine time without prefill. `acceptance` is accepted ÷
judged; a *pass* is one pass of the target. Fastest with its draft: **{precision}**. The table is that of

    python -m assets.pocket.recipe --work SOME_FOLDER --stages corpus,bench

| goal (best length for speed, {precision}) | asked | reached |
| --- | --- | --- |
{goals}

Best speculative ÷ best plain over all precisions: {absolute}.

What limits them: in int4 a token of so small a target takes half a millisecond, so that what a round does beside its
passes weighs as much as they do, and the draft, made for slower checks, pays little. In bf16, where a pass waits for
memory, the same drafts bring more of a slower plain decoding. At temperature 1 the draft agrees less, because text drawn
from a small model is less predictable than its greedy text. Tried for acceptance: distillation on
the target's distribution instead of the text, total variation in the loss, training on text the target wrote itself, a
second draft of two layers (more often right, and slower by as much). Not tried for want of computing time: more text. A
pass over the corpus is little for a model of this size.

{bench}

## Five unedited samples

Temperature 0.7, 128 tokens, seed 0; the first lines are the prompt.

{samples}

## Sources

| source | version | licence |
| --- | --- | --- |
{sources}
"""


def print_bits(bits: dict[str, dict[str, float]]) -> str:
    """A table of bits per byte: a row for each model and precision."""
    buckets = list(next(iter(bits.values())))
    lines = [f"| model | {' | '.join(buckets)} |", f"| --- |{' --- |' * len(buckets)}"]
    lines += [f"| {name} | {' | '.join(f'{row[b]:.3f}' for b in buckets)} |" for name, row in bits.items()]
    return "\n".join(lines)


def print_goals(rows: list[dict]) -> str:
    """Asked against reached; acceptance is read at the length that was fastest."""
    lines = []
    for label, method, temperature, figure, asked in GOALS:
        reached = find_best(rows, temperature, (method,))[figure] or 0.0
        lines.append(f"| {label} | {asked:.2f} | {reached:.2f}{'' if reached >= asked else ' (missed)'} |")
    return "\n".join(lines)


def compare_absolute(bench: dict[str, list[dict]]) -> str:
    """The fastest speculation of any precision against the fastest plain of any precision."""
    found = []
    for temperature in TEMPERATURES:
        plain = max(find_best(rows, temperature, ("plain",))["tokens_per_second"] for rows in bench.values())
        best = max(
            (find_best(rows, temperature, ("draft", "early-exit", "ngram")) | {"precision": precision}
             for precision, rows in bench.items()),
            key=lambda row: row["tokens_per_second"],
        )  # fmt: skip
        found.append(
            f"{best['tokens_per_second'] / plain:.2f} at temperature {temperature:g} "
            f"({best['method']} in {best['precision']}, {best['tokens_per_second']:.0f} against {plain:.0f} tokens/s)"
        )
    return "; ".join(found)


def print_samples(samples: list[str]) -> str:
    """Each in a block of its own."""
    return "\n\n".join(f"```python\n{text.rstrip()}\n```" for text in samples)


def write_card(file: Path, results: dict, sources: list[dict[str, str]]) -> None:
    """Fill the card from `evaluation.json` and the corpus's sources."""
    bench = {name: results["bench"][name] for name in PRECISIONS if name in results["bench"]}
    filled = HEAD.format(
        **results["facts"],
        bits=print_bits(results["bits"]),
        precision=results["precision"],
        prompts=results["prompts"],
        new_tokens=results["new_tokens"],
        goals=print_goals(bench[results["precision"]]),
        absolute=compare_absolute(bench),
        bench=print_bench(bench),
        samples=print_samples(results["samples"]),
        sources="\n".join(f"| {s['name']} | {s['version']} | {s['licence']} |" for s in sources),
    )
    file.write_text(filled)


def read_results(file: Path) -> dict:
    """What the evaluation wrote."""
    return json.loads(file.read_text())
