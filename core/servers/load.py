"""The same prompts for one reader and for many at once: what speculation buys as the batch grows.

Each level is a closed loop: so many readers, each taking the next prompt as soon as its answer is complete. Servers are
measured one after the other at each level, in an order that rotates, so that two on one machine are never loaded at
once. Only the time during which every reader was busy counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

from core.errors import Cancelled, UserError
from core.progress import Stop, never
from core.records import Spread, median_of_known, percentile
from core.servers.connection import LOOK_SECONDS, Connection, until_stopped
from core.servers.counters import between
from core.servers.dialects import counters
from core.servers.lane import ask, warm_up
from core.servers.records import (
    Server,
    ServerRun,
    Speculation,
    measure_run,
    per_pass,
    pooled,
    speculation_from_dict,
)
from core.settings import Settings

MOST_READERS = 256
ANSWERS_PER_READER = 2
LEVEL_SECONDS = 120.0
"""A level ends then, with the answers that are complete."""
MOST_ERRORS = 3
"""Of a level, that are kept."""


@dataclass(frozen=True)
class Level:
    """What one server (by its number, from 0) did at one number of readers, by the reader's clock.

    `tokens_per_second` is of all readers together while all were busy, reading prompts included; `per_reader` is each
    answer's decoding; both count tokens, or, as `counted` says, chunks. `first_token_seconds` and its 95th percentile
    are over answers. `failed` answers gave `errors`; `cut`: the time was up before all prompts were answered.
    """

    server: int
    readers: int
    answers: int
    counted: str
    seconds: float
    tokens_per_second: float | None
    per_reader: Spread | None
    first_token_seconds: float | None
    first_token_p95: float | None
    speculation: Speculation | None
    cut: bool = False
    failed: int = 0
    errors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        counted = self.speculation.to_dict() if self.speculation else None
        return {**asdict(self), "speculation": counted, "errors": list(self.errors)}


def level_from_dict(document: dict[str, Any]) -> Level:
    """The inverse of `Level.to_dict`."""
    spread, counted = document["per_reader"], document["speculation"]
    return Level(
        **{
            **document,
            "per_reader": Spread(**spread) if spread else None,
            "speculation": speculation_from_dict(counted) if counted else None,
            "errors": tuple(document["errors"]),
        }
    )


@dataclass
class Load:
    """A measurement as far as it has come. `runs[i]` are the answers of server i at its first level, a prompt each, in
    the prompts' order."""

    servers: list[Server]
    prompts: int
    settings: Settings
    readers: list[int]
    answers_per_reader: int
    levels: list[Level] = field(default_factory=list)
    runs: list[list[ServerRun]] = field(default_factory=list)
    stopped: bool = False

    def of(self, server: int) -> list[Level]:
        """The levels of one server, by readers."""
        return [level for level in self.levels if level.server == server]


@dataclass(frozen=True)
class LoadStep:
    """`done` of `total` levels (warm-ups count as one each), what was done last, and the measurement so far."""

    done: int
    total: int
    label: str
    load: Load


def load(
    servers: Sequence[Server],
    prompts: Sequence[str],
    settings: Settings,
    readers: Sequence[int] = (1,),
    stop: Stop = never,
    answers_per_reader: int = ANSWERS_PER_READER,
    level_seconds: float = LEVEL_SECONDS,
) -> Iterator[LoadStep]:
    """Measure every server at every number of readers, step by step.

    One reader is asked every prompt once; at more, each gives `answers_per_reader` answers, the prompts taken in turn.
    After `stop()` the level in progress is dropped. Raises UserError where there is nothing to measure, or where a
    server fails at its warm-up; an answer that fails later is counted in its level.
    """
    if not servers or not prompts:
        raise UserError("There is nothing to measure: name a server and a prompt.")
    found = Load(list(servers), len(prompts), settings, check_readers(readers), answers_per_reader)
    found.runs = [[] for _ in servers]
    total, done = len(servers) * (len(found.readers) + 1), 0
    for at, server in enumerate(servers):
        if stop():
            break
        found.servers[at] = warm_up(server, prompts[0], settings, stop)
        done += 1
        yield LoadStep(done, total, f"{server.name}: warm", found)
    for turn, number in enumerate(found.readers):
        for at in [(turn + k) % len(servers) for k in range(len(servers))]:
            answers = len(prompts) if number == 1 else number * answers_per_reader
            asked = [n % len(prompts) for n in range(answers)]
            try:
                level, runs = measure_level(found.servers[at], prompts, asked, settings, number, stop, level_seconds)
            except Cancelled:
                level, runs = None, []
            if level is None or stop():
                found.stopped = True
                yield LoadStep(done, total, "stopped", found)
                return
            found.levels.append(replace(level, server=at))
            found.runs[at] = found.runs[at] or runs
            if runs:
                found.servers[at] = runs[0].server
            done += 1
            yield LoadStep(done, total, f"{found.servers[at].name}: {in_readers(number)}", found)


def finish(steps: Iterator[LoadStep], tell: Callable[[LoadStep], None] = lambda step: None) -> Load:
    """Run a measurement to its end."""
    step = None
    for step in steps:
        tell(step)
    assert step is not None
    return step.load


def check_readers(given: Sequence[int]) -> list[int]:
    """Ascending numbers of readers, each once. UserError for none, or one out of bounds."""
    if not given or any(not 1 <= each <= MOST_READERS for each in given):
        raise UserError(f"Numbers of readers lie between 1 and {MOST_READERS}.")
    return sorted(set(given))


def in_readers(number: int) -> str:
    return f"{number} reader{'' if number == 1 else 's'}"


@dataclass
class _Answer:
    """One answer under load: the run, and when each of its chunks arrived on the level's clock."""

    prompt: int
    run: ServerRun
    arrivals: list[float] = field(default_factory=list)
    error: str | None = None


def measure_level(
    server: Server,
    prompts: Sequence[str],
    asked: Sequence[int],
    settings: Settings,
    readers: int,
    stop: Stop = never,
    longest: float = LEVEL_SECONDS,
) -> tuple[Level, list[ServerRun]]:
    """Ask the prompts with the numbers `asked`, `readers` of them at once; the level (as server 0), and the first
    complete answer to each prompt, in order."""
    jobs: Queue[int] = Queue()
    for number in asked:
        jobs.put(number)
    news: Queue[_Answer | float | BaseException] = Queue()
    over = Event()
    before = until_stopped(lambda connection: counters(connection, server), server.address, stop)
    start = time.perf_counter()
    readers = min(readers, len(asked))
    connections: list[Connection] = []
    begun: list[_Answer] = []
    for _ in range(readers):
        work = (server, prompts, settings, jobs, news, over, start, connections, begun)
        Thread(target=_read, args=work, name="answer", daemon=True).start()
    try:
        answers, idle, cut = _wait(news, readers, stop, start, longest)
    finally:
        over.set()
        for connection in connections:
            connection.leave()
    after = until_stopped(lambda connection: counters(connection, server), server.address, stop)
    level = _sum_up(readers, answers, begun, min(idle), cut)
    if level.speculation is None and before is not None and after is not None:
        counted = between(before, after)  # of answers that were cut off, too
        level = replace(level, speculation=counted if cut else _of_all(counted, answers))
    whole = [answer for answer in answers if answer.error is None and answer.run.stop_reason != "cancelled"]
    firsts = {answer.prompt: answer.run for answer in reversed(whole)}
    return level, [firsts[number] for number in sorted(firsts)]


def _read(
    server: Server,
    prompts: Sequence[str],
    settings: Settings,
    jobs: Queue[int],
    news: Queue[_Answer | float | BaseException],
    over: Event,
    start: float,
    connections: list[Connection],
    begun: list[_Answer],
) -> None:
    """One reader: takes prompts until there are none, and tells when it is idle."""
    try:
        with Connection(server.address, stop=over.is_set) as connection:
            connections.append(connection)
            while not over.is_set():
                try:
                    number = jobs.get_nowait()
                except Empty:
                    break
                answer = _Answer(number, ServerRun(server, settings, prompts[number]))
                begun.append(answer)
                try:
                    for _ in ask(connection, answer.run, over.is_set, counted=False):
                        answer.arrivals.append(time.perf_counter() - start)
                except UserError as error:
                    answer.error = str(error)
                except Cancelled:
                    break
                news.put(answer)
        news.put(time.perf_counter() - start)
    except BaseException as error:  # a fault of ours: to whoever measures
        news.put(error)


def _wait(
    news: Queue[_Answer | float | BaseException],
    readers: int,
    stop: Stop,
    start: float,
    longest: float,
) -> tuple[list[_Answer], list[float], bool]:
    """Every answer, when each reader became idle, and whether the time was up, or Stop pressed, first."""
    answers: list[_Answer] = []
    idle: list[float] = []
    while len(idle) < readers:
        passed = time.perf_counter() - start
        if stop() or passed > longest:
            return answers, [*idle, passed], True
        try:
            found = news.get(timeout=LOOK_SECONDS)
        except Empty:
            continue
        if isinstance(found, _Answer):
            answers.append(found)
        elif isinstance(found, BaseException):
            raise found
        else:
            idle.append(found)
    return answers, idle, False


def _sum_up(readers: int, answers: Sequence[_Answer], begun: Sequence[_Answer], busy: float, cut: bool) -> Level:
    """A level out of its answers; `busy` is when the first reader had nothing left to do. What came until then of those
    that were `begun` counts as text that came in that time, though they were cut off."""
    whole = [answer for answer in answers if answer.error is None and answer.run.chunks]
    errors = [answer.error for answer in answers if answer.error is not None]
    metrics = [measure_run(answer.run) for answer in whole]
    arrived = sum(tokens for answer in begun for at, tokens in zip(answer.arrivals, _weights(answer.run)) if at <= busy)
    waited = [found.first_token_seconds for found in metrics if found.first_token_seconds is not None]
    speeds = [found.reader_tokens_per_second for found in metrics if found.reader_tokens_per_second]
    return Level(
        server=0,
        readers=readers,
        answers=len(whole),
        counted="tokens" if metrics and all(found.counted == "tokens" for found in metrics) else "chunks",
        seconds=busy,
        tokens_per_second=arrived / busy if whole and busy > 0 else None,
        per_reader=Spread.of(speeds) if speeds else None,
        first_token_seconds=median_of_known(waited),
        first_token_p95=percentile([(seconds, 1) for seconds in waited], 0.95),
        speculation=_of_answers(whole),
        cut=cut,
        failed=len(errors),
        errors=tuple(dict.fromkeys(errors))[:MOST_ERRORS],
    )


def _weights(run: ServerRun) -> list[float]:
    """Tokens of each chunk; where the server tells only their sum, that divided evenly."""
    if run.new_tokens is not None and any(chunk.tokens is None for chunk in run.chunks):
        return [run.new_tokens / len(run.chunks)] * len(run.chunks)
    return [1.0 if chunk.tokens is None else chunk.tokens for chunk in run.chunks]


def _of_answers(answers: Sequence[_Answer]) -> Speculation | None:
    """What the answers themselves count, if each does."""
    counted = [answer.run.speculation for answer in answers]
    if not counted or any(found is None for found in counted):
        return None
    return _of_all(pooled([found for found in counted if found]), answers)


def _of_all(found: Speculation | None, answers: Sequence[_Answer]) -> Speculation | None:
    """With tokens per pass, where every answer's tokens are known."""
    tokens = [answer.run.new_tokens for answer in answers]
    if found is None or any(each is None for each in tokens):
        return found
    return per_pass(found, sum(each for each in tokens if each), len(tokens))
