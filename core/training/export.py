"""A trained head as a folder: weights and config in the format of its kind, and a card that says how it was made.

vLLM, SGLang and vLLM's speculators read the folder; the target's embeddings are not in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.costs.rounds import acceptance_rate
from core.heads import HeadConfig
from core.heads.checkpoint import MEASURED, save_block, save_head
from core.heads.dflash import DFlashNetwork
from core.loading.head import identify
from core.training import AnyConfig, kind_of
from core.training.blocks import ANCHORS, GAMMA, OVERLAP_SHARE
from core.training.dialogues import BLOCK, HELD_OUT, HELD_OUT_AT_FIRST
from core.training.kept import on_disk
from core.training.learning import MATRIX_RATE, OTHER_RATE
from core.training.loop import GOING_ON_RATE, Plan, Standing, Trainer
from core.training.unroll import STEP_WEIGHT, STEPS

HELD_OUT_TEXTS = "on texts held out of its training, greedy"
SAMPLES = "on the page's sample prompts, greedy"


def export(trainer: Trainer, folder: Path) -> None:
    """Write config.json, model.safetensors (bf16) and README.md into `folder`. Raises UserError where it cannot be."""
    target = trainer.target.name
    entries: dict[str, Any] = {"target": {"name": target, **identify(trainer.target.config, trainer.target.tokenizer)}}
    standing = trainer.standing
    if reached := standing.reached or standing.agreement:
        where = SAMPLES if standing.reached else HELD_OUT_TEXTS
        entries[MEASURED] = {"acceptance_rate": round(acceptance_rate(reached), 4), "where": where}
        if standing.reached and standing.between:
            entries[MEASURED]["between"] = [round(rate, 4) for rate in standing.between]
    head = trainer.head
    with on_disk(folder):
        if isinstance(head, DFlashNetwork):
            save_block(head, folder, trainer.target.layers, **entries)
        else:
            save_head(head, folder, **entries)
        told = card(target, trainer.config, trainer.plan, trainer.standing, folder)
        (folder / "README.md").write_text(told, encoding="utf-8")


SERVED = """
    vllm serve TARGET \\
        --speculative-config '{{"method": "{}", "model": "THIS_FOLDER", "num_speculative_tokens": {}}}'"""
CALLED = {"eagle3": "An EAGLE-3 head", "dspark": "A DSpark block drafter", "dflash": "A DFlash block drafter"}
IN_BLOCKS = f"At most {ANCHORS} blocks a text, their anchors drawn anew each time, token k weighing exp(-k / {GAMMA:g})"
LEARNT = {
    "eagle3": f"{STEPS} passes unrolled (at first one), pass i weighing {STEP_WEIGHT}^i; cross-entropy",
    "dspark": f"{IN_BLOCKS}; {1 - OVERLAP_SHARE:.1f} of cross-entropy, {OVERLAP_SHARE} of Σ|p - q|, and the confidence",
    "dflash": f"{IN_BLOCKS}; cross-entropy",
}


def card(target: str, config: AnyConfig, plan: Plan, standing: Standing, folder: Path) -> str:
    """The card of a head, every figure from its training."""
    kind = kind_of(config)
    one_by_one = isinstance(config, HeadConfig)
    method, length = ("head", 3) if one_by_one else ("block", config.drafted)
    served = SERVED.format(kind, length)
    drafts = "" if one_by_one else f" {config.drafted} tokens are drafted in a pass."
    data = "prompts of a person's own" if plan.prompts else "prompts it wrote itself"
    before = f"it went on from a head trained before, at {GOING_ON_RATE:g} of those rates"
    begun = before if plan.head else "it began as the target's last layer"
    layers = ", ".join(map(str, config.aux_layers))
    size = (folder / "model.safetensors").stat().st_size / 1e6
    rows = "\n".join(
        f"| {i + 1} | {share:.3f} | {share / before if before else 0:.3f} |"
        for i, (share, before) in enumerate(zip(standing.agreement, [1.0, *standing.agreement]))
    )
    overlap = (
        f" At temperature 1, Σ min(p, q) at the first position is {standing.overlap:.3f}." if standing.overlap else ""
    )
    return f"""# A draft head for {target}

{CALLED[kind]} ({size:.1f} MB in bf16): one layer of {config.hidden_size}, {config.heads} heads over {config.kv_heads}
keys, an MLP of {config.intermediate_size}, {config.draft_vocab_size:,} draft tokens. It reads the hidden states at the
target's layers {layers} (what enters the block of that number).{drafts}

    python -m core generate --target {target} --draft THIS_FOLDER --method {method} --prompt "…"{served}

## How it was made

`python -m core train-head`: {standing.answer_tokens:,} answer tokens in {standing.dialogues:,} texts that the target
wrote at temperatures up to 1 on {data}; every {HELD_OUT}th prompt held out, of the first {BLOCK} every
{HELD_OUT_AT_FIRST}th. {standing.visits:,} answer tokens were learnt from, each time counted, in
{standing.seconds / 3600:.2f} hours with the writing. {LEARNT[kind]} against the target's distribution over the draft
vocabulary; Muon at {MATRIX_RATE} for the matrices of the layer, AdamW at {OTHER_RATE} for the rest; {begun}.
What is exported is the running average of the weights.

## On held-out texts

Teacher-forced and greedy, in the precision it was trained in. *Accepted so far*: the share of drafts whose tokens up to
this position are all the target's own choice; past the end of an answer nothing is judged.

| position | accepted so far | of those that got there |
| --- | --- | --- |
{rows}

Tokens per target pass that follow: {standing.tokens_per_pass or 1:.2f}.{overlap}
"""
