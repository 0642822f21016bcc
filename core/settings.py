"""Every setting, once: its type, default, limits and words.

The flags of the command line, the functions for programs, the page's controls, links and "copy as command" all follow
from here. A new setting is a field of `Settings`, a new precision an entry of its table, a new method one of
`core.drafting.methods`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

from core.drafting.methods import METHODS
from core.errors import UserError

POCKET_NAME = "pocket"
"""The name of the bundled pair, whose settings name no target."""
SMOLLM2_NAME = "smollm2"
"""The name of SmolLM2-135M-Instruct wherever its weights are found (core/loading/pair.py)."""
LONGEST_DRAFT = 64
"""Tokens of a draft at most: more never pay."""

BROKEN = re.compile("[\0\ud800-\udfff]")
"""What no text of a person holds: NUL, and halves of characters, which could be neither sent nor stored."""

PRECISIONS = {
    "auto": "auto",
    "nf4": "NF4 (4 bits)",
    "int4": "int4 (4 bits)",
    "bf16": "bf16 (16 bits)",
    "fp16": "fp16 (16 bits)",
    "fp32": "fp32 (32 bits)",
}
DEVICES = {"auto": "auto", "cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}
CHATS = {"auto": "as a chat message", "off": "as text to continue"}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a setting may hold and what people are told of it; name, default and `kind` (bool, int, float or str) are
    those of its field.

    Its values are of that kind, or those of `choices` (value -> what it is called). Numbers lie between `low` (above it
    where `open`) and `high`; None is no limit. Where `auto`, the word stands for the default. `most_on_page` is the
    largest number, or the most characters, that a visitor of the page may ask for; `on_page` is False for what only
    the owner of the machine decides.
    """

    label: str
    help: str
    choices: Mapping[str, Any] | None = None
    low: float | None = None
    high: float | None = None
    open: bool = False
    auto: bool = False
    of_models: bool = False
    """Whether it decides which models are loaded, and how."""
    on_page: bool = True
    most_on_page: int | None = None
    step: float = 1
    slider: float | None = None
    """Where the page shows a slider from `low`: its other end."""
    metavar: str | None = None
    name: str = ""
    default: Any = None
    kind: type = str

    def read(self, value: Any, most: float | None = None) -> Any:
        """`value`, a number or text, as this setting holds it; `most` is a limit besides its own.

        Raises UserError, one sentence, for what cannot be.
        """
        if self.auto and isinstance(value, str) and value == "auto":
            return self.default
        if value is None and self.default is None:
            return None
        if self.choices is not None:
            return self._chosen(value)
        if self.kind is bool:
            return self._switch(value)
        return self._text(value, most) if self.kind is str else self._number(value, most)

    def words(self, most: float | None = None) -> str:
        """The help, and what the setting may hold."""
        if self.choices is not None:
            return f"{self.help} One of {', '.join(self.choices)}."
        if self.kind in (bool, str):
            return self.help
        limits = self._range(self._highest(most))
        return f"{self.help} {limits[0].upper()}{limits[1:]}."

    def _highest(self, most: float | None) -> float:
        return min((limit for limit in (self.high, most) if limit is not None), default=math.inf)

    def _chosen(self, value: Any) -> str:
        if isinstance(value, str) and self.choices and value in self.choices:
            return value
        name = self.label[0].lower() + self.label[1:]
        raise UserError(f"There is no {name} {_shown(value)}; choose one of {', '.join(self.choices or ())}.")

    def _switch(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise UserError(f"{self.label} must be true or false, not {_shown(value)}.")

    def _text(self, value: Any, most: float | None) -> str:
        if not isinstance(value, str) or BROKEN.search(value):
            raise UserError(f"{self.label} must be text.")
        if most is not None and len(value) > most:
            raise UserError(f"{self.label} is longer than {most:,} characters; shorten it.")
        return value

    def _number(self, value: Any, most: float | None) -> float | int:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        high = self._highest(most)
        low = -math.inf if self.low is None else self.low
        if (
            number is None
            or not low <= number <= high
            or (self.open and number == low)
            or math.isinf(number)
            or (self.kind is int and not number.is_integer())
        ):
            shown = _shown(value) if number is None else f"{number:.12g}"
            raise UserError(f"{self.label} must be {self._range(high)}, not {shown}.")
        return self.kind(value if isinstance(value, int) else number)

    def _range(self, high: float) -> str:
        noun = ("auto or " if self.auto else "") + ("a whole number" if self.kind is int else "a number")
        if math.isinf(high):
            return noun if self.low is None else f"{noun} of at least {self.low:,}"
        return f"{noun} {'above' if self.open else 'between'} {self.low:,} and {'at most ' * self.open}{high:,}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


@dataclass(slots=True)
class Settings:
    """Everything that decides a run, as the command line names it. `target=None` means this machine's default
    pair: SmolLM2-135M-Instruct where its weights are at hand, else the bundled one."""

    target: Annotated[
        str | None,
        Spec(
            "Target",
            "The model that writes the text: a Hub id such as Qwen/Qwen3-4B, or a folder of safetensors or a GGUF file "
            "on this machine; pocket is the bundled pair. Without one: SmolLM2 where it is installed, else pocket.",
            of_models=True,
            most_on_page=300,
            metavar="ID_OR_DIR",
        ),
    ] = None
    draft: Annotated[
        str | None,
        Spec(
            "Draft",
            "The same, for the small model, or the trained head of the target, that guesses; the target once more, "
            "where it has an MTP layer. N-grams and early exit need none.",
            of_models=True,
            most_on_page=300,
            metavar="ID_OR_DIR",
        ),
    ] = None
    method: Annotated[
        str,
        Spec(
            "Method",
            "Who guesses the next tokens. Whatever the method, the target has the last word on every token. A trained "
            "head is one layer more, trained to guess from the target's hidden states: the numbers that its own layers "
            "compute on the way to a word.",
            choices=METHODS,
        ),
    ] = "draft"
    draft_length: Annotated[
        int | Literal["auto"],
        Spec(
            "Draft length",
            "How many tokens are proposed before the target checks them, all in one pass. Auto follows how many are "
            "accepted and what a pass costs on this machine.",
            low=1,
            high=LONGEST_DRAFT,
            most_on_page=16,
            auto=True,
            metavar="N|auto",
        ),
    ] = "auto"
    tree: Annotated[
        str | None,
        Spec(
            "Tree",
            "Children by depth, for the method tree: 3x2x1 is three first tokens, two continuations of each, one of "
            "each of those. Auto follows which branches are accepted and what a pass costs; the draft length does "
            "not matter here.",
            most_on_page=40,
            auto=True,
            metavar="SPEC",
        ),
    ] = None
    exit_layer: Annotated[
        int | None,
        Spec(
            "Exit layer",
            "After which of the target's layers the drafting pass stops, for early exit. Auto takes the one that "
            "promises most when measured on a few lines.",
            low=1,
            auto=True,
            metavar="L",
        ),
    ] = None
    temperature: Annotated[
        float,
        Spec(
            "Temperature",
            "0 is greedy: always the likeliest token, and speculation writes the same text as plain decoding. Above "
            "0 tokens are drawn: the texts differ by chance, their law does not.",
            low=0,
            high=100,
            slider=2,
            step=0.05,
            metavar="T",
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        Spec(
            "Top-k",
            "Draw only from the k likeliest tokens. 0 switches it off. No effect at temperature 0.",
            low=0,
            step=5,
            metavar="K",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Spec(
            "Top-p",
            "Draw only from the likeliest tokens that together hold this much probability. 1 switches it off.",
            low=0,
            high=1,
            open=True,
            step=0.05,
            metavar="P",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Spec(
            "Min-p",
            "Draw only from tokens at least this fraction as likely as the likeliest one. 0 switches it off.",
            low=0,
            high=1,
            step=0.01,
            metavar="M",
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Spec(
            "Seed",
            "The same seed gives the same run, on one device and with the same settings and draft length in every "
            "round; auto chooses lengths by measured times.",
            low=0,
            high=2**32 - 1,
            metavar="S",
        ),
    ] = 0
    max_new_tokens: Annotated[
        int,
        Spec(
            "New tokens",
            "Where to stop at the latest. A run stops earlier when the text ends.",
            low=1,
            most_on_page=4096,
            step=16,
            metavar="N",
        ),
    ] = 128
    ignore_eos: Annotated[
        bool,
        Spec("Ignore the end", "Go on past the end-of-sequence token.", on_page=False),
    ] = False
    chat: Annotated[
        Literal["auto", "off"],
        Spec(
            "Prompt is taken",
            "A chat model answers a message in its own template, thinking switched off where the template offers it. "
            "As text (off), the model goes on writing it.",
            choices=CHATS,
        ),
    ] = "auto"
    system: Annotated[
        str | None,
        Spec(
            "System prompt",
            "What a chat model is told before the prompt. Without one: nothing, or what its template says itself.",
            most_on_page=20_000,
            metavar="TEXT",
        ),
    ] = None
    device: Annotated[
        str,
        Spec("Device", "Where the models run.", choices=DEVICES, of_models=True, on_page=False),
    ] = "auto"
    precision: Annotated[
        str,
        Spec(
            "Precision",
            "How many bits a weight takes. Fewer bits are read faster from memory; auto takes what suits this machine.",
            choices=PRECISIONS,
            of_models=True,
        ),
    ] = "auto"
    draft_precision: Annotated[
        str,
        Spec(
            "Draft precision",
            "The draft may be in another precision than the target: a small draft is often faster in 16 bits. Auto: as "
            "the target; a trained head takes what is fastest.",
            choices={**PRECISIONS, "auto": "as the target"},
            of_models=True,
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        Spec(
            "Revision",
            "A branch, tag or commit of the target on the Hub. Without one, the newest.",
            of_models=True,
            most_on_page=300,
            metavar="R",
        ),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _specs() -> dict[str, Spec]:
    hints = get_type_hints(Settings, include_extras=True)
    found = {}
    for each in fields(Settings):
        held, spec = get_args(hints[each.name])
        types = get_args(held) or (held,)
        kind = next((kind for kind in (bool, int, float) if kind in types), str)
        found[each.name] = replace(spec, name=each.name, default=each.default, kind=kind)
    return found


SPECS = _specs()
"""Every setting by its name, in the order of the run document."""
# Whoever asks for help on `Settings` reads types, not all of the above a second time.
Settings.__annotations__ = get_type_hints(Settings)
Settings.__init__.__annotations__ = {**Settings.__annotations__, "return": None}


def check(settings: Settings) -> None:
    """Raise UserError, one sentence, for the first setting outside its limits."""
    for name, spec in SPECS.items():
        spec.read(getattr(settings, name))
