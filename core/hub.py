"""A model id or a folder -> a local folder with a safetensors model in it, or one sentence why not."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from core.errors import UserError

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model: a local one as it is, or a Hub id downloaded (or found in the local cache)."""
    if not name.strip():
        raise UserError("The name of a model is empty; give a folder with a model in it, or a Hub id.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _check_folder(folder, name)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"There is no folder {name!r}; give a folder with a model in it, or a Hub id such as Qwen/Qwen3-0.6B."
        )
    try:
        return _check_folder(_download(name, revision), name)
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
        raise UserError(
            f"{name} is not in the local cache and the Hub cannot be reached; "
            "connect to a network, or use the bundled pair or a local folder."
        ) from None


def _download(name: str, revision: str | None) -> Path:
    if not os.environ.get("HF_HUB_OFFLINE"):
        try:
            files = [s.rfilename for s in HfApi().model_info(name, revision=revision).siblings or []]
            _check_names(files, name)
        except Exception as error:
            if not out_of_reach(error):
                raise
            # The cache may have it.
    return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=["original/*"]))


def out_of_reach(error: Exception) -> bool:
    """Whether an error says that there is no network, or that nothing is cached to do without one. Transport errors
    are known by name: the Hub's client changed its HTTP library once, and their classes with it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)) or bool(
        names & {"TransportError", "ConnectionError"}
    )


def _check_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a transformers model folder.")
    _check_names([p.name for p in folder.iterdir()], name)
    return folder


def _check_names(files: list[str], name: str) -> None:
    if any(f.endswith(".safetensors") for f in files):
        return
    if any(f.endswith((".bin", ".pt", ".pth", ".ckpt")) for f in files):
        raise UserError(
            f"{name} has its weights only as pickle files, which can run code when opened; "
            "this program loads safetensors only. Convert it, or choose another model."
        )
    raise UserError(f"{name} has no .safetensors weights; choose a repository or folder that holds them.")
