"""Files of a Hub model into the local cache of huggingface_hub: counted in bytes, stopped at once, gone on with later.

huggingface_hub's own download looks up between two pieces of 10 MB at the soonest and deletes what has come of a file
when it is stopped. This one uses its HTTP session, token, locks and cache layout, so that the client finds the files as
if it had fetched them itself; a part of a file stays in the cache as `<blob>.incomplete`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import BinaryIO

from filelock import Timeout
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status

from core.errors import Cancelled
from core.progress import Meter, Stop

AT_ONCE = 4
ATTEMPTS = 5
"""So many times in a row may a connection break without a byte having come."""
PASSING = {408, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; `blob` is the name of its content in the cache."""

    name: str
    size: int
    blob: str


def blob_path(repo: str, file: RemoteFile) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs" / file.blob


def bytes_here(repo: str, file: RemoteFile) -> int:
    """How much of a file the cache holds, finished or not."""
    for path in (blob_path(repo, file), _partial(blob_path(repo, file))):
        if path.exists():
            return min(path.stat().st_size, file.size)
    return 0


def download(repo: str, commit: str, files: Sequence[RemoteFile], meter: Meter, stop: Stop) -> None:
    """Fetch what the cache lacks of `files`, several at once. `meter` counts all of them, with what is there already.

    Raises Cancelled within a tenth of a second of `stop`, an HfHubHTTPError or a transport error of the HTTP library
    when the Hub refuses or is lost, and OSError when the disk does not take it.
    """
    meter.add(sum(bytes_here(repo, file) for file in files))
    missing = [file for file in files if not blob_path(repo, file).exists()]
    over = Event()
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="download")
    pending = {pool.submit(_download_file, repo, commit, file, meter, over) for file in missing}
    try:
        while pending:
            done, pending = wait(pending, 0.1, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if stop():
                raise Cancelled
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _download_file(repo: str, commit: str, file: RemoteFile, meter: Meter, over: Event) -> None:
    blob = blob_path(repo, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(_locked(blob, over))
        if blob.exists():  # another process was faster
            return
        url = hf_hub_url(repo, file.name, revision=commit, endpoint=constants.ENDPOINT)
        with _partial(blob).open("ab") as part:
            _complete(part, url, file.size, meter, over)
        _partial(blob).replace(blob)


def _locked(blob: Path, over: Event) -> ExitStack:
    """The lock that the Hub's client takes for this blob, as something to leave."""
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / blob.parent.parent.name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = ExitStack()
    while not over.is_set():
        try:
            held.enter_context(WeakFileLock(lock, timeout=0.2))
            return held
        except Timeout:
            continue
    raise Cancelled


def _complete(part: BinaryIO, url: str, size: int, meter: Meter, over: Event) -> None:
    """Append to `part` until it holds `size` bytes; a connection that breaks is taken up again where it broke."""
    failures = 0
    while (have := part.tell()) != size:
        try:
            for piece in _pieces(url, part, meter):
                if over.is_set():
                    raise Cancelled
                part.write(piece)
                meter.add(len(piece))
            problem: Exception = ConnectionError(f"the Hub sent {part.tell()} of {size} bytes")
        except Exception as error:
            if not _passing(error):
                raise
            problem = error
        if part.tell() > size:  # not the file it was said to be
            _restart(part, meter)
        failures = 0 if part.tell() > have else failures + 1
        if failures >= ATTEMPTS:
            raise problem
        if part.tell() != size and _pause(over, min(2**failures, 8) / 2):
            raise Cancelled


def _pause(over: Event, seconds: float) -> bool:
    return over.wait(seconds)


def _restart(part: BinaryIO, meter: Meter) -> None:
    meter.add(-part.tell())
    part.seek(0)
    part.truncate()


def _pieces(url: str, part: BinaryIO, meter: Meter) -> Iterator[bytes]:
    """The rest of a file as it comes from the network."""
    have = part.tell()
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)
        if have and response.status_code != 206:  # it sends the whole file again
            _restart(part, meter)
        yield from response.iter_bytes()


def _passing(error: Exception) -> bool:
    """Whether trying again may help."""
    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", None) in PASSING
    return isinstance(error, ConnectionError) or transport_error(error)


def transport_error(error: BaseException) -> bool:
    """Whether an HTTP library says that the other end was not reached or was lost. Known by name: the Hub's client
    changed its library once, and the classes with it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError"})
