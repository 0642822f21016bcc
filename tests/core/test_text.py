"""Text as it streams: characters whole, nothing lost, nothing shown twice."""

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.errors import UserError
from core.records import Candidate, Round, Token
from core.settings import Settings
from core.text import REPLACEMENT, Detokenizer, encode_prompt, read_prompts

TEXTS = [
    "the quick brown fox",
    "smile 🙂 and 👩‍👩‍👧 wave 👋🏽",
    "中文字符，日本語、한국어",
    "été naïve Ωmega",
    "\n\n  two lines\tand\r\n   spaces   ",
    "<script>alert(`${1+1}`)</script> {{x}} \u202eright\u0007",
    "🙂",
]


def stream(tokenizer, ids, prompt=()):
    text = Detokenizer(tokenizer, list(prompt))
    return [text.push(i) for i in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_concatenation_is_the_text(tokenizer, text):
    """Token texts add up to exactly the text, at every token to a prefix of it, never with a replacement character."""
    ids = tokenizer.encode(text)
    parts = stream(tokenizer, ids, prompt=tokenizer.encode("the lazy dog"))
    assert "".join(parts) == text
    assert not any(REPLACEMENT in part for part in parts)


@pytest.mark.parametrize("text", ["🙂", "中", "é"])
def test_the_token_that_completes_a_character_carries_it(tokenizer, text):
    """Bytes before it show nothing; they are split over as many tokens as bytes here."""
    parts = stream(tokenizer, tokenizer.encode(text))
    assert len(parts) == len(text.encode())
    assert parts == [""] * (len(parts) - 1) + [text]


def test_whole_characters_after_broken_bytes(tokenizer):
    """Bytes that belong to no character are shown as such, and do not spoil the character after them."""
    broken, whole = tokenizer.encode("中")[:2], tokenizer.encode("字")
    parts = stream(tokenizer, [*broken, *whole, *tokenizer.encode(" fox")])
    assert "".join(parts) == REPLACEMENT + "字 fox"


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_add_up_to_what_the_tokenizer_decodes(tokenizer, seed):
    """Whatever a model says: the parts are the tokenizer's own text, but for a character unfinished at the end."""
    ids = random.Random(seed).choices([i for i in tokenizer.get_vocab().values() if i], k=60)
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    streamed = "".join(stream(tokenizer, ids))
    assert whole.startswith(streamed)
    assert set(whole[len(streamed) :]) <= {REPLACEMENT}


def test_peek_does_not_commit(tokenizer):
    """Drafted tokens get their text after their parents; what follows is as if nobody had looked."""
    text = Detokenizer(tokenizer, tokenizer.encode("the"))
    ids = tokenizer.encode(" fox 🙂")
    chain = [None, *range(len(ids) - 1)]
    assert "".join(text.peek(ids, chain)) == " fox 🙂"
    assert text.peek(ids, chain) == text.peek(ids, chain)
    assert "".join(text.push(i) for i in ids) == " fox 🙂"


def test_peek_follows_the_branches_of_a_tree(tokenizer):
    """Two siblings complete the same half character differently."""
    text = Detokenizer(tokenizer, [])
    *common, last = tokenizer.encode("中")
    *same, other = tokenizer.encode("丮")
    assert common == same
    for i in common:
        text.push(i)
    assert text.peek([last, other, last], [None, None, 1]) == ["中", "丮", ""]


def test_special_tokens_show_in_the_stream_but_not_in_the_text(tokenizer):
    text = Detokenizer(tokenizer, [])
    end = tokenizer.eos_token_id
    ids = [*tokenizer.encode("fox"), end, *tokenizer.encode("dog")]
    rounds = [Round(index, [], Token(i, "", "plain")) for index, i in enumerate(ids)]
    assert "".join(text.write(round_) for round_ in rounds) == "foxdog"
    assert [r.emitted.text for r in rounds if r.emitted.id == end] == ["<|end|>"]


def test_writing_a_round_gives_every_token_and_candidate_its_text(tokenizer):
    """A drafted token continues its parent, the emitted one what was accepted; candidates stand by themselves."""
    f, o, x, g = tokenizer.convert_tokens_to_ids(["f", "o", "x", "g"])
    drafted = [Token(f, "", "accepted"), Token(g, "", "ignored"), Token(o, "", "accepted", parent=0)]
    drafted[1].top_draft = [Candidate(g, "", 0.9)]
    emitted = Token(x, "", "bonus", top_target=[Candidate(x, "", 0.5), Candidate(o, "", 0.2)])
    text = Detokenizer(tokenizer, [])
    assert text.write(Round(0, drafted, emitted)) == "fox"
    assert [token.text for token in drafted] == ["f", "g", "o"]
    assert [candidate.text for candidate in (*drafted[1].top_draft, *emitted.top_target)] == ["g", "x", "o"]


def test_alone_shows_a_token_without_context(tokenizer):
    half = tokenizer.encode("中")[0]
    assert Detokenizer(tokenizer, []).alone(half) == REPLACEMENT


def test_leading_space_marks_of_sentencepiece_are_kept():
    """Such tokenizers drop the space before a first word; only the first token of a text is one."""
    pieces = ["▁the", "▁fox", "s", "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    model = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    parts = stream(tokenizer, [1, 2, 0, 4, 5, 6, 7, 0], prompt=[0])
    assert parts == [" fox", "s", " the", "", "", "", "🙂", " the"]


HOSTILE = {
    **{'prompt = "x"': "not a file of prompts", "prompt = []": "holds no prompts", "": "not a file of prompts"},
    **{'[prompt]\nname = "a"\ntext = "b"': "not a file of prompts", "a = " + "[" * 5000: "not a file of prompts"},
    '[[prompt]]\nname = "a"\ntext = 5': "not a file of prompts",
}


@pytest.mark.parametrize("content", HOSTILE)
def test_what_is_no_file_of_prompts_is_one_sentence(tmp_path, content):
    (tmp_path / "prompts.toml").write_text(content)
    with pytest.raises(UserError, match=HOSTILE[content]):
        read_prompts(tmp_path / "prompts.toml")
    (tmp_path / "prompts.txt").write_text(" \n\n")
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(tmp_path / "prompts.txt")


@pytest.mark.parametrize(("prompt", "sentence"), [(" \n", "is empty"), ("x" * 1_000_001, "1,000,001 characters")])
def test_a_prompt_that_no_model_can_continue_is_not_even_parted_into_tokens(prompt, sentence):
    """Fifty million characters would take all the memory there is, and hold the device for minutes."""
    with pytest.raises(UserError, match=sentence):
        encode_prompt(SimpleNamespace(tokenizer=None, name="a model"), prompt, Settings())
