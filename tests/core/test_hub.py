"""Downloads from a stand-in hub through the real client: progress, resume, cancel, and a sentence for every refusal."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._xet import XetSessionHolder
from stand_in_hub import COMMIT, stand_in_hub
from tiny import make_tokenizer

from core.disk import free_space
from core.errors import Cancelled, UserError
from core.loading import hub
from core.loading.hub import cached, fetch
from core.progress import Meter, console, in_bytes

NAME = "someone/model"
WEIGHTS = 300_000
TOKEN = "hf_" + "secret" * 6


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model; downloads never open its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(os.urandom(WEIGHTS))
    (folder / "README.md").write_text("not wanted")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def served(model, tmp_path, monkeypatch):
    """The hub that serves it, with the client pointed at it, an empty cache and no token."""
    with stand_in_hub() as server:
        server.repositories[NAME] = model
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, huggingface_hub.file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16_384)
        monkeypatch.setattr(huggingface_hub.file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield server


def test_files_come_into_the_clients_own_cache_and_are_counted(served, model):
    """Progress tells bytes of all wanted files, up to the last; a second fetch asks for no file again."""
    told = []
    folder = fetch(NAME, progress=told.append)
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert not (folder / "README.md").exists()
    total = in_bytes(sum(f.stat().st_size for f in model.iterdir() if f.name != "README.md"))
    assert told[0] == f"Asking the Hub for {NAME}"
    assert told[-1] == f"Downloading {NAME}: {total} of {total}"
    served.requests.clear()
    assert fetch(NAME) == folder == cached(NAME)
    assert not served.file_requests("model.safetensors")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_connection_is_taken_up_and_counts_no_byte_twice(served, model, ranges):
    served.drop_after, served.ranges = 100_000, ranges
    told = []
    folder = fetch(NAME, progress=told.append)
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert len(served.file_requests("model.safetensors")) == 2
    assert len(set(told[-1].removeprefix(f"Downloading {NAME}: ").split(" of "))) == 1


@pytest.mark.parametrize(
    "index", ["[]", "5", "{}", '{"weight_map": {"a": []}}', "[" * 100_000, "{"], ids=lambda it: it[:9]
)
def test_a_model_whose_index_is_none_is_not_whole(served, index):
    """Whoever looks for it in the cache is told so, and not of a fault of ours."""
    (fetch(NAME) / "model.safetensors.index.json").write_text(index)
    assert cached(NAME) is None


def test_stop_ends_a_download_at_once_and_keeps_the_files_that_came(served, model):
    """However slowly bytes come: the next fetch goes on with what is missing."""
    served.seconds_per_piece = 0.02
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        fetch(NAME, stop=lambda: bool(served.file_requests("model.safetensors")))
    assert time.monotonic() - begun < 0.02 * WEIGHTS / served.piece
    for thread in threading.enumerate():
        if thread.name.startswith("download"):
            thread.join(60)  # it sees the stop at its next piece
    assert cached(NAME) is None
    served.seconds_per_piece = 0.0
    served.requests.clear()
    assert (fetch(NAME) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert len(served.file_requests("model.safetensors")) == 1


class Transfers:
    """In place of Xet's session and its groups of files: what runs outside Python, and ends all at once or not at all.
    `may_end` lets what is under way come to its end."""

    under_way, may_end = 0, threading.Event()

    def __init__(self):
        self.aborted = threading.Event()

    def sigint_abort(self):
        self.aborted.set()

    @contextmanager
    def new_file_download_group(self, **_):
        yield self
        Transfers.under_way += 1
        ended = False
        while not ended:
            ended = Transfers.may_end.wait(0.01)
            if self.aborted.is_set():
                raise RuntimeError("aborted")

    def start_download_file(self, info, path):
        Path(path).write_bytes(bytes(info.file_size))


@pytest.mark.parametrize("name", ["another/model", NAME], ids=["another file", "the same file"])
def test_stop_ends_nobody_elses_download(served, model, monkeypatch, name):
    """Of transfers that can be ended only together, one that was stopped goes on until nobody waits for any."""
    served.xet, served.repositories["another/model"] = True, model
    sessions, stopped = [], threading.Event()
    monkeypatch.setattr("hf_xet.XetSession", lambda: sessions.append(Transfers()) or sessions[-1])
    monkeypatch.setattr("huggingface_hub.utils._xet._GLOBAL_XET_HOLDER", XetSessionHolder())
    Transfers.under_way = 0
    Transfers.may_end.clear()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(fetch, NAME, stop=stopped.is_set)
        while not Transfers.under_way:
            time.sleep(0.01)
        other = pool.submit(fetch, name, stop=lambda: False)
        while len(hub._going) < 2 or Transfers.under_way < (1 if name == NAME else 2):
            time.sleep(0.01)
        stopped.set()
        with pytest.raises(Cancelled):
            one.result()
        Transfers.may_end.set()
        assert (other.result() / "model.safetensors").stat().st_size == WEIGHTS
    assert len(sessions) == 1 and sessions[0].aborted.is_set(), "the other's was the last"


def test_bytes_that_somebody_left_in_the_cache_are_not_taken_for_the_file(served, model, tmp_path):
    """The beginning of a file under its own name, but for its content, was completed and believed."""
    info = huggingface_hub.HfApi().model_info(NAME, files_metadata=True)
    sha = next(s.lfs.sha256 for s in info.siblings if s.rfilename == "model.safetensors")
    blobs = tmp_path / "cache" / "models--someone--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha}.incomplete").write_bytes(bytes(WEIGHTS - 1))
    assert (fetch(NAME) / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_connection_lost_for_good_says_how_far_it_came(served):
    served.drop_after, served.drops = 0, 100
    with pytest.raises(UserError, match=rf"connection to the Hub was lost at .* of {NAME}; the files that came whole"):
        fetch(NAME)
    served.drops = 0
    assert (fetch(NAME) / "model.safetensors").stat().st_size == WEIGHTS


def test_a_file_of_another_size_than_the_hub_said_is_not_taken(served, model, monkeypatch):
    shorter = (model / "model.safetensors").read_bytes()[:-1]
    monkeypatch.setattr(huggingface_hub.file_download, "_get_file_length_from_http_response", lambda response: None)
    served.cut = {"model.safetensors": shorter}
    with pytest.raises(UserError, match="connection to the Hub was lost"):
        fetch(NAME)
    assert cached(NAME) is None


@pytest.mark.parametrize("token, allowed", [(None, False), ("hf_other", False), (TOKEN, True)])
def test_a_gated_model_wants_the_readers_own_token(served, monkeypatch, caplog, token, allowed):
    """The token goes to the Hub and nowhere else: neither a message nor a log nor the cache holds it."""
    served.gated.add(NAME)
    served.token = TOKEN
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    told = []
    if allowed:
        folder = fetch(NAME, progress=told.append)
        assert TOKEN in served.tokens
        kept = b"".join(f.read_bytes() for f in folder.parents[1].rglob("*") if f.is_file())
        assert TOKEN.encode() not in kept
    else:
        with pytest.raises(UserError, match=rf"{NAME} is gated: accept its terms .* HF_TOKEN") as caught:
            fetch(NAME, progress=told.append)
        told.append(str(caught.value))
    assert not token or token not in caplog.text + "".join(told)


@pytest.mark.parametrize(
    "name, revision, sentence",
    [
        ("someone/else", None, r"The Hub has no model 'someone/else' that you may see"),
        (NAME, "v9", rf"{NAME} has no revision 'v9'"),
        ("not an id!", None, r"neither a folder nor a Hub id"),
    ],
)
def test_what_the_hub_has_not(served, name, revision, sentence):
    with pytest.raises(UserError, match=sentence):
        fetch(name, revision)


def test_a_revision_by_its_commit(served):
    assert fetch(NAME, COMMIT).name == COMMIT


def test_a_hub_that_fails_is_answered_from_the_cache(served):
    served.broken = 500
    with pytest.raises(UserError, match="The Hub answered 500"):
        fetch(NAME)
    served.broken = None
    folder = fetch(NAME)
    served.broken = 500
    assert fetch(NAME) == folder


def test_a_repository_of_pickles_is_refused_before_any_file_is_fetched(served, model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights only as pickle files"):
        fetch(NAME)
    assert not any("resolve" in path for _, path, _ in served.requests)


def test_a_disk_without_room_is_told_before_the_download(served, monkeypatch):
    monkeypatch.setattr(hub, "free_space", lambda folder: 1000)
    with pytest.raises(UserError, match=rf"{NAME} needs 3\d\d kB more on the disk .* 1\.0 kB are free"):
        fetch(NAME)
    assert not served.file_requests("model.safetensors")


def test_what_is_free_is_told_by_the_nearest_folder_that_is_there(tmp_path, monkeypatch):
    """Whatever the name; where nothing is, as of a drive that is missing, that is said."""
    assert free_space(tmp_path / "made" / "later") > 0
    assert free_space(tmp_path / ("x" * 300)) > 0

    def missing(place):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))

    monkeypatch.setattr("core.disk.shutil.disk_usage", missing)
    with pytest.raises(UserError, match="Z:/cache cannot be made: neither it nor anything above it is there"):
        free_space(Path("Z:/cache"))


def test_a_disk_that_fills_up_meanwhile(served, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    with pytest.raises(UserError, match=rf"{NAME} needs .* more on the disk .* are free"):
        fetch(NAME)


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network"])
def test_offline_the_cache_works_and_the_rest_says_what_it_needs(served, monkeypatch, how):
    folder = fetch(NAME)
    served.requests.clear()
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch(NAME) == folder
    with pytest.raises(UserError, match="someone/other is not in the local cache and the Hub cannot be reached"):
        fetch("someone/other")
    with pytest.raises(UserError, match=f"whether it has a model of that name cannot be told; {NAME} is here, if that"):
        fetch(NAME + "s")
    assert not served.requests


def test_a_snapshot_that_lacks_files_is_not_taken_for_whole(served, tmp_path):
    folder = fetch(NAME)
    (folder / "model.safetensors").unlink()
    assert cached(NAME) is None


def test_progress_is_told_a_few_times_a_second_and_at_the_end():
    now, told = [0.0], []
    meter = Meter("Reading", 1000, told.append, clock=lambda: now[0])
    for _ in range(100):
        meter.add(10)
        now[0] += 0.01
    assert told[0] == "Reading: 10 bytes of 1.0 kB"
    assert told[-1] == "Reading: 1.0 kB of 1.0 kB"
    assert 4 <= len(told) <= 6


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_one_line_and_a_file_a_few(terminal):
    out, now = io.StringIO(), [0.0]
    out.isatty = lambda: terminal
    tell = console(out, clock=lambda: now[0])
    tell("Asking the Hub for a/b")
    for done in ("0 bytes", "1.0 MB", "1.5 MB", "2.0 MB"):
        tell(f"Downloading a/b: {done} of 2.0 MB")
        now[0] += 4.0
    tell("Done")
    if terminal:
        assert out.getvalue().count("\n") == 3
        assert out.getvalue().count("\r") == 6
    else:
        kept = ["0 bytes of 2.0 MB", "2.0 MB of 2.0 MB"]
        lines = ["Asking the Hub for a/b", *(f"Downloading a/b: {each}" for each in kept), "Done"]
        assert out.getvalue().splitlines() == lines


def test_the_command_line_downloads_from_a_hub_and_runs(pair_folder, tmp_path):
    """The whole way, in a process of its own with HF_ENDPOINT: ids, progress in bytes, a run."""
    with stand_in_hub() as server:
        server.repositories = {"a/target": pair_folder / "target", "a/draft": pair_folder / "draft"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path)}
        command = "-m core generate --target a/target --draft a/draft --precision fp32 --device cpu --max-new-tokens 8"
        done = subprocess.run(
            [sys.executable, *command.split(), "--prompt", "the quick"],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert "Downloading a/target: " in done.stderr
    assert "Reading a/draft: " in done.stderr
    assert "8 tokens" in done.stderr
