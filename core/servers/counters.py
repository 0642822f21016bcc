"""What a server counts of its speculation: in an answer, or under /metrics before and after.

Field names as of late 2026 (vLLM 0.32, SGLang 0.5, llama.cpp build 11549) with the names they had before. All are
optional.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from core.servers.fields import MOST, amount, counts, whole, within
from core.servers.records import Engine, Speculation, speculation

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,4})"')
"""Of a sample's labels. Both patterns take time in proportion to what they are given, whatever it is."""

Counters = Mapping[str, float]
"""Totals by short name: "passes", "drafted", "accepted", and "position 0", "position 1" …"""

NAMES: dict[Engine, dict[str, str]] = {
    "vLLM": {
        "vllm:spec_decode_num_drafts": "passes",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "position",
    },
    "SGLang": {
        "sglang:spec_verify_calls": "passes",
        "sglang:spec_num_proposed_drafts": "drafted",
        "sglang:spec_num_correct_drafts": "accepted",
    },
    "llama.cpp": {
        "llamacpp:spec_decode_num_drafts": "passes",
        "llamacpp:spec_decode_num_draft_tokens": "drafted",
        "llamacpp:spec_decode_num_accepted_tokens": "accepted",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos": "position",
    },
    "OpenAI-compatible": {},
}
"""Counters under /metrics, each with and without the ending _total."""


def read_counters(engine: Engine, metrics: str) -> dict[str, float]:
    """An engine's counters of speculation out of Prometheus' text format, summed over its workers. What does not
    parse is passed over."""
    found: dict[str, float] = {}
    for line in metrics.split("\n"):
        if line.startswith("#") or not (sample := SAMPLE.match(line)):
            continue
        short = NAMES[engine].get(sample[1].removesuffix("_total"))
        try:
            value = amount(float(sample[3]), MOST)
        except ValueError:
            continue
        if short is None or value is None:
            continue
        if short == "position":
            position = POSITION.search(sample[2] or "")
            if position is None or int(position[1]) > MOST_POSITIONS:
                continue
            short = f"position {int(position[1])}"
        found[short] = found.get(short, 0) + value
    return found


MOST_POSITIONS = 1024


def between(before: Counters, after: Counters) -> Speculation | None:
    """What was counted between two readings; None where a counter ran backwards (the server began anew) or neither
    drafted nor accepted tokens are counted."""
    grown = {key: after[key] - before.get(key, 0) for key in after}
    if any(value < 0 for value in grown.values()) or not {"drafted", "accepted"} & grown.keys():
        return None
    deepest = max((int(key.split()[1]) for key in grown if key.startswith("position ")), default=-1)
    positions = [int(grown.get(f"position {at}", 0)) for at in range(deepest + 1)]
    numbers = {key: int(grown[key]) for key in ("passes", "drafted", "accepted") if key in grown}
    return speculation("/metrics before and after", **numbers, by_position=positions or None, shared=True)


def of_vllm(metrics: Any) -> Speculation | None:
    """From `metrics.speculative_decoding` of an answer, there where the server runs with
    --per-request-spec-decode-metrics summary or detailed."""
    found = within(metrics, "speculative_decoding")
    if not isinstance(found, Mapping):
        return None
    return speculation(
        "this answer's metrics",
        whole(found.get("num_spec_steps")),
        whole(found.get("num_draft_tokens")),
        whole(found.get("num_accepted_draft_tokens")),
        at_least(counts(found.get("acceptance_histogram"))),
    )


def of_sglang(meta: Any) -> Speculation | None:
    """From the `meta_info` of an answer, by its newer names or those before."""
    if not isinstance(meta, Mapping):
        return None

    def first(*names: str) -> Any:
        return next((meta[each] for each in names if meta.get(each) is not None), None)

    passes = whole(first("spec_verify_ct"))
    accepted = whole(first("spec_num_correct_drafts", "spec_accept_token_num"))
    drafted = whole(first("spec_num_proposed_drafts", "spec_draft_token_num"))
    histogram = counts(first("spec_correct_drafts_histogram", "spec_accept_histogram"))
    rate, length = amount(first("spec_accept_rate"), 1), amount(first("spec_accept_length"), MOST_POSITIONS)
    if passes is None and accepted is None and length is None:
        return None
    return speculation("this answer's meta_info", passes, drafted, accepted, at_least(histogram), rate, length)


def of_llama(timings: Any) -> Speculation | None:
    """From the `timings` of an answer, which counts tokens and no passes. Without a drafter, or where nothing was
    drafted, it gives no counts at all."""
    drafted, accepted = whole(within(timings, "draft_n")), whole(within(timings, "draft_n_accepted"))
    if drafted is None or accepted is None or accepted > drafted:
        return None
    return speculation("this answer's timings", None, drafted, accepted)


def at_least(histogram: Sequence[int] | None) -> list[int] | None:
    """Passes that accepted at least 1, 2, … tokens, from how many accepted exactly 0, 1, 2 …"""
    if histogram is None:
        return None
    return list(accumulate(reversed(histogram[1:])))[::-1]


MISSING = {
    "passes": "verifying passes",
    "drafted": "drafted tokens",
    "accepted": "accepted tokens",
    "by_position": "acceptance by position",
    "tokens_per_pass": "tokens per pass",
}


def missing_of(found: Speculation | None) -> list[str]:
    """What a server does not tell of its speculation."""
    if found is None:
        return ["speculation"]
    return [words for name, words in MISSING.items() if getattr(found, name) is None]
