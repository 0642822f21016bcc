"""An 8B-shape target in NF4 with a 0.5B-shape draft: plain and speculative decoding against transformers' generate,
against the honest formula, and against the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from core.costs import AT_ONCE, CostTable, time_passes
from core.costs.rounds import RoundCosts, promise
from core.decoding import speculative
from core.drafting.length import Adaptive, Controller, Fixed
from core.errors import release_memory
from core.lanes import describe_environment
from core.loading.fastest import ROWS, fastest_precision, time_products
from core.loading.model import Model
from core.loading.pair import Pair
from core.loading.precision import product_shapes
from core.measuring.bench import bytes_read, copy_bandwidth, describe_bandwidth
from core.measuring.peers import transformers_peers
from core.records import Run, Settings, Spread, summarise
from core.runners.clock import PassTimer
from core.runners.dynamic import DynamicRunner
from core.runners.graph import GraphRunner
from core.runners.static_layers import StaticNetwork
from core.runners.widths import TEXTS
from tests.accelerator.models import DRAFT, SMALL, TARGET, as_model, build
from tests.accelerator.scripted import ScriptedDrafter, ScriptedTarget

Say = Callable[[str], None]
ALPHAS = (0.6, 0.8, 0.9)
LENGTHS = (2, 4, 6, 8)
CONTEXT = 128
FAR, SMALL_FAR = 4096, 200
FAR_CURVE = (1, 5, 17)
SMALL_TEXTS = (2, 3)
NEAR = 0.6
"""A pass that takes no more than its bound over this is not looked at."""
WANTED = {
    "plain over transformers' generate": 4.0,
    "speculative over plain at acceptance 0.8": 2.0,
    "of the honest formula at acceptance 0.8": 0.95,
    "of a copy's bandwidth in a plain step": 0.6,
    "one row's pass over that of eight rows": 1 / 1.15,
    "efficiency": 0.95,
}


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    target: dict[str, Any]
    draft: dict[str, Any]
    prompt: int
    tokens: int
    repeats: int
    alphas: tuple[float, ...] = ALPHAS
    lengths: tuple[int, ...] = LENGTHS
    curve: tuple[int, ...] = tuple(range(1, 18))
    """Tokens of the passes that are timed."""
    timed: int = 5
    """How often each of them."""


FULL = Scale(TARGET, DRAFT, 128, 256, 3)
TINY = Scale(
    target=TARGET | SMALL | {"num_hidden_layers": 2},
    draft=DRAFT | SMALL | {"num_hidden_layers": 1},
    prompt=16,
    tokens=24,
    repeats=1,
    alphas=(0.8,),
    lengths=(4,),
    curve=(1, 5, 8, 17),
    timed=1,
)


def measure(small: bool, say: Say) -> dict[str, Any]:
    """A document with every figure; `verdicts` holds what was wanted beside what was reached."""
    scale = TINY if small else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    say("building the target and the draft")
    pair = Pair(
        as_model("target", build(scale.target, "nf4", device), "nf4"),
        as_model("draft", build(scale.draft, "bf16", device), "bf16"),
    )
    assert pair.draft is not None
    for model in (pair.target, pair.draft):
        as_captured(model)
    say(f"runners: {pair.target.runner_kind}, {pair.draft.runner_kind}")
    far = SMALL_FAR if small else FAR
    curves = {
        name: curve_of(model, say, far, scale) for name, model in (("target", pair.target), ("draft", pair.draft))
    }
    say("what they cost where they stand in a round")
    pair.target.costs, pair.draft.costs = rounds = pair.time_rounds(lengths=scale.curve)
    runs = Runs(pair, scale, say)
    peers = runs.of_generate()
    rows = runs.of_lanes()
    bandwidth = describe_bandwidth(pair.target, pair.target.costs(1), CONTEXT)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    document = {
        "environment": describe_environment(pair.target, pair.draft, pair.head),
        "small": small,
        "prompt": scale.prompt,
        "new_tokens": scale.tokens,
        "repeats": scale.repeats,
        "curves": {m: {kind: table.to_dict() for kind, table in c.items()} for m, c in curves.items()},
        "in_rounds": {m: table.to_dict() for m, table in zip(("target", "draft"), rounds)},
        "following": pair.draft.costs.following,
        "transformers_generate": vars_of(Spread.of(peers)),
        "lanes": rows,
        "bandwidth": bandwidth,
        "peak_memory_bytes": memory,
    }
    document["verdicts"] = verdicts(document)
    return document


def curve_of(model: Model, say: Say, far: int, scale: Scale) -> dict[str, CostTable]:
    """The verification cost curve on the runner the model chose, on transformers' own modules captured alike, and on
    its own forward; the first two behind a long text too."""
    say(f"what a pass over 1 to {scale.curve[-1]} tokens of the {model.name} costs ({model.runner_kind})")
    modules = GraphRunner(model.network, model.vocab_size, limit=model.context_length)
    found: dict[str, CostTable] = {}
    with model.lease(far + 2 * scale.curve[-1]) as chosen:
        for name, runner in (("chosen", chosen), ("modules", modules)):
            found[name] = time_passes(runner, CONTEXT, scale.timed, scale.curve)
            runner.reset()
            found[f"{name} at {far}"] = time_passes(runner, far, scale.timed, FAR_CURVE)
            if isinstance(runner, GraphRunner) and runner.failure:
                say(f"NOT CAPTURED: {runner.failure}")
    found["dynamic"] = time_passes(
        DynamicRunner(model.network, model.vocab_size), CONTEXT, min(3, scale.timed), scale.curve
    )
    return found


def measure_precisions(small: bool, say: Say) -> dict[str, Any]:
    """The target's curves in each precision, what one layer's products take in it, and what `auto` would take."""
    scale = TINY if small else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copied = copy_bandwidth(device, 1 << (22 if small else 30))
    document: dict[str, Any] = {"copy_bandwidth": copied, "curves": {}, "products": {}, "bounds": {}}
    for precision in ("nf4", "int4", "bf16"):
        torch.manual_seed(0)
        network = build(scale.target, precision, device)
        shapes = tuple((name, *shape) for name, shape in product_shapes(network.config).items())
        document["auto"] = vars_or_none(fastest_precision(network.config, device, measure=True))
        document["products"][precision] = dict(zip(ROWS, time_products(device, shapes, precision, layers=2)))
        model = as_model("target", network, precision)
        as_captured(model)
        far = SMALL_FAR if small else FAR
        curves = curve_of(model, say, far, scale)
        document["curves"][precision] = {kind: table.to_dict() for kind, table in curves.items()}
        document["bounds"][precision] = beside_bounds(model, curves, document["products"][precision], copied, far)
        say("\n".join(f"{precision}, {row['pass']}: {row['sentence']}" for row in document["bounds"][precision]))
        del network, model
        release_memory()
    return document


def measure_batches(small: bool, say: Say) -> dict[str, Any]:
    """What a pass over the rows of several texts of the target takes, by texts and rows of each, beside a text alone:
    what speculation is worth to many is how little the rows add."""
    scale = TINY if small else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    document: dict[str, Any] = {}
    for precision in ("nf4", "bf16"):
        torch.manual_seed(0)
        model = as_model("target", build(scale.target, precision, device), precision)
        as_captured(model)
        alone = model.time_passes(scale.timed, AT_ONCE)
        rows = [of_texts(1, alone)]
        for texts in SMALL_TEXTS if small else TEXTS[1:]:
            if not model.in_slots:
                say(f"NOT CAPTURED: {model.runner_kind}")
                break
            rows.append(of_texts(texts, model.measure_at_once(texts)))
        document[precision] = {"runner": model.runner_kind, "rows": rows}
        say("\n".join(f"{precision}, {row['sentence']}" for row in rows))
        del model
        release_memory()
    return document


def of_texts(texts: int, table: CostTable) -> dict[str, Any]:
    """Passes of so many texts at once."""
    seconds = {n: table(texts * n) for n in AT_ONCE}
    told = ", ".join(f"{1000 * each:.2f} ms over {n} of each" for n, each in seconds.items())
    plain = texts / seconds[1]
    return {
        "texts": texts,
        "seconds": seconds,
        "plain_tokens_per_second": plain,
        "sentence": f"{texts} at once: {told}; {plain:.0f} tokens a second plainly",
    }


def beside_bounds(
    model: Model, curves: dict[str, CostTable], products: dict[int, float], copied: float, far: int
) -> list[dict[str, Any]]:
    """Passes over one row and over five by each kind of runner, beside what reading their bytes takes at the bandwidth
    of a copy; where they part, what to look at."""
    rows = []
    for kind, table in curves.items():
        context = far if " at " in kind else CONTEXT
        for n in ROWS:
            if n not in table.seconds:
                continue
            bound, seconds = bytes_read(model, context) / copied, table.seconds[n]
            found = {"pass": f"{kind}, {n} rows", "seconds": seconds, "bound": bound, "share": bound / seconds}
            rows.append(found | {"sentence": reading_of(found, kind, model.layers * products[n], curves["dynamic"](n))})
    return rows


def reading_of(found: dict[str, Any], kind: str, products: float, eager: float) -> str:
    """What a pass takes of its bound, and what to look at where that is little."""
    seconds, share = found["seconds"], found["share"]
    told = f"{1000 * seconds:.2f} ms, bound {1000 * found['bound']:.2f} ({share:.0%})"
    if kind == "dynamic" or share >= NEAR:
        return told
    if seconds > 0.8 * eager:
        return f"{told}: as slow as eagerly; look at whether it was captured (runner and its failure)"
    if products > 0.7 * seconds:
        return f"{told}: its products take {1000 * products:.2f} ms of it; look at the kernel of this precision"
    if " at " in kind:
        return f"{told}: look at attention over the long cache (core/runners/attention.py)"
    return f"{told}: {1000 * (seconds - products):.2f} ms lie between its products; look at norms, attention, the head"


def as_captured(model: Model) -> None:
    """On a CPU the passes that a GPU captures, eagerly."""
    if model.device.type == "cpu":
        model.runner_kind, model._fused = GraphRunner.fused_kind, StaticNetwork(model.network)


def vars_or_none(found: Any) -> dict[str, Any] | None:
    return None if found is None else vars(found)


class Runs:
    """Runs over one scripted text, lanes in turn, ratios repeat by repeat."""

    def __init__(self, pair: Pair, scale: Scale, say: Say) -> None:
        self._pair, self._scale, self._say = pair, scale, say
        draws, vocabulary = random.Random(0), pair.target.vocab_size
        room = scale.prompt + scale.tokens + 2 * scale.curve[-1]
        self._ids = [draws.randrange(vocabulary) for _ in range(room)]
        self._text = torch.tensor(self._ids, device=pair.target.device)

    def of_generate(self) -> list[float]:
        """Tokens per second of transformers' eager generate on the same weights."""
        self._say("transformers' generate")
        prompt = "def add(a, b):\n    return a + b\n" * 8
        settings = Settings(max_new_tokens=self._scale.tokens, ignore_eos=True)
        return [
            transformers_peers(self._pair)["transformers generate"](prompt, settings)
            for _ in range(self._scale.repeats + 1)
        ][1:]

    def of_lanes(self) -> list[dict[str, Any]]:
        lanes = [
            ("plain", None, None),
            *((f"{n}", alpha, n) for alpha in self._scale.alphas for n in self._scale.lengths),
        ]
        lanes += [("auto", alpha, "auto") for alpha in self._scale.alphas]
        found: dict[int, list[dict[str, float]]] = {i: [] for i in range(len(lanes))}
        for repeat in range(-1, self._scale.repeats):
            for i, (name, alpha, length) in enumerate(lanes):
                self._say(f"repeat {repeat + 1}: {name}" + (f" at acceptance {alpha}" if alpha else ""))
                sample = self._run(alpha, length)
                if repeat >= 0:
                    found[i].append(sample)
        plain = [sample["tokens_per_second"] for sample in found[0]]
        return [self._row(alpha, length, found[i], plain) for i, (_, alpha, length) in enumerate(lanes)]

    def _run(self, alpha: float | None, length: Any) -> dict[str, float]:
        pair, scale = self._pair, self._scale
        assert pair.draft is not None and pair.target.costs is not None and pair.draft.costs is not None
        run = Run(Settings(max_new_tokens=scale.tokens), {}, "", self._ids[: scale.prompt])
        costs = RoundCosts(pair.target.costs, pair.draft.costs, pair.draft.costs.following)
        controller: Controller = Adaptive(costs) if length == "auto" else Fixed(length or 1)
        with pair.target.lease() as target, pair.draft.lease() as draft:
            drafter = None if alpha is None else ScriptedDrafter(draft, self._text, alpha, pair.target.vocab_size)
            rounds = speculative(
                ScriptedTarget(target, self._text),
                drafter,
                run,
                length=controller,
            )
            next(rounds)
            with PassTimer(target.device) as passes:
                for _ in rounds:
                    pass
            bare = passes.seconds()
        if run.token_ids != self._ids[scale.prompt : scale.prompt + scale.tokens]:
            raise RuntimeError("the text written is not the script: a cache was not rolled back rightly")
        metrics = summarise(run)
        promised = promise(run.rounds, costs)
        return {
            "tokens_per_second": metrics.tokens_per_second,
            "efficiency": bare / sum(r.seconds for r in run.rounds[1:]),
            "acceptance_rate": metrics.acceptance_rate or 0.0,
            "tokens_per_round": metrics.tokens_per_round,
            "promised": promised.ratio(),
            "other_ms": 1000 * sum(r.other_seconds for r in run.rounds) / len(run.rounds),
        }

    @staticmethod
    def _row(alpha: float | None, length: Any, samples: list[dict[str, float]], plain: list[float]) -> dict[str, Any]:
        ratios = [sample["tokens_per_second"] / base for sample, base in zip(samples, plain)]
        reached = [ratio / sample["promised"] for ratio, sample in zip(ratios, samples)]
        middle = {name: median(sample[name] for sample in samples) for name in samples[0]}
        return {
            "acceptance": alpha,
            "draft_length": length,
            **middle,
            "ratio_to_plain": vars_of(Spread.of(ratios)),
            "of_honest": vars_of(Spread.of(reached)),
        }


def vars_of(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.min, "max": spread.max}


def verdicts(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was wanted, what was reached, and whether that is enough."""
    plain, rows = document["lanes"][0], document["curves"]["target"]["chosen"]
    best = max(
        (row for row in document["lanes"] if row["acceptance"] == 0.8), key=lambda r: r["ratio_to_plain"]["median"]
    )
    reached = {
        "plain over transformers' generate": plain["tokens_per_second"] / document["transformers_generate"]["median"],
        "speculative over plain at acceptance 0.8": best["ratio_to_plain"]["median"],
        "of the honest formula at acceptance 0.8": best["of_honest"]["median"],
        "of a copy's bandwidth in a plain step": (document["bandwidth"] or {"share": 0.0})["share"],
        "one row's pass over that of eight rows": rows["1"] / rows["8"],
        "efficiency": min(plain["efficiency"], best["efficiency"]),
    }
    return {
        name: {"wanted": WANTED[name], "reached": value, "enough": value >= WANTED[name]}
        for name, value in reached.items()
    }


def describe(document: dict[str, Any]) -> str:
    """The document for a person to read."""
    heads = f"{'acceptance':>11}{'tokens/s':>10}{'x plain':>9}{'honest':>8}{'of it':>8}{'in passes':>11}{'rest ms':>9}"
    lines = [f"{'length':<8}{heads}"]
    for row in document["lanes"]:
        lines.append(
            f"{row['draft_length'] or 'plain':<8}{row['acceptance'] or '':>11}{row['tokens_per_second']:>10.1f}"
            f"{row['ratio_to_plain']['median']:>9.2f}{row['promised']:>8.2f}{row['of_honest']['median']:>8.0%}"
            f"{row['efficiency']:>11.1%}{row['other_ms']:>9.3f}"
        )
    lines.append(f"transformers' generate: {document['transformers_generate']['median']:.1f} tokens/s")
    for name, kinds in document["curves"].items():
        for kind, seconds in kinds.items():
            points = "  ".join(f"{n}: {1000 * s:.2f}" for n, s in seconds.items())
            lines.append(f"{name}, {kind}, milliseconds by tokens: {points}")
    if found := document["bandwidth"]:
        lines.append(f"{found['achieved'] / 1e9:.0f} of {found['copy'] / 1e9:.0f} GB/s ({found['share']:.0%})")
    for name, verdict in document["verdicts"].items():
        word = "reached" if verdict["enough"] else "MISSED"
        lines.append(f"{name}: {verdict['reached']:.2f}, wanted {verdict['wanted']:.2f}: {word}")
    return "\n".join(lines)
