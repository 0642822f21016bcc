"""What the tab Train says: what will happen, what is kept. Names come from people and hubs,
so all is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from core.loading.pair import label_of

OFF = (
    "Training is off on this public page: it would take the device from everybody else for minutes. Start the app on "
    "a machine of your own, or use python -m core train-head."
)
ENGINES = ("vLLM", "SGLang")
"""Those that draft with such a head."""


def short(folder: Path) -> str:
    """A folder as people write it."""
    home = Path.home()
    return f"~/{folder.relative_to(home).as_posix()}" if folder.is_relative_to(home) else str(folder)


def duration(seconds: float) -> str:
    """Time as people say it."""
    if seconds < 90:
        return f"{round(seconds)} seconds"
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{seconds / 3600:.1f} hours"


def forecast(target: str, plan: Mapping[str, Any], folder: Path) -> str:
    """What Start would do."""
    own = plan["prompts"]
    name = label_of(target, "target")
    does = f"answers your {len(own)} prompts" if own else "writes texts of its own"
    long = duration(plan["seconds"]) if plan.get("seconds") else f"{plan['tokens']:,} tokens"
    return (
        f"Start: {name} {does}, and a head of one layer learns from them to guess its next tokens, for {long}. "
        f"It is kept in {short(folder)}."
    )


def resumption(standing: Mapping[str, Any], folder: Path) -> str:
    """What Resume would do."""
    so_far = "that was just begun"
    if standing:
        so_far = f"of {duration(standing['seconds'])} ({standing['agreement'][0]:.0%} of first tokens accepted)"
    return f"Resume: goes on with the training {so_far} in {short(folder)}, where it stopped."


def kept_html(folder: Path, standing: Mapping[str, Any]) -> str:
    """Where the newest head lies, and how good it is."""
    shares = ", ".join(f"{share:.0%}" for share in standing.get("agreement", ()))
    of = f" It accepts {shares} at positions 1 to {len(standing['agreement'])} of held-out answers." if shares else ""
    return f"<p>The newest head of this target is kept in <code>{escape(str(folder))}</code>.{escape(of)}</p>"
