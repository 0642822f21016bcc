"""The command line: python -m core COMMAND. Exit status 0 done, 2 bad input, 1 a fault of ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from core.errors import UserError
from core.progress import console
from core.records import METHODS, POCKET_NAME, PRECISIONS, Settings


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, not {text!r}") from None


def parser() -> Parser:
    top = Parser(prog="python -m core", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    generate = commands.add_parser("generate", help="continue a prompt, speculatively or plainly")
    add_model_arguments(generate)
    add_decoding_arguments(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="F", help="a UTF-8 text file; - for standard input")
    generate.add_argument("--samples", type=int, metavar="N", help="seeds S … S+N-1, one JSON line each")
    generate.add_argument("--json", metavar="F", help="write the run document to F; - for standard output")
    bench = commands.add_parser("bench", help="measure methods against plain decoding, interleaved")
    add_model_arguments(bench)
    add_decoding_arguments(bench)
    bench.add_argument("--methods", default="plain,draft", metavar="M,M", help=f"of {', '.join(METHODS)}")
    bench.add_argument("--against", choices=("transformers",), help="measure its generate, plain and assisted, too")
    bench.add_argument("--prompts", metavar="F", help="a prompts.toml, or a text file with a prompt a line")
    bench.add_argument("--repeats", type=int, default=3, metavar="R")
    bench.add_argument("--contexts", metavar="N,N", help="also a round's cost at these lengths: 128,512,1024,max")
    bench.add_argument("--json", metavar="F", help="write the bench document to F; - for standard output")
    sweep = commands.add_parser("sweep", help="find the draft length that suits this pair and machine")
    add_model_arguments(sweep)
    add_decoding_arguments(sweep, max_new_tokens=64)
    sweep.add_argument("--draft-lengths", default="1,2,3,4,6,8", metavar="N,N", help="in place of --draft-length")
    sweep.add_argument("--temperatures", default="0,1", metavar="T,T", help="in place of --temperature")
    sweep.add_argument("--prompts", metavar="F", help="as for bench; without it, one bundled prompt of each kind")
    sweep.add_argument("--repeats", type=int, default=1, metavar="R")
    sweep.add_argument("--json", metavar="F", help="write the sweep document to F; - for standard output")
    inspect = commands.add_parser("inspect", help="what a pair needs and may gain here, before any download")
    add_model_arguments(inspect)
    tokens = "tokens of prompt and answer that caches are counted for (default: 2048)"
    inspect.add_argument("--context", "--max-new-tokens", type=int, default=2048, metavar="N", help=tokens)
    inspect.add_argument("--json", metavar="F", help="write the inspection to F; - for standard output")
    pairs = commands.add_parser("pairs", help="the catalogue, and what of it fits this machine")
    pairs.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default=Settings().device)
    pairs.add_argument("--precision", default=Settings().precision, metavar="|".join(PRECISIONS))
    pairs.add_argument("--json", metavar="F", help="write the catalogue to F; - for standard output")
    return top


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    default = Settings()
    group = command.add_argument_group("models")
    group.add_argument("--target", metavar="ID_OR_DIR", help="Hub id or folder; without it, the bundled pair")
    group.add_argument("--draft", metavar="ID_OR_DIR")
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default=default.device)
    group.add_argument("--precision", default=default.precision, metavar="|".join(PRECISIONS))
    group.add_argument("--draft-precision", default=default.draft_precision, metavar="P")
    group.add_argument("--revision", metavar="R", help="of the target on the Hub")


def add_decoding_arguments(command: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    default = Settings(max_new_tokens=max_new_tokens)
    group = command.add_argument_group("decoding")
    group.add_argument("--method", choices=METHODS, default=None, help="default: draft, or ngram without a draft model")
    group.add_argument("--draft-length", type=draft_length, default=default.draft_length, metavar="N|auto")
    group.add_argument("--tree", metavar="SPEC", help="children by depth, such as 4x2x1")
    group.add_argument("--exit-layer", type=int, metavar="L")
    group.add_argument("--temperature", type=float, default=default.temperature, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, default=default.top_p, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, default=default.min_p, metavar="M", help="0 is off")
    group.add_argument("--seed", type=int, default=default.seed, metavar="S")
    group.add_argument("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    group.add_argument("--chat", choices=("auto", "off"), default=default.chat)
    group.add_argument("--system", metavar="TEXT")


def settings_of(arguments: argparse.Namespace) -> Settings:
    known = Settings.__dataclass_fields__
    given = {k: v for k, v in vars(arguments).items() if k in known and v is not None}
    given.setdefault("method", "ngram" if arguments.target and not arguments.draft else "draft")
    return Settings(**given)


def generate(arguments: argparse.Namespace) -> None:
    from core.lanes import open_lane
    from core.loading import load_pair

    settings = settings_of(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else read_text(arguments.prompt_file)
    to_stdout = arguments.json == "-"
    pair = load_pair(settings, console())
    if arguments.samples is not None:
        for seed in range(settings.seed, settings.seed + positive(arguments.samples, "--samples")):
            run = finish(open_lane(pair, prompt, Settings(**{**settings.to_dict(), "seed": seed})))
            print(json.dumps({"seed": seed, "token_ids": run.token_ids}), flush=True)
        return
    lane = open_lane(pair, prompt, settings, tops=3 if arguments.json else 0)
    run = finish(lane, None if to_stdout else lambda text: print(text, end="", flush=True))
    if arguments.json:
        write_json(arguments.json, run.to_dict())
    if not to_stdout:
        print()
        say(totals(run))


def bench(arguments: argparse.Namespace) -> None:
    from core.loading import load_pair
    from core.measuring.bench import bench as measure
    from core.measuring.bench import contexts_of, growth
    from core.measuring.report import table
    from core.text import read_prompts

    names = [name.strip() for name in arguments.methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise UserError(f"There is no method {unknown[0]!r}; choose from {', '.join(METHODS)}.")
    settings = settings_of(arguments)
    prompts = [prompt.text for prompt in read_prompts(arguments.prompts)]
    pair = load_pair(settings, console())
    variants: dict[str, Settings] = {name: replace(settings, method=name) for name in names}  # type: ignore[arg-type]
    contexts = contexts_of(arguments.contexts or "", pair.target.context_length)
    document = measure(pair, prompts, variants, positive(arguments.repeats, "--repeats"), bool(arguments.against), say)
    if contexts:
        document["growth"] = growth(pair, variants, contexts, say)
    if arguments.json != "-":
        print(table(document))
    if arguments.json:
        write_json(arguments.json, document)


def sweep(arguments: argparse.Namespace) -> None:
    from core.loading import load_pair
    from core.measuring.report import report
    from core.measuring.sweep import finish as measure
    from core.measuring.sweep import sweep as steps
    from core.text import one_of_each_kind, read_prompts

    settings = settings_of(arguments)
    lengths = numbers(arguments.draft_lengths, "--draft-lengths", int)
    temperatures = numbers(arguments.temperatures, "--temperatures", float)
    repeats = positive(arguments.repeats, "--repeats")
    prompts = read_prompts(arguments.prompts)
    prompts = prompts if arguments.prompts else one_of_each_kind(prompts)
    pair = load_pair(settings, console())
    document = measure(
        steps(pair, prompts, settings, lengths, temperatures, repeats),
        lambda step: say(f"{step.done} of {step.total}: {step.label}"),
    )
    if arguments.json != "-":
        print(report(document))
    if arguments.json:
        write_json(arguments.json, document)


def inspect(arguments: argparse.Namespace) -> None:
    from core.inspecting import inspect_pair
    from core.inspecting.offers import drafts_for, inspection_card

    given = {name: getattr(arguments, name) for name in ("device", "precision", "revision")}
    found = inspect_pair(
        arguments.target, arguments.draft, draft_precision=arguments.draft_precision, context=arguments.context, **given
    )
    drafts = drafts_for(arguments.target or POCKET_NAME, **given)
    if arguments.json != "-":
        print(inspection_card(found, drafts))
    if arguments.json:
        write_json(arguments.json, {**found.to_dict(), "drafts": [asdict(draft) for draft in drafts]})


def pairs(arguments: argparse.Namespace) -> None:
    from core.inspecting.offers import offers, offers_document, offers_table

    found = offers(arguments.device, arguments.precision)
    if arguments.json != "-":
        print(offers_table(found))
    if arguments.json:
        write_json(arguments.json, offers_document(found))


def numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    """A list such as 1,2,4."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{name} must be numbers with commas between, not {text!r}.") from None


def finish(lane: Any, show: Any = None) -> Any:
    """Step a lane to its end; the run."""
    from core.lanes import race

    shown = 0
    for _ in race([lane]):
        if show:
            show(lane.run.text[shown:])
            shown = len(lane.run.text)
    return lane.run


def totals(run: Any) -> str:
    from core.records import summarise

    m = summarise(run)
    rate = "nothing judged" if m.acceptance_rate is None else f"acceptance rate {m.acceptance_rate:.0%}"
    return (
        f"[{m.new_tokens} tokens, {m.tokens_per_second:.1f} tokens/s, {m.tokens_per_round:.2f} tokens per target pass, "
        f"{rate}, stopped by {run.stop_reason}]"
    )


def read_text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The prompt file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The prompt file {path} is not UTF-8 text.") from None


def write_json(path: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def positive(number: int, name: str) -> int:
    if number < 1:
        raise UserError(f"{name} must be at least 1, not {number}.")
    return number


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries would drown the one line that matters."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")


COMMANDS = {"generate": generate, "bench": bench, "sweep": sweep, "inspect": inspect, "pairs": pairs}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    quiet_libraries()
    try:
        COMMANDS[arguments.command](arguments)
    except UserError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:  # a fault of ours: one line, the trace-back on request
        if os.environ.get("PLAYGROUND_DEBUG"):
            raise
        say(f"Internal fault ({type(error).__name__}: {error}); set PLAYGROUND_DEBUG=1 for details and report it.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
