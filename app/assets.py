"""What the page is made of beside Python: templates, sheets, and scripts as ES modules.

The running page fetches each module by itself, under an address that changes with any of them: a browser keeps them for
good and asks for none twice. A page without a server gets the same modules as one script.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from posixpath import dirname, join, normpath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ASSETS = Path(__file__).resolve().parent.parent / "assets"
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "(\.[\w./]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
"""The two forms that our modules use, and `in_one_script` knows."""


@cache
def asset(name: str) -> str:
    """A file's text, by its path below assets/."""
    return (ASSETS / name).read_text(encoding="utf-8")


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
    needed = dict.fromkeys(module for entry in entries for module in in_order(entry))
    return "".join(f'<link rel="modulepreload" href="{address(module)}">' for module in needed)


def route() -> Route:
    """Serves the modules and nothing else, to anybody who reaches the page: they hold what its repository holds."""

    def serve(request: Request) -> Response:
        text = modules().get(request.path_params["module"])
        if text is None or request.path_params["version"] != version():
            return Response("There is no such script.", 404, media_type="text/plain")
        forever = {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(text, headers=forever, media_type="text/javascript")

    return Route("/scripts/{version}/{module:path}", serve)


def imports_of(module: str) -> dict[str, list[str]]:
    """What a module imports: names by the path of the module they come from."""
    return {
        normpath(join(dirname(module), path)): names.split(", ") for names, path in IMPORT.findall(modules()[module])
    }


def in_order(entry: str) -> list[str]:
    """`entry` and all that it needs, each after what it imports. Raises ValueError where modules import in a circle."""
    done: list[str] = []

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            raise ValueError(f"modules import each other: {' -> '.join([*above, module])}")
        if module in done:
            return
        for needed in imports_of(module):
            visit(needed, (*above, module))
        done.append(module)

    visit(entry, ())
    return done


@cache
def in_one_script(entry: str) -> str:
    """`entry` and all that it needs as one classic script that calls its `mount()`.

    Each module becomes a function, which returns what the module exports.
    """
    names = {module: f"m{number}" for number, module in enumerate(in_order(entry))}
    parts = [f"const {name} = {_function(module, names)};\n" for module, name in names.items()]
    return '(() => {\n"use strict";\n' + "".join(parts) + f"{names[entry]}.mount();\n}})();\n"


def _function(module: str, names: dict[str, str]) -> str:
    imports = imports_of(module)
    text = modules()[module]
    exports = EXPORT.findall(text)
    body = EXPORT.sub("", IMPORT.sub("", text))
    if re.search(r"^\s*(import|export)\b(?!\()", body, re.MULTILINE):
        raise ValueError(f"{module} imports or exports in a form that cannot be put into one script")
    heads = [f"const {{ {', '.join(found)} }} = {names[path]};\n" for path, found in imports.items()]
    return f"(() => {{\n{''.join(heads)}{body}return {{ {', '.join(exports)} }};\n}})()"
