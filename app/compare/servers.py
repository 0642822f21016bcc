"""Lanes of a comparison that are running servers: what was asked of them, their events and their rows.

Each answers alone, prompt by prompt, after the lanes of this page: on one machine they would slow each other down.
Their events are those of the other lanes, with `chunk` in place of `round`, and `name` once a server told what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.serving.turns import Event, Stop, sentence
from core.errors import Cancelled, UserError
from core.measuring.comparison import Contender
from core.records import Run, median_of_known, percentile
from core.servers import Server, ServerChunk, ServerRun, connect, first_parting, measure_run, open_lane, warm_up
from core.servers.records import pooled
from core.servers.report import sum_up
from core.settings import Settings
from core.text import Prompt


@dataclass
class ServerContender:
    """A server as a lane, and what came of it: `runs` by the number of the prompt, `error` if it had to give up.
    `model` is the one asked for, None for the server's first."""

    number: int
    address: str
    model: str | None
    settings: Settings
    server: Server | None = None
    runs: dict[int, ServerRun] = field(default_factory=dict)
    error: str | None = None

    @property
    def name(self) -> str:
        """As the server reports it, once it was asked."""
        return self.server.title if self.server else self.address

    @property
    def models(self) -> str:
        """The server's model, of a path its last part, and where it is."""
        return f"{self.server.model.rpartition('/')[2]} at {self.server.address}" if self.server else ""

    def counted(self) -> dict[int, ServerRun]:
        """The answers that figures are made of: those that came to their end, or what there is where none did."""
        written = {at: run for at, run in self.runs.items() if run.text}
        return {at: run for at, run in written.items() if run.stop_reason in ("eos", "length")} or written


def asked_server(number: int, lane: Mapping[str, Any], settings: Settings) -> ServerContender:
    """The server that a lane of people's own names; UserError for a lane that sets anything else."""
    if other := [key for key, value in lane.items() if key not in ("server", "model") and value is not None]:
        raise UserError(f"a running server decides on {other[0]!r} itself; such a lane has server and model.")
    address, model = lane["server"], lane.get("model")
    if not isinstance(address, str) or not isinstance(model, str | None):
        raise UserError("the address of a server and the name of its model are texts.")
    if not address.strip():
        raise UserError("give the address of the running server, such as http://127.0.0.1:8000.")
    return ServerContender(number, address.strip(), (model or "").strip() or None, settings)


def connect_all(contenders: Sequence[ServerContender], stop: Stop) -> Iterator[Event]:
    """Ask every server what it is. One that does not answer gives up; the others go on."""
    for contender in contenders:
        if stop():
            return
        yield {"e": "status", "kind": "starting", "text": f"Connecting to {contender.address}\u2026"}
        try:
            contender.server = connect(contender.address, contender.model, stop)
        except Cancelled:
            return
        except Exception as error:
            yield give_up(contender, error)
        else:
            yield name_event(contender)


def name_event(contender: ServerContender) -> Event:
    return {"e": "name", "lane": str(contender.number), "name": contender.name, "models": contender.models}


def give_up(contender: Contender | ServerContender, error: Exception) -> Event:
    """Why a lane sits out the rest. One that was added says so in its row of the table."""
    contender.error = sentence(error)
    return {"e": "fail", "lane": str(contender.number), "text": contender.error}


def warm(contender: ServerContender, prompt: Prompt, stop: Stop) -> Iterator[Event]:
    """One short answer that does not count."""
    assert contender.server
    try:
        warm_up(contender.server, prompt.text, contender.settings, stop)
    except Exception as error:
        yield give_up(contender, error)


def answer(contender: ServerContender, at: int, prompt: Prompt, stop: Stop) -> Iterator[Event]:
    """One prompt: the lane opens, its chunks come, it ends. What came of an answer that failed is kept."""
    assert contender.server
    with open_lane(contender.server, prompt.text, contender.settings, stop) as lane:
        run = contender.runs[at] = lane.run
        yield open_event(contender, run)
        told = 0
        try:
            for chunk in lane:
                told += 1
                yield chunk_event(contender, chunk)
        except Exception as error:
            yield give_up(contender, error)
            return
    if run.server != contender.server:  # an answer may tell what it was drafted with
        contender.server = run.server
        yield name_event(contender)
    ended = end_event(contender, run)
    if told != len(run.chunks):  # parted since
        ended["run"]["chunks"] = [drawn(chunk) for chunk in run.chunks]
    yield ended


def answered(contender: ServerContender, run: ServerRun) -> Iterator[Event]:
    """The same events of an answer that is over."""
    yield open_event(contender, run)
    for chunk in run.chunks:
        yield chunk_event(contender, chunk)
    yield end_event(contender, run)


def open_event(contender: ServerContender, run: ServerRun) -> Event:
    settings = {"max_new_tokens": run.settings.max_new_tokens, "chat": run.settings.chat}
    about = {"server": run.server.to_dict(), "settings": settings, "prompt": run.prompt}
    return {"e": "open", "lane": str(contender.number), "run": about}


def chunk_event(contender: ServerContender, chunk: ServerChunk) -> Event:
    return {"e": "chunk", "lane": str(contender.number), "chunk": drawn(chunk)}


def drawn(chunk: ServerChunk) -> dict[str, Any]:
    return {"text": chunk.text, "seconds": chunk.seconds, "tokens": chunk.tokens, "kind": tint(chunk)}


def tint(chunk: ServerChunk) -> str | None:
    """What a chunk is coloured as: not at all where nothing was drafted, or where the server does not say."""
    return None if chunk.outcome == "plain" else chunk.outcome


def end_event(contender: ServerContender, run: ServerRun) -> Event:
    """What is known at the end alone; `kinds` are what the chunks are coloured as, which some servers tell last. With
    `chunks`, too, these replace those that came."""
    rest = {
        "stop_reason": run.stop_reason,
        "seconds": run.seconds,
        "missing": run.missing,
        "kinds": [tint(chunk) for chunk in run.chunks],
        "metrics": measure_run(run).to_dict(),
    }
    return {"e": "end", "lane": str(contender.number), "run": rest}


# Rows of the table

WAITS = ("first_token_seconds", "token_seconds", "token_seconds_p95")


def server_row(
    contender: ServerContender, servers: Sequence[ServerContender], ours: Mapping[int, Mapping[int, Run]]
) -> dict[str, Any]:
    """A server's line of the table, in the columns of the other lanes; `ours` are their runs, by lane and prompt.

    `acceptance_rate` is accepted ÷ drafted, as servers count it; `server` has what only they have.
    """
    runs = contender.counted()
    found = sum_up(list(runs.values()))
    counts = [run.speculation for run in runs.values()]
    counted = pooled([each for each in counts if each]) if counts and all(counts) else None
    return {
        "name": contender.name,
        "pair": contender.models or contender.address,
        "lane": contender.number,
        "method": "server",
        "baseline": False,
        "added": False,
        "prompts": found["prompts"],
        "tokens_per_second": found["tokens_per_second"],
        "ratio_to_plain": None,
        "faster": None,
        "acceptance_rate": counted.acceptance_rate if counted else None,
        "tokens_per_round": median_of_known(each.tokens_per_pass for each in counts if each),
        "accepted_by_position": [],
        "drafts_by_position": [],
        "weight_bytes": None,
        "identical": None,
        "error": contender.error,
        **{name: found[name] for name in WAITS},
        "server": {
            "clock": found["clock"],
            "counted": found["counted"],
            "drafted": counted.drafted if counted else None,
            "accepted": counted.accepted if counted else None,
            "shared": any(each.shared for each in counts if each),
            "missing": found["missing"],
            "same": same_text(contender, runs, servers, ours),
        },
    }


def own_waits(runs: Sequence[Run]) -> dict[str, float | None]:
    """The waiting times of a lane of ours in engine time, as a server's row has them: medians over its prompts."""
    waits = [[(each.seconds / len(each.kept), len(each.kept)) for each in run.rounds[1:] if each.kept] for run in runs]
    firsts = [
        run.prefill_seconds + run.draft_prefill_seconds + first.seconds for run in runs for first in run.rounds[:1]
    ]
    found = (firsts, [percentile(each, 0.5) for each in waits], [percentile(each, 0.95) for each in waits])
    return {name: median_of_known(values) for name, values in zip(WAITS, found)}


def same_text(
    contender: ServerContender,
    runs: Mapping[int, ServerRun],
    servers: Sequence[ServerContender],
    ours: Mapping[int, Mapping[int, Run]],
) -> dict[str, Any] | None:
    """Whether a greedy server wrote what another lane did, as far as both go: the first server before it, for the first
    server the first lane of ours that ran. None where tokens are drawn by chance, or there is no such lane."""
    if contender.settings.temperature > 0:
        return None
    before = next((each for each in servers if each.number < contender.number and each.counted()), None)
    lane, others = (before.number, before.counted()) if before else _first_of(ours)
    pairs = [(others[at], run) for at, run in runs.items() if at in others]
    if not pairs:
        return None
    partings = [found for one, other in pairs if (found := first_parting(_as_answer(one, other), other))]
    parting = asdict(partings[0]) if partings else None
    return {"lane": lane, "same": len(pairs) - len(partings), "compared": len(pairs), "parting": parting}


def _first_of(ours: Mapping[int, Mapping[int, Run]]) -> tuple[int, dict[int, Any]]:
    return next(((lane, dict(runs)) for lane, runs in sorted(ours.items()) if runs), (0, {}))


def _as_answer(run: Run | ServerRun, like: ServerRun) -> ServerRun:
    """A run of ours as an answer to be compared: by character, for a server's tokens may be of another tokenizer."""
    if isinstance(run, ServerRun):
        return run
    return ServerRun(like.server, run.settings, run.prompt, [ServerChunk(run.text, 0.0)], run.stop_reason)
