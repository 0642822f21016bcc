"""The front door: reads the arguments, loads the pair, opens the page."""

from __future__ import annotations

import os
import signal
import sys

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it asks once


def main() -> int:
    from app.arguments import read_arguments

    chosen = read_arguments()
    from app.engine import Engine
    from app.page import build, launch_options
    from core.errors import UserError
    from core.records import Settings

    settings = Settings(target=chosen.target, draft=chosen.draft, precision=chosen.precision)
    try:
        page = build(Engine(settings), public=chosen.public)
        _, address, shared = page.launch(
            server_name=chosen.host,
            server_port=chosen.port,
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
    print(f"Ready: {address}" + (f" and {shared}" if shared else ""), flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl+C does
    page.block_thread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
