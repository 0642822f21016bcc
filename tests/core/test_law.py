"""Lossless: whatever drafts, the output has the target's own law. Joint over blocks of three tokens, by G-test."""

from dataclasses import dataclass

import pytest
import torch
from drafters import DRAFTS, METHODS, TARGET, make_drafter
from lookup import BLOCK, CPU, VOCABULARY, LookupRunner, block_law, count_blocks, decode, p_value
from tiny import random_model

from core.costs.rounds import RoundCosts
from core.decoding import take_step
from core.drafting.length import Adaptive, AdaptiveSource, Repeating
from core.drafting.model import ModelDrafter
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.tree import AdaptiveShape, TreeDrafter
from core.runners.dynamic import DynamicRunner
from core.sampling import Sampling, Uniforms

DRAWS, TREE_DRAWS = 2_000, 4_000
"""Blocks of three tokens, of chains and of trees: as many as test_mutants.py sees every broken rule in. Of those the
hardest to see need 1,000 blocks with a chain, and 3,000 with a tree, where only repeated siblings show it."""
THRESHOLD = 1e-4
MIXED = Sampling(temperature=0.8, top_k=4, top_p=0.9, min_p=0.1)


@dataclass(frozen=True)
class Case:
    method: str
    gamma: int
    sampling: Sampling
    draft: str = "similar"

    def __str__(self) -> str:
        s = self.sampling
        chain = f"T{s.temperature:g}-k{s.top_k}-p{s.top_p:g}-m{s.min_p:g}"
        return f"{self.method}-{self.draft}-{self.gamma}-{chain}"


CASES = [
    Case("plain", 1, Sampling(0.8)),
    Case("draft", 1, Sampling(1.0), "hot"),
    Case("draft", 1, Sampling(1.7), "cold"),
    Case("draft", 2, Sampling(0.5), "hot"),
    Case("draft", 4, Sampling(1.0), "equal"),
    Case("draft", 1, Sampling(1.0), "disjoint"),
    Case("draft", 3, Sampling(1.0, top_k=3)),
    Case("draft", 2, Sampling(1.0, top_p=0.8)),
    Case("draft", 4, Sampling(1.0, min_p=0.15)),
    Case("draft", 3, MIXED),
    Case("early-exit", 2, Sampling(1.0)),
    Case("early-exit", 4, MIXED),
    Case("ngram", 2, Sampling(1.0)),
    Case("ngram", 4, Sampling(1.3, top_k=3)),
    Case("ngram+draft", 3, Sampling(1.0)),
    Case("tree 3", 1, Sampling(1.0)),
    Case("tree 2x2", 2, Sampling(0.8, top_k=4)),
    Case("tree 2x1x1 i.i.d.", 3, Sampling(1.0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_joint_law_is_the_targets(case):
    """Counts of blocks decoded by the real loop against the law enumerated from the target's table."""
    target = LookupRunner(TARGET)
    drafter = make_drafter(case.method, target, DRAFTS[case.draft], case.sampling)
    draws = TREE_DRAWS if case.method.startswith("tree") else DRAWS
    run = decode(target, drafter, case.sampling, case.gamma, draws * BLOCK, seed=1)
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, case.sampling)) > THRESHOLD


@pytest.mark.parametrize("draft", ["similar", "disjoint"])
def test_choosing_the_length_from_outcomes_keeps_the_law(draft):
    """The length of a round depends on what was accepted before it, never on what it will draw: still lossless."""
    sampling = Sampling(1.0)
    target = LookupRunner(TARGET)
    drafter = make_drafter("draft", target, DRAFTS[draft], sampling)
    adaptive = Adaptive(RoundCosts(lambda n: 1 + 0.1 * n, lambda n: 0.2 * n), longest=4)
    run = decode(target, drafter, sampling, adaptive, DRAWS * BLOCK, seed=1)
    assert len({len(r.drafted) for r in run.rounds}) > 1
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)) > THRESHOLD


def test_choosing_between_two_sources_keeps_the_law():
    """And where an n-gram or a model drafts, by what either has hit."""
    sampling = Sampling(1.0)
    ngram, model = NgramDrafter(CPU), ModelDrafter(LookupRunner(DRAFTS["similar"]), sampling)
    costs = RoundCosts(lambda n: 1 + 0.02 * n, lambda n: 0.1 * n)
    chosen = AdaptiveSource(Repeating(ngram.match, RoundCosts(costs.target), longest=4), Adaptive(costs, longest=4))
    sources = []
    drafter = CombinedDrafter(ngram, model, lambda: sources.append(chosen.source()) or sources[-1])
    run = decode(LookupRunner(TARGET), drafter, sampling, chosen, DRAWS * BLOCK, seed=1)
    assert set(sources) == {"ngram", "model"}
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)) > THRESHOLD


def test_choosing_the_tree_from_outcomes_keeps_the_law():
    """The same for the shape of a tree."""
    sampling = Sampling(1.0)
    shape = AdaptiveShape(RoundCosts(lambda n: 1 + 0.05 * n, lambda n: 0.2))
    drafter = TreeDrafter(LookupRunner(DRAFTS["similar"]), sampling, shape)
    run = decode(LookupRunner(TARGET), drafter, sampling, shape, TREE_DRAWS * BLOCK, seed=1)
    assert len({len(r.drafted) for r in run.rounds}) > 1
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)) > THRESHOLD


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_outcome_is_met(method):
    """The law above says little if a drafter never fires or is never refused: here each outcome occurs."""
    sampling = Sampling(1.0)
    target = LookupRunner(TARGET)
    drafter = make_drafter(method, target, DRAFTS["similar"], sampling)
    run = decode(target, drafter, sampling, length=2, tokens=600, seed=1)
    met = {token.outcome for r in run.rounds for token in (*r.drafted, r.emitted)}
    judged = {"accepted", "rejected", "ignored", "corrected", "bonus"}
    assert met >= ({"plain"} if method == "plain" else judged)


def test_equal_draft_is_never_refused():
    """q = p: the acceptance probability is 1, so nothing is rejected, and the 0/0 residual is never a NaN."""
    sampling = Sampling(1.0)
    drafter = make_drafter("draft", LookupRunner(TARGET), DRAFTS["equal"], sampling)
    run = decode(LookupRunner(TARGET), drafter, sampling, length=3, tokens=4_000, seed=2)
    assert {token.outcome for r in run.rounds[:-1] for token in r.drafted} == {"accepted"}


def test_acceptance_rate_is_the_overlap_of_the_laws():
    """E[β] = Σ min(p, q): with one drafted token a round, acceptance by context is the overlap there."""
    sampling = Sampling(1.0)
    p, q = sampling.probabilities(TARGET), sampling.probabilities(DRAFTS["similar"])
    overlap = torch.minimum(p, q).sum(-1)
    target = LookupRunner(TARGET)
    drafter = ModelDrafter(LookupRunner(DRAFTS["similar"]), sampling)
    numbers = Uniforms(3, torch.device("cpu"))
    accepted = 0
    draws = 4_000
    with torch.inference_mode():
        for _ in range(draws):
            accepted += len(take_step(target, drafter, [0] * BLOCK, 1, sampling, numbers).verdict.path)
            target.truncate(BLOCK - 1)
            drafter.truncate(BLOCK - 1)
    expected = float(overlap[0])
    assert accepted / draws == pytest.approx(expected, abs=4 * (expected * (1 - expected) / draws) ** 0.5)


def test_a_transformers_model_end_to_end():
    """The same law where the runners are real: first two tokens after a prompt, tiny GPT-2 target and Llama draft."""
    sampling = Sampling(temperature=0.9, top_k=4)
    target = DynamicRunner(random_model("gpt2", seed=1, vocab=VOCABULARY), VOCABULARY)
    drafter = ModelDrafter(DynamicRunner(random_model("llama", seed=2, vocab=VOCABULARY), VOCABULARY), sampling)
    prompt = [1, 2, 3]
    with torch.inference_mode():
        first = sampling.probabilities(target.feed(torch.tensor(prompt), rows=1))[0].double()
        law = torch.empty(VOCABULARY, VOCABULARY, dtype=torch.double)
        for token in range(VOCABULARY):
            target.truncate(len(prompt))
            law[token] = first[token] * sampling.probabilities(target.feed(torch.tensor([token])))[0].double()
        numbers = Uniforms(4, torch.device("cpu"))
        counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.long)
        for _ in range(1_000):
            text = list(prompt)
            target.truncate(len(prompt) - 1)
            drafter.truncate(len(prompt) - 1)
            while len(text) < len(prompt) + 2:
                step = take_step(target, drafter, text, 1, sampling, numbers)
                text += step.kept
            counts[text[len(prompt)], text[len(prompt) + 1]] += 1
    assert p_value(counts.flatten(), law.flatten()) > THRESHOLD
