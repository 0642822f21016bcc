"""What a run yielded and what it cost: expected against happened, bytes moved, and when speculation would not pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from app.explain.html import html
from app.tokens.markup import milliseconds, plural, size
from core.drafting.methods import METHODS
from core.explaining.traffic import (
    Costs,
    Traffic,
    batch_limit,
    batch_speed_ups,
    break_even_acceptance,
    break_even_length,
    cost_table,
    describe_bandwidth,
    expected_by_formula,
    fixed_share,
    measure,
    run_traffic,
)
from core.measuring.batches import describe_all, measured_of
from core.measuring.deciding import about_even, speedup_range
from core.records import Run, summarise

Finding = tuple[bool | None, str, str]
"""Whether it holds here (None: cannot be told), the condition, and the numbers that decide it."""


def costs_html(
    run: Run,
    plain: Run | None,
    load: dict[str, Any] | None = None,
    servers: bool = False,
    many: dict[str, Any] | None = None,
) -> str:
    """The sections below the walk; nothing where the run drafted nothing. `load` is what Compare measured on running
    servers (`core.servers.load_document`); `servers`: whether it can be measured here; `many` what Tune measured
    of many texts at once (`core.measuring.batches`)."""
    if not any(r.drafted for r in run.rounds):
        return ""
    costs = measure(run, plain)
    pays = _pays(run, plain, costs)
    sections = [_yield(run), _why_faster(run, plain, costs, pays)]
    if costs:
        sections.append(_when_not(run, plain, costs, pays, load, servers, many))
    return Markup().join(sections)


def _pays(run: Run, plain: Run | None, costs: Costs | None) -> bool | None:
    """Whether the run was faster than plain decoding; None within the noise of the two."""
    low, high = speedup_range(run, plain) if plain else (1.0, 1.0)
    if plain and low <= 1 <= high:
        return None
    return costs is not None and costs.gain > 0


# What a round yields


def _yield(run: Run) -> str:
    metrics = summarise(run)
    alpha = metrics.acceptance_rate
    if alpha is None:
        return ""
    lengths = sorted({len(r.drafted) for r in run.rounds})
    drafted = plural(lengths[0], "token") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    predicted = expected_by_formula(run, alpha)
    by_position = metrics.accepted_by_position
    rows = [
        ["the formula, α = " + f"{alpha:.3f}", f"{predicted:.2f}"],
        ["what happened", html.bold(f"{metrics.tokens_per_round:.2f}")],
    ]
    tree = METHODS[run.settings.method].tree
    said = (
        "In a tree every level has several chances, so the formula for a chain stays below what happens."
        if tree
        else _apart(predicted, metrics.tokens_per_round)
    )
    reached = ", ".join(f"{share:.0%}" for share in by_position[:8])
    deep = "one draft was" if len(by_position) == 1 else "1, 2 … drafts were"
    about = (
        f"In {plural(metrics.rounds, 'round')} with drafts of {drafted}, {alpha:.1%} of the judged drafts were "
        "accepted: that is α. If each draft were accepted with this chance, whatever came before, a round of draft "
        "length γ would yield"
    )
    shares = f"Of the rounds that drafted so deep, the share in which at least {deep} accepted: {reached}."
    answer = f"{metrics.tokens_per_round:.2f} tokens; the formula for chains says {predicted:.2f}."
    return html.yields(answer, about, rows, said, shares)


def _apart(predicted: float, happened: float) -> str:
    if abs(predicted - happened) <= 0.05 * happened:
        return "The two agree: acceptance was about the same all along."
    if happened > predicted:
        return "More came than the formula says: acceptance comes in runs, easy stretches and hard ones."
    return "Less came than the formula says: later drafts were right less often, or the text's end cut one short."


# Why this is faster


def _why_faster(run: Run, plain: Run | None, costs: Costs | None, pays: bool | None) -> str:
    unsure = "about as fast as plain decoding"
    if costs and not about_even(costs.speed_up):
        unsure = "perhaps faster" if costs.gain > 0 else "perhaps slower"
    title = {True: "faster", False: "not faster", None: unsure}[pays]
    answer = f"A token takes {milliseconds(costs.speculative)}, plain {milliseconds(costs.plain)}." if costs else ""
    found, base = run_traffic(run), run_traffic(plain) if plain else None
    shared = _what_is_shared(run, with_bytes=found is not None)
    if found is None:
        return html.traffic(title, answer, None, [], shared)
    bandwidth = describe_bandwidth(plain, base) if plain and base else describe_bandwidth(run, found)
    reading = [_traffic_reading(found, base, costs), bandwidth]
    return html.traffic(title, answer, _traffic_table(found, base), reading, shared)


def _traffic_table(found: Traffic, base: Traffic | None) -> list[list[str]]:
    """Its head, and its rows."""

    def column(traffic: Traffic) -> list[str]:
        n = traffic.tokens or 1
        return [
            size(traffic.target_weights / n),
            size(traffic.draft_weights / n) if traffic.draft_weights else "0",
            size(traffic.cache / n),
            html.bold(size(traffic.per_token)),
            milliseconds(traffic.seconds / n),
            f"{traffic.bandwidth / 1e9:.1f} GB/s",
        ]

    names = [
        "target's weights",
        "draft's weights",
        "keys and values",
        "read in all",
        "time it took",
        "that is, a bandwidth of",
    ]
    columns = [column(found), *([column(base)] if base else [])]
    heads = ["for every token written", "speculative", *(["plain"] if base else [])]
    return [heads, *(list(row) for row in zip(names, *columns))]


def _traffic_reading(found: Traffic, base: Traffic | None, costs: Costs | None) -> str:
    first = base or found
    weights = first.target_weights + first.draft_weights
    kind = "plain" if base else "speculative"
    n = first.tokens or 1
    what, part = ("weights", weights) if first.weight_share >= 0.5 else ("cached keys and values", first.cache)
    says = f"Most of what is read is {what}: {size(part / n)} of {size(first.per_token)} for a {kind} token."
    if base and costs:
        less = 1 - found.per_token / base.per_token
        faster = 1 - (found.seconds / (found.tokens or 1)) / (base.seconds / (base.tokens or 1))
        bytes_word = f"{abs(less):.0%} {'less' if less >= 0 else 'more'}"
        time_word = f"{abs(faster):.0%} {'less' if faster >= 0 else 'more'}"
        says += f" Speculation read {bytes_word} for every token, and took {time_word} time."
    return says


def _what_is_shared(run: Run, with_bytes: bool) -> str:
    costs = cost_table(run, "target")
    if costs is None:
        return ""
    last = max(costs.seconds)
    share = fixed_share(costs)
    return (
        f"Measured on this target: a pass over one token takes {milliseconds(costs(1))}, over {last} tokens "
        f"{milliseconds(costs(last))}. So {share:.0%} of the pass is paid once, however many tokens ride along: "
        "reading weights, and on small models starting each operation. Only the rest, arithmetic, grows with the "
        "tokens." + (" The bandwidth is what the times imply if reading were all there is." if with_bytes else "")
    )


# When it would not be


def _when_not(
    run: Run,
    plain: Run | None,
    costs: Costs,
    pays: bool | None,
    load: dict[str, Any] | None,
    servers: bool,
    many: dict[str, Any] | None,
) -> str:
    findings = [
        _short_output(run, plain, costs),
        _mismatch(run, costs),
        _climbing(run, costs),
        _batches(run, costs, load, servers, many),
    ]
    source = "the plain run beside it" if costs.plain_measured else "the cost table, for want of a plain run beside it"
    here = [condition.lower() for holds, condition, _ in findings if holds]
    return html.limits(
        "When would it not be?" if pays else "What may stand in the way?",
        f"Here: {', '.join(here)}." if here else "None of four known reasons holds here.",
        f"Decided from this run, these models and this machine; a plain token is timed by {source}.",
        [(*HOLDS[holds], condition, numbers) for holds, condition, numbers in findings],
    )


HOLDS = {True: ("bites", "yes, here"), False: ("fine", "not here"), None: ("open", "not known")}
"""How a finding is coloured, and its verdict."""


def _short_output(run: Run, plain: Run | None, costs: Costs) -> Finding:
    prefill = run.prefill_seconds + run.draft_prefill_seconds
    share = prefill / run.engine_seconds if run.engine_seconds else 0.0
    tokens = len(run.token_ids)
    length = break_even_length(run, costs)
    numbers = (
        f"Reading the prompt took {share:.0%} of this run ({milliseconds(run.prefill_seconds)} by the target, "
        f"{milliseconds(run.draft_prefill_seconds)} by the drafter), and drafts cannot shorten it. "
    )
    if length is None:
        return True, "A short output", numbers + "Here no length pays: a token costs more with speculation."
    if plain and plain.engine_seconds:
        whole = plain.engine_seconds / run.engine_seconds * tokens / max(1, len(plain.token_ids))
        numbers += f"With the prompt counted the speed-up is {whole:.2f}×, without it {costs.speed_up:.2f}×. "
    numbers += f"The drafter's own reading is earned back after {plural(length, 'token')}; this run wrote {tokens:,}."
    return tokens < length, "A short output", numbers


def _mismatch(run: Run, costs: Costs) -> Finding:
    alpha = summarise(run).acceptance_rate
    needed = break_even_acceptance(costs)
    if alpha is None:
        return None, "A draft that disagrees with the target", "Nothing was judged in this run."
    name = "A draft that disagrees with the target"
    if needed is None:
        least = costs.round / costs.plain
        return (
            True,
            name,
            f"{alpha:.0%} accepted, and not even 100% would do: a round costs {least:.2f} plain tokens, and with "
            f"{costs.gamma:.1f} drafts it yields at most {costs.gamma + 1:.1f}.",
        )
    return (
        alpha <= needed,
        name,
        f"{alpha:.0%} accepted; at the measured costs of a round it takes more than {needed:.0%} to win.",
    )


def _climbing(run: Run, costs: Costs) -> Finding:
    name = "A cost curve that climbs"
    table_ = cost_table(run, "target")
    checking = costs.verify / costs.plain
    numbers = (
        f"Checking a draft took {checking:.2f} plain steps, drafting it {costs.draft / costs.plain:.2f}; such a "
        f"round yielded {costs.tokens:.2f} tokens. "
    )
    if table_:
        points = ", ".join(f"{n} → {table_(n) / table_(1):.2f}×" for n in sorted(table_.seconds) if n > 1)
        numbers += f"Measured passes, against one token: {points}."
    return checking >= costs.tokens, name, numbers


def _on_servers(text: str, load: dict[str, Any] | None, servers: bool, here: bool = False) -> str:
    """With what running servers gave where many read at once, if two were measured, and where to measure; `here`: also
    in Tune, for what `text` says is predicted only, and comes after what was measured."""
    if not load or not load["gains"]:
        return html.batches(text, "", "", "", servers, here)
    names = [f"{server['engine']} {server['version'] or ''}".strip() for server in load["servers"]]
    points = ", ".join(f"{gain['readers']} → {gain['ratio']:.2f}×" for gain in load["gains"])
    return html.batches(text, names[load["gains"][0]["speculative"]], load["crossing"], points, servers, here)


def _batches(
    run: Run, costs: Costs, load: dict[str, Any] | None, servers: bool, many: dict[str, Any] | None
) -> Finding:
    name = "Many texts at once"
    if many and measured_of(many, run.environment, asdict(run.settings)):
        lost = min((each for each in many["loses_from"].values() if each), default=None)
        here = lost is not None, f"From {lost} texts at once" if lost and lost > 1 else name
        return *here, _on_servers(describe_all(many), load, servers)
    speed_ups, measured = batch_speed_ups(run, costs), cost_table(run, "target")
    if not speed_ups or not measured:
        return None, name, _on_servers("The cost of larger passes was not measured.", load, servers, here=True)
    lost = batch_limit(speed_ups)
    points = ", ".join(f"{batch} → {speed_up:.2f}×" for batch, speed_up in speed_ups if batch in (1, 4, 16, 64, 256))
    tail = (
        f"a loss from about {lost} texts in a batch on"
        if lost and lost > 1
        else "a loss with one text already"
        if lost
        else f"a gain up to {speed_ups[-1][0]} texts"
    )
    numbers = (
        "In a batch, plain decoding shares the reading of weights already. "
        f"Predicted from what passes cost: {tail}; speed-up by texts at once: {points}. Passes over more than "
        f"{max(measured.seconds)} tokens are not measured for this but continued as the longest measured ones climb."
    )
    name = name if lost in (None, 1) else f"From about {lost} texts at once, predicted"
    return lost is not None, name, _on_servers(numbers, load, servers, here=True)
