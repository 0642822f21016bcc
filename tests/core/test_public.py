"""`import core`: the public names, what README shows of them, and what `help(core)` tells."""

import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import core
from core import Settings, UserError, generate, load_pair, race, stream, summarise

ROOT = Path(__file__).parents[2]
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"


@pytest.fixture(scope="module")
def settings(pair_folder):
    return Settings(
        target=str(pair_folder / "target"),
        draft=str(pair_folder / "draft"),
        precision="fp32",
        device="cpu",
        draft_length=3,
        max_new_tokens=16,
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def pair(settings):
    return load_pair(settings)


def test_the_lines_of_the_readme(capsys, monkeypatch):
    """They run as they stand, on a machine that has the bundled pair alone, and print what the run holds."""
    monkeypatch.setattr("core.loading.pair.at_hand", lambda name: name == "pocket")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 12
    found = {}
    exec(lines, found)
    run, printed = found["lane"].run, capsys.readouterr().out
    assert printed.count("| the target adds") == len(run.rounds) > 1
    assert sum(printed.count(f" {outcome}, p ") for outcome in ("accepted", "rejected", "ignored")) == sum(
        len(round_.drafted) for round_ in run.rounds
    )
    assert run.text in printed
    assert str(summarise(run)) in printed
    plain = generate(found["pair"], run.prompt, replace(run.settings, method="plain"))
    assert run.text == plain.text


def test_a_stream_yields_the_rounds_of_its_run(pair, settings):
    lane = stream(pair, PROMPT, settings, tops=2)
    rounds = list(lane)
    assert rounds == lane.run.rounds
    assert [token.id for round_ in rounds for token in round_.kept] == lane.run.token_ids
    assert len(rounds[0].emitted.top_target) == 2
    assert lane.run.stop_reason == "length"
    assert generate(pair, PROMPT, settings).token_ids == lane.run.token_ids


def test_caches_go_back_at_the_end_and_when_the_loop_is_left(pair, settings):
    """A finished run holds nothing, whether or not the caller writes `with`; nor does one that was left."""
    for _ in stream(pair, PROMPT, settings):
        pass
    kept = len(pair.target._idle)
    assert kept > 0
    with stream(pair, PROMPT, settings) as lane:
        next(lane)
        assert len(pair.target._idle) == kept - 1
    assert lane.run.stop_reason == "cancelled"
    assert len(pair.target._idle) == kept


def test_a_race_names_its_lanes(pair, settings):
    lanes = {"fast": stream(pair, PROMPT, settings), "plain": stream(pair, PROMPT, replace(settings, method="plain"))}
    rounds = {name: [] for name in lanes}
    for name, round_ in race(lanes):
        rounds[name].append(round_)
    assert all(rounds[name] == lane.run.rounds for name, lane in lanes.items())
    assert lanes["fast"].run.token_ids == lanes["plain"].run.token_ids


def test_a_race_left_early_closes_its_lanes(pair, settings):
    lanes = {name: stream(pair, PROMPT, settings) for name in ("one", "other")}
    rounds = race(lanes)
    next(rounds)
    rounds.close()
    assert [lane.run.stop_reason for lane in lanes.values()] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(
    "changes, sentence",
    [({"temperature": -1}, "Temperature must be"), ({"seed": -1}, "Seed must be"), ({"method": "magic"}, "no method")],
)
def test_what_cannot_be_is_a_sentence(pair, settings, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        stream(pair, PROMPT, replace(settings, **changes))


@pytest.mark.parametrize("code", ["import core", "import core.__main__ as command; command.parser().format_help()"])
def test_it_is_there_at_once(code):
    """torch and transformers take seconds; whoever only asks for names or help does not wait for them."""
    heavy = "[name for name in ('torch', 'transformers', 'numpy', 'pydantic', 'gradio') if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({heavy})"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_help_is_a_table_of_contents():
    """Every public name, and every module and room that is there, stands in it; and nothing that is not."""
    names, _, house = core.__doc__.partition("From a shell")
    entry = re.compile(r"^    (\w+)  +\S", re.MULTILINE)
    assert sorted(entry.findall(names)) == sorted(core.__all__)
    folder = ROOT / "core"
    modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    rooms = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert sorted(entry.findall(house)) == sorted(modules + rooms)
    shown = pydoc.plain(pydoc.render_doc(core))
    assert "Spec(" not in shown
    assert "temperature: float = 0.0" in shown
