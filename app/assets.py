"""What the page is made of beside Python: templates, sheets, scripts as ES modules; and the theme beneath the sheets.

The running page fetches each module by itself, under an address that changes with any of them: a browser keeps them for
good and asks for none twice. A page without a server holds the same modules in itself.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from posixpath import dirname, join, normpath

from gradio.themes import Base
from gradio.themes.utils import colors, fonts, sizes
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ASSETS = Path(__file__).resolve().parent.parent / "assets"
FOREVER = "public, max-age=31536000, immutable"
"""For how long a browser may keep what has a name of its own for every content."""
INCLUDE = re.compile(r"<!-- include ([\w/]+\.html) -->\n")
IMPORT = re.compile(r'^(import \{ [\w, ]+ \} from )"(\.[\w./]+)";$', re.MULTILINE)
"""The one form in which our modules name each other."""


@cache
def asset(name: str) -> str:
    """A file's text, by its path below assets/, with the files that it includes in their places."""
    text = (ASSETS / name).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda found: asset(found[1]), text)


@cache
def modules() -> dict[str, str]:
    """Every module's text by its path below assets/."""
    paths = sorted(path.relative_to(ASSETS).as_posix() for path in ASSETS.glob("*/*.js"))
    return {path: asset(path) for path in paths}


@cache
def version() -> str:
    """A name for the modules as they are now."""
    return sha256("\0".join(f"{path}\0{text}" for path, text in modules().items()).encode()).hexdigest()[:16]


def address(module: str) -> str:
    """Where the page finds a module, from its own address on (its `base`, wherever a proxy puts that)."""
    if module not in modules():
        raise ValueError(f"there is no module {module}")
    return f"scripts/{version()}/{module}"


def preloads(*entries: str) -> str:
    """Links by which a browser fetches modules and all they need at once, not level by level."""
    wanted = dict.fromkeys(module for entry in entries for module in needed(entry))
    return "".join(f'<link rel="modulepreload" href="{address(module)}">' for module in wanted)


def route() -> Route:
    """Serves the modules and nothing else, to anybody who reaches the page: they hold what its repository holds."""

    def serve(request: Request) -> Response:
        text = modules().get(request.path_params["module"])
        if text is None or request.path_params["version"] != version():
            return Response("There is no such script.", 404, media_type="text/plain")
        return Response(text, headers={"Cache-Control": FOREVER}, media_type="text/javascript")

    return Route("/scripts/{version}/{module:path}", serve)


def imports_of(module: str) -> list[str]:
    """The modules that a module imports."""
    return [_path(module, found[2]) for found in IMPORT.finditer(modules()[module])]


def needed(entry: str) -> list[str]:
    """`entry`, and all that it needs to run."""
    found = [entry]
    for module in found:  # which grows meanwhile
        found += [each for each in imports_of(module) if each not in found]
    return found


@cache
def import_map(entry: str) -> str:
    """`entry` and all that it needs as a browser's import map of modules by their paths below assets/.

    For a page without a server. A module in such a map has no address to look from, so it names others by those paths.
    """

    def held(module: str) -> str:
        text = IMPORT.sub(lambda found: f'{found[1]}"{_path(module, found[2])}";', modules()[module])
        return f"data:text/javascript;base64,{b64encode(text.encode()).decode()}"

    return json.dumps({"imports": {module: held(module) for module in needed(entry)}})


def _path(module: str, named: str) -> str:
    return normpath(join(dirname(module), named))


INK = colors.Color(
    name="ink",
    c50="#fafaf9",
    c100="#f4f4f3",
    c200="#e5e5e3",
    c300="#d3d3d0",
    c400="#9c9c98",
    c500="#71716d",
    c600="#545450",
    c700="#3a3a37",
    c800="#262624",
    c900="#1a1a19",
    c950="#121211",
)
ACCENT = colors.Color(
    name="accent",
    c50="#f3f1fd",
    c100="#e8e4fb",
    c200="#d3ccf7",
    c300="#b4a8f0",
    c400="#9382e6",
    c500="#7560d8",
    c600="#5f48c6",
    c700="#4f3aa8",
    c800="#423289",
    c900="#372b6e",
    c950="#211945",
)


def theme() -> Base:
    """Colours and type: neutral surfaces, one accent; colour is left to what became of a token. Fonts are the ones
    Gradio itself serves, in the two weights that it serves whole: no other host is asked."""
    return Base(
        primary_hue=ACCENT,
        secondary_hue=ACCENT,
        neutral_hue=INK,
        text_size=sizes.text_sm,
        spacing_size=sizes.spacing_sm,
        radius_size=sizes.radius_sm,
        font=[fonts.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif"],
        font_mono=[fonts.LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="#a9a9a4",
        background_fill_primary="white",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="*neutral_950",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_title_text_weight="400",
        block_title_text_color="*neutral_900",
        block_title_text_color_dark="*neutral_100",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="#a9a9a4",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_width="1px",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_900",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_700",
        button_border_width="1px",
        button_large_text_weight="400",
        button_large_text_size="14px",
        button_large_padding="6px 14px",
        button_large_radius="6px",
        form_gap_width="0px",
        container_radius="8px",
        input_radius="6px",
        layout_gap="10px",
        section_header_text_weight="700",
        button_primary_border_color="transparent",
        button_primary_shadow="none",
        shadow_drop="none",
        shadow_drop_lg="none",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
    )
