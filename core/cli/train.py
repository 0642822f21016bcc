"""Train a draft head for a target (train-head)."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from core.cli import Commands, add_settings, positive, say, settings_of
from core.errors import UserError
from core.progress import SECONDS_BETWEEN_LINES, Stop, console


def add(commands: Commands) -> None:
    train = commands.add_parser("train-head", help="train a draft head on what the target itself writes")
    add_settings(train, "target", "precision", "device")
    train.add_argument("--out", metavar="DIR", required=True, help="the head's folder; holds the training, too")
    limit = train.add_mutually_exclusive_group()
    limit.add_argument("--hours", type=float, metavar="H", help="without a limit it trains until it is interrupted")
    limit.add_argument("--tokens", type=int, metavar="N", help="answer tokens to learn from, each time counted")
    train.add_argument("--prompts", metavar="FILE", help="answer these; a prompts.toml, or a text file with one a line")
    train.add_argument("--kind", choices=("eagle3", "dspark", "dflash"), help="of a new head; eagle3 if not named")
    train.add_argument("--dialogues", metavar="FILE", help="learn from these texts of the target first (JSON lines)")
    train.add_argument("--from", dest="head", metavar="HEAD", help="go on from the trained head in this folder")
    train.add_argument("--resume", action="store_true", help="go on with the training in --out")
    train.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> None:
    from core.loading import load_model, resolve_device
    from core.loading.pair import choose_target
    from core.text import read_prompts
    from core.training.export import export
    from core.training.loop import Plan, Trainer

    if arguments.hours is not None and not arguments.hours > 0:
        raise UserError(f"--hours must be more than 0, not {arguments.hours:g}.")
    tokens = None if arguments.tokens is None else positive(arguments.tokens, "--tokens")
    seconds = None if arguments.hours is None else arguments.hours * 3600
    prompts = [prompt.text for prompt in read_prompts(arguments.prompts)] if arguments.prompts else None
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the head.")
    settings = settings_of(arguments)
    device = resolve_device(settings.device)
    target = load_model(choose_target(settings.target), device, settings.precision, progress=console())
    dialogues, head = (Path(given) if given else None for given in (arguments.dialogues, arguments.head))
    plan = Plan(tokens, seconds, prompts, dialogues=dialogues, head=head, kind=arguments.kind)
    trainer = Trainer(target, out, plan, arguments.resume)
    with interruptible() as stop:
        told: Any = None
        for standing in trainer.run(stop):
            if told is None or told.doing != standing.doing or standing.seconds - told.seconds >= SECONDS_BETWEEN_LINES:
                say(line(standing))
                told = standing
        if trainer.standing.steps:
            export(trainer, out)
            say(f"The head is in {out}; --resume goes on with it.")


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the training to stop after the step it is at."""
    asked = Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def line(standing: Any) -> str:
    """A standing in a line."""
    told = (
        f"{standing.doing}: {standing.seconds:.0f} s, {standing.dialogues} texts of {standing.answer_tokens} answer "
        f"tokens, {standing.visits} learnt from"
    )
    if standing.agreement:
        shares = " ".join(f"{share:.2f}" for share in standing.agreement)
        loss = "" if standing.loss is None else f", loss {standing.loss:.2f}"
        told += f"{loss}, accepted {shares}, {standing.tokens_per_pass:.2f} tokens a pass"
    return told
