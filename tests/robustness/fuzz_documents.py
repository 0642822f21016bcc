"""Anything in a document that somebody opens, through everything the page does with one: within memory, within time.

    python tests/robustness/fuzz_documents.py [--cases 10000] [--seed 0] [--check-every 50]

Races of a tiny pair by every method, a comparison with running servers and a measurement of them are changed in one to
three places and opened; what opens is listed, shown again, explained step by step, exported in every form and, now and
then, checked against the models. The process may take ROOM bytes more than it has once everything is imported, and a
case may take SECONDS.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("browser", "core"))]

import app.insides  # noqa: E402, F401, I001  (first: it imports Gradio in half the time)
import gradio as gr  # noqa: E402
from stand_in_servers import stand_in_server  # noqa: E402
from tiny_pair import make_pair  # noqa: E402

from app.api import STARTING  # noqa: E402
from app.compare import Compare  # noqa: E402
from app.explain import Explain  # noqa: E402
from app.history import History, table  # noqa: E402
from app.playground import Playground  # noqa: E402
from app.playground.take_away import command_of, export  # noqa: E402
from app.serving import Engine  # noqa: E402
from app.serving.device import Device  # noqa: E402
from app.serving.turns import OUR_FAULT  # noqa: E402
from app.serving.visit import Visit  # noqa: E402
from app.sidebar.picker import measured_acceptance  # noqa: E402
from core.errors import UserError  # noqa: E402
from core.servers import connect, finish, load, load_document  # noqa: E402
from core.settings import Settings  # noqa: E402

ROOM = 400 << 20
SECONDS = 5.0
ASKED: list[dict[str, Any]] = [
    {"method": "draft", "draft_length": 4},
    {"method": "draft", "draft_length": 3, "temperature": 0.8},
    {"method": "tree", "tree": "2x2", "temperature": 0.8},
    {"method": "ngram", "draft_length": 3},
    {"method": "early-exit", "draft_length": 2, "exit_layer": 1},
]
WHOLE = [0, 1, 2, 3, 7, 16, 17, 255, 1024, 1025, 511, 512, 20_000, 200_000, 2**31 - 1, 2**31, 10**12, 2**53, 2**63, -1]
REAL = [0.0, 1.0, 0.5, 1e-300, 5e-324, 1.001, 1e7, 1e300, -1.0, 2.0]
TEXTS = [
    "",
    "x",
    "\x00",
    "\u202e",
    "<b>",
    "${40+2}",
    "{{value}}",
    "\ud800",
    "x" * 499,
    "x" * 1999,
    "x" * 900_000,
    "=1+1",
]


Spots = dict[str, list[tuple[Any, ...]]]
"""Places in a document by the names of their fields."""


class TooSlowError(BaseException):
    """Of no kind that the page turns into a sentence."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, as keys from its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield path
    for key, part in inner:
        yield from places(part, (*path, key))


def changed(value: Any, chance: random.Random) -> Any:
    """Something of the same kind that is seldom there: most of what is of another kind is refused at once."""
    if isinstance(value, bool) or chance.random() < 0.1:
        return chance.choice([None, True, {}, [], "draft", chance.choice(WHOLE), chance.choice(REAL)])
    if isinstance(value, int):
        return chance.choice([*WHOLE, value + 1, value - 1, 2 * value])
    if isinstance(value, float):
        return chance.choice([*REAL, 10 * value, -value])
    if isinstance(value, str):
        return chance.choice([*TEXTS, value * 2, value[:-1]])
    if isinstance(value, list):
        return chance.choice([[], value[:-1], value * 2, value[:1] * chance.choice([40, 1024]), value[::-1]])
    if isinstance(value, dict):
        return {key: changed(part, chance) if chance.random() < 0.3 else part for key, part in value.items()}
    return chance.choice([0, 1, 10**12, 0.5, "x"])


def mutated(documents: list[dict[str, Any]], spots: list[Spots], chance: random.Random) -> str:
    """One of the documents with one to three of its places changed. Every field comes up as often as any other, however
    often it stands there."""
    number = chance.randrange(len(documents))
    document = json.loads(json.dumps(documents[number]))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        *way, last = chance.choice(spots[number][chance.choice(sorted(spots[number]))])
        at = document
        try:
            for key in way:
                at = at[key]
            at[last] = changed(at[last], chance)
        except (LookupError, TypeError):
            continue  # taken away by a change before
    return json.dumps(document)


class Page:
    """What the page does with a document, over a real engine."""

    def __init__(self, folder: Path) -> None:
        target, draft = make_pair(folder)
        base = Settings(target=str(target), draft=str(draft), precision="fp32", device="cpu")
        self.engine, self.device = Engine(base), Device()
        self.explain = Explain(self.engine, self.device)
        self.own = ""
        """A race of ours, as a file."""
        self.history = History(Compare(self.engine, self.device, {}))

    def documents(self) -> list[dict[str, Any]]:
        playground = Playground(self.engine, self.device)
        found = []
        for asked in ASKED:
            asked = {**STARTING, "max_new_tokens": 12, "precision": "fp32", **asked}
            *_, (_, document) = playground.race("def add(a, b):\n    return", asked)
            assert document
            found.append(json.loads(json.dumps(document)))
        with stand_in_server("vLLM") as one, stand_in_server("llama.cpp") as other:
            servers = [connect(each.address) for each in (one, other)]
            asked = Settings(max_new_tokens=16)
            measured = load_document(finish(load(servers, ["Why?", "Where?"], asked, [1, 2], answers_per_reader=1)))
        measured = json.loads(json.dumps(measured))
        answers = {"server_runs": measured["server_runs"]}
        self.own = json.dumps(found[0])
        return [*found, found[0] | answers, {"schema": 1, **answers}, {"schema": 1, "servers": measured}]

    @staticmethod
    def sent(text: str) -> gr.EventData:
        return gr.EventData(None, {"name": "a file", "text": text})

    def use(self, text: str, check: str | None) -> str:
        """Open a document and do everything with it; what became of it in a word. Raises AssertionError for a fault of
        ours."""
        visit = Visit()
        opened = json.loads(self.history.open(visit, self.sent(text)))
        if opened["error"]:
            fine(opened["say"])
            return "refused"
        entry = visit.entries[0]
        fine(table(visit))
        race, *_ = self.history.show(visit, gr.EventData(None, {"number": entry.number}))
        fine(race)
        if not entry.heads:  # answers of servers, which are explained beside a run of ours alone
            fine(export(entry, "json").text)
            assert not json.loads(self.history.open(visit, self.sent(self.own)))["error"]
            fine(*self.explain.choose(visit, "2:0"))
            return "shown"
        settings = entry.runs[0].settings
        measured_acceptance(visit, settings)
        for form in ("json", "csv", "html"):
            fine(export(entry, form).text)
        fine(command_of(entry))
        first, *_ = self.explain.open(visit, None, 0)
        del first
        for lane, run in enumerate(entry.runs):
            chosen = f"{entry.number}:{lane}"
            fine(*self.explain.choose(visit, chosen))
            for number in range(1, min(len(run.rounds), 6) + 1):
                fine(self.explain.step(visit, chosen, number))
        if check is not None:
            fine(*self.explain.check(check, 50, visit, f"{entry.number}:0", gr.Request()))
            return f"checked ({check})"
        return "shown"


def fine(*shown: Any) -> None:
    for each in shown:
        assert OUR_FAULT not in str(each), "a fault of ours"


def bounded(room: int) -> None:
    """From now on this process may take so many bytes of addresses more."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))


def too_slow(*_: object) -> None:
    raise TooSlowError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=50)
    chosen = parser.parse_args()
    chance, outcomes, slowest = random.Random(chosen.seed), Counter[str](), (0.0, 0)
    faults: list[Exception] = []
    log = logging.getLogger("app.serving.turns")
    log.error = lambda *_, exc_info=None, **__: faults.append(exc_info)  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder))
        documents = page.documents()
        spots: list[Spots] = []
        for document in documents:
            named: Spots = {}
            for path in list(places(document))[1:]:
                named.setdefault(".".join(str(key) for key in path if isinstance(key, str)), []).append(path)
            spots.append(named)
            assert page.use(json.dumps(document), "greedy") != "refused"  # so that what is loaded once is there
            assert page.use(json.dumps(document), "law") == ("checked (law)" if document.get("runs") else "shown")
        bounded(ROOM)
        signal.signal(signal.SIGALRM, too_slow)
        for case in range(chosen.cases):
            text = mutated(documents, spots, chance)
            check = chance.choice(["law", "broken", "greedy"]) if case % chosen.check_every == 0 else None
            begun = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, SECONDS * (10 if check else 1))
            try:
                outcomes[page.use(text, check)] += 1
            except UserError as error:
                outcomes["a sentence"] += 1
                fine(error)
            except (Exception, TooSlowError) as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                kept = Path(tempfile.gettempdir()) / f"document-{chosen.seed}-{case}.json"
                kept.write_text(text)
                cause = faults[-1] if faults else error
                print(f"case {case}: {type(error).__name__}: {error}; {cause!r}; the document is in {kept}")
                faults.clear()
                outcomes["FAULT"] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if check is None:
                slowest = max(slowest, (time.monotonic() - begun, case))
    seconds, which = slowest
    print(f"{chosen.cases} documents within {ROOM >> 20} MB: {dict(outcomes)}; longest, {seconds:.2f} s: case {which}")
    return bool(outcomes["FAULT"])


if __name__ == "__main__":
    sys.exit(main())
