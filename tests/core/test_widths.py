"""One tokenizer, two vocabulary sizes: a target or a draft whose weights have no row for the tokenizer's last token."""

import pytest
from tiny import make_tokenizer, random_model

from core.drafting.methods import METHODS
from core.errors import UserError
from core.explaining.lossless import LawCheck, check_law
from core.lanes import open_lane
from core.loading import load_pair
from core.settings import Settings

EXTRA = "<extra>"
PROMPT = f"the quick {EXTRA} brown fox jumps over the lazy dog and the quick {EXTRA}"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Pairs of one tokenizer by the number of rows a model lacks: load(target, draft)."""
    folder = tmp_path_factory.mktemp("widths")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([EXTRA])
    for role, layers, seed in (("target", 2, 1), ("draft", 1, 2)):
        for lacking in (0, 1):
            network = random_model("llama", seed, vocab=len(tokenizer) - lacking, num_hidden_layers=layers)
            network.float().save_pretrained(folder / f"{role}{lacking}")
            tokenizer.save_pretrained(folder / f"{role}{lacking}")

    def load(target, draft):
        names = str(folder / f"target{target}"), str(folder / f"draft{draft}")
        return load_pair(Settings(target=names[0], draft=names[1], precision="fp32", device="cpu"))

    return load


def finished(pair, prompt, **settings):
    with open_lane(pair, prompt, Settings(max_new_tokens=24, ignore_eos=True, exit_layer=1, **settings)) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize("method", [method for method in METHODS if METHODS[method].network != "head"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [3, "auto"])
def test_a_draft_of_fewer_rows(load, method, temperature, length):
    """The prompt holds the token that the draft lacks; greedy text is the target's own."""
    pair = load(0, 1)
    assert pair.target.vocab_size == pair.draft.vocab_size + 1
    run = finished(pair, PROMPT, method=method, temperature=temperature, draft_length=length)
    assert pair.target.vocab_size - 1 in run.prompt_ids
    assert len(run.token_ids) == 24
    if temperature == 0:
        assert run.token_ids == finished(pair, PROMPT, method="plain").token_ids


@pytest.mark.parametrize("method", [method for method in METHODS if METHODS[method].network != "head"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_of_fewer_rows(load, method, temperature):
    """What only the draft has is not proposed; a prompt that holds it is refused in one sentence."""
    pair = load(1, 0)
    run = finished(pair, "the quick brown fox", method=method, temperature=temperature, draft_length=3)
    assert max(run.token_ids) < pair.target.vocab_size
    with pytest.raises(UserError, match=f"holds {EXTRA}, which the tokenizer"):
        finished(pair, PROMPT, method=method)


@pytest.mark.parametrize("method", ["draft", "tree", "ngram+draft"])
def test_the_law_is_the_targets(load, method):
    """The target can still say what its draft cannot: the check meets no width of another size."""
    settings = Settings(method=method, temperature=1.5, draft_length=2, tree="2x2")
    *_, found = check_law(load(0, 1), None, PROMPT, settings, 400)
    assert isinstance(found, LawCheck)
    assert found.p_value > 1e-4
