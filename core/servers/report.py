"""A measurement of servers as figures, sentences and tables; its document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from core.records import SCHEMA, Spread, median_of_known
from core.servers.load import Load, in_readers, level_from_dict
from core.servers.records import ASKED, Parting, Server, ServerRun, first_parting, measure_run, server_run_from_dict
from core.settings import Settings


@dataclass(frozen=True)
class Gain:
    """How many times the tokens per second of the `plain` server the `speculative` one gave at so many readers."""

    speculative: int
    plain: int
    readers: int
    ratio: float


def roles(load: Load) -> tuple[int, int] | None:
    """(speculative, plain): of two servers the one that drafts, and the one that does not; where neither is known to,
    the second and the first. None unless there are two, or where both draft."""
    if len(load.servers) != 2 or both_draft(load):
        return None
    return (0, 1) if _drafts(load, 0) else (1, 0)


def both_draft(load: Load) -> bool:
    """Whether there are two servers and neither is plain."""
    return len(load.servers) == 2 and _drafts(load, 0) and _drafts(load, 1)


def _drafts(load: Load, server: int) -> bool:
    counted = any(level.speculation and level.speculation.drafted for level in load.of(server))
    return counted or load.servers[server].drafter is not None


def gains(load: Load) -> list[Gain]:
    """The speed-up at each number of readers at which both of two servers were measured, in one unit."""
    if (found := roles(load)) is None:
        return []
    one, other = ({level.readers: level for level in load.of(server)} for server in found)
    return [
        Gain(*found, readers, one[readers].tokens_per_second / plain)  # type: ignore[operator]
        for readers in sorted(one.keys() & other.keys())
        if (plain := other[readers].tokens_per_second)
        and one[readers].tokens_per_second
        and one[readers].counted == other[readers].counted
    ]


def describe_crossing(found: Sequence[Gain]) -> str:
    """From how many readers on speculation costs more than it brings, as one sentence; empty without figures."""
    if not found:
        return ""
    losing = [gain.ratio < 1 for gain in found]
    first, last = found[0], found[-1]
    if not any(losing):
        at = "at 1 reader" if len(found) == 1 and last.readers == 1 else f"up to {in_readers(last.readers)}"
        return f"Speculation pays {at}: {last.ratio:.2f}× there."
    if all(losing):
        where = f"at {in_readers(first.readers)}" if len(found) == 1 else "at every number of readers measured"
        return f"Speculation costs you {where}: {first.ratio:.2f}× the plain server at {in_readers(first.readers)}."
    crossing = max(at for at, loses in enumerate(losing) if not loses) + 1
    if crossing < len(found) and not any(losing[:crossing]):
        gain, before = found[crossing], found[crossing - 1]
        return (
            f"From {in_readers(gain.readers)} on, speculation costs you: {gain.ratio:.2f}× the plain server, "
            f"{before.ratio:.2f}× at {before.readers}."
        )
    costs = " and ".join(str(gain.readers) for gain, loses in zip(found, losing) if loses)
    return f"Speculation costs you at {costs} readers and pays at the others: there is no one crossing."


def describe_gains(load: Load) -> str:
    """The same of a measurement, or why it cannot be told."""
    if both_draft(load):
        return "Both servers draft, so neither is plain: start one without speculation to see what it brings."
    return describe_crossing(gains(load))


@dataclass(frozen=True)
class SameText:
    """Of `compared` prompts that two servers (by number) answered greedily, how many had the same text as far as both
    go, and where the first of the others parts."""

    first: int
    second: int
    same: int
    compared: int
    prompt: str | None = None
    parting: Parting | None = None


def same_texts(load: Load) -> list[SameText]:
    """Each two servers compared; empty where tokens are drawn by chance."""
    if load.settings.temperature > 0:
        return []
    found = []
    for one, other in combinations(range(len(load.servers)), 2):
        answers = {run.prompt: run for run in load.runs[other]}
        pairs = [(run, answers[run.prompt]) for run in load.runs[one] if run.prompt in answers]
        partings = [(a.prompt, parting) for a, b in pairs if (parting := first_parting(a, b))]
        if pairs:
            prompt, parting = partings[0] if partings else (None, None)
            found.append(SameText(one, other, len(pairs) - len(partings), len(pairs), prompt, parting))
    return found


def describe_same(found: SameText, load: Load) -> str:
    """Whether two servers wrote the same, as a sentence."""
    one, other = (label(load, server) for server in (found.first, found.second))
    if found.parting is None:
        return f"Same text: {one} and {other} wrote the same for all {found.compared} prompts."
    at = found.parting
    return (
        f"Not the same text: {one} and {other} agree on {found.same} of {found.compared} prompts; the first parting is "
        f"at {at.unit} {at.position + 1}: after {at.shared[-24:]!r}, {at.first[:24]!r} and {at.second[:24]!r}."
    )


def label(load: Load, server: int) -> str:
    """A server's name, with its drafter and place where another of the same name is measured too."""
    it = load.servers[server]
    alike = [each.name for each in load.servers].count(it.name) > 1
    return f"{it.title} ({it.address.partition('//')[2]})" if alike else it.title


def load_document(load: Load) -> dict[str, Any]:
    """The whole measurement: servers, settings, levels, gains and their sentence, texts compared, and the answers at
    one reader, each a server's run."""
    found = gains(load)
    return {
        "schema": SCHEMA,
        "servers": [server.to_dict() for server in load.servers],
        "settings": {name: getattr(load.settings, name) for name in ASKED},
        "prompts": load.prompts,
        "readers": load.readers,
        "answers_per_reader": load.answers_per_reader,
        "levels": [level.to_dict() for level in load.levels],
        "rows": [row(load, server) for server in range(len(load.servers))],
        "gains": [asdict(gain) for gain in found],
        "crossing": describe_gains(load) or None,
        "same_text": [asdict(same) for same in same_texts(load)],
        "notes": notes(load),
        "stopped": load.stopped,
        "server_runs": [run.to_dict() for runs in load.runs for run in runs],
    }


def load_from_document(document: dict[str, Any]) -> Load:
    """The inverse of `load_document`; what that computes is computed anew. Raises ValueError for an answer of another
    schema."""
    asked, levels = document["settings"], [level_from_dict(each) for each in document["levels"]]
    servers = [Server(**{**each, "models": tuple(each["models"])}) for each in document["servers"]]
    found = Load(
        servers,
        document["prompts"],
        Settings(**{name: asked[name] for name in ASKED}),
        list(document["readers"]),
        document["answers_per_reader"],
        levels,
        [[] for _ in servers],
        document["stopped"],
    )
    for run in map(server_run_from_dict, document["server_runs"]):
        whose = (run.server.address, run.server.model)
        same = (runs for server, runs in zip(servers, found.runs) if (server.address, server.model) == whose)
        # Of two that are one server, the second answered a prompt once more.
        next((runs for runs in same if all(each.prompt != run.prompt for each in runs)), []).append(run)
    return found


def row(load: Load, server: int) -> dict[str, Any]:
    """What a server's answers at its first level come to, over the prompts: medians, with the spread of the speed."""
    level = next(iter(load.of(server)), None)
    counted = level.speculation if level else None
    speculation = counted.to_dict() if counted else None
    return {"name": label(load, server), **sum_up(load.runs[server]), "speculation": speculation}


MEDIANS = ("reader_tokens_per_second", "first_token_seconds", "token_seconds", "token_seconds_p95")


def sum_up(runs: Sequence[ServerRun]) -> dict[str, Any]:
    """A server's answers to so many prompts: medians, with the spread of the speed, and what any answer lacks. Figures
    are None without answers; `clock` is "mixed" where some have the server's own timings and some have not."""
    metrics = [measure_run(run) for run in runs]
    speeds = [found.tokens_per_second for found in metrics if found.tokens_per_second]
    clocks, counted = ({getattr(found, name) for found in metrics} for name in ("clock", "counted"))
    return {
        "prompts": len(runs),
        "tokens_per_second": asdict(Spread.of(speeds)) if speeds else None,
        "counted": "chunks" if "chunks" in counted else "tokens" if counted else None,
        "clock": "mixed" if len(clocks) > 1 else next(iter(clocks), None),
        **{name: median_of_known(getattr(found, name) for found in metrics) for name in MEDIANS},
        "missing": list(dict.fromkeys(word for run in runs for word in run.missing)),
    }


def notes(load: Load) -> list[str]:
    """What to know before believing the figures."""
    found = []
    most = max((level.answers for level in load.levels), default=0)
    if most > load.prompts:
        found.append(
            f"The {load.prompts} prompts were sent up to {-(-most // load.prompts)} times to each server at one level: "
            "a drafter or a cache that remembers earlier answers gains from that."
        )
    if any(level.speculation and level.speculation.shared for level in load.levels):
        found.append("Counters under /metrics hold what other clients of the server did meanwhile too.")
    for level in load.levels:
        where = f"{label(load, level.server)} at {in_readers(level.readers)}"
        if level.failed:
            found.append(f"{where}: {level.failed} answers failed, such as: {level.errors[0]}")
        if level.cut:
            found.append(f"{where}: the time was up before every prompt was answered.")
    return found


def server_table(load: Load) -> str:
    """The measurement for a person to read: a row per server, a table by readers, and what they say."""
    rows = [row(load, server) for server in range(len(load.servers))]
    width = max(12, *(len(found["name"]) for found in rows)) + 2
    heads = (
        "tokens/s",
        "(min-max)",
        "by clock of",
        "reader's",
        "first ms",
        "ms/token",
        "p95 ms",
        "acc/drafted",
        "tok/pass",
    )
    lines = [f"{'server':<{width}}" + "".join(f"{head:>12}" for head in heads)]
    lines += [f"{found['name']:<{width}}" + "".join(f"{cell:>12}" for cell in _cells(found)) for found in rows]
    for found in rows:
        if found["missing"]:
            lines.append(f"Not told by {found['name']}: {', '.join(found['missing'])}.")
        if found["counted"] == "chunks":
            lines.append(f"{found['name']} does not say how many tokens it wrote: chunks of text are counted instead.")
    if len(load.readers) > 1:
        lines += ["", *_by_readers(load, width)]
    lines += ["", *filter(None, [describe_gains(load)])]
    lines += [describe_same(found, load) for found in same_texts(load)]
    lines += notes(load)
    if load.stopped:
        lines.append("Stopped early: only what was measured until then is shown.")
    return "\n".join(lines).rstrip()


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    speed, counted = found["tokens_per_second"], found["speculation"] or {}
    return (
        f"{speed['median']:.1f}" if speed else "",
        f"{speed['min']:.0f}-{speed['max']:.0f}" if speed else "",
        found["clock"] or "",
        _number(found["reader_tokens_per_second"], 1),
        _number(found["first_token_seconds"], 0, 1000),
        _number(found["token_seconds"], 1, 1000),
        _number(found["token_seconds_p95"], 1, 1000),
        _share(counted),
        _number(counted.get("tokens_per_pass"), 2),
    )


def _by_readers(load: Load, width: int) -> list[str]:
    heads = ("readers", "tokens/s", "per reader", "first ms", "p95 ms", "acc/drafted", "tok/pass", "x plain")
    ratios = {(gain.speculative, gain.readers): gain.ratio for gain in gains(load)}
    lines = [f"{'':<{width}}" + "".join(f"{head:>12}" for head in heads)]
    for level in sorted(load.levels, key=lambda level: (level.readers, level.server)):
        counted = level.speculation.to_dict() if level.speculation else {}
        cells = (
            str(level.readers),
            _number(level.tokens_per_second, 1),
            _number(level.per_reader.median if level.per_reader else None, 1),
            _number(level.first_token_seconds, 0, 1000),
            _number(level.first_token_p95, 0, 1000),
            _share(counted),
            _number(counted.get("tokens_per_pass"), 2),
            _number(ratios.get((level.server, level.readers)), 2),
        )
        lines.append(f"{label(load, level.server):<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _share(counted: dict[str, Any]) -> str:
    if counted.get("drafted") == 0:
        return "no drafts"
    return "" if counted.get("acceptance_rate") is None else f"{counted['acceptance_rate']:.0%}"


def _number(value: float | None, digits: int, times: float = 1) -> str:
    return "" if value is None else f"{times * value:.{digits}f}"
