"""Lossless at temperature 0: the token ids are those of transformers' own greedy `generate` of the target alone.

In float64, because random tiny models meet near-ties, and a pass over several tokens rounds differently from a pass
over one.
"""

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from lookup import CPU
from tiny import KINDS, SLIDING, draft_runner, random_prompt, target_of, target_runner
from transformers import AutoModelForCausalLM

from core.decoding import speculative
from core.drafting.length import Fixed
from core.drafting.model import ModelDrafter
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.tree import TreeDrafter
from core.records import Run, Settings
from core.sampling import Sampling

GREEDY = Sampling(0.0)
NEW = 20
PROMPTS = (1, 33, 200)


@cache
def reference(kind: str, prompt_length: int, stop_id: int | None = None) -> list[int]:
    """What transformers generates alone."""
    prompt = torch.tensor([random_prompt(prompt_length)])
    network = target_of(kind.split()[0])
    ids = network.generate(prompt, do_sample=False, max_new_tokens=NEW, eos_token_id=stop_id, pad_token_id=0)
    return ids[0, prompt_length:].tolist()


def prompts_of(kind: str, depth: int) -> tuple[int, ...]:
    """Where a window slides, how deep a draft is and how long its prompt decide together what the cache has dropped:
    all prompts. Elsewhere they do not meet: one prompt for each depth, and another one for the next kind."""
    turn = (KINDS.index(kind) + depth) % len(PROMPTS)
    return PROMPTS if kind.split()[0] in SLIDING else (PROMPTS[turn],)


def decode(target, drafter, prompt_length, gamma, stop_ids=frozenset()):
    run = Run(Settings(max_new_tokens=NEW), {}, "", random_prompt(prompt_length))
    for _ in speculative(target, drafter, run, length=Fixed(gamma), stop_ids=stop_ids):
        pass
    return run


def outcomes(run):
    return Counter(token.outcome for round_ in run.rounds for token in round_.drafted)


@pytest.mark.parametrize("kind", KINDS)
def test_draft_model(kind):
    """Every kind with short and long drafts and every prompt length, with a draft that is sometimes right."""
    met = Counter()
    for gamma in (1, 2, 3, 5, 8):
        for length in prompts_of(kind, gamma):
            drafter = ModelDrafter(draft_runner(kind), GREEDY)
            run = decode(target_runner(kind), drafter, length, gamma)
            assert run.token_ids == reference(kind, length), (gamma, length)
            met += outcomes(run)
    assert met["accepted"] and met["rejected"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind):
    """The baseline, one token a pass, is the same text."""
    assert decode(target_runner(kind), None, 33, 1).token_ids == reference(kind, 33)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 4])
def test_draft_identical_to_its_target(kind, gamma):
    """Everything is accepted: each round ends with the bonus token, and the draft must catch up on its own last one."""
    run = decode(target_runner(kind), ModelDrafter(target_runner(kind), GREEDY), 33, gamma)
    assert run.token_ids == reference(kind, 33)
    assert set(outcomes(run)) == {"accepted"}
    assert {r.emitted.outcome for r in run.rounds[:-1]} == {"bonus"}
    assert len(run.rounds) == -(-NEW // (gamma + 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_early_exit(kind, gamma):
    """The target's first layer drafts, writing into the target's own cache."""
    for length in prompts_of(kind, gamma):
        target = target_runner(kind)
        run = decode(target, ModelDrafter(target.view(1), GREEDY), length, gamma)
        assert run.token_ids == reference(kind, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("method", ["ngram", "ngram+draft"])
def test_ngram(kind, gamma, method):
    """Repeats of single tokens are enough to draft from here, so that it fires often and is mostly wrong."""
    drafter = NgramDrafter(CPU, shortest=1, longest=3)
    if method == "ngram+draft":
        drafter = CombinedDrafter(drafter, ModelDrafter(draft_runner(kind), GREEDY))
    run = decode(target_runner(kind), drafter, 200, gamma)
    assert run.token_ids == reference(kind, 200)
    assert outcomes(run)["rejected"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 1, 2, 1), (1, 1, 1)], ids=str)
def test_tree(kind, shape):
    """The likeliest children of every node, judged by one pass over the whole tree."""
    drafter = TreeDrafter(draft_runner(kind), GREEDY, lambda: shape)
    for length in prompts_of(kind, len(shape)):
        drafter.reset()
        run = decode(target_runner(kind), drafter, length, len(shape))
        assert run.token_ids == reference(kind, length)


@pytest.mark.parametrize("kind", ["llama", "llama fused"])
@pytest.mark.parametrize("gamma", [2, 5, 8])
@pytest.mark.parametrize("position", range(7))
def test_end_of_sequence_inside_a_draft(kind, gamma, position):
    """The text ends with the stop id wherever it falls in a draft; what was drafted past it is ignored only."""
    stop_id = reference(kind, 33)[position]
    drafter = ModelDrafter(target_runner(kind), GREEDY)
    run = decode(target_runner(kind), drafter, 33, gamma, frozenset({stop_id}))
    assert run.token_ids == reference(kind, 33, stop_id)
    assert run.stop_reason == "eos"
    assert run.token_ids[-1] == stop_id
    assert not outcomes(run)["rejected"]


@pytest.mark.parametrize("kind", SLIDING)
def test_sliding_windows_do_slide(kind):
    """The cases above go past the window: the same weights with a window wider than the prompt say something else."""
    network = target_of(kind)
    wide = copy.deepcopy(network.config)
    wide.sliding_window = 512
    unlimited = AutoModelForCausalLM.from_config(wide, dtype=torch.float64).eval()
    unlimited.load_state_dict(network.state_dict())
    ids = torch.tensor([random_prompt(33)])
    short = network.config.sliding_window
    assert torch.allclose(network(ids[:, :short]).logits, unlimited(ids[:, :short]).logits)
    assert not torch.allclose(network(ids).logits[:, -1], unlimited(ids).logits[:, -1])
