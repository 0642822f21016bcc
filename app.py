"""The front door: reads the arguments, loads the pair, opens the page."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it asks once
with suppress(ImportError):
    if os.environ.get("SPACES_ZERO_GPU"):
        import spaces  # type: ignore[import-not-found]  # noqa: F401  (before anything can touch CUDA)


def main() -> int:
    from app.settings import read_arguments, unmet

    chosen = read_arguments()
    from app.api import leave_to_programs
    from app.insides import hang_up
    from app.page import build, launch_options
    from app.serving import Engine
    from app.serving.device import Device, measure_in_turn
    from app.serving.spaces import settle_in
    from core.errors import UserError
    from core.loading.pair import choose_method, choose_target
    from core.progress import console
    from core.records import Settings

    target = choose_target(chosen.target)
    method = choose_method(target, chosen.draft)
    settings = Settings(target=target, draft=chosen.draft, method=method, precision=chosen.precision)
    device = Device()
    try:
        engine = Engine(settings)
        settle_in(engine)
        pair = engine.load(engine.settings, console(), measure=False)
        page = build(engine, public=chosen.public, device=device)
        if chosen.mcp:
            leave_to_programs(page)
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
    for trouble in unmet(chosen, shared, page.mcp_error):
        print(trouble, file=sys.stderr, flush=True)
    print(f"Ready: {address}" + (f" and {shared}" if shared else ""), flush=True)

    ended = threading.Event()
    threading.Thread(target=measure_in_turn, args=(device, pair), name="measuring", daemon=True).start()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    ended.wait()
    device.close()
    device.drain(5)  # a thread in the middle of a pass would bring the interpreter down
    logging.disable()  # of connections cut short
    threading.Timer(1, hang_up, (page,)).start()  # a browser never does by itself
    page.close(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
