"""Models whose passes nobody has timed: every draft length here is fixed, and to measure what no run asks for takes
longer than several runs."""

import torch

from core.costs import CostTable
from core.costs.rounds import RoundCosts
from core.drafting.tree import MOST_NODES
from core.loading import load_model
from core.loading.model import Model


def load_unmeasured(name: str, precision: str) -> Model:
    """A model with made-up costs, as far as any method asks."""
    model = load_model(name, torch.device("cpu"), precision)
    model.costs = CostTable({1: 1.0, MOST_NODES + 1: 1.0})
    model.exits = dict.fromkeys(range(1, model.layers), RoundCosts(model.costs))
    return model
