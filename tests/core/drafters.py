"""Every way of drafting, over lookup tables: one place, so that every law is tested for all of them."""

from lookup import CPU, LookupRunner, LookupView, table
from torch import Tensor

from core.drafting import Drafter
from core.drafting.model import ModelDrafter
from core.drafting.ngram import CombinedDrafter, NgramDrafter
from core.drafting.tree import TreeDrafter, parse_shape
from core.sampling import Sampling

TARGET = table(seed=0)
DRAFTS = {
    "similar": TARGET + table(seed=1, spread=0.7),
    "hot": table(seed=2, spread=0.3),
    "cold": table(seed=3, spread=5.0),
    "equal": TARGET,
    "disjoint": -3 * TARGET,
    "obsessed": (0.5 * TARGET).scatter(1, TARGET.argmin(1, keepdim=True), 2.5),
}
"""Draft models by how they relate to the target; the last has a favourite that the target all but excludes."""

METHODS = ("plain", "draft", "early-exit", "ngram", "ngram+draft", "tree 2x2", "tree 2x2 i.i.d.")


def make_drafter(method: str, target: LookupRunner, draft: Tensor, sampling: Sampling) -> Drafter | None:
    """The drafter of a method, as core.drafting.build puts it together, over tables."""
    if method == "plain":
        return None
    if method == "ngram":
        return NgramDrafter(CPU)
    if method == "early-exit":
        return ModelDrafter(LookupView(target, draft), sampling)
    if method.startswith("tree"):
        shape = parse_shape(method.split()[1])
        return TreeDrafter(LookupRunner(draft), sampling, lambda: shape, replacement=method.endswith("i.i.d."))
    model = ModelDrafter(LookupRunner(draft), sampling)
    # Only long repeats, so that both halves of the combination get their turn.
    return CombinedDrafter(NgramDrafter(CPU, shortest=5, longest=6), model) if method == "ngram+draft" else model
