"""python -m core generate: documents on stdout, one clear line on stderr and status 2 for bad input, no trace-backs."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONTEXT, random_model

from core.__main__ import main

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
METHODS = ("plain", "draft", "ngram", "ngram+draft", "early-exit", "tree")


@pytest.fixture
def models(pair_folder):
    return ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"), "--precision", "fp32"]


@pytest.fixture
def generate(capsys, models):
    """Run the command in this process: status, stdout, stderr."""

    def run(*arguments, prompt=PROMPT, models=models):
        given = [] if prompt is None else ["--prompt", prompt]
        try:
            status = main(["generate", *models, *given, "--device", "cpu", *arguments])
        except SystemExit as left:
            status = left.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("method", METHODS)
def test_json_is_one_document_on_stdout(generate, method):
    """Nothing else goes to stdout; every method writes the target's own greedy text."""
    common = ("--max-new-tokens", "20", "--draft-length", "3", "--ignore-eos", "--json", "-")
    status, out, _ = generate("--method", method, *common)
    document = json.loads(out)
    _, plain, _ = generate("--method", "plain", *common)
    assert status == 0
    assert (document["schema"], document["prompt"], document["stop_reason"]) == (1, PROMPT, "length")
    assert document["token_ids"] == json.loads(plain)["token_ids"]
    assert document["rounds"][0]["emitted"]["top_target"]


def test_text_on_stdout_and_totals_on_stderr(generate, tmp_path):
    """Without --json - the text itself streams; the document goes to the file."""
    status, out, err = generate("--max-new-tokens", "12", "--json", str(tmp_path / "run.json"))
    document = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert status == 0
    assert out == document["text"] + "\n"
    assert "12 tokens" in err.splitlines()[-1] or "eos" in err.splitlines()[-1]


def test_samples_are_the_runs_of_their_seeds(generate):
    """Loaded once, seeds S … S+N-1; each line is what that seed gives alone."""
    common = ("--temperature", "1", "--max-new-tokens", "6", "--draft-length", "2")
    status, out, _ = generate("--samples", "3", "--seed", "5", *common)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["seed"] for line in lines] == [5, 6, 7]
    _, alone, _ = generate("--seed", "6", "--json", "-", *common)
    assert lines[1] == {"seed": 6, "token_ids": json.loads(alone)["token_ids"]}


def test_target_alone_drafts_with_ngrams(generate, models):
    _, out, _ = generate("--json", "-", "--max-new-tokens", "5", models=models[:2] + models[4:])
    assert json.loads(out)["settings"]["method"] == "ngram"


def test_prompt_from_a_file(generate, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("été 🙂 fox", encoding="utf-8")
    _, out, _ = generate("--prompt-file", str(file), "--json", "-", "--max-new-tokens", "2", prompt=None)
    assert json.loads(out)["prompt"] == "été 🙂 fox"


def test_text_that_looks_like_a_special_token_stays_text(generate, tokenizer):
    """Model text and prompts are hostile: an end token typed by a person does not end anything."""
    _, out, _ = generate("--json", "-", "--max-new-tokens", "2", prompt="a <|end|> b")
    document = json.loads(out)
    assert tokenizer.eos_token_id not in document["prompt_ids"]
    assert tokenizer.decode(document["prompt_ids"]) == "a <|end|> b"


BAD = [
    (["--draft-length", "0"], r"Draft length must be auto or a whole number between 1 and 64, not 0"),
    (["--draft-length", "1000"], r"Draft length must be auto or a whole number between 1 and 64, not 1000"),
    (["--draft-length", "many"], r"Draft length must be auto or a whole number between 1 and 64, not 'many'"),
    (["--max-new-tokens", "0"], r"at least 1, not 0"),
    (["--max-new-tokens", "1000"], r"1,000 new tokens make .*past the context of .*ask for at most \d+ new tokens"),
    (["--temperature", "-1"], r"Temperature must be"),
    (["--temperature", "nan"], r"Temperature must be"),
    (["--top-p", "0"], r"Top-p must be"),
    (["--top-k", "-3"], r"Top-k must be"),
    (["--min-p", "2"], r"Min-p must be"),
    (["--method", "early-exit", "--exit-layer", "9"], r"exit layer must be between 1 and 3"),
    (["--method", "tree", "--tree", "4xx"], r"A tree is written as children by depth"),
    (["--method", "tree", "--tree", "9x9x9"], r"819 nodes; at most 64"),
    (["--method", "magic"], r"There is no method 'magic'; choose one of plain, draft"),
    (["--samples", "0"], r"--samples must be at least 1, not 0"),
    (["--system", "Be brief."], r"takes no system prompt"),
    (["--precision", "int3"], r"There is no precision 'int3'"),
    (["--target", "nobody/nothing"], r"not in the local cache and the Hub cannot be reached"),
    (["--json", "/nowhere/run.json"], r"/nowhere/run.json cannot be written"),
]


def assert_refused(result, sentence):
    """Status 2, the sentence as the last line, nothing but progress before it; what went to stdout."""
    status, out, err = result
    *progress, last = err.strip().splitlines()
    assert status == 2
    assert re.search(sentence, last)
    assert "Traceback" not in err
    assert all(line.startswith(("Loading", "Measuring")) for line in progress)
    return out


@pytest.mark.parametrize(
    "arguments, sentence", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_status_2(generate, arguments, sentence):
    assert_refused(generate(*arguments), sentence)


@pytest.mark.parametrize("prompt", ["", "   \n"])
def test_empty_prompt(generate, prompt):
    assert assert_refused(generate(prompt=prompt), r"The prompt is empty") == ""


def test_a_place_that_cannot_be_written_is_told_before_the_work(generate, tmp_path):
    for place in ("/nowhere/run.json", str(tmp_path)):
        status, out, err = generate("--json", place)
        assert (status, out, err) == (2, "", f"{place} cannot be written; is its folder there?\n")


def test_prompt_longer_than_the_context_says_by_how_much(generate):
    """Every word here is one token and more; the sentence counts what must go."""
    status, _, err = generate(prompt="fox " * 400)
    assert status == 2
    count, surplus = (int(word.replace(",", "")) for word in err.splitlines()[-1].split() if word[0].isdigit())
    assert count - surplus == CONTEXT - 1


@pytest.mark.parametrize("content, sentence", [(None, "cannot be read"), (b"\xff\xfe\xff", "is not UTF-8 text")])
def test_prompt_file_that_cannot_be_read(generate, tmp_path, content, sentence):
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    assert_refused(generate("--prompt-file", str(file), prompt=None), sentence)


def test_method_that_needs_a_draft(generate, models):
    assert_refused(generate("--method", "draft", models=models[:2] + models[4:]), "no draft model is loaded")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_weights_that_are_not_numbers(generate, models, pair_folder, tmp_path, tokenizer, role, temperature):
    """A sentence, or for a greedy draft, whose guesses are only judged, the target's own text."""
    broken = tmp_path / role
    broken.mkdir()
    for file in (pair_folder / role).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] *= float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    common = ("--temperature", temperature, "--max-new-tokens", "8", "--draft-length", "2", "--json", "-")
    result = generate(f"--{role}", str(broken), *common)
    if (role, temperature) == ("draft", "0"):
        _, plain, _ = generate("--method", "plain", *common)
        assert json.loads(result[1])["token_ids"] == json.loads(plain)["token_ids"]
    else:
        assert_refused(result, "logits that are not numbers")


@pytest.mark.parametrize("method", ["draft", "tree"])
def test_draft_with_a_shorter_context_than_the_text(generate, models, tmp_path, tokenizer, method):
    """Past its own context a draft has nothing to say; the target goes on alone."""
    network = random_model("gpt2", 3, vocab=320, dtype=torch.float32, n_positions=32)
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    common = ("--max-new-tokens", "60", "--draft-length", "4", "--ignore-eos", "--json", "-")
    drafting = ("--method", method, "--draft", str(tmp_path))
    for prompt in ("the fox", PROMPT * 2):
        status, out, _ = generate(*drafting, *common, prompt=prompt[:100])
        _, plain, _ = generate("--method", "plain", *common, prompt=prompt[:100])
        assert status == 0
        assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_what_a_model_writes_goes_to_any_stdout(generate, monkeypatch):
    """On Windows a pipe is given the alphabet of one country."""
    piped = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(piped, encoding="latin-1"))
    assert generate("--max-new-tokens", "2", "--json", "-", prompt="✦")[0] == 0
    sys.stdout.flush()
    assert json.loads(piped.getvalue().decode())["prompt"] == "✦"


def test_as_a_command():
    """The real process: its exit status and streams as a script sees them."""
    command = [sys.executable, "-m", "core", "generate", "--repeat", "run.json", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert assert_refused((done.returncode, done.stdout, done.stderr), "give it no others") == ""
