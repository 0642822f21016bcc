"""The HTML of Explain: `html.NAME(…)` calls a macro of explain.html, which escapes what is not HTML already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.tokens.markup import plural, probability, quoted, shape

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "n": "{:,}".format,
    "plural": plural,
    "probability": probability,
    "quoted": quoted,
    "shape": shape,
}
html: Any = _environment.get_template("explain.html").module
