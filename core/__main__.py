"""The command line: python -m core COMMAND. Exit status 0 done, 2 bad input, 1 a fault of ours.

A file of `core/cli/` per group of commands, each with `add(commands)`: its arguments, and the function that runs them.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from core.cli import Parser, generate, inspect, measure, say, train
from core.errors import UserError

GROUPS = (generate, measure, inspect, train)
DESCRIPTION = "The command line: python -m core COMMAND. Exit status 0 done, 2 bad input, 1 a fault of ours."


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m core", description=DESCRIPTION)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for group in GROUPS:
        group.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as files are: what a model writes fits into no smaller one
    quiet_libraries()
    try:
        arguments = parser().parse_args(argv)
        return arguments.run(arguments) or 0
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


def quiet_libraries() -> None:
    """Progress bars and advice of the libraries would drown the one line that matters."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")


if __name__ == "__main__":
    sys.exit(main())
