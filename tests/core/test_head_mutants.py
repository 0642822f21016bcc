"""What is wrong without a sound: every fault leaves the output lossless and is seen in what a head gets accepted.

A head that knows a text of its target by heart drafts it whole; with a fault in its way it does so no longer.
"""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from heads import fused_head, taught_head
from tiny import random_prompt, target_of, target_runner

from core.decoding import speculative
from core.drafting.head import HeadDrafter
from core.drafting.length import Fixed
from core.heads.runner import runner_of
from core.records import Run
from core.sampling import Sampling
from core.settings import Settings

PROMPT, NEW = 12, 40


@cache
def text() -> list[int]:
    prompt = torch.tensor([random_prompt(PROMPT)])
    return target_of("llama").generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0)[0].tolist()


@cache
def taught():
    """A head that knows the text; nobody changes its weights."""
    return taught_head(target_of("llama"), text(), sorted(set(text())))


def accepted(gamma: int = 1, mutate=lambda drafter: None) -> int:
    """How many drafted tokens stand when the text is written with a head that knows it; it must come out the same."""
    target = target_runner("llama")
    network = taught()
    drafter = HeadDrafter(runner_of(fused_head(network, target_of("llama"))), target.watch((0, 1, 2)), Sampling())
    mutate(drafter)
    run = Run(Settings(max_new_tokens=NEW), {}, "", text()[:PROMPT])
    for _ in speculative(target, drafter, run, length=Fixed(gamma)):
        pass
    assert run.token_ids == text()[PROMPT:]
    return sum(token.outcome == "accepted" for round_ in run.rounds for token in round_.drafted)


def absolute_ids(drafter):
    """`d2t` read as ids, not as offsets."""
    drafter.runner.head.target_ids = drafter.runner.head.network.d2t.clamp(min=0)


def shifted(drafter):
    """Each row pairs a token's features with that token, not with the next."""
    read = drafter.runner.read

    def late(ids, features):
        return read(torch.cat([ids[:1], ids[:-1]]) if len(ids) > 1 else ids * 0 + 1, features)

    drafter.runner.read = late


def other_layers(drafter):
    """The features in another order."""
    read = drafter.runner.read
    drafter.runner.read = lambda ids, features: read(ids, features.roll(features.shape[1] // 3, 1))


@pytest.mark.parametrize("mutate", [absolute_ids, shifted, other_layers])
def test_a_silent_fault_costs_acceptance(mutate):
    sound = accepted()
    assert sound >= 0.9 * NEW // 2
    assert accepted(mutate=mutate) <= 0.9 * sound


def test_stale_recurrent_rows_are_seen_in_the_cache():
    """Rows made from the head's own guesses that are not dropped shift every row that is read after them."""
    target = target_runner("llama")
    network = taught()
    features = target.watch((0, 1, 2))

    def after(keep_stale: bool) -> torch.Tensor:
        target.truncate(0)
        runner = runner_of(fused_head(network, target_of("llama")))
        drafter = HeadDrafter(runner, features, Sampling())
        target.feed(torch.tensor(text()[:20]))
        drafter.propose(text()[:21], 4, torch.empty(0))
        if keep_stale:
            runner.truncate = lambda length: None  # type: ignore[method-assign]
        target.feed(torch.tensor(text()[20:24]))
        output = drafter._refresh(text()[:25])
        assert output is not None
        return output

    assert not torch.allclose(after(True), after(False), rtol=1e-3)


def test_a_normed_output_fed_back_changes_what_is_drafted_next():
    """The first proposal is the same, since it comes from the target's features; the ones after it are not."""
    drafts = []
    for normed in (False, True):
        target = target_runner("llama")
        network = copy.deepcopy(taught())
        network.config = replace(network.config, norm_output=normed)
        runner = runner_of(fused_head(network, target_of("llama")))
        drafter = HeadDrafter(runner, target.watch((0, 1, 2)), Sampling())
        target.feed(torch.tensor(text()[:20]))
        drafts.append(drafter.propose(text()[:21], 3, torch.empty(0)).logits)
    torch.testing.assert_close(drafts[0][0], drafts[1][0])
    assert not torch.allclose(drafts[0][1], drafts[1][1], rtol=1e-3)
