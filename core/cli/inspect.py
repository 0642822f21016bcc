"""What a pair needs and may gain here (inspect), and the catalogue of pairs (pairs)."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from core.cli import Commands, add_json, add_model_settings, add_settings, settings_of, tell
from core.errors import UserError
from core.progress import in_bytes


def add(commands: Commands) -> None:
    inspect = commands.add_parser("inspect", help="what a pair needs and may gain here, before any download")
    add_model_settings(inspect)
    tokens = "tokens of prompt and answer that caches are counted for (default: 2048)"
    inspect.add_argument("--context", "--max-new-tokens", type=int, default=2048, metavar="N", help=tokens)
    like = "also predict a GPU that is not here: its name, or '12 GB, 504 GB/s, 58 TFLOPS'; twice: compare two"
    inspect.add_argument("--device-like", metavar="GPU", action="append", default=[], help=like)
    add_json(inspect, "inspection")
    inspect.set_defaults(run=run_inspect)
    pairs = commands.add_parser("pairs", help="the catalogue, and what of it fits this machine")
    add_settings(pairs, "device", "precision")
    add_json(pairs, "catalogue")
    pairs.add_argument("--clear-cache", action="store_true", help="remove what was converted from GGUF files")
    pairs.set_defaults(run=run_pairs)


def run_inspect(arguments: argparse.Namespace) -> None:
    from core.inspecting import inspect_pair
    from core.inspecting.devices import compare, find_card, predict_on, prediction_card
    from core.inspecting.offers import drafts_for, inspection_card
    from core.loading.pair import choose_target

    cards = [find_card(name) for name in arguments.device_like]
    if len(cards) > 2:
        raise UserError("Two GPUs can be compared at a time; name --device-like once or twice.")
    settings = settings_of(arguments)
    given = {name: getattr(settings, name) for name in ("device", "precision", "revision")}
    found = inspect_pair(
        settings.target, settings.draft, draft_precision=settings.draft_precision, context=arguments.context, **given
    )
    drafts = drafts_for(choose_target(settings.target), **given)
    predicted = [predict_on(card, settings.target, settings.draft, arguments.context) for card in cards]
    words, document = inspection_card(found, drafts), {**found.to_dict(), "drafts": [asdict(draft) for draft in drafts]}
    for at, each in zip(("device_like", "compared_with"), predicted):
        words += f"\n\n{prediction_card(each)}"
        document[at] = each.to_dict()
    if len(predicted) > 1:
        document["comparison"] = compare(*predicted)
        words += f"\n\n{document['comparison']}"
    tell(words, document, arguments.json)


def run_pairs(arguments: argparse.Namespace) -> None:
    from core.inspecting.offers import offers, offers_document, offers_table
    from core.loading.conversion import cache_folder, cache_size, clear_cache

    if arguments.clear_cache:
        print(f"Freed {in_bytes(clear_cache())} in {cache_folder()}.")
        return
    settings = settings_of(arguments)
    found = offers(settings.device, settings.precision)
    words = offers_table(found)
    if size := cache_size():
        words += f"\nConverted from GGUF files: {in_bytes(size)} in {cache_folder()}; --clear-cache removes it."
    tell(words, offers_document(found), arguments.json)
