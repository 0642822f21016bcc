"""Caches, precisions and the sampled law on a real model with a real vocabulary of 49,152 tokens."""

import numpy as np
import pytest
import torch
from questions import QUESTIONS
from scipy.special import xlogy
from scipy.stats import chi2
from transformers import AutoModelForCausalLM
from unmeasured import load_unmeasured

from core.decoding import take_step
from core.drafting.model import ModelDrafter
from core.drafting.ngram import NgramDrafter
from core.drafting.tree import TreeDrafter
from core.lanes import finish_together, open_lane
from core.loading.head import bundled_head, load_head
from core.loading.pair import Pair
from core.sampling import Sampling, Uniforms
from core.settings import SMOLLM2_NAME, Settings
from core.text import encode_prompt
from core.verification import verify_chain

CPU = torch.device("cpu")
SAMPLING = Sampling(temperature=1.0)
CLOSE = {"rtol": 1e-4, "atol": 2e-3}
"""Logits of up to 40 in float32, after thirty layers."""
DRAWS, CONTEXTS, EXIT = 2500, 20, 24
"""Against a law that is known, so many draws see more than 4,000 would beside as many of plain decoding."""


def probe(runner, context):
    """What a runner says next, having caught up with the context; leaves it as it was."""
    held = runner.length
    logits = runner.feed(torch.tensor(context[held:]))[-1].clone()
    runner.truncate(held)
    return logits


@pytest.fixture(scope="module")
def first_layers(draft_folder):
    return AutoModelForCausalLM.from_pretrained(draft_folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("method", ["draft", "tree", "early-exit", "ngram"])
def test_caches_are_exact_after_every_round(pair, reference, first_layers, method):
    """After any round both caches answer as if they had been fed the committed text and nothing else."""
    with pair.target.lease() as target, pair.draft.lease() as draft, torch.inference_mode():
        view = target.view(EXIT)
        drafter = {
            "draft": lambda: ModelDrafter(draft, SAMPLING),
            "tree": lambda: TreeDrafter(draft, SAMPLING, lambda: (3, 2, 1)),
            "early-exit": lambda: ModelDrafter(view, SAMPLING),
            "ngram": lambda: NgramDrafter(CPU, shortest=1),
        }[method]()
        numbers = Uniforms(1, CPU)
        context = encode_prompt(pair.target, QUESTIONS[6], Settings())
        for gamma in (3, 1, 3, 2, 3):
            context = context + take_step(target, drafter, context, gamma, SAMPLING, numbers).kept
            assert target.length == len(context) - 1
            expected = reference(torch.tensor([context])).logits[0, -1]
            torch.testing.assert_close(probe(target, context), expected, **CLOSE)
            if method in ("draft", "tree"):
                expected = first_layers(torch.tensor([context])).logits[0, -1]
                torch.testing.assert_close(probe(draft, context), expected, **CLOSE)
    assert len(set(context[-6:])) > 1


EXACT = [
    *((precision, "ngram") for precision in ("nf4", "bf16")),
    *(("int4", method) for method in ("ngram", "early-exit", "head", "head-tree", "ngram+head")),
]
"""The pair in int4 comes last: the tests below go on with it."""


SOME = QUESTIONS[:5]


@pytest.fixture(scope="module")
def plain_texts(weights):
    """By precision: a pair with the bundled head, and the ids that plain decoding answers each question with."""
    known = {}

    def found(precision):
        if precision not in known:
            target = load_unmeasured(SMOLLM2_NAME, precision)
            if target.precision != precision:
                pytest.skip(f"this machine runs {target.precision} for {precision}")
            assert target.runner_kind == "native" and target.exact_rows
            folder = bundled_head(target.config, target.tokenizer) if precision == "int4" else None
            pair = Pair(target, head=folder and load_head(folder.name, folder, target))
            known.clear()
            known[precision] = pair, [answer(pair, question, "plain") for question in SOME]
        return known[precision]

    return found


def answer(pair, question, method):
    settings = Settings(method=method, draft_length=5, max_new_tokens=24, precision=pair.target.precision)
    with open_lane(pair, question, settings) as lane:
        for _ in lane:
            pass
    return lane.run.token_ids


@pytest.mark.parametrize("precision, method", EXACT)
def test_speculative_text_is_plain_text_bit_for_bit(plain_texts, precision, method):
    """What a row of the native pass comes to does not depend on the rows beside it: no tie can fall another way."""
    pair, expected = plain_texts(precision)
    assert [answer(pair, question, method) for question in SOME] == expected


@pytest.mark.parametrize("method", ["plain", "head"])
def test_texts_together_are_those_of_each_alone(plain_texts, method):
    """Three at a time of five, in 4 bits, with drafts as long as pays where there are three."""
    pair, expected = plain_texts("int4")
    settings = Settings(method=method, draft_length="auto", max_new_tokens=24, precision="int4")
    runs = finish_together(pair, [(question, settings) for question in SOME], 3)
    assert [run.token_ids for run in runs] == expected


@pytest.fixture(scope="module")
def laws(model):
    """Next-token laws after CONTEXTS contexts, p and q [contexts, vocabulary]: inside questions, where much is
    possible, and where an answer begins. The draft's are by turns those of the first layers and a flatter p."""
    rows = []
    for question in QUESTIONS[:5]:
        ids = torch.tensor(encode_prompt(model, question, Settings()))
        with model.lease() as runner, torch.inference_mode():
            logits = runner.feed(ids)
            p, flat = SAMPLING.probabilities(logits), Sampling(temperature=1.5).probabilities(logits)
            runner.truncate(0)
            q = SAMPLING.probabilities(runner.view(EXIT).feed(ids))
        for turn, i in enumerate((-9, -8, -7, -1)):
            rows.append((p[i].clone(), (flat if turn % 2 else q)[i].clone()))
    assert len(rows) == CONTEXTS
    return rows


@torch.inference_mode()
def speculative_draws(p, q, seed, q_seen=None):
    """The first token of DRAWS rounds with a draft of one token, judged by the rule that runs; `q_seen` is what the
    judge is told the draft was drawn from, if not q."""
    random = torch.Generator().manual_seed(seed)
    proposed = torch.multinomial(q, DRAWS, replacement=True, generator=random)
    uniforms = torch.rand(DRAWS, 2, generator=random)
    both, seen = torch.stack([p, p]), (q if q_seen is None else q_seen)[None]
    found = []
    for token, numbers in zip(proposed, uniforms):
        verdict = verify_chain(both, token[None], seen, numbers)
        found.append(int(token) if int(verdict.accepted) else int(verdict.token))
    return np.bincount(found, minlength=len(p))


def chance_of(counts, p):
    """G-test: the chance of counts at least so far from the law p if they follow it. Cells that expect fewer than five
    are pooled; one that the law excludes must be empty."""
    law = p.double().numpy()
    if counts[law == 0].any():
        return 0.0
    expected = law / law.sum() * counts.sum()
    rare = expected < 5
    counts, expected = (np.append(of[~rare], of[rare].sum()) for of in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    g = 2 * xlogy(counts, counts / expected).sum()
    return float(chi2.sf(g, df=max(1, len(counts) - 1)))


def test_the_sampled_law_is_the_targets(laws):
    """After each context: counts of the next token against the law itself."""
    values = [chance_of(speculative_draws(p, q, seed), p) for seed, (p, q) in enumerate(laws)]
    assert min(values) > 1e-4, values
    agreement = [float(torch.minimum(p, q).sum()) for p, q in laws]
    assert min(agreement) < 0.6 and max(agreement) > 0.3, "drafts were both accepted and refused"


def test_a_law_that_is_broken_is_seen(laws):
    """The same with a judge that takes every draft for certain: the classical mistake."""
    unsure = [(p, q) for p, q in laws if 0.2 < float(torch.minimum(p, q).sum()) < 0.9 and float(p.max()) < 0.9][:4]
    assert unsure
    for seed, (p, q) in enumerate(unsure):
        counts = speculative_draws(p, q, seed, q_seen=torch.full_like(q, 1e-9))
        assert chance_of(counts, p) < 1e-6
