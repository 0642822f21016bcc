"""A trained head never changes the output: the joint law of a table that is known, and greedy texts token by token.

Heads are random: a hot one says anything, a cold one is sure of a few tokens, a constant one always says the same; none
of them is right more often than it happens to be.
"""

from functools import cache

import pytest
import torch
from heads import random_head, taught_head
from lookup import BLOCK, CPU, VOCABULARY, LookupRunner, block_law, count_blocks, decode, p_value, table
from test_law import DRAWS, THRESHOLD
from tiny import VOCABULARY as TOKENS
from tiny import random_prompt, target_of, target_runner

from core.costs.rounds import RoundCosts
from core.decoding import speculative
from core.drafting.head import HeadDrafter
from core.drafting.length import AdaptiveSource, Confident, Fixed, Repeating
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.heads.block import FusedHead
from core.heads.runner import runner_of
from core.records import Run
from core.sampling import Sampling
from core.settings import Settings

SPREADS = {"hot": 0.3, "cold": 4.0, "constant": 0.0}
ALL = list(range(VOCABULARY))
TEXTS = 20
MIXED = Sampling(0.8, top_k=4, top_p=0.9, min_p=0.1)
CASES = [
    ("hot", 2, Sampling(1.3, top_k=3), [1, 4]),
    ("cold", 2, MIXED, [0, 2, 3]),
    ("cold", 1, Sampling(1.0), ALL),
    ("constant", 1, Sampling(1.0, top_p=0.8), [4]),
]


class TableHead:
    """A head whose law follows from the token it has just read and the feature before it, without a network: its
    passes take no time, so that many rounds can be decoded."""

    device = torch.device("cpu")

    def __init__(self, kind: str, ids: list[int]) -> None:
        self.head = self
        self.target_ids = torch.tensor(ids)
        self.length = 0
        generator = torch.Generator().manual_seed(7)
        self._laws = SPREADS[kind] * torch.randn(3, VOCABULARY, len(ids), generator=generator)

    def read(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        self.length += len(ids)
        return torch.stack([self._laws[int(f.argmax()) % 3, i] for f, i in zip(features, ids.tolist())])

    def draft(self, ids: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        self.length += len(ids)
        return self._laws[int(outputs.argmax()) % 3, ids]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def on_target(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.full((len(rows), VOCABULARY), fill).index_copy_(1, self.target_ids, rows)


@pytest.mark.parametrize("kind, gamma, sampling, ids", CASES, ids=str)
def test_joint_law_is_the_targets(kind, gamma, sampling, ids):
    """Blocks of three tokens decoded with a head, of whole and reduced vocabularies, by G-test."""
    logits = table(1)
    target = LookupRunner(logits)
    drafter = HeadDrafter(TableHead(kind, ids), target.watch([0]), sampling)
    run = decode(target, drafter, sampling, gamma, DRAWS * BLOCK, seed=5)
    assert sum(len(round_.drafted) for round_ in run.rounds) > DRAWS
    assert p_value(count_blocks(run.token_ids), block_law(logits, sampling)) > THRESHOLD


def test_an_n_gram_before_the_head_keeps_the_law():
    """Each drafts where it promises more, the head's chains ending by its confidence; in texts of usual length."""
    logits, sampling = table(1), Sampling(1.0)
    costs, counts = RoundCosts(lambda n: 1 + 0.02 * n, lambda n: 0.1), 0
    for seed in range(TEXTS):
        target, confident, ngram = LookupRunner(logits), Confident(costs, longest=4), NgramDrafter(CPU)
        head = HeadDrafter(TableHead("cold", [0, 2, 3]), target.watch([0]), sampling, confident)
        chosen = AdaptiveSource(Repeating(ngram.match, RoundCosts(costs.target), longest=4), confident)
        drafter = CombinedDrafter(ngram, head, chosen.source)
        run = decode(target, drafter, sampling, chosen, DRAWS // TEXTS * BLOCK, seed)
        assert {round_.source for round_ in run.rounds} >= {"ngram", "model"}
        counts = counts + count_blocks(run.token_ids)
    assert p_value(counts, block_law(logits, sampling)) > THRESHOLD


@cache
def text_and_head(architecture, prompt_length):
    """What transformers writes, and a head that has learnt it."""
    network = target_of(architecture)
    prompt = torch.tensor([random_prompt(prompt_length)])
    text = network.generate(prompt, do_sample=False, max_new_tokens=24, pad_token_id=0)[0].tolist()
    return text, taught_head(network, text, sorted(set(text[1::2])))


@pytest.mark.xdist_group("taught heads")
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "llama fused", "qwen3 fused", "llama graph"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
def test_greedy_texts_are_transformers_own(kind, gamma):
    """In float64; with a head that is often right and with a random one, a prompt of one token among them."""
    network = target_of(kind)
    met = set()
    for length in (1, 40):
        text, taught = text_and_head(kind.split()[0], length)
        for head in (taught, random_head()):
            target = target_runner(kind)
            fused = FusedHead(head, network.get_input_embeddings().weight, TOKENS)
            drafter = HeadDrafter(runner_of(fused), target.watch(head.config.aux_layers), Sampling())
            for either in (drafter, CombinedDrafter(NgramDrafter(CPU), drafter)):
                target.truncate(0)
                drafter.reset()
                run = Run(Settings(max_new_tokens=24), {}, "", text[:length])
                for _ in speculative(target, either, run, length=Fixed(gamma)):
                    pass
                assert run.token_ids == text[length:]
                met |= {token.outcome for round_ in run.rounds for token in round_.drafted}
    assert {"accepted", "rejected"} <= met
