"""What a finished race says in words: is the text the same, was it faster, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.markup import plural
from core.metrics import Divergence, Metrics, summarise
from core.records import Run

Kind = Literal["identical", "diverged", "chance", "stopped", "inactive"]


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    text: str


def verdict(speculative: Run, plain: Run, divergence: Divergence | None) -> Verdict:
    """How the two texts compare; `divergence`: where they first differ under greedy decoding, or None."""
    if "cancelled" in (speculative.stop_reason, plain.stop_reason):
        return Verdict("stopped", _stopped(speculative, plain, divergence))
    if speculative.settings.temperature > 0:
        return Verdict(
            "chance",
            "The texts differ by chance, the law is the same: both are drawn from the target's own distribution.",
        )
    if divergence is None:
        return Verdict("identical", f"Identical to plain decoding, all {len(speculative.token_ids)} tokens.")
    return Verdict("diverged", _diverged(divergence))


def _stopped(speculative: Run, plain: Run, divergence: Divergence | None) -> str:
    both = min(len(speculative.token_ids), len(plain.token_ids))
    if speculative.settings.temperature > 0 or not both:
        return "Stopped."
    if divergence is None:
        return f"Stopped. Both lanes began with the same {plural(both, 'token')}."
    return "Stopped. " + _diverged(divergence)


def _diverged(divergence: Divergence) -> str:
    found = (
        f"First difference at token {divergence.position + 1}: plain wrote {divergence.first_text!r}, speculative "
        f"{divergence.second_text!r}."
    )
    if divergence.logit_gap is None:
        return found
    apart = (
        f"lie {divergence.logit_gap:.2g} apart" if divergence.logit_gap else "are equal to the last digit it computes"
    )
    return found + (
        f" The target's two best logits {apart} there: a pass over several tokens rounds differently from a pass over "
        "one."
    )


def inactive(run: Run) -> str | None:
    """Why nothing was drafted, where nothing was."""
    if run.settings.method == "plain":
        return "Speculation is off (method: plain). Choose another method to race against plain decoding."
    if run.rounds and not any(round_.drafted for round_ in run.rounds):
        return f"The drafter proposed nothing in {plural(len(run.rounds), 'round')}, so every round was a plain step."
    return None


def why_slower(speculative: Run, plain: Run) -> str | None:
    """The main reason where speculation lost: the one cost whose removal would have gained most. None where it won."""
    fast, slow = summarise(speculative), summarise(plain)
    if not fast.rounds or not slow.new_tokens or fast.tokens_per_second >= slow.tokens_per_second:
        return None
    drafted = sum(len(r.drafted) for r in speculative.rounds)
    if not drafted:
        return inactive(speculative)
    idle = sum(not r.drafted for r in speculative.rounds)
    if 2 * idle > fast.rounds:
        return (
            f"{idle} of {fast.rounds} rounds were plain steps: on this machine, drafting for this text costs more than "
            "it brings."
        )
    return max(_remedies(speculative, fast, slow.seconds / slow.new_tokens, drafted))[1]


def _remedies(run: Run, metrics: Metrics, step: float, drafted: int) -> list[tuple[float, str]]:
    """(tokens per second with this cost removed, the sentence that names it), for each of the three costs."""
    rounds = metrics.rounds
    draft = sum(r.draft_seconds for r in run.rounds)
    verify = sum(r.verify_seconds for r in run.rounds)
    accepted = metrics.acceptance_rate or 0.0
    return [
        (
            (drafted + rounds) / metrics.seconds,
            f"Mostly because of acceptance: {accepted:.0%} of the judged drafts were accepted, so a round gave only "
            f"{metrics.tokens_per_round:.1f} tokens.",
        ),
        (
            metrics.new_tokens / max(1e-9, metrics.seconds - verify + min(verify, rounds * step)),
            f"Mostly because of verification: checking a draft took {verify / rounds / step:.1f} times a plain step.",
        ),
        (
            metrics.new_tokens / max(1e-9, metrics.seconds - draft),
            f"Mostly because of drafting: proposing {drafted / rounds:.1f} tokens a round took "
            f"{draft / rounds / step:.1f} times a plain step.",
        ),
    ]
