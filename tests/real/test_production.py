"""The commands of "take it to production" for llama.cpp, run: on llama.cpp itself, as the package xllamacpp brings it.

The package is a library, so a command's flags are looked up among those that its build of llama-server knows, and set
on the parameters that they stand for. Without the package these tests are skipped.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.tune.production import Deployment, llama_cpp
from core.loading.pair import smollm2_file
from core.servers import connect, open_lane
from core.servers.connection import Connection
from core.servers.dialects import counters
from core.servers.records import Server, ServerRun
from core.settings import SMOLLM2_NAME, Settings

xllamacpp: Any = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")

REPEATING = 6 * "one two three four five six. "
"""Text that goes on as it went before, so that an n-gram finds it."""
LENGTH = 3
SETTINGS = Settings(max_new_tokens=24, chat="off", ignore_eos=True)


def parse(command: str) -> argparse.Namespace:
    """The server's line of a recipe; a flag that is not named here, or that llama-server does not know, fails."""
    words = shlex.split(command.replace("\\\n", " ").splitlines()[-1])
    assert words[0] == "llama-server"
    library = Path(xllamacpp.xllamacpp.__file__).read_bytes()
    unknown = [word for word in words if word.startswith("-") and b"\0" + word.encode() + b"\0" not in library]
    assert not unknown, f"llama-server does not know {unknown}"
    flags = argparse.ArgumentParser(exit_on_error=False)
    flags.add_argument("-m")
    flags.add_argument("-md")
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--spec-type")
    flags.add_argument("--spec-draft-n-max", type=int)
    flags.add_argument("--spec-draft-p-min", type=float)
    flags.add_argument("--spec-draft-sampling", default="greedy")
    flags.add_argument("--spec-ngram-simple-size-n", type=int)
    flags.add_argument("--spec-ngram-simple-size-m", type=int)
    return flags.parse_args(words[1:])


def speculations(found: argparse.Namespace) -> list[Any]:
    kinds = [f"COMMON_SPECULATIVE_TYPE_{kind.replace('-', '_').upper()}" for kind in found.spec_type.split(",")]
    return [getattr(xllamacpp.common_speculative_type, kind) for kind in kinds]


def parameters(found: argparse.Namespace) -> Any:
    """What a command's flags set, on the file that its conversion stands for."""
    weights, options = str(smollm2_file()), xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = weights, 512, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.ui, options.verbosity, options.endpoint_metrics = False, -1, found.metrics
    options.speculative.types = speculations(found)
    if found.md:
        options.speculative.draft.mparams.path = weights  # the target drafts for itself
        options.speculative.draft.n_max = found.spec_draft_n_max
        options.speculative.draft.p_min = found.spec_draft_p_min
        options.speculative.draft.probabilistic = found.spec_draft_sampling == "probabilistic"
    if found.spec_ngram_simple_size_n:
        options.speculative.ngram_simple.size_n = found.spec_ngram_simple_size_n
        options.speculative.ngram_simple.size_m = found.spec_ngram_simple_size_m
    return options


@contextmanager
def serving(command: str) -> Iterator[Server]:
    server = xllamacpp.Server(parameters(parse(command)))
    yield connect(server.listening_address)
    del server


def answer(server: Server, temperature: float) -> ServerRun:
    with open_lane(server, REPEATING, replace(SETTINGS, temperature=temperature)) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize(
    "method, temperature, drafter", [("ngram", 0.0, "ngram-simple"), ("draft", 1.0, "draft-simple")]
)
def test_the_command_starts_a_server_whose_drafter_is_on(method: str, temperature: float, drafter: str) -> None:
    settings = Settings(target=SMOLLM2_NAME, draft=SMOLLM2_NAME, method=method, temperature=temperature)
    recipe = llama_cpp(Deployment(settings, LENGTH, "bf16", "bf16"))
    assert any("--metrics" in note for note in recipe.notes)
    with serving(f"{recipe.command} --metrics") as server, Connection(server.address) as connection:
        assert server.engine == "llama.cpp" and server.metrics
        run, total = answer(server, temperature), counters(connection, server)
    assert run.server.drafter == drafter and run.new_tokens == SETTINGS.max_new_tokens
    counted = run.speculation
    assert counted is not None and counted.drafted and counted.accepted and counted.passes and not counted.shared
    assert total is not None and (total["drafted"], total["accepted"]) == (counted.drafted, counted.accepted)
    assert counted.drafted <= LENGTH * counted.passes and (counted.tokens_per_pass or 0) > 1
    steps = [outcome for chunk in run.chunks for outcome in chunk.outcomes or ["unknown"]]
    assert "unknown" not in steps and len(steps) == run.new_tokens
    # The last pass may be cut short.
    assert counted.accepted - LENGTH <= steps.count("accepted") <= counted.accepted
    assert not run.missing


@pytest.mark.parametrize("method", ["head", "ngram+draft"])
def test_the_other_commands_name_what_llama_server_knows(method: str) -> None:
    settings = Settings(target=SMOLLM2_NAME, draft="org/drafter", method=method)
    found = parse(llama_cpp(Deployment(settings, LENGTH, "bf16", "bf16")).command)
    assert found.md and len(speculations(found)) == 1 + ("+" in method)
