"""Continue a prompt, speculatively or plainly."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from core.cli.shared import (
    Commands,
    add_decoding_settings,
    add_model_settings,
    positive,
    read_text,
    say,
    settings_of,
    write_json,
)
from core.progress import console


def add(commands: Commands) -> None:
    generate = commands.add_parser("generate", help="continue a prompt, speculatively or plainly")
    add_model_settings(generate)
    add_decoding_settings(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="a UTF-8 text file; - for standard input")
    generate.add_argument("--samples", type=int, metavar="N", help="seeds S … S+N-1, one JSON line each")
    generate.add_argument("--json", metavar="F", help="write the run document to F; - for standard output")
    generate.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> None:
    from core.lanes import open_lane
    from core.loading import load_pair

    settings = settings_of(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else read_text(arguments.prompt_file)
    to_stdout = arguments.json == "-"
    pair = load_pair(settings, console())
    if arguments.samples is not None:
        for seed in range(settings.seed, settings.seed + positive(arguments.samples, "--samples")):
            with open_lane(pair, prompt, replace(settings, seed=seed)) as lane:
                for _ in lane:
                    pass
            print(json.dumps({"seed": seed, "token_ids": lane.run.token_ids}), flush=True)
        return
    shown = 0
    with open_lane(pair, prompt, settings, tops=3 if arguments.json else 0) as lane:
        for _ in lane:
            if not to_stdout:
                print(lane.run.text[shown:], end="", flush=True)
                shown = len(lane.run.text)
    if arguments.json:
        write_json(arguments.json, lane.run.to_dict())
    if not to_stdout:
        print()
        say(totals(lane.run))


def totals(run: Any) -> str:
    from core.records import summarise

    m = summarise(run)
    rate = "nothing judged" if m.acceptance_rate is None else f"acceptance rate {m.acceptance_rate:.0%}"
    return (
        f"[{m.new_tokens} tokens, {m.tokens_per_second:.1f} tokens/s, {m.tokens_per_round:.2f} tokens per target pass, "
        f"{rate}, stopped by {run.stop_reason}]"
    )
