"""Copy as command: the line, given back to the command line's own parser, makes the same settings."""

import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.__main__ import parser
from core.cli import arguments_of, command, settings_of
from core.drafting.methods import METHODS
from core.errors import UserError
from core.loading.pair import choose_target
from core.settings import Settings

names = st.none() | st.sampled_from(["Qwen/Qwen3-4B", "/models/my model", "-odd", "it's"])
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
chances = st.floats(0, 1, allow_subnormal=False)
runs = st.builds(
    Settings,
    target=names,
    draft=names,
    method=st.sampled_from(list(METHODS)),
    draft_length=st.just("auto") | st.integers(1, 64),
    tree=st.none() | st.just("3x2x1"),
    exit_layer=st.none() | st.integers(1, 80),
    temperature=st.floats(0, 5),
    top_k=st.integers(0, 1000),
    top_p=chances.filter(bool),
    min_p=chances,
    seed=st.integers(0, 2**32 - 1),
    max_new_tokens=st.integers(1, 4096),
    ignore_eos=st.booleans(),
    chat=st.sampled_from(["auto", "off"]),
    system=st.none() | texts,
    device=st.sampled_from(["auto", "cpu", "cuda", "mps"]),
    precision=st.sampled_from(["auto", "nf4", "bf16"]),
    draft_precision=st.sampled_from(["auto", "fp32"]),
    revision=st.none() | st.just("main"),
)


@settings(max_examples=300, deadline=None)
@given(run=runs, prompt=texts | st.sampled_from(["--help", "-5", "'; rm -rf / #", "$(id) `id` \\", "a\nb\tc\r", '"']))
def test_the_line_makes_the_same_settings_and_prompt(run, prompt):
    words = shlex.split(command(run, prompt))
    assert words[:4] == ["python", "-m", "core", "generate"]
    parsed = parser().parse_args(words[3:])
    assert settings_of(parsed) == replace(run, target=choose_target(run.target))
    assert parsed.prompt == prompt


def test_a_shell_hands_the_words_over_unchanged():
    """Nothing of a prompt is expanded or run by the shell that the line is pasted into."""
    prompt = 'a\'b "c" $(echo no) `echo no` $HOME \\n !x *\n#end'
    line = command(Settings(), prompt).replace("python -m core", f"{shlex.quote(sys.executable)} -c 'import sys; "
        "print(sys.argv[1:])'")  # fmt: skip
    shown = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == repr(["generate", *arguments_of(Settings(), prompt)])


def test_defaults_are_left_out():
    assert (
        command(Settings("pocket"), "class A:")
        == "python -m core generate --target pocket --method draft --prompt 'class A:'"
    )


@pytest.mark.parametrize("prompt", ["a\0b", "\ud800", "x" * 100_001, ""])
def test_a_prompt_that_no_command_line_carries(prompt):
    with pytest.raises(UserError, match=r"--prompt-file\.$"):
        command(Settings(), prompt)
