"""What sampling costs here, beside the passes: to draw a token, and to judge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.costs import undisturbed
from core.drafting import Draft
from core.drafting.chain import Chain, confidence_of
from core.runners import Favourites
from core.runners.clock import timed
from core.sampling import MOST_DRAFTED, Sampling, likeliest
from core.verification import judge

DRAFTED, REPEATS = 4, 5


@dataclass(frozen=True)
class SamplingCosts:
    """Seconds: `plain`, of choosing the token of a plain step; `drawing`, of choosing a drafted one; `judging`, of
    judging one more; `waiting`, of the host's reading a number that the device has just computed."""

    plain: float
    drawing: float
    judging: float
    waiting: float


@torch.inference_mode()
def time_sampling(
    sampling: Sampling, vocabulary: int, drafted: int, device: torch.device, told: bool = False
) -> SamplingCosts:
    """Measured over random logits of the target's `vocabulary` and of the `drafted` tokens a drafter knows, the
    likeliest of which passes may have `told`."""
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(DRAFTED + 1, vocabulary, generator=generator, device=device)
    own = torch.randn(1, drafted, generator=generator, device=device)
    uniforms = torch.rand(MOST_DRAFTED + 1, generator=generator, device=device)
    tokens = torch.zeros(DRAFTED, dtype=torch.long, device=device)
    draft = Draft(tokens, None if sampling.greedy else sampling.probabilities(rows[:-1]))
    none = Draft.none(device)
    of_one, of_all, of_own = (_told(each) if told else None for each in (rows[:1], rows, own))
    plain = _time(device, lambda: judge(rows[:1], none, sampling, uniforms, of_one))
    four = _time(device, lambda: judge(rows, draft, sampling, uniforms, of_all))
    law = None if sampling.greedy else sampling.probabilities(own)

    def draw() -> None:
        Chain(1, sampling, uniforms).draw(own, favourites=of_own)
        if not told or law is not None:
            confidence_of(own, law)

    drawing = _time(device, draw)
    waiting = 0.0 if device.type == "cpu" else _time(device, lambda: own.sum().item())
    return SamplingCosts(plain, drawing, max(0.0, four - plain) / DRAFTED, waiting)


def _told(rows: Tensor) -> Favourites:
    largest, ids = likeliest(rows)
    return Favourites(ids, largest)


def _time(device: torch.device, work: Callable[[], object]) -> float:
    found = [timed(device, work)[1] for _ in range(REPEATS + 1)]
    return undisturbed(found[1:])  # the first is warm-up
