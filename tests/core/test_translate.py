"""A target and a draft with different tokenizers: what a token means, what the draft reads, and whose law comes out."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from drafters import DRAFTS, TARGET
from lookup import BLOCK, CPU, LookupRunner, block_law, count_blocks, decode, p_value
from test_law import DRAWS, THRESHOLD
from tiny import random_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from core.decoding import speculative
from core.drafting.build import available
from core.drafting.length import Fixed
from core.drafting.methods import METHODS
from core.drafting.translate import DraftText, TranslateDrafter
from core.errors import Cancelled, UserError
from core.lanes import open_lane
from core.loading import load_pair
from core.loading.pair import Translation, token_bytes, translate
from core.progress import never
from core.records import Run, Settings
from core.runners import PREFILL_CHUNK
from core.runners.dynamic import DynamicRunner
from core.sampling import Sampling

ENGLISH = "The first people to see the river called it the mother of waters, and they were not wrong. " * 3
CODE = "def first(people):\n    for person in people:\n        return person  # the first\n" * 3
MIXED = ENGLISH + CODE + "Grüße, 你好 und 🙂🙃!  Two  spaces.\n\n" + ENGLISH
GREEDY = Sampling(0.0)


def byte_level(text: str, size: int, end: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's: every byte is a token, frequent runs of them are too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def sentence_piece(text: str, size: int) -> PreTrainedTokenizerFast:
    """Words begin with ▁, also the first; characters it does not know are spelt in <0xNN>. As Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spelling = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    words = [word for line in text.split("\n") for word in line.split(" ") if word]
    tokenizer.train_from_iterator(words, trainer)
    learnt = json.loads(tokenizer.model.__getstate__())  # the trainer has no option for byte tokens
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *spelling])}
    for token in learnt["vocab"]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZER = byte_level(ENGLISH + CODE, 400, "<|end|>")
OTHER = byte_level(CODE + "people see the waters " * 3, 340, "</s>")
SPELLING = sentence_piece(ENGLISH, 400)


class Named:
    """As much of a Model as the map between vocabularies looks at."""

    def __init__(self, tokenizer, name="some/model"):
        self.tokenizer, self.name, self.vocab_size = tokenizer, name, len(tokenizer)


class NoTokenizer:
    """In place of a draft's tokenizer: text is read by longest matches."""

    def encode(self, text, **options):
        return []


class RowRunner:
    """A runner that always answers the same, and notes what it is fed."""

    kind, device = "row", CPU

    def __init__(self, row):
        self.row, self.ids, self.feeds = row, [], []

    @property
    def length(self):
        return len(self.ids)

    def feed(self, ids, parents=None, *, rows=None):
        self.ids += ids.tolist()
        self.feeds.append(len(ids))
        return self.row[None]

    def truncate(self, length):
        del self.ids[length:]


# --- What tokens mean -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [TOKENIZER, OTHER], ids=["larger", "smaller"])
def test_bytes_of_byte_level_tokens(tokenizer):
    """The bytes of a text's tokens are the text's, also where a token is a part of a character."""
    pieces = token_bytes(tokenizer, len(tokenizer), "x")
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    assert b"".join(pieces[i] for i in ids) == MIXED.encode()
    assert {bytes([b]) for b in range(256)} <= set(pieces)
    assert pieces[tokenizer.eos_token_id] is None


def test_bytes_of_sentence_pieces():
    """▁ is a space (one more comes first), <0xNN> a byte."""
    pieces = token_bytes(SPELLING, len(SPELLING), "x")
    ids = SPELLING.encode(MIXED, add_special_tokens=False)
    assert b"".join(pieces[i] for i in ids) == b" " + MIXED.encode()
    assert [pieces[i] for i in SPELLING.encode("🙂", add_special_tokens=False)][1:] == [
        b"\xf0",
        b"\x9f",
        b"\x99",
        b"\x82",
    ]


def test_unknown_kind_of_tokenizer_is_refused():
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="does not say which bytes its tokens stand for"):
        translate(Named(TOKENIZER), Named(PreTrainedTokenizerFast(tokenizer_object=words)))


def test_too_little_in_common_is_refused():
    """Every byte-level vocabulary shares the 256 bytes; that alone is no common language."""
    russian = byte_level("Первые люди, увидевшие реку, назвали её матерью вод, и не ошиблись. " * 3, 400, "</s>")
    with pytest.raises(UserError, match=r"only 0\.\d% of the smaller one's tokens in common"):
        translate(Named(TOKENIZER), Named(russian))


def test_end_of_text_is_matched_by_its_role():
    """<|end|> and </s> are written differently and mean the same."""
    translation = translate(Named(TOKENIZER), Named(OTHER))
    assert translation.draft_of[TOKENIZER.eos_token_id] == OTHER.eos_token_id
    assert (OTHER.eos_token_id, TOKENIZER.eos_token_id) in zip(
        translation.draft_ids.tolist(), translation.target_ids.tolist()
    )
    text = DraftText(translation)
    text.extend([*TOKENIZER.encode("people"), TOKENIZER.eos_token_id, *TOKENIZER.encode("see")])
    assert text.ids == [*OTHER.encode("people"), OTHER.eos_token_id, *OTHER.encode("see")]


# --- What the draft reads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"), [(TOKENIZER, OTHER), (OTHER, TOKENIZER), (TOKENIZER, SPELLING), (SPELLING, OTHER)]
)
def test_text_that_grows_is_read_as_if_whole(ours, theirs):
    """Token by token, with only a tail encoded again, the draft's ids are those of the whole text."""
    text = DraftText(translate(Named(ours), Named(theirs)))
    for token in ours.encode(MIXED, add_special_tokens=False):
        before = list(text.ids)
        stable = text.extend([token])
        assert text.ids[:stable] == before[:stable]
    whole = " " + MIXED if ours is SPELLING else MIXED
    assert text.ids == theirs.encode(whole, add_special_tokens=False)


def test_work_does_not_grow_with_the_text(monkeypatch):
    """The longest piece encoded again is as long in a text twenty times as long."""
    translation = translate(Named(TOKENIZER), Named(OTHER))
    lengths = []
    encode = translation.encode
    monkeypatch.setattr(
        translation, "encode", lambda text, beginning: lengths.append(len(text)) or encode(text, beginning)
    )
    tokens = TOKENIZER.encode(MIXED, add_special_tokens=False)
    longest = []
    for text in (tokens, tokens * 20):
        reader = DraftText(translation)
        lengths.clear()
        for token in text:
            reader.extend([token])
        longest.append(max(lengths))
    assert longest[0] == longest[1] < 100


def test_no_draft_inside_a_character():
    """🙂 is four tokens: nothing is drafted until the last, and bytes that are no text at all do no harm."""
    translation = translate(Named(TOKENIZER), Named(OTHER))
    drafter = TranslateDrafter(RowRunner(torch.zeros(len(OTHER))), GREEDY, translation)
    smile = TOKENIZER.encode("🙂")
    assert len(smile) == 4
    context = TOKENIZER.encode("the first ")
    drafted = []
    for token in [*smile, *TOKENIZER.encode("!"), smile[-1]]:
        context.append(token)
        drafted.append(len(drafter.propose(context, 2, torch.rand(2))))
    assert drafted == [0, 0, 0, 2, 2, 2]


def test_prefill_is_chunked_and_can_be_stopped():
    """A long prompt goes in by chunks; between them the run can end. The first draft reads what is missing."""
    translation = translate(Named(TOKENIZER), Named(OTHER))
    context = TOKENIZER.encode(MIXED * 4)
    wanted = OTHER.encode(MIXED * 4)
    runner = RowRunner(torch.zeros(len(OTHER)))
    drafter = TranslateDrafter(runner, GREEDY, translation)
    answers = iter([False, True])
    with pytest.raises(Cancelled):
        drafter.prefill(context, lambda: next(answers))
    assert runner.ids == wanted[:PREFILL_CHUNK]
    assert drafter.prefill(context[:-1], never) > 0
    assert max(runner.feeds) == PREFILL_CHUNK
    drafter.propose(context, 1, torch.rand(1))
    assert runner.ids == wanted
    assert runner.feeds[-1] < 10


def test_draft_keeps_to_its_own_context_length():
    """The same text may be more tokens for the draft: where they no longer fit, nothing is drafted."""
    translation = translate(Named(TOKENIZER), Named(OTHER))
    runner = RowRunner(torch.zeros(len(OTHER)))
    context = TOKENIZER.encode(ENGLISH)
    needed = len(OTHER.encode(ENGLISH))
    for limit, length in [(needed - 1, 0), (needed, 1), (needed + 1, 2), (needed + 9, 4)]:
        drafter = TranslateDrafter(runner, GREEDY, translation, limit)
        drafter.prefill(context, never)
        assert len(drafter.propose(context, 4, torch.rand(4))) == length
        assert runner.length <= limit
        drafter.reset()
        assert runner.length == 0


# --- The law ----------------------------------------------------------------------------------------------------------

OURS = [b"a", b"b", b" c", b"ab", b"d"]
THEIRS = [b"b", b"a", b"e", b"a", b" c"]
"""Of the draft's tokens two are the target's "a" and one the target does not know; "ab" and "d" it cannot say."""


def lookup_translation():
    return Translation(OURS, THEIRS, {}, NoTokenizer())


def test_push_forward_exactly():
    """Equal bytes add up, the rest is cut off, what remains sums to one; a draft token is fed for each drawn."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.1, 0.2]).log()
    runner = RowRunner(row)
    draft = TranslateDrafter(runner, Sampling(1.0), lookup_translation()).propose([0], 2, torch.tensor([0.0, 0.99]))
    q = torch.tensor([0.3, 0.1, 0.2, 0.0, 0.0]) / 0.6
    assert draft.tokens.tolist() == [0, 2]
    torch.testing.assert_close(draft.probs, q.expand(2, -1))
    assert THEIRS[runner.ids[-1]] == b"a"


def test_nothing_left_stops_before_any_draw():
    """All of the chain's probability on a token the target does not have: no draft, sampled or greedy."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.1, 0.2]).log()
    for sampling in (Sampling(1.0, top_k=1), GREEDY):
        drafter = TranslateDrafter(RowRunner(row), sampling, lookup_translation())
        assert len(drafter.propose([0], 3, torch.rand(3))) == 0


@pytest.mark.parametrize(
    ("draft", "gamma", "sampling"),
    [("similar", 2, Sampling(1.0)), ("cold", 3, Sampling(1.3, top_k=4, top_p=0.95))],
)
def test_joint_law_is_the_targets(draft, gamma, sampling):
    """Blocks of three tokens by the real loop against the law enumerated from the target's table."""
    drafter = TranslateDrafter(LookupRunner(DRAFTS[draft]), sampling, lookup_translation())
    run = decode(LookupRunner(TARGET), drafter, sampling, gamma, DRAWS * BLOCK, seed=1)
    met = Counter(token.outcome for r in run.rounds for token in (*r.drafted, r.emitted))
    assert met.keys() >= {"accepted", "rejected", "corrected", "bonus"}
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)) > THRESHOLD


class NotRenormalised(TranslateDrafter):
    """Forgets that what was cut off makes the rest likelier: its probs are not what its tokens were drawn from."""

    def propose(self, context, length, uniforms):
        draft = super().propose(context, length, uniforms)
        return draft if draft.probs is None else replace(draft, probs=0.7 * draft.probs)


def test_without_renormalisation_the_law_breaks():
    sampling = Sampling(1.0)
    drafter = NotRenormalised(LookupRunner(DRAFTS["similar"]), sampling, lookup_translation())
    run = decode(LookupRunner(TARGET), drafter, sampling, 2, DRAWS * BLOCK, seed=1)
    assert p_value(count_blocks(run.token_ids), block_law(TARGET, sampling)) < THRESHOLD


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_k=8)], ids=["greedy", "sampled"])
def test_the_target_under_other_ids_is_always_accepted(sampling):
    """A draft that is the target with its ids shuffled says what the target says: nothing is ever rejected."""
    letters = [bytes([64 + i]) for i in range(64)]
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))  # draft id -> target id
    target, draft = (random_model("llama", seed=3) for _ in range(2))
    draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight[shuffled])
    draft.lm_head.weight.copy_(target.lm_head.weight[shuffled])
    translation = Translation(letters, [letters[i] for i in shuffled], {}, NoTokenizer())
    drafter = TranslateDrafter(DynamicRunner(draft, 64), sampling, translation)
    settings = Settings(temperature=sampling.temperature, top_k=sampling.top_k, max_new_tokens=60)
    run = Run(settings, {}, "", [5, 6, 7])
    for _ in speculative(DynamicRunner(target, 64), drafter, run, length=Fixed(4)):
        pass
    assert {token.outcome for r in run.rounds for token in r.drafted} == {"accepted"}
    assert run.draft_prefill_seconds > 0


# --- A whole pair -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two folders with different tokenizers, loaded as anybody's; then in float64, where near-ties do not matter."""
    folder = tmp_path_factory.mktemp("pair")
    for role, tokenizer, seed in (("target", TOKENIZER, 1), ("draft", OTHER, 2)):
        network = random_model("llama", seed, vocab=len(tokenizer), dtype=torch.float32)
        network.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    settings = Settings(target=str(folder / "target"), draft=str(folder / "draft"), device="cpu", precision="fp32")
    loaded = load_pair(settings)
    target, draft = (replace(model, network=model.network.double()) for model in (loaded.target, loaded.draft))
    return replace(loaded, target=target, draft=draft)


@pytest.mark.parametrize("method", ["draft", "ngram+draft"])
@pytest.mark.parametrize("prompt", ["The first people", CODE, "Grüße, 你好 🙂"], ids=["short", "long", "characters"])
def test_greedy_text_is_the_targets_own(pair, method, prompt):
    settings = Settings(method=method, draft_length=3, max_new_tokens=40, chat="off", ignore_eos=True)
    with open_lane(pair, prompt, settings) as lane:
        for _ in lane:
            pass
    alone = pair.target.network.generate(
        torch.tensor([lane.run.prompt_ids]), do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0
    )
    assert lane.run.token_ids == alone[0, len(lane.run.prompt_ids) :].tolist()
    assert sum(len(r.drafted) for r in lane.run.rounds) > 10


def test_sampled_run_records_a_draft_in_the_targets_tokens(pair):
    """What is recorded of the draft, its favourites too, are tokens of the target."""
    with open_lane(
        pair, ENGLISH, Settings(draft_length=3, max_new_tokens=30, temperature=1.0, chat="off"), tops=3
    ) as lane:
        for _ in lane:
            pass
    drafted = [token for r in lane.run.rounds for token in r.drafted]
    assert drafted
    known = set(pair.translation.target_ids.tolist())
    assert {c.id for token in drafted for c in token.top_draft} | {token.id for token in drafted} <= known


def test_what_a_translated_pair_offers(pair):
    """Trees need the same tokens, and say so; no head is loaded; everything else is there."""
    off = {method: reason for method, reason in available(pair).items() if reason}
    assert off.pop("tree") == "a tree needs a draft with the target's own tokens"
    assert set(off) == {name for name, method in METHODS.items() if method.network == "head"} and set(off.values()) == {
        "no trained head of the target is loaded"
    }
    with pytest.raises(UserError, match="a tree needs a draft"):
        open_lane(pair, "x", Settings(method="tree", chat="off"))


def test_same_tokenizer_needs_no_translation(pair, tmp_path):
    pair.target.load_again().save_pretrained(tmp_path)
    pair.target.tokenizer.save_pretrained(tmp_path)
    settings = Settings(target=str(tmp_path), draft=str(tmp_path), device="cpu", precision="fp32")
    assert load_pair(settings).translation is None
