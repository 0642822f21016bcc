"""Which pair: the catalogue's, the one the app was started with, or any other; and a card on it before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any, NamedTuple

import gradio as gr
from gradio.events import Dependency

from app.header import short_pair
from app.insides import PRIVATE, QUIET, UNCHECKED, html_block
from app.serving import Engine, Offer
from app.serving.device import Device
from app.serving.turns import Event, guarded, sentence, with_device
from app.serving.visit import Visit, alone
from app.settings import CONTROLS, NAMED, PAIR_CONTROLS, pair_from
from app.sidebar import control, follow_pair
from app.sidebar.card import card_html, outlooks_html, trouble_html, waiting_html
from core.drafting.methods import HEAD, HEADS, METHODS, Means, method_of
from core.errors import UserError
from core.inspecting.acceptance import Acceptance, of_runs
from core.inspecting.catalogue import Found
from core.measuring.deciding import Gain, baseline_of, gain_of
from core.progress import in_bytes, never
from core.records import Run
from core.settings import POCKET_NAME, Settings

SENT = (*CONTROLS, "pair")
"""Whose values go with what is asked for; `sent` reads them."""
OTHER = "other…"
BUNDLED = f"{POCKET_NAME} (bundled)"
FOLLOWING = ("method", "refused", "exit_layer", "chat", "system", "news")
"""What depends on the pair: controls, and what its choice changed of them."""
PLACEHOLDERS = {
    "target": "owner/model, folder or file.gguf",
    "draft": "owner/model, folder, file.gguf, or empty",
    "revision": "main",
}


@dataclass(frozen=True)
class Choice:
    """An entry of the list: what it is called, and the models it means ("" for those the app was started with)."""

    label: str
    target: str = ""
    draft: str = ""
    why: str = ""
    gated: bool = False


def choices(
    started: Settings, offers: list[Offer], public: bool, found_here: Sequence[Found] = ()
) -> dict[str, Choice]:
    """The entries by value: the pair of the start first, then the bundled one, the catalogue, what other programs
    keep on this machine, and whatever is typed."""
    bundled = started.target == POCKET_NAME
    found = {"default": Choice(BUNDLED if bundled and started.draft is None else short_pair(started))}
    if not bundled:
        found[POCKET_NAME] = Choice(BUNDLED, POCKET_NAME, POCKET_NAME)
    for offer in offers:
        if (offer.target, offer.draft) == (started.target, started.draft):
            found["default"] = Choice(_label(offer), why=offer.why)
            continue
        found[offer.name] = Choice(_label(offer), offer.target, offer.draft or "", offer.why, offer.gated)
    if public:
        return found
    for each in found_here:
        label = f"{each.label} ({each.place}, {in_bytes(each.bytes)})"
        found[each.name] = Choice(label, each.name, why=f"Found on this machine, where {each.place} keeps its models.")
    return {**found, OTHER: Choice(OTHER)}


def _label(offer: Offer) -> str:
    if offer.cached:
        return f"{offer.name} (here)"
    meant = "any machine" if not offer.memory_gb else f"{offer.memory_gb} GB"
    return f"{offer.name} ({meant}{'' if offer.fits else ' GPU'}{', gated' if offer.gated else ''})"


def as_chosen(choices: Mapping[str, Choice], pair: Any, controls: dict[str, Any]) -> dict[str, Any]:
    """The values of the controls with the models of the pair that is chosen, whose fields are filled a moment later."""
    chosen = choices.get(pair)
    if chosen is None or pair == OTHER:
        return controls
    models = {"target": chosen.target, "draft": chosen.draft}
    same = all((controls.get(name) or "") == models[name] for name in models)
    return controls if same else {**controls, **models, "revision": ""}


def sent(choices: Mapping[str, Choice], values: Sequence[Any]) -> dict[str, Any]:
    """The values of SENT, as they came from the page, by name and of the pair that is chosen."""
    controls = dict(zip(SENT, values))
    return as_chosen(choices, controls.pop("pair", None), controls)


def reasons_of(found: dict[str, Any]) -> dict[str, str | None]:
    """Each method with the reason why a pair that was inspected cannot use it; the same as once it is loaded."""
    likeness = found["likeness"] or {}
    no_draft = None if found["draft"] else "no draft model is named"
    if likeness.get("same") is False and not likeness.get("usable", True):
        no_draft = "its draft does not fit the target"
    kind = (found["draft"] or {}).get("model_type")
    head = kind in HEADS
    no_head = "no trained head of the target is named"
    if head:
        no_head, no_draft = no_draft, f"the draft is a trained head, whose method is {method_of(kind).label}"
    alike = likeness.get("same") is not False
    return Means(no_draft, no_head, kind if head else HEAD, found["target"]["layers"], alike).reasons()


class Asked(NamedTuple):
    """What the controls say of a pair: the entry of the list, what is typed, and the method beside it."""

    pair: str
    target: str
    draft: str
    revision: str
    precision: str = "auto"
    draft_precision: str = "auto"
    method: str = ""


class Picker:
    """The list, the fields of a pair that is typed, the card, and Unload. `values` are those of `Asked`."""

    def __init__(self, engine: Engine, device: Device, public: bool = False) -> None:
        self.engine = engine
        self.device = device
        self.choices = choices(engine.settings, engine.offers(), public, [] if public else engine.found())

    def build(self) -> dict[str, Any]:
        """Lay it out; the controls by name, "pair" and those of `app.settings.CONTROLS` that it holds."""
        controls: dict[str, Any] = {
            "pair": gr.Dropdown(
                [(choice.label, value) for value, choice in self.choices.items()],
                value="default",
                label="Pair",
                info="The target writes the text. The draft, much smaller, guesses what it will write next. Those on "
                "this machine come first, then those that fit it.",
                filterable=False,
                elem_id="pair",
            ),
            **{
                name: control(name, Settings(), visible=False, placeholder=text, elem_id=f"pair-{name}")
                for name, text in PLACEHOLDERS.items()
            },
        }
        controls["card"] = html_block(waiting_html(""), elem_id="pair-card")
        controls["news"] = html_block(elem_id="pair-news")
        controls["gpu"] = gr.Dropdown(
            self.engine.gpus(),
            value=[],
            label="What if my GPU is …",
            info="Predicts this pair on a card that is not here: whether it fits, how fast, and whether its draft "
            "pays. Choose one, or two to compare them, or type figures: 12 GB, 504 GB/s, 58 TFLOPS.",
            multiselect=True,
            max_choices=2,
            allow_custom_value=True,
            elem_id="gpu",
        )
        controls["outlook"] = html_block(elem_id="outlook", visible=False)
        controls["draft_precision"] = control("draft_precision", self.engine.settings, render=False)
        return controls

    def connect(
        self,
        page: gr.Blocks,
        controls: dict[str, Any],
        visit: gr.State,
        opened: Dependency,
        linked: gr.State,
        finished: Dependency,
    ) -> Dependency:
        """Fill the fields when a pair is chosen, and choose the pair that a link named (`opened`, `linked`): the event
        that ends then. Look at it, without a turn on the device: its card, what it would be like on another GPU, and
        the controls that depend on it. The card is of the method chosen, and goes by the visitor's own runs once one
        has `finished`."""
        fields = [controls[name] for name in NAMED]
        # By the browser itself: nothing of the old pair is sent with what is asked for next.
        filled = f"pair => ({json.dumps({value: self.fill(value) for value in self.choices})})[pair]"
        controls["pair"].change(None, controls["pair"], fields, js=filled, show_progress="hidden")
        # Not by the fields: while `fill` is on its way, one is of the new pair and one of the old.
        recognised = opened.then(self.recognise, [controls["pair"], linked], [controls["pair"], *fields], **QUIET)
        controls["unload"].click(self.unload, None, controls["unloaded"], concurrency_limit=None, **PRIVATE)
        typed = [event for field in fields for event in (field.submit, field.blur)]
        options: dict[str, Any] = {"concurrency_limit": None, "trigger_mode": "always_last", **PRIVATE}
        asked = [visit, *(controls[name] for name in Asked._fields)]
        predicting = self.predict, [controls["gpu"], visit, controls["pair"], *fields], controls["outlook"]
        gr.on([controls["gpu"].change, controls["pair"].change, *typed], *predicting, **options)
        gr.on(
            [page.load, *(controls[name].change for name in ("pair", "precision", "draft_precision")), *typed],
            self.look,
            asked,
            [controls[name] for name in ("card", *FOLLOWING)],
            **options,
            **UNCHECKED,
        )
        learning = self.learn, asked, controls["card"]
        controls["method"].change(*learning, **options, **UNCHECKED)
        finished.then(*learning, **options, **UNCHECKED).then(*predicting, **options)
        return recognised

    def fill(self, pair: str) -> list[Any]:
        """The fields of a pair. What was typed before is taken away with the fields."""
        if pair == OTHER:
            return [gr.update(visible=True) for _ in NAMED]
        chosen = self._choice(pair)
        return [gr.update(value=value, visible=False) for value in (chosen.target, chosen.draft, "")]

    def recognise(self, pair: str, linked: tuple[str, str]) -> list[Any]:
        """The entry that means the target and the draft of a link. A visitor who has chosen already, whose fields may
        not be filled yet, keeps the choice."""
        chosen = self._choice(pair)
        if pair != "default" or linked == (chosen.target, chosen.draft):
            return [gr.skip() for _ in range(1 + len(NAMED))]
        same = [value for value, each in self.choices.items() if (each.target, each.draft) == linked]
        if same or OTHER not in self.choices:
            return [same[0] if same else pair, *self.fill(same[0] if same else pair)]
        return [OTHER, *(gr.update(visible=True) for _ in NAMED)]

    def look(self, visit: Visit, *values: Any) -> Iterator[list[Any]]:
        """The card of a pair: at once that it is being looked at, then what was found and the controls that follow."""
        asked, unchanged = Asked(*values), [gr.skip() for _ in FOLLOWING]
        try:
            if asked.pair == OTHER and not asked.target:
                words = "Name a target, and a draft for it; this card will tell what they would be like here."
                yield [waiting_html(words), *unchanged]
                return
            settings = self._named(asked)
            yield [waiting_html("Looking at the models' configs…"), *unchanged]
            found = self.engine.inspect(settings, measured_acceptance(visit, settings))
            loaded = self.engine.loaded(settings)
            reasons = self.engine.methods(loaded) if loaded is not None else reasons_of(found)
            updates = follow_pair(reasons, asked.method, found["target"]["layers"], bool(found["target"]["chat"]))
            following = [updates[name] for name in FOLLOWING]
            yield [self._card(asked.pair, settings, visit, found), *following]
            if asked.pair == OTHER:  # "which draft for my target?"
                yield [self._card(asked.pair, settings, visit, found, self.engine.drafts(settings)), *following]
        except Exception as error:
            yield [trouble_html(sentence(error)), *unchanged]

    def learn(self, visit: Visit, *values: Any) -> Any:
        """The card of a pair once more: another method was chosen, or a run has told what one brings."""
        asked = Asked(*values)
        try:
            settings = self._named(asked)
            found = self.engine.inspect(settings, measured_acceptance(visit, settings))
            drafts = self.engine.drafts(settings) if asked.pair == OTHER else ()
            return self._card(asked.pair, settings, visit, found, drafts)
        except UserError:  # the run has said it, or the card does
            return gr.skip()
        except Exception as error:
            return trouble_html(sentence(error))

    def _card(
        self,
        pair: str,
        settings: Settings,
        visit: Visit,
        found: dict[str, Any],
        drafts: Sequence[tuple[str, float]] = (),
    ) -> str:
        chosen = self._choice(pair)
        return card_html(found, chosen.why, chosen.gated, drafts, settings.method, measured_gain(visit, settings))

    def predict(self, gpus: list[str] | None, visit: Visit, *values: Any) -> Any:
        """What the pair would be like on one or two GPUs that are not here; nothing where none is named."""
        asked = Asked(*values)
        if not gpus or (asked.pair == OTHER and not asked.target):
            return gr.update(visible=False, value="")
        try:
            settings = self._named(asked)
            found, compared = self.engine.predict_on(gpus, settings, measured_acceptance(visit, settings))
            return gr.update(visible=True, value=outlooks_html(found, compared))
        except Exception as error:
            return gr.update(visible=True, value=trouble_html(sentence(error)))

    def _named(self, asked: Asked) -> Settings:
        """The settings of the pair that is chosen, or typed, with the method beside it."""
        chosen = self._choice(asked.pair)
        if asked.pair != OTHER:
            asked = asked._replace(target=chosen.target, draft=chosen.draft, revision="")
        found = pair_from(self.engine.settings, **{name: getattr(asked, name) for name in PAIR_CONTROLS})
        return replace(found, method=asked.method) if asked.method in METHODS else found

    def unload(self) -> Iterator[str]:
        """Free the models in memory once nothing runs; the next run loads what it needs. Not for strangers, who share
        them."""

        def free() -> Iterator[Event]:
            freed = self.engine.unload()
            text = f"Freed {in_bytes(freed)} of weights." if freed else "Nothing is loaded."
            yield {"e": "status", "kind": "finished", "text": text}

        def events() -> Iterator[Event]:
            if self.engine.public:
                raise UserError("On this public page the models are everybody's; they stay loaded.")
            yield from with_device(self.device, never, free)

        for event in guarded(events()):
            if event["e"] != "done":
                yield _said(event["text"])

    def _choice(self, pair: Any) -> Choice:
        if pair not in self.choices:
            raise UserError(f"There is no pair {pair!r} in this list.")
        return self.choices[pair]


def _said(text: str) -> str:
    return f'<p role="status">{escape(text)}</p>'


NEWEST = 8
"""Races of this visit that speak for a pair."""
HERE = "here, in your latest runs of this pair"


@alone
def measured_acceptance(visit: Visit, settings: Settings) -> Acceptance | None:
    """Accepted ÷ judged in the newest runs of this visit that the pair's draft drafted; None where they are few."""
    of_pair = partial(_drafted_by, (settings.target, settings.draft, settings.revision))
    entries = [entry for entry in reversed(visit.entries) if any(map(of_pair, entry.heads))]
    return of_runs((run for entry in entries[:NEWEST] for run in entry.document()["runs"] if of_pair(run)), HERE)


def _drafted_by(pair: tuple[str | None, ...], run: dict[str, Any]) -> bool:
    """Whether a run, by its head, was drafted by the draft of this pair."""
    own = run["settings"]
    method = METHODS[own["method"]]
    if method.tree or method.network not in ("draft", "head"):  # of a tree, what stood tells of more than the draft
        return False
    return tuple(own.get(name) for name in ("target", "draft", "revision")) == pair


@alone
def measured_gain(visit: Visit, settings: Settings) -> Gain | None:
    """What the method of these settings brought their pair in the newest races of this visit, each beside plain
    decoding; None where it was not run."""
    own = ("target", "draft", "revision", "precision", "draft_precision", "method")

    def alike(run: dict[str, Any]) -> bool:
        return all(run["settings"].get(name) == getattr(settings, name) for name in own)

    races: list[tuple[Run, Run]] = []
    for entry in reversed(visit.entries):
        if len(races) < NEWEST and any(map(alike, entry.heads)):
            runs = entry.runs
            drafting = [run for run, head in zip(runs, entry.heads) if alike(head) and run.rounds]
            races += [(run, plain) for run in drafting if (plain := baseline_of(run, runs))]
    return gain_of(races) if settings.method != "plain" else None
