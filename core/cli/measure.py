"""Measure methods against plain decoding (bench), draft lengths against each other (sweep), and what rounding a
model's weights costs in quality (perplexity)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.cli import (
    Commands,
    add_decoding_settings,
    add_json,
    add_model_settings,
    numbers,
    open_pair,
    positive,
    read_text,
    say,
    settings_of,
    tell,
)
from core.drafting.methods import METHODS
from core.errors import UserError
from core.records import SCHEMA
from core.settings import SPECS, Settings

if TYPE_CHECKING:
    from core.loading.pair import Pair
    from core.text import Prompt


def add(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure methods against plain decoding, interleaved")
    add_model_settings(bench)
    add_decoding_settings(bench)
    bench.add_argument("--methods", metavar="M,M", help=f"of {', '.join(METHODS)} (default: plain and the method)")
    bench.add_argument("--against", metavar="P,P", help="measure other engines too: transformers, llama.cpp")
    bench.add_argument("--gguf", metavar="F", help="the target as a GGUF file, for llama.cpp")
    bench.add_argument("--prompts", metavar="F", help="a prompts.toml, or a text file with a prompt a line")
    bench.add_argument("--repeats", type=int, default=3, metavar="R")
    bench.add_argument("--contexts", metavar="N,N", help="also a round's cost at these lengths: 128,512,1024,max")
    bench.add_argument("--batch", metavar="N,N", help="instead, so many texts at once: 1,2,4,8,16")
    bench.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a running server; again for more. A key in PLAYGROUND_SERVER_KEY is sent to these",
    )
    bench.add_argument("--concurrency", metavar="N,N", help="readers at once of each server: 1,2,4,8 (default: 1)")
    add_json(bench, "bench document")
    bench.set_defaults(run=run_bench)
    sweep = commands.add_parser("sweep", help="find the draft length that suits this pair and machine")
    add_model_settings(sweep)
    add_decoding_settings(sweep, max_new_tokens=64)
    sweep.add_argument("--draft-lengths", default="1,2,3,4,6,8", metavar="N,N", help="in place of --draft-length")
    sweep.add_argument("--temperatures", default="0,1", metavar="T,T", help="in place of --temperature")
    sweep.add_argument("--prompts", metavar="F", help="as for bench; without it, one bundled prompt of each kind")
    sweep.add_argument("--repeats", type=int, default=1, metavar="R")
    add_json(sweep, "sweep document")
    sweep.set_defaults(run=run_sweep)
    quality = commands.add_parser("perplexity", help="how well a model predicts a text in each precision")
    add_model_settings(quality)
    quality.add_argument("--precisions", default="bf16,nf4,int4", metavar="P,P", help="in place of --precision")
    quality.add_argument("--text", metavar="F", help="a UTF-8 text file; without it, the bundled prompts")
    add_json(quality, "document")
    quality.set_defaults(run=run_perplexity)


OWN = ("target", "draft", "methods", "method", "against", "contexts", "batch")
"""Flags of bench that ask for lanes on this machine."""


def run_bench(arguments: argparse.Namespace) -> None:
    if arguments.concurrency and not arguments.server:
        raise UserError("--concurrency is of running servers: name one with --server URL.")
    alone = arguments.server and all(getattr(arguments, name) is None for name in OWN)
    document: dict[str, Any] = {"schema": SCHEMA}
    shown = ""
    if not alone:
        shown, document = (measure_batches if arguments.batch else measure_here)(arguments)
    if arguments.server:
        of_servers, document["servers"] = measure_servers(arguments)
        shown = "\n\n".join(filter(None, [shown, of_servers]))
    tell(shown, document, arguments.json)


def measure_servers(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Each server on the same prompts, one after the other: the tables and the document."""
    from core.servers import connect, finish, load, load_document, name_servers, server_table
    from core.text import read_prompts

    settings = settings_of(arguments)
    readers = numbers(arguments.concurrency or "1", "--concurrency", int)
    prompts = [prompt.text for prompt in read_prompts(arguments.prompts, chat=settings.chat == "auto")]
    name_servers(arguments.server)
    servers = [connect(address) for address in arguments.server]
    steps = load(servers, prompts, settings, readers)
    measured = finish(steps, lambda step: say(f"{step.done} of {step.total}: {step.label}"))
    return server_table(measured), load_document(measured)


def measure_here(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The methods on this machine: the table and the document."""
    from core.loading import find_file
    from core.measuring.bench import bench as measure
    from core.measuring.bench import contexts_of, growth
    from core.measuring.peers import llama_peers, transformers_peers
    from core.measuring.report import table

    against = [name.strip() for name in (arguments.against or "").split(",") if name.strip()]
    if unknown := [name for name in against if name not in ("transformers", "llama.cpp")]:
        raise UserError(f"There is no engine {unknown[0]!r} to measure against; choose from transformers, llama.cpp.")
    settings = settings_of(arguments)
    variants = variants_of(arguments, settings)
    pair, prompts = open_with_prompts(settings, arguments.prompts)
    file = find_file(settings.target)
    gguf = arguments.gguf or (str(file) if file else None)
    peers = transformers_peers(pair) if "transformers" in against else {}
    peers |= llama_peers(pair, gguf, progress=say) if "llama.cpp" in against else {}
    contexts = contexts_of(arguments.contexts or "", pair.target.context_length)
    texts = [prompt.text for prompt in prompts]
    document = measure(pair, texts, variants, positive(arguments.repeats, "--repeats"), peers, say)
    document["prompt_names"] = [prompt.name for prompt in prompts]
    if contexts:
        document["growth"] = growth(pair, variants, contexts, say)
    return table(document), document


def variants_of(arguments: argparse.Namespace, settings: Settings) -> dict[str, Settings]:
    """The methods that are to be measured, each with its settings."""
    methods = arguments.methods or f"plain,{settings.method}"
    names = [SPECS["method"].read(name.strip()) for name in methods.split(",")]
    return {name: replace(settings, method=name) for name in names}


def measure_batches(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The methods on this machine with many texts at once: the table and the document."""
    from core.measuring.batches import batch_table, batches
    from core.measuring.sweep import finish

    if wrong := next((name for name in ("against", "contexts") if getattr(arguments, name)), None):
        raise UserError(f"--{wrong} is measured of one text at a time; leave out --batch, or that.")
    settings = settings_of(arguments)
    variants, repeats = variants_of(arguments, settings), positive(arguments.repeats, "--repeats")
    sizes = numbers(arguments.batch, "--batch", int)
    pair, prompts = open_with_prompts(settings, arguments.prompts)
    steps = batches(pair, prompts, variants, sizes, repeats)
    document = finish(steps, lambda step: say(f"{step.done} of {step.total}: {step}"))
    return batch_table(document), document


def run_perplexity(arguments: argparse.Namespace) -> None:
    from core.loading.pair import choose_target
    from core.measuring.perplexity import compare_precisions, perplexity_table
    from core.text import read_prompts

    text = read_text(arguments.text) if arguments.text else "\n\n".join(prompt.text for prompt in read_prompts())
    precisions = [SPECS["precision"].read(name.strip()) for name in arguments.precisions.split(",")]
    settings = settings_of(arguments)
    name = choose_target(settings.target)
    document = compare_precisions(name, text, precisions, settings.device, settings.revision, say)
    tell(perplexity_table(document), document, arguments.json)


def run_sweep(arguments: argparse.Namespace) -> None:
    from core.measuring.report import report
    from core.measuring.sweep import finish as measure
    from core.measuring.sweep import sweep as steps
    from core.text import one_of_each_kind

    settings = settings_of(arguments)
    lengths = numbers(arguments.draft_lengths, "--draft-lengths", int)
    temperatures = numbers(arguments.temperatures, "--temperatures", float)
    repeats = positive(arguments.repeats, "--repeats")
    pair, prompts = open_with_prompts(settings, arguments.prompts, one_of_each_kind)
    document = measure(
        steps(pair, prompts, settings, lengths, temperatures, repeats),
        lambda step: say(f"{step.done} of {step.total}: {step}"),
    )
    tell(report(document), document, arguments.json)


def open_with_prompts(
    settings: Settings, path: str | None, some_of: Callable[[list[Prompt]], list[Prompt]] = list
) -> tuple[Pair, list[Prompt]]:
    """The pair, and the prompts of a file, which is read first; without one, of the bundled prompts that suit the
    target those that `some_of` takes."""
    from core.text import answers_messages, read_prompts

    own = read_prompts(path) if path else None
    pair = open_pair(settings)
    return pair, own or some_of(read_prompts(chat=answers_messages(pair.target, settings)))
