"""A model id or a folder -> a local folder with a safetensors model in it, or one sentence why not.

Files of a Hub model come by the Hub's own client, which locks, checks and takes up connections that break; here its
bytes are counted and it is stopped.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from threading import Event, Lock
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from tqdm.asyncio import tqdm_asyncio

from core.disk import free_space, is_full
from core.errors import Cancelled, UserError, first_line, refused_pickle
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


def as_path(name: str) -> Path:
    """The path that a name is, if it is one. UserError for what can be none: too long, in the home of nobody known, in
    a folder that is closed to us."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error).rstrip(".")
        raise UserError(f"{name[:60]!r} cannot be opened as the name of a model: {reason}.") from None
    return path


def local_folder(name: str) -> Path | None:
    """The folder a name means, None for a Hub id. Raises UserError for a path without a folder."""
    if not name.strip():
        raise UserError("The name of a model is empty; give a folder with a model in it, or a Hub id.")
    folder = as_path(name)
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
    return Path(found) if has_all_weights(Path(found)) else None


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
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    _check_names(list(sizes), name)
    wanted = filter_repo_objects(sizes, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    missing = [file for file in wanted if not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)]
    meter = Meter(f"Downloading {name}", sum(sizes[file] for file in missing), progress)
    with _explained_by(name, meter):
        if meter.total > free_space(Path(constants.HF_HUB_CACHE)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return Path(_snapshot(name, revision, meter, stop))


def _snapshot(name: str, revision: str | None, meter: Meter, stop: Stop) -> str:
    """The client at work in a thread of its own: it looks up between two pieces of 10 MB, and `stop` is seen at once
    however slowly they come."""
    over = Event()
    with _lock:
        _going.add(over)
    pool = ThreadPoolExecutor(1, thread_name_prefix="download")
    found = pool.submit(
        snapshot_download,
        name,
        revision=revision,
        allow_patterns=WANTED,
        ignore_patterns=UNWANTED,
        tqdm_class=bars(meter, over),
    )
    try:
        while not wait([found], 0.1).done:
            if stop():
                raise Cancelled
        return found.result()
    except Cancelled:
        _stopped.add(over)
        raise
    finally:
        over.set()
        pool.shutdown(wait=False)
        _end(over)


_lock = Lock()
_going: set[Event] = set()
_stopped: set[Event] = set()
"""Downloads that somebody waits for, and those that nobody does any more."""


def _end(over: Event) -> None:
    """Xet's transfers run outside Python, where no bar ends them, and only all of a process can be ended: one that was
    stopped goes on, unseen, until no other download does."""
    with _lock:
        _going.remove(over)
        if _stopped and not _going:
            _stopped.clear()
            if xet := sys.modules.get("huggingface_hub.utils._xet"):
                xet.abort_xet_session()


def bars(meter: Meter, over: Event) -> type[tqdm_asyncio]:
    """What the client tells its progress to: bars that count bytes count them in `meter`, nothing is drawn, and once it
    is `over` the next piece raises Cancelled. It may count the bytes that come and those that are written apart: what
    has come furthest is taken."""
    lock = Lock()

    class Bar(tqdm_asyncio):
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            self._counts, self._bytes = options.get("unit") == "B", 0
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if over.is_set():
                raise Cancelled
            if self._counts:
                with lock:
                    self._bytes += int(n or 0)
                    fresh = min(self._bytes, meter.total) - meter.done
                    if fresh > 0:
                        meter.add(fresh)

    return Bar


@contextmanager
def _explained_by(name: str, meter: Meter) -> Iterator[None]:
    """Say how far a download came that lost its connection, and what a disk that cannot take it lacks."""
    try:
        yield
    except OSError as error:
        cache, left = Path(constants.HF_HUB_CACHE), meter.total - meter.done
        if is_full(error):
            raise UserError(
                f"{name} needs {in_bytes(left)} more on the disk of the model cache, and "
                f"{in_bytes(free_space(cache))} are free; free some space, or set HF_HOME to a larger disk."
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"The model cache cannot be written ({error.strerror}); set HF_HOME to a folder of yours."
            ) from None
        if isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError)) or error.errno is not None:
            raise
        raise _lost(name, meter) from None  # fewer or more bytes than the Hub had said
    except Exception as error:
        if not transport_error(error):
            raise
        raise _lost(name, meter) from None


def _lost(name: str, meter: Meter) -> UserError:
    return UserError(
        f"The connection to the Hub was lost at {in_bytes(meter.done)} of {in_bytes(meter.total)} of {name}; the files "
        "that came whole are kept: try again."
    )


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


def has_all_weights(folder: Path) -> bool:
    """Whether a snapshot has its config and all its weight files; a download that was stopped leaves some out."""
    shards = {path.name for path in folder.glob("*.safetensors")}
    if not shards or not (folder / "config.json").is_file():
        return False
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return set(index["weight_map"].values()) <= shards
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of another shape
        return False


def transport_error(error: BaseException) -> bool:
    """Whether an HTTP library says that the other end was not reached or was lost. Known by name: the Hub's client
    changed its library once, and the classes with it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError"})
