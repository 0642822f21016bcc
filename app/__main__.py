"""The page from the front door on: reads the arguments, loads the pair, opens the page."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it asks once
with suppress(ImportError):
    if os.environ.get("SPACES_ZERO_GPU"):
        import spaces  # type: ignore[import-not-found]  # noqa: F401  (before anything can touch CUDA)


def main() -> int:
    from app.serving.first_screen import first_screen
    from app.serving.starting import leave_garbage, own_uploads, serve
    from app.settings import read_arguments, unguarded, unmet
    from core.errors import UserError
    from core.progress import console

    chosen = read_arguments()
    leave_garbage()
    try:
        own_uploads()
        with first_screen(chosen.host, chosen.port, console()) as (tell, port):
            page, device, engine, pair = prepare(chosen, tell)
        from app.insides import without_tools
        from app.page import launch_options

        _, address, shared = page.launch(
            server_name=chosen.host,
            server_port=port,
            share=chosen.share,
            auth=chosen.auth,
            mcp_server=chosen.mcp,
            prevent_thread_lock=True,
            quiet=True,
            **launch_options(),
        )
    except (UserError, OSError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped before the page was ready.", file=sys.stderr)
        return 130
    for trouble in filter(None, (engine.instead, unguarded(chosen), *unmet(chosen, shared, without_tools(page)))):
        print(trouble, file=sys.stderr, flush=True)
    print(f"Ready: {address}" + (f" and {shared}" if shared else ""), flush=True)
    serve(page, engine, device, pair)
    return 0


def prepare(chosen: Namespace, tell: Callable[[str], None]) -> tuple[Any, Any, Any, Any]:
    """The page, the device its visitors share, the engine and the pair it has loaded: what a start takes its time
    for."""
    from app.serving.starting import beside, bundled_instead, engine_for, load

    tell("Importing PyTorch and transformers")
    from app.serving.device import Device

    device, engine = Device(), engine_for(chosen.target, chosen.draft, chosen.precision)
    with beside(partial(load, engine, tell)) as loading:
        import app.insides  # noqa: F401  (first: it imports Gradio in half the time)
        from app.api import leave_to_programs
        from app.page import build
    if (why := loading.exception()) and chosen.target is None:
        engine, pair = bundled_instead(engine, why, tell)
    else:
        pair = loading.result()
    tell("Building the page")
    page = build(engine, public=chosen.public, device=device)
    if chosen.mcp:
        leave_to_programs(page)
    return page, device, engine, pair


if __name__ == "__main__":
    sys.exit(main())
