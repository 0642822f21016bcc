"""A comparison as a stream of events, in the order in which the page draws them.

As in a race (`app.playground.race`) the events `open`, `round` and `end` of a lane, which is named by its number here,
make its run document, once for every prompt. Besides: `plan` (lanes and prompts, once, first), `prompt` (which one
comes now), `fail` (a lane gave up, and why), `result` (the table), and in a `status` how many runs are `done` of how
many. Lanes that are running servers come last (`app.compare.servers`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from app.compare.lanes import lane_names, short_precision, target_name
from app.compare.servers import ServerContender, answer, connect_all, give_up, own_waits, server_row, warm
from app.header import pair_name, short_pair, with_head
from app.playground.race import end_event, round_event, run_head
from app.serving import TOPS, Engine
from app.serving.device import Device
from app.serving.turns import Event, Stop, fetching, loading
from core.drafting.methods import METHODS
from core.errors import Cancelled, UserError
from core.measuring.comparison import Contender, Heat, counted, heats, row
from core.measuring.deciding import about_even, faster
from core.records import Round, Run, Settings
from core.servers import ServerRun
from core.settings import POCKET_NAME
from core.text import Prompt

WARM_UP_TOKENS = 8


@dataclass
class Comparison:
    """What is put side by side, and what has come of it so far."""

    heats: list[Heat]
    prompts: list[Prompt]
    names: dict[int, tuple[str, str]]
    """Of every lane its method, and its models where they differ (`app.compare.lanes.lane_names`)."""
    servers: list[ServerContender] = field(default_factory=list)
    stopped: bool = False

    @classmethod
    def of(cls, lanes: Sequence[Settings | ServerContender], prompts: Sequence[Prompt]) -> Comparison:
        servers = [each for each in lanes if isinstance(each, ServerContender)]
        found = cls(heats([each for each in lanes if isinstance(each, Settings)]), list(prompts), {}, servers)
        taken = {each.number for each in servers}
        free = (number for number in count(1) if number not in taken)
        for contender, number in zip(found.contenders, free):
            contender.number = number
        names = lane_names([each.settings for each in found.contenders])
        found.names = {each.number: name for each, name in zip(found.contenders, names)}
        return found

    @property
    def contenders(self) -> list[Contender]:
        """All lanes by number, those added for a baseline last."""
        return sorted((each for heat in self.heats for each in heat.contenders), key=lambda each: each.number)

    def name(self, number: int) -> str:
        return ", ".join(part for part in self.names[number] if part)

    def rows(self) -> list[dict[str, Any]]:
        """The table: a row a lane, each with its name and its pair; a baseline that was added only if it ran."""
        ours = {each.number: counted(each) for each in self.contenders if not each.added}
        theirs = [server_row(each, self.servers, ours) for each in self.servers]
        heat_of = {each.number: heat for heat in self.heats for each in heat.contenders}
        rows = [
            {"name": self.name(each.number), "pair": described(each)}
            | row(each, heat_of[each.number].baseline).to_dict()
            | own_waits(list(counted(each).values()))
            | {"server": None}
            for each in self.contenders
            if each.runs or not each.added
        ]
        return sorted([*rows, *theirs], key=lambda row: row["lane"])

    def runs(self) -> list[Run]:
        """Every run that wrote something, lane by lane."""
        return [run for each in self.contenders for _, run in sorted(each.runs.items()) if run.token_ids]

    def server_runs(self) -> list[ServerRun]:
        """Every answer of a server that wrote something, lane by lane."""
        return [run for each in self.servers for _, run in sorted(each.runs.items()) if run.text]

    def done(self) -> int:
        """How many runs are over."""
        lanes = [*self.contenders, *self.servers]
        return sum(run.stop_reason is not None for each in lanes for run in each.runs.values())

    def asked(self) -> int:
        """How many runs there will be, if all goes well."""
        return (len(self.contenders) + len(self.servers)) * len(self.prompts)


def described(contender: Contender) -> str:
    """The models of a contender as they were loaded, or as they were asked for."""
    run = next(iter(contender.runs.values()), None)
    if run is None:
        return short_pair(contender.settings)
    method, target = run.settings.method, run.environment["target"]
    draft = run.environment.get("draft") if METHODS[method].network == "draft" else None
    pair = with_head(pair_name({"target": target, "draft": draft}), run.environment, method)
    return f"{pair}, {short_precision(target['precision'])}"


def plan_event(comparison: Comparison) -> Event:
    asked = [each for each in comparison.contenders if not each.added]
    named = [(each.number, *comparison.names[each.number], False) for each in asked]
    named += [(each.number, each.name, each.models, True) for each in comparison.servers]
    return {
        "e": "plan",
        "lanes": [
            {"lane": str(number), "name": name, "models": models, "server": server}
            for number, name, models, server in sorted(named)
        ],
        "prompts": [prompt.name for prompt in comparison.prompts],
        "notes": notes(comparison),
    }


def notes(comparison: Comparison) -> list[str]:
    """What a person should know before: which lanes wait for another target, and which baselines come on top."""
    said = []
    first, later = comparison.heats[:1], comparison.heats[1:]
    for heat in later:
        lanes = [each for each in heat.contenders if not each.added]
        same = target_name(heat.baseline.settings) == target_name(first[0].baseline.settings)
        other = "the target in another precision" if same else "another target"
        verbs = ("needs", "it is loaded and runs") if len(lanes) == 1 else ("need", "they are loaded and run")
        said.append(f"{numbered(lanes)} {verbs[0]} {other}: {verbs[1]} after the others.")
    if any(heat.baseline.added for heat in comparison.heats):
        of = " of each target" if later else ""
        said.append(f"Plain decoding{of} runs as well, to have something to hold the lanes against.")
    if servers := comparison.servers:
        one = len(servers) == 1
        alone = "answers alone, after the others" if comparison.heats else "answers alone"
        said.append(
            f"{numbered(servers)} {'is a running server: it' if one else 'are running servers: each'} {alone}, so that "
            "no lane slows another down."
        )
    return said


def numbered(lanes: Sequence[Contender | ServerContender]) -> str:
    """Lane 1; Lanes 1 and 2; Lanes 1, 2 and 4."""
    numbers = [str(each.number) for each in lanes]
    if len(numbers) == 1:
        return f"Lane {numbers[0]}"
    return f"Lanes {', '.join(numbers[:-1])} and {numbers[-1]}"


def compare(device: Device, engine: Engine, comparison: Comparison, stop: Stop) -> Generator[Event, None, None]:
    """Run every heat in turn, then sum up. The `device` must be ours. A lane that cannot go on says why and sits out
    the rest, while the others go on."""
    for heat in comparison.heats:
        yield from _run_heat(device, engine, comparison, heat, stop)
        if stop():
            break
    yield from _ask_servers(comparison, stop)
    comparison.stopped = stop()
    lanes = [*(each for each in comparison.contenders if not each.added), *comparison.servers]
    failures = [each.error for each in lanes]
    if len(set(failures)) == 1 and failures[0] and not comparison.runs() and not comparison.server_runs():
        raise UserError(failures[0])
    yield result_event(comparison)


def _run_heat(device: Device, engine: Engine, comparison: Comparison, heat: Heat, stop: Stop) -> Iterator[Event]:
    pairs: dict[int, Any] = {}
    for contender in sorted(heat.contenders, key=lambda each: (each.added, not _needs_draft(each.settings))):
        if stop() or not _asked(heat):
            return
        try:
            if not contender.error:
                pairs[contender.number] = yield from _pair_for(device, engine, contender, heat, pairs, stop)
        except Cancelled:
            return
        except Exception as error:
            yield give_up(contender, error)
    for contender in heat.contenders:
        if not contender.error and not stop():
            yield _status(comparison, "Warming up: every lane writes a few tokens that do not count.")
            yield from _warm_up(engine, pairs[contender.number], contender, comparison.prompts[0], stop)
    for at, prompt in enumerate(comparison.prompts):
        if stop() or not _asked(heat):
            return
        yield {"e": "prompt", "at": at, "name": prompt.name}
        yield _status(comparison, _progress(comparison, _asked(heat), at))
        yield from _race(engine, comparison, heat, pairs, at, stop)


def _ask_servers(comparison: Comparison, stop: Stop) -> Iterator[Event]:
    """Every server in turn, each alone."""
    for contender in comparison.servers:
        if not contender.error and not stop():
            yield _status(comparison, f"Warming up: {contender.name} writes a few tokens that do not count.")
            yield from warm(contender, comparison.prompts[0], stop)
    for at, prompt in enumerate(comparison.prompts):
        for contender in comparison.servers:
            if contender.error or stop():
                continue
            yield {"e": "prompt", "at": at, "name": prompt.name}
            yield _status(comparison, _progress(comparison, [contender], at))
            yield from answer(contender, at, prompt, stop)


def _asked(heat: Heat) -> list[Contender]:
    """Those of a heat that somebody asked for and that still can run: without them there is nothing to compare."""
    return [each for each in heat.contenders if not each.added and not each.error]


def _pair_for(
    device: Device, engine: Engine, contender: Contender, heat: Heat, pairs: dict[int, Any], stop: Stop
) -> Generator[Event, None, Any]:
    """The loaded pair of a contender. A target that needs no second model takes any pair with it."""
    settings = contender.settings
    draft = (settings.draft, settings.draft_precision)
    for other in heat.contenders:
        same_draft = (other.settings.draft, other.settings.draft_precision) == draft
        if other.number in pairs and (same_draft or not _needs_draft(settings)):
            return pairs[other.number]
    return (yield from loading(device, engine, _to_load(engine, settings), stop))


def _needs_draft(settings: Settings) -> bool:
    """Whether a lane reads the weights of a second model."""
    return METHODS[settings.method].network == "draft"


def _to_load(engine: Engine, settings: Settings) -> Settings:
    """What to load for a lane of its own: of a target that needs no second model that alone, unless it is there."""
    if _needs_draft(settings) or settings.target == POCKET_NAME or engine.is_loaded(settings):
        return settings
    return replace(settings, draft=None)


def fetch_all(engine: Engine, comparison: Comparison, stop: Stop) -> Iterator[Event]:
    """Download what the lanes lack, while others use the device. A lane whose models cannot be had gives up."""
    for contender in comparison.contenders:
        if contender.added:
            continue
        try:
            yield from fetching(engine, _to_load(engine, contender.settings), stop)
        except Cancelled:
            raise
        except Exception as error:
            yield give_up(contender, error)
    yield from connect_all(comparison.servers, stop)


def _warm_up(engine: Engine, pair: Any, contender: Contender, prompt: Prompt, stop: Stop) -> Iterator[Event]:
    few = min(WARM_UP_TOKENS, contender.settings.max_new_tokens)
    try:
        with engine.open_lane(pair, prompt.text, replace(contender.settings, max_new_tokens=few), stop, tops=0) as lane:
            for _ in lane:
                pass
    except Exception as error:
        yield give_up(contender, error)


class Tolerant:
    """A lane whose failure ends it alone, not the race."""

    def __init__(self, lane: Any, contender: Contender) -> None:
        self.run: Run = lane.run
        self.contender = contender
        self.error: Exception | None = None
        self._lane = lane

    @property
    def seconds(self) -> float:
        return self._lane.seconds

    def __next__(self) -> Round:
        try:
            return next(self._lane)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise StopIteration from error

    def close(self) -> None:
        self._lane.close()


def _race(
    engine: Engine, comparison: Comparison, heat: Heat, pairs: dict[int, Any], at: int, stop: Stop
) -> Iterator[Event]:
    """One prompt: every lane of the heat at once, the least engine time first."""
    tops = TOPS if len(comparison.prompts) == 1 else 0  # a set of prompts makes many runs to keep
    lanes: list[Tolerant] = []
    try:
        for contender in heat.contenders:
            if contender.error is not None:
                continue
            text = comparison.prompts[at].text
            try:
                lane = engine.open_lane(pairs[contender.number], text, contender.settings, stop, tops=tops)
            except Exception as error:
                yield give_up(contender, error)
                continue
            lanes.append(Tolerant(lane, contender))
            contender.runs[at] = lane.run
            if not contender.added:
                yield {"e": "open", "lane": str(contender.number), "run": run_head(lane.run)}
        ended = set()
        for index, round_ in engine.race(lanes):
            yield from _shown(lanes[index], round_)
            if lanes[index].run.stop_reason:
                ended.add(index)
    finally:
        for lane in lanes:
            lane.close()
    for index, lane in enumerate(lanes):
        if lane.error:
            yield give_up(lane.contender, lane.error)
        elif index not in ended and not lane.contender.added:
            yield end_event(str(lane.contender.number), lane.run)


def _shown(lane: Tolerant, round_: Round) -> Iterator[Event]:
    """A lane's round, and its end with its last one. Of a lane that was added nothing is shown but its figures."""
    if lane.contender.added:
        return
    yield round_event(str(lane.contender.number), lane.run, round_)
    if lane.run.stop_reason:
        yield end_event(str(lane.contender.number), lane.run)


def _progress(comparison: Comparison, lanes: Sequence[Contender | ServerContender], at: int) -> str:
    going = f"{numbered(lanes)} {'is' if len(lanes) == 1 else 'are'} running"
    if len(comparison.prompts) == 1:
        return f"{going}, each on its own clock."
    which = f"Prompt {at + 1} of {len(comparison.prompts)}, {comparison.prompts[at].name}"
    return f"{which}: {going[0].lower()}{going[1:]}."


def _status(comparison: Comparison, text: str) -> Event:
    done, of = comparison.done(), comparison.asked()
    return {"e": "status", "kind": "running", "text": text, "done": done, "of": of}


def result_event(comparison: Comparison) -> Event:
    """The table, and in a sentence who was fastest."""
    rows = comparison.rows()
    return {
        "e": "result",
        "kind": "stopped" if comparison.stopped else "finished",
        "text": conclusion(comparison, rows),
        "rows": rows,
    }


def conclusion(comparison: Comparison, rows: Sequence[dict[str, Any]]) -> str:
    """The fastest lane in tokens per second, whatever its target and precision, and what it gains."""
    stopped = "Stopped. " if comparison.stopped else ""
    best, server = fastest(rows), fastest_server(rows)
    if best is None:
        return stopped + (server or "No lane came far enough to be compared.")
    over = f", median of {best['prompts']} prompts" if best["prompts"] > 1 else ""
    of = " of those chosen" if best["faster"] is False else " of this page\u2019s lanes" if server else ""
    speed = f"{best['tokens_per_second']['median']:.0f} tokens/s{over}"
    if level := level_with(comparison, best):
        others = [each for each in comparison.contenders if each.number in level]
        lanes, near = numbered(others).lower(), [row for row in rows if row["lane"] in (best["lane"], *level)]
        rates = [row["tokens_per_second"]["median"] for row in near]
        even = about_even(min(rates) / max(rates)) or not any(row["drafted"] for row in near)
        stand = f"and {lanes} are about as fast" if even else f"is ahead of {lanes}"
        text = f"Lane {best['lane']}, {best['name']}, {stand}: {speed}"
        on = "one prompt does" if best["prompts"] == 1 else f"{best['prompts']} prompts do"
        text += f"; {on} not separate them" + (f". Lane {best['lane']} is faster than plain" if best["faster"] else "")
    else:
        text = f"Lane {best['lane']}, {best['name']}, is the fastest{of}: {speed}"
    gain = "" if level and not best["faster"] and best["method"] != "plain" else _over_plain(best)
    return f"{stopped}{text}{gain}.{server and ' ' + server}"


def _over_plain(best: dict[str, Any]) -> str:
    """What the fastest lane gains over plain decoding, as far as that is told from noise."""
    ratio = best["ratio_to_plain"]
    if best["method"] == "plain":
        return ". No lane gains enough over plain decoding to be faster"
    if not ratio:
        return ""
    if not best["drafted"]:
        return ". It drafted nothing, so it did what plain decoding does"
    if best["faster"] is None:
        return ", about as fast as plain decoding of its own target"
    if not best["faster"]:
        return f", and slower than plain decoding of its own target ({ratio['median']:.2f}×)"
    return f", {ratio['median']:.2f}× plain decoding of its own target"


def level_with(comparison: Comparison, best: dict[str, Any]) -> list[int]:
    """The lanes that the fastest is not faster than beyond the noise."""
    runs = {each.number: counted(each) for each in comparison.contenders if not each.added}
    return [
        number for number, own in runs.items() if own and number != best["lane"] and not faster(runs[best["lane"]], own)
    ]


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the lane with most tokens per second, those added and running servers apart."""
    found = [row for row in rows if row["tokens_per_second"] and not row["added"] and not row["server"]]
    return max(found, key=lambda row: row["tokens_per_second"]["median"], default=None)


def fastest_server(rows: Sequence[dict[str, Any]]) -> str:
    """Which of the running servers wrote fastest, as a sentence; empty where none did."""
    found = [each for each in rows if each["server"] and each["tokens_per_second"]]
    if not found:
        return ""
    best = max(found, key=lambda each: each["tokens_per_second"]["median"])
    which = "Of the running servers, lane" if len(found) > 1 else "The running server, lane"
    clock = {"server": ", by its own clock", "reader": ", by the reader's clock"}.get(best["server"]["clock"], "")
    unit = best["server"]["counted"]
    speed = f"{best['tokens_per_second']['median']:.1f} {unit}/s{clock}"
    verb = "is fastest:" if len(found) > 1 else "wrote"
    return f"{which} {best['lane']}, {best['name']}, {verb} {speed}."
