"""The benchmark: acceptance, tokens a pass and speed of every way to draft, through the project's own engine."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

from tqdm import tqdm

from core.lanes import open_lane
from core.loading import load_pair
from core.loading.pair import Pair
from core.records import Run, Settings, summarise

NEW_TOKENS = 128
FASTEST = "int4"
PRECISIONS = (FASTEST, "nf4", "bf16")
TEMPERATURES = (0.0, 1.0)
METHODS: dict[str, tuple[int | str, ...]] = {
    "draft": (3, 5, 7, 10, "auto"),
    "early-exit": (2, 4, "auto"),
    "ngram": (4, 8, "auto"),
}


def complete(pair: Pair, prompt: str, settings: Settings) -> Run:
    """Run one lane to its end."""
    with open_lane(pair, prompt, settings) as lane:
        for _ in lane:
            pass
    return lane.run


def pool_runs(runs: list[Run]) -> dict[str, float | None]:
    """Figures of several runs as if they were one: rates over all tokens, not means of rates."""
    outcomes = [token.outcome for run in runs for round_ in run.rounds for token in round_.drafted]
    judged = outcomes.count("accepted") + outcomes.count("rejected")
    totals = [summarise(run) for run in runs]
    tokens = sum(total.new_tokens for total in totals)
    return {
        "acceptance_rate": outcomes.count("accepted") / judged if judged else None,
        "tokens_per_pass": tokens / sum(total.rounds for total in totals),
        "tokens_per_second": tokens / sum(total.seconds for total in totals),
    }


def bench_pair(pair: Pair, prompts: list[str], base: Settings) -> list[dict]:
    """A row for each method and length at one temperature and precision. On every prompt all rows take their turn
    before the next prompt, so that a slow minute of the machine hits all alike."""
    entries = [("plain", 1), *((method, length) for method, lengths in METHODS.items() for length in lengths)]
    runs: dict[tuple, list[Run]] = {entry: [] for entry in entries}
    for method, length in entries:
        complete(pair, prompts[0], replace(base, method=method, draft_length=length, max_new_tokens=16))
    for seed, prompt in enumerate(tqdm(prompts, desc=f"{base.precision} T={base.temperature:g}", leave=False)):
        for method, length in entries:
            runs[method, length].append(
                complete(pair, prompt, replace(base, method=method, draft_length=length, seed=seed))
            )
    rows = [
        {"method": method, "draft_length": length, "temperature": base.temperature, **pool_runs(found)}
        for (method, length), found in runs.items()
    ]
    for row in rows:
        row["ratio_to_plain"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return rows


def bench_precisions(target: Path, draft: Path, prompts: list[str], precisions=PRECISIONS) -> dict[str, list[dict]]:
    """Rows of `bench_pair` for every precision, both temperatures."""
    found = {}
    for precision in precisions:
        settings = Settings(
            target=str(target), draft=str(draft), precision=precision, device="cpu", chat="off",
            max_new_tokens=NEW_TOKENS, ignore_eos=True,
        )  # fmt: skip
        pair = load_pair(settings)
        rows = [row for t in TEMPERATURES for row in bench_pair(pair, prompts, replace(settings, temperature=t))]
        found[precision] = rows
    return found


def find_best(rows: list[dict], temperature: float, methods: tuple[str, ...]) -> dict:
    """The fastest row."""
    fitting = [r for r in rows if r["temperature"] == temperature and r["method"] in methods]
    return max(fitting, key=lambda row: row["tokens_per_second"])


def choose_precision(bench: dict[str, list[dict]]) -> str:
    """The precision in which the draft model is fastest in absolute tokens a second, both temperatures alike."""
    return max(
        bench, key=lambda name: mean(find_best(bench[name], t, ("draft",))["tokens_per_second"] for t in TEMPERATURES)
    )


def print_bench(bench: dict[str, list[dict]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| precision | T | method | length | acceptance | tokens/pass | tokens/s | ÷ plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for precision, rows in bench.items():
        for row in rows:
            rate = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
            lines.append(
                f"| {precision} | {row['temperature']:g} | {row['method']} | {row['draft_length']} | {rate} "
                f"| {row['tokens_per_pass']:.2f} | {row['tokens_per_second']:.0f} | {row['ratio_to_plain']:.2f} |"
            )
    return "\n".join(lines)


def write_results(file: Path, results: dict) -> None:
    """Keep the figures for the card."""
    file.write_text(json.dumps(results, indent=1) + "\n")
