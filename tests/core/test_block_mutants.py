"""Block drafters write the target's greedy text whatever they guess, and what goes wrong without a sound is seen in
what is accepted of one that knows a text by heart."""

from functools import cache

import pytest
import torch
from blocks import DSPARK, blocks_afresh, random_block, taught_block
from heads import random_head
from test_block_drafting import KINDS, PARALLEL, block_drafter, parallel_drafter
from tiny import random_prompt, target_of

from core.decoding import speculative
from core.drafting.length import Fixed
from core.heads.dflash import MARKOV_HEADS
from core.records import Run
from core.settings import Settings

PROMPT, NEW = 12, 40


@cache
def text(kind="llama"):
    prompt = torch.tensor([random_prompt(PROMPT)])
    return target_of(kind).generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0)[0].tolist()


@cache
def taught(kind="llama"):
    return taught_block(target_of(kind), text(kind))


def written(kind, network, gamma=3, mutate=lambda drafter: None, of=block_drafter):
    """How many drafted tokens stand when a text is written, which must come out as transformers writes it."""
    target, drafter = of(kind, network)
    mutate(drafter)
    run = Run(Settings(max_new_tokens=NEW), {}, "", text(kind.split()[0])[:PROMPT])
    for _ in speculative(target, drafter, run, length=Fixed(gamma)):
        pass
    assert run.token_ids == text(kind.split()[0])[PROMPT:]
    return sum(token.outcome == "accepted" for round_ in run.rounds for token in round_.drafted)


@pytest.mark.xdist_group("taught blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_transformers_own(kind):
    """With drafters that are right and others that are not; more may be asked for than a block has."""
    for gamma, other in ((1, random_block()), (3, random_block(**DSPARK)), (8, random_block(**DSPARK))):
        written(kind, taught(), gamma)
        written(kind, other, gamma)
    for gamma in (1, 8):
        written(kind, random_head(**PARALLEL), gamma, of=parallel_drafter)


def other_rows(drafter):
    """Rows that fill in taken to predict the next token."""
    advance = drafter.runner.advance

    def early(ids, features, width):
        hidden = advance(ids, features, width)
        return torch.cat([hidden[:1], hidden[:-1]])

    drafter.runner.advance = early


def one_row_less(drafter):
    """Features injected one token late: those of the anchor's predecessor are missing."""
    inject = drafter.runner._inject
    drafter.runner._inject = lambda features: inject(torch.cat([features[:1], features[:-1]]))


def other_layers(drafter):
    inject = drafter.runner._inject
    drafter.runner._inject = lambda features: inject(features.roll(features.shape[1] // 2, 1))


def kept_block(drafter):
    """Block rows stay in the cache, behind which the next features go."""
    advance = drafter.runner.advance

    def keeping(ids, features, width):
        hidden = advance(ids, features, width)
        drafter.runner.length += width
        return hidden

    drafter.runner.advance = keeping
    drafter._unread = lambda context, end: (
        torch.tensor(context[drafter._features.start + 1 : end + 1]),
        drafter._features.take(end),
    )


def position_in_the_block(drafter):
    """Rows of a block turned by their place in it, not in the text."""
    network = drafter.runner.head.network
    forward = network.forward

    def relative(embedded, rotation, seen, masks):
        rows = embedded.shape[1]
        near = drafter.runner._cos[None, :rows], drafter.runner._sin[None, :rows]
        return forward(embedded, near, seen, masks)

    drafter.runner.head.network = type("Relative", (), {})()
    held = drafter.runner.head.network
    held.inject, held.keys_values, held.rotation = network.inject, network.keys_values, network.rotation
    held.logits, held.markov_head = network.logits, network.markov_head
    held.__class__.__call__ = lambda self, *args: relative(*args)


@pytest.mark.xdist_group("taught blocks")
@pytest.mark.parametrize("mutate", [other_rows, one_row_less, other_layers, kept_block, position_in_the_block])
def test_a_silent_fault_costs_acceptance(mutate):
    sound = written("llama", taught())
    assert sound >= 0.9 * NEW * 3 // 4
    assert written("llama", taught(), mutate=mutate) <= 0.8 * sound


@pytest.mark.parametrize("markov", MARKOV_HEADS)
def test_each_row_is_biased_by_the_token_before_it(markov):
    """As training biases a whole block, given its tokens; by the anchor alone, all but the first row are others."""
    network = random_block(**{**DSPARK, "markov_head": markov})
    target, drafter = block_drafter("llama", network)
    context = random_prompt(20)
    target.feed(torch.tensor(context[:-1]))
    draft = drafter.propose(context, 4, torch.empty(0))
    hidden = blocks_afresh(network, target_of("llama"), context, [19])[0]
    base = drafter.runner.head.logits(hidden)

    def biased(before):
        return base + network.bias(network.markov_head(hidden, torch.tensor(before)))

    found = torch.cat(draft.logits)
    torch.testing.assert_close(found, biased([context[-1], *draft.tokens[:-1].tolist()]), rtol=1e-5, atol=1e-5)
    wrong = biased([context[-1]] * 4)
    assert all(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(found[1:], wrong[1:]))
