"""Continue a prompt, speculatively or plainly."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.cli import (
    Commands,
    add_decoding_settings,
    add_json,
    add_model_settings,
    open_pair,
    positive,
    read_json,
    read_text,
    say,
    settings_of,
    write_json,
)
from core.errors import UserError
from core.records import run_from_dict
from core.settings import SPECS, Settings

if TYPE_CHECKING:
    from core.loading.pair import Pair


def add(commands: Commands) -> None:
    generate = commands.add_parser("generate", help="continue a prompt, speculatively or plainly")
    add_model_settings(generate)
    add_decoding_settings(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="a UTF-8 text file; - for standard input")
    prompt.add_argument("--repeat", metavar="F", help="a run document: the same run again; status 1 if it is another")
    generate.add_argument("--samples", type=int, metavar="N", help="seeds S … S+N-1, together, a JSON line each")
    add_json(generate, "run document")
    generate.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> int:
    if arguments.repeat is None:
        continue_prompt(arguments, settings_of(arguments))
        return 0
    if arguments.samples is not None or any(getattr(arguments, name, None) is not None for name in SPECS):
        raise UserError("--repeat takes every setting from the run document; give it no others.")
    return repeat_runs(arguments.repeat, arguments.json)


def continue_prompt(arguments: argparse.Namespace, settings: Settings) -> None:
    from core.lanes import open_lane
    from core.text import check_prompt

    prompt = arguments.prompt if arguments.prompt is not None else read_text(arguments.prompt_file)
    check_prompt(prompt)
    to_stdout = arguments.json == "-"
    pair = open_pair(settings)
    if arguments.samples is not None:
        print_samples(pair, prompt, settings, positive(arguments.samples, "--samples"))
        return
    shown = 0
    with open_lane(pair, prompt, settings, tops=3 if arguments.json else 0) as lane:
        for _ in lane:
            if not to_stdout:
                print(lane.run.text[shown:], end="", flush=True)
                shown = len(lane.run.text)
    if not to_stdout:
        print()
        say(totals(lane.run))
    if arguments.json:
        write_json(arguments.json, lane.run.to_dict())


SAMPLES_AT_ONCE = 16


def print_samples(pair: Pair, prompt: str, settings: Settings, count: int) -> None:
    """A line for each seed, in their order."""
    from core.lanes import decode_together

    seeds = range(settings.seed, settings.seed + count)
    ended: dict[int, list[int]] = {}
    shown = 0
    texts = ((prompt, replace(settings, seed=seed)) for seed in seeds)
    for told in decode_together(pair, texts, min(count, SAMPLES_AT_ONCE)):
        if told.run.stop_reason is not None:
            ended[told.text] = told.run.token_ids
        while shown in ended:
            print(json.dumps({"seed": seeds[shown], "token_ids": ended.pop(shown)}), flush=True)
            shown += 1


def repeat_runs(path: str, output: str | None) -> int:
    """Repeat the run, or every run of the race, in a document; the exit status: 0 identical, 1 different."""
    from core.lanes import other_surroundings, repeat

    document = read_json(path)
    several = isinstance(document, dict) and isinstance(document.get("runs"), list)
    try:
        runs = [run_from_dict(each) for each in (document["runs"] if several else [document])]
    except ValueError as error:
        raise UserError(f"{path} cannot be repeated: {error}.") from None
    pair, loaded, repeated, status = None, None, [], 0
    for then in runs:
        models = [getattr(then.settings, name) for name, spec in SPECS.items() if spec.of_models]
        if pair is None or models != loaded:
            pair, loaded = open_pair(then.settings), models
        for other in other_surroundings(pair, then):
            say(f"Not as it was: {other}.")
        now, difference = repeat(pair, then)
        repeated.append(now.to_dict())
        status = 1 if difference else status
        kept = f"{len(now.token_ids)} tokens in {len(now.rounds)} rounds"
        verdict = f"different. {difference}" if difference else f"identical, {kept}."
        (say if output == "-" else print)(f"{then.settings.method}: {verdict}")
    if output:
        write_json(output, {**document, "runs": repeated} if several else repeated[0])
    return status


def totals(run: Any) -> str:
    from core.records import summarise

    m = summarise(run)
    rate = "nothing judged" if m.acceptance_rate is None else f"acceptance rate {m.acceptance_rate:.0%}"
    return (
        f"[{m.new_tokens} tokens, {m.tokens_per_second:.1f} tokens/s, {m.tokens_per_round:.2f} tokens per target pass, "
        f"{rate}, stopped by {run.stop_reason}]"
    )
