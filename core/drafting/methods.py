"""The methods: who drafts, in plain data, without torch. Everything that speaks of methods iterates over this table.

A method is its entry here and, in the file of its drafter, how that is built and what its rounds cost (`Way`, in
core/drafting/build.py). A new one touches these two and its tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD = "EAGLE-3 head"
"""What an inspected draft's `model_type` is where it is a trained head of the target."""
MTP = "MTP layer"
"""The same, where it is the layer for predicting several tokens that the target itself comes with."""
BLOCK = "block drafter"
"""The same, where it drafts a whole block in one pass (DFlash, DSpark, P-EAGLE)."""


@dataclass(frozen=True)
class Method:
    """`label` and `help` are its words; `guesser`, in the singular, who guesses in a sentence of the page.

    `module` is the file of its drafter in core/drafting. `network` drafts in it: a draft model, a trained head or
    layers of the target; None where none does. `ngram`: what followed the same words before is proposed first.
    `tree`: of several continuations. `settings` are those that only some methods heed. `heads` are the kinds of head it
    drafts with. `own_tokens`: the draft must have the target's. `elsewhere` is what other engines have in its place.
    """

    name: str
    label: str
    help: str
    guesser: str = ""
    module: str = ""
    network: Literal["draft", "head", "target"] | None = None
    ngram: bool = False
    tree: bool = False
    settings: tuple[str, ...] = ("draft_length",)
    heads: tuple[str, ...] = ()
    own_tokens: bool = False
    elsewhere: str = ""

    @property
    def drafts(self) -> bool:
        return bool(self.module)

    @property
    def simple(self) -> bool:
        """Whether one drafter proposes chains."""
        return not (self.tree or (self.ngram and self.network))

    @property
    def swept(self) -> bool:
        """Whether a sweep may vary its draft length."""
        return self.drafts and not self.tree

    def heeds(self, setting: str) -> bool:
        """Whether a setting means anything to it."""
        return setting in self.settings or setting not in SOME_HEED

    def missing(self, means: Means) -> str | None:
        """Why a pair cannot use it; None: it can."""
        if self.network == "target":
            return None if means.layers >= 2 else "the target has a single layer"
        if self.network == "head":
            if means.no_head or means.head in self.heads:
                return means.no_head
            what = "drafts chains, and no trees" if self.tree else f"is drafted with by {method_of(means.head).label}"
            return f"the {means.head} {what}"
        if self.network == "draft":
            if means.no_draft or means.same_tokens or not self.own_tokens:
                return means.no_draft
            return f"a {self.label.lower()} needs a draft with the target's own tokens"
        return None


@dataclass(frozen=True)
class Means:
    """What a pair has to draft with. `no_draft` and `no_head` say why there is no draft model and no trained head
    (None: there is one); `head` is the head's kind, `layers` are the target's; `same_tokens`: the draft has its tokens.
    """

    no_draft: str | None
    no_head: str | None
    head: str
    layers: int
    same_tokens: bool

    def reasons(self) -> dict[str, str | None]:
        """Every method with None where it can be used, else the reason why not."""
        return {name: method.missing(self) for name, method in METHODS.items()}


_ALL = (
    Method("plain", "Plain only", "No speculation: one token per pass.", settings=()),
    Method(
        "draft",
        "Draft model",
        "A small model proposes, the target checks.",
        guesser="a small draft model",
        module="model",
        network="draft",
    ),
    Method(
        "head",
        "Trained head",
        "One extra layer, trained on what the target computes, proposes.",
        guesser="a trained head (one more layer on top of the target)",
        module="head",
        network="head",
        heads=(HEAD, MTP),
    ),
    Method(
        "head-tree",
        "Trained head, tree",
        "The same layer proposes its likeliest continuations, checked in one pass.",
        guesser="a trained head (one more layer on top of the target)",
        module="head",
        network="head",
        tree=True,
        heads=(HEAD,),
        elsewhere="head",
    ),
    Method(
        "block",
        "Block drafter",
        "A few layers, trained on what the target computes, propose a whole block in one pass.",
        guesser="a trained block drafter (a few more layers on top of the target)",
        module="block",
        network="head",
        heads=(BLOCK,),
    ),
    Method(
        "ngram",
        "N-gram",
        "Proposes what followed the same words before; no second model.",
        guesser="an n-gram (what followed the same words earlier in the text)",
        module="ngram",
        ngram=True,
    ),
    Method(
        "ngram+draft",
        "N-gram, then draft",
        "Repeats where the text repeats, else asks the small model.",
        guesser="an n-gram (what followed the same words earlier in the text), or else a small draft model,",
        module="ngram",
        network="draft",
        ngram=True,
        elsewhere="draft",
    ),
    Method(
        "ngram+head",
        "N-gram, then head",
        "Repeats where the text repeats, else asks the trained head.",
        guesser="an n-gram (what followed the same words earlier in the text), or else a trained head,",
        module="ngram",
        network="head",
        ngram=True,
        heads=(HEAD, MTP),
        elsewhere="head",
    ),
    Method(
        "early-exit",
        "Early exit",
        "The target's own first layers propose.",
        guesser="a short cut through the target's own first layers",
        module="model",
        network="target",
        settings=("draft_length", "exit_layer"),
    ),
    Method(
        "tree",
        "Tree",
        "Proposes several continuations at once, checked in one pass.",
        guesser="a small draft model",
        module="tree",
        network="draft",
        tree=True,
        settings=("tree",),
        own_tokens=True,
    ),
)
METHODS = {method.name: method for method in _ALL}
"""Every method by its name, in the order in which they are offered."""
SOME_HEED = frozenset(setting for method in _ALL for setting in method.settings)
"""Settings that mean nothing to other methods."""
HEADS = frozenset(head for method in _ALL for head in method.heads)
"""The kinds of trained head."""


def method_of(head: str) -> Method:
    """The method that a head of this kind drafts in where none is named."""
    return next(method for method in _ALL if head in method.heads)
