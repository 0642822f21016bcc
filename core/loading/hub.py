"""A model id or a folder -> a local folder with a safetensors model in it, or one sentence why not.

Files of a Hub model into the local cache of huggingface_hub: counted in bytes, stopped at once, gone on with later.

huggingface_hub's own download looks up between two pieces of 10 MB at the soonest and deletes what has come of a file
when it is stopped. This one uses its HTTP session, token, locks and cache layout, so that the client finds the files as
if it had fetched them itself; a part of a file stays in the cache as `<blob>.incomplete`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from filelock import Timeout
from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    filter_repo_objects,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

from core.disk import free_space, is_full
from core.errors import Cancelled, UserError, refused_pickle
from core.progress import Meter, Progress, Stop, in_bytes, never, silent

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["original/*"]
PATIENCE = 10.0
"""Seconds to wait for the Hub to say what a repository holds."""


def fetch(name: str, revision: str | None = None, progress: Progress = silent, stop: Stop = never) -> Path:
    """The folder of a model: a local one as it is, or a Hub id downloaded (or found in the local cache).

    Raises UserError with one sentence, and Cancelled as soon as `stop()` says so; what has come by then stays.
    """
    if (folder := local_folder(name)) is not None:
        return _check_folder(folder, name)
    with explained(name, revision):
        return _check_folder(_download(name, revision, progress, stop), name)


def local_folder(name: str) -> Path | None:
    """The folder a name means, None for a Hub id. Raises UserError for a path without a folder."""
    if not name.strip():
        raise UserError("The name of a model is empty; give a folder with a model in it, or a Hub id.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"There is no folder {name!r}; give a folder with a model in it, or a Hub id such as Qwen/Qwen3-0.6B."
        )
    return None


def cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a Hub id in the local cache, None where the cache has not all of it. Asks no network."""
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return Path(found) if _is_whole(Path(found)) else None


@contextmanager
def explained(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn what the Hub's client raises into one sentence. No sentence repeats what a server or a header said: those
    can hold a token."""
    try:
        yield
    except HFValidationError:
        raise UserError(f"{name!r} is neither a folder nor a Hub id of the form owner/model.") from None
    except GatedRepoError:
        raise UserError(
            f"{name} is gated: accept its terms on its Hub page, then log in (`hf auth login`) or set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r} on the Hub.") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"The Hub has no model {name!r} that you may see; check the spelling, or log in if it is private."
        ) from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "an error")
        raise UserError(f"The Hub answered {status} for {name}; try again later.") from None
    except Exception as error:
        if not out_of_reach(error):
            raise
        raise UserError(unreachable(name)) from None


def unreachable(name: str) -> str:
    """What to say of a model that is not here while the Hub does not answer: that may be all that is wrong, or the name
    may be mistyped, and only a name that is here can hint at that."""
    near = get_close_matches(name, _cached_names(), n=1, cutoff=0.75)
    hint = f"{near[0]} is here, if that is meant; else " if near else ""
    return (
        f"{name} is not in the local cache and the Hub cannot be reached, so whether it has a model of that name "
        f"cannot be told; {hint}connect to a network, or use the bundled pair or a local folder."
    )


def _cached_names() -> list[str]:
    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def out_of_reach(error: BaseException) -> bool:
    """Whether an error says that there is no network, or that nothing is cached to do without one."""
    return isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)) or transport_error(error)


def _download(name: str, revision: str | None, progress: Progress, stop: Stop) -> Path:
    """From the Hub, with the cache for what it has; from the cache alone where the Hub cannot or will not answer."""
    validate_repo_id(name)
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES:
            raise OfflineModeIsEnabled
        progress(f"Asking the Hub for {name}")
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=PATIENCE)
    except RevisionNotFoundError:
        raise
    except Exception as error:
        if (folder := cached(name, revision)) is not None:
            return folder
        raise error from None
    siblings = info.siblings or []
    _check_names([s.rfilename for s in siblings], name)
    wanted = set(filter_repo_objects([s.rfilename for s in siblings], allow_patterns=WANTED, ignore_patterns=UNWANTED))
    files = [_remote_file(s) for s in siblings if s.rfilename in wanted and s.size is not None and s.blob_id]
    _fetch_files(name, str(info.sha), files, progress, stop)
    # Everything is there: this only lays it out, writes down the revision, and gets what was not listed with a size.
    with _disk_explained(name, files):
        found = snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    return Path(found)


def _remote_file(sibling: Any) -> RemoteFile:
    return RemoteFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)


def _fetch_files(name: str, commit: str, files: Sequence[RemoteFile], progress: Progress, stop: Stop) -> None:
    total = sum(file.size for file in files)
    meter = Meter(f"Downloading {name}", total, progress)
    with _disk_explained(name, files):
        needed, free = _missing_bytes(name, files), free_space(Path(constants.HF_HUB_CACHE))
        if needed > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not needed:
            return
        try:
            download(name, commit, files, meter, stop)
        except Exception as error:
            if not transport_error(error):
                raise
            raise UserError(
                f"The connection to the Hub was lost at {in_bytes(meter.done)} of {in_bytes(total)} of {name}; what "
                "has come is kept: try again and it goes on from there."
            ) from None


def _missing_bytes(name: str, files: Sequence[RemoteFile]) -> int:
    return sum(file.size - bytes_here(name, file) for file in files)


@contextmanager
def _disk_explained(name: str, files: Sequence[RemoteFile]) -> Iterator[None]:
    """Say what a disk that cannot take the files lacks."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            cache = Path(constants.HF_HUB_CACHE)
            raise UserError(
                f"{name} needs {in_bytes(_missing_bytes(name, files))} more on the disk of the model cache, and "
                f"{in_bytes(free_space(cache))} are free; free some space, or set HF_HOME to a larger disk."
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"The model cache cannot be written ({error.strerror}); set HF_HOME to a folder of yours."
            ) from None
        raise


def _check_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a transformers model folder.")
    _check_names([p.name for p in folder.iterdir()], name)
    return folder


def _check_names(files: list[str], name: str) -> None:
    if any(f.endswith(".safetensors") for f in files):
        return
    if pickles := sorted(f for f in files if f.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        raise UserError(refused_pickle(name, pickles[0]))
    raise UserError(f"{name} has no .safetensors weights; choose a repository or folder that holds them.")


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its config and all its weight files; a download that was stopped leaves some out."""
    shards = {path.name for path in folder.glob("*.safetensors")}
    if not shards or not (folder / "config.json").is_file():
        return False
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return set(index["weight_map"].values()) <= shards
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, AttributeError):
        return False


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
