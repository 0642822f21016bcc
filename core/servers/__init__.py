"""Running servers: what speculation buys where it is deployed, read from outside. Knows HTTP and no model.

    connect        an address -> Server: which engine, its version, its models
    open_lane      one answer as it streams, chunk by chunk; `lane.run` is the ServerRun it grows into
    warm_up        a short answer that does not count, before those that do
    load           the same prompts at one reader and at many, step by step
    gains          the speed-up at each number of readers, and describe_gains, where it turns into a loss
    first_parting  where the greedy texts of two servers part
    refuse_public  what a page for strangers asks before anything else

vLLM, SGLang and llama.cpp are told by what they answer, everything else is an OpenAI-compatible server. A figure that a
server does not give is None, and its name stands in `missing`; nothing is estimated in its place.
"""

from core.servers.connection import KEY_VARIABLE, SERVERS_VARIABLE, name_servers, refuse_public
from core.servers.dialects import connect
from core.servers.lane import open_lane, warm_up
from core.servers.load import finish, load
from core.servers.records import (
    Server,
    ServerChunk,
    ServerRun,
    first_parting,
    measure_run,
    server_run_from_dict,
)
from core.servers.report import describe_gains, gains, load_document, load_from_document, server_table

__all__ = [
    "KEY_VARIABLE",
    "SERVERS_VARIABLE",
    "Server",
    "ServerChunk",
    "ServerRun",
    "connect",
    "describe_gains",
    "finish",
    "first_parting",
    "gains",
    "load",
    "load_document",
    "load_from_document",
    "measure_run",
    "name_servers",
    "open_lane",
    "refuse_public",
    "server_run_from_dict",
    "server_table",
    "warm_up",
]
