"""A GGUF file -> a folder of safetensors, made once and kept in a cache of ours.

Weights are unpacked by the package gguf and written one after the other, so that no more than one of them is in memory:
quantised ones as fp16, which holds them closest in 16 bits; floats as they are. The folder is then loaded like any
other, in whatever precision is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize, quantize
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from core.disk import folder_for_now, on_disk, require_room, user_folder, writable
from core.errors import Cancelled, UserError, first_line
from core.loading.gguf import Header, Kind, StoredTensor, is_gguf, read_header
from core.loading.gguf_layout import Place, config_of, layout, quiet_transformers, read_by_us
from core.loading.hub import has_all_weights
from core.progress import Meter, Progress, Stop, never, silent

VERSION = 1
"""Of what is written; another one is another key, so that nothing of an older kind is taken for ours."""
SAMPLES, SAMPLE = 64, 65_536
"""The content of a file is known by its size, its first four megabytes and so many samples of so many bytes."""
FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
ORIGIN = "origin.json"
WRITTEN = (ORIGIN, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Beside the weights and their config."""
ELSEWHERE = "set XDG_CACHE_HOME to another folder, such as one on a larger disk"


def cache_folder() -> Path:
    """Where converted files are kept."""
    return user_folder("cache") / "gguf"


def _place(name: str) -> Path:
    """Where something converted is or is to be: in the cache or, if it is not there and the cache cannot be written, in
    a folder that goes with this process."""
    kept = cache_folder() / name
    if not kept.exists() and not writable(kept.parent):
        with suppress(OSError):
            return folder_for_now() / "gguf" / name
    return kept


def cache_size() -> int:
    """Bytes of all that was converted."""
    return sum(file.stat().st_size for file in cache_folder().glob("*/*") if file.is_file())


def clear_cache() -> int:
    """Remove all that was converted; how many bytes that were. A model that is loaded keeps running."""
    freed = cache_size()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without safetensors; None: it means
    another kind of model. Raises UserError where a folder leaves a choice."""
    if is_gguf(path):
        return path
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise UserError(f"There is no file {path}.")
    if not path.is_dir() or (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    found = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4]) + (", …" if len(found) > 4 else "")
        raise UserError(f"{path} holds {len(found)} GGUF files; name one of them: {names}.")
    return found[0] if found else None


def origin(folder: Path) -> str | None:
    """How the weights of a folder were quantised in the file they came from, such as Q4_1; None: from none."""
    try:
        return str(json.loads((folder / ORIGIN).read_text(encoding="utf-8"))["quantisation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def converted(file: Path) -> Path | None:
    """The folder of a file that was converted before."""
    folder = _place(fingerprint(file))
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Whether all was written, and nothing was cut off or cleaned away since; what is not whole is made anew."""
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np"):
                pass
    except (OSError, SafetensorError):
        return False
    return has_all_weights(folder) and all((folder / name).is_file() for name in WRITTEN)


def fingerprint(file: Path) -> str:
    """The key of a file's content, the same wherever it lies."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(size.to_bytes(8, "little") + stream.read(SAMPLES * SAMPLE))
            for i in range(1, SAMPLES + 1):
                stream.seek(max(0, i * size // SAMPLES - SAMPLE))
                digest.update(stream.read(SAMPLE))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()[:32]


def convert(file: Path, progress: Progress = silent, stop: Stop = never) -> Path:
    """The folder of safetensors, config and tokenizer of a GGUF file; made where it is not there.

    Raises UserError with one sentence for a file that cannot be read or a disk that cannot take it, and Cancelled soon
    after `stop()` says so.
    """
    if (folder := converted(file)) is not None:
        return folder
    header = read_header(file)
    config = config_of(header)
    folder = _place(fingerprint(file))
    with _on_disk(header):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if _is_whole(folder):  # another process was faster
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
                _write(header, config, Path(making) / "model", progress, stop)
                (Path(making) / "model").rename(folder)
    return folder


def requantised(file: Path, kind: Kind, progress: Progress = silent, stop: Stop = never) -> Path:
    """A GGUF file of the same weights with its matrices in `kind`, for engines that have kernels of their own for it;
    made where it is not there, the file itself where it is of that kind. The same errors as `convert`."""
    header = read_header(file)
    if header.quantisation == kind.name:
        return file
    made = _place(f"{fingerprint(file)}-{kind.name}") / f"{file.stem}-{kind.name}.gguf"
    with _on_disk(header):
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(made.with_suffix(".lock")):
            if not made.is_file():
                with tempfile.TemporaryDirectory(dir=made.parent, prefix=".making-") as making:
                    _requantise(header, kind, Path(making) / made.name, progress, stop)
                    (Path(making) / made.name).rename(made)
    return made


def _requantise(header: Header, kind: Kind, made: Path, progress: Progress, stop: Stop) -> None:
    reader, writer = GGUFReader(header.path), GGUFWriter(made, header.architecture)
    for field in reader.fields.values():
        if field.name != Keys.General.ARCHITECTURE and not field.name.startswith("GGUF."):  # the writer's own
            of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind.name}"])
    block, size = GGML_QUANT_SIZES[kind]
    packed = {}
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        shown, dtype, bytes_, as_ = tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
        if len(shape) > 1 and shape[-1] % block == 0:
            packed[tensor.name] = shape
            shown, dtype, as_ = (*shape[:-1], shape[-1] // block * size), np.dtype(np.uint8), kind
            bytes_ = int(np.prod(shown))
        writer.add_tensor_info(tensor.name, shown, dtype, bytes_, as_)
    meter = Meter(f"Writing {made.name}", int(sum(tensor.n_bytes for tensor in reader.tensors)), progress)
    require_room(made.name, made.parent, meter.total, f"free some space, or {ELSEWHERE}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        if stop():
            raise Cancelled
        values = tensor.data
        if tensor.name in packed:
            values = quantize(dequantize(values, tensor.tensor_type).reshape(packed[tensor.name]), kind)
        writer.write_tensor_data(values)
        meter.add(int(tensor.n_bytes))
    writer.close()


def _write(header: Header, config: dict[str, Any], folder: Path, progress: Progress, stop: Stop) -> None:
    folder.mkdir()
    gguf_tokenizer(header).save_pretrained(folder)
    ends = [config.get("eos_token_id"), header.settings.get("tokenizer.ggml.eot_token_id")]
    flat = [i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])]
    _write_json(folder / "generation_config.json", {"eos_token_id": list(dict.fromkeys(flat))})
    if read_by_us(header):
        _write_json(folder / "config.json", config)
        _write_weights(header, config, folder / "model.safetensors", progress, stop)
    else:
        progress(f"Converting {header.path.name}")
        _save_as_transformers_reads(header, folder)
    found = {"file": header.path.name, "quantisation": header.quantisation, "architecture": header.architecture}
    _write_json(folder / ORIGIN, found)


def _write_weights(header: Header, config: dict[str, Any], file: Path, progress: Progress, stop: Stop) -> None:
    """One safetensors file: eight bytes that tell the length of a JSON text, that text, then the weights."""
    places = dict(layout(header, config))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, place in places.items():
        tensor = header.tensors[name]
        dtype = FLOATS.get(tensor.kind.name, "F16")
        size = int(np.prod(tensor.shape)) * WIDTHS[dtype]
        entries[place.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    require_room(header.path.name, file.parent, at, f"free some space, or {ELSEWHERE}")
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    meter = Meter(f"Converting {header.path.name}", at, progress)
    content = np.memmap(header.path, np.uint8, mode="r")
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, place in places.items():
            if stop():
                raise Cancelled
            meter.add(_write_tensor(out, header, header.tensors[name], place, content))


def _write_tensor(out: BinaryIO, header: Header, tensor: StoredTensor, place: Place, content: Any) -> int:
    packed = content[tensor.start : tensor.start + tensor.bytes]
    if width := WIDTHS.get(tensor.kind.name):
        values = packed.view(f"u{width}").reshape(tensor.shape)
    else:
        rows = packed.reshape(-1, tensor.bytes * tensor.shape[-1] // int(np.prod(tensor.shape)))
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(rows, tensor.kind).astype(np.float16).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise UserError(f"{header.path.name} is broken: its tensor {tensor.name} holds values past all bounds.")
    if place.heads:
        values = unpermuted(values, place.heads)
    return out.write(np.ascontiguousarray(values).tobytes())


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads · size, …] of queries or keys in transformers' order, where llama.cpp has the two halves that turn
    together interleaved."""
    size = values.shape[0] // heads
    return values.reshape(heads, size // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def gguf_tokenizer(header: Header) -> Any:
    """The tokenizer of a file, with its chat template. Raises UserError where it has none or one of an unknown kind."""
    if "tokenizer.ggml.tokens" not in header.settings:
        raise UserError(f"{header.path.name} holds no tokenizer, so its text could not be read.")
    try:
        with quiet_transformers():
            return PreTrainedTokenizerFast.from_pretrained(
                header.path.parent, gguf_file=header.path.name, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # whatever transformers makes of a stranger's vocabulary
        raise UserError(f"The tokenizer of {header.path.name} cannot be read: {first_line(error, 200)}") from error


def _save_as_transformers_reads(header: Header, folder: Path) -> None:
    """A family that is not ours: transformers unpacks it, and a fresh network of the same config is saved."""
    try:
        with quiet_transformers():
            read: Any = AutoModelForCausalLM.from_pretrained(
                header.path.parent,
                gguf_file=header.path.name,
                dtype=torch.float16,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        loaded, found = read
        if absent := sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]):
            raise ValueError(f"{absent[0]} is missing")
        plain = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        config = AutoConfig.for_model(**plain)
        with torch.device("meta"):
            fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.save_pretrained(folder)
    except Exception as error:  # whatever transformers makes of a stranger's file
        raise UserError(
            f"{header.path.name} is a {header.architecture[:40]} model, which cannot be read from a GGUF file here "
            f"({first_line(error, 120)}); look for its safetensors."
        ) from error


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _on_disk(header: Header) -> AbstractContextManager[None]:
    """What a disk that cannot take the folder lacks, in a sentence."""
    name = header.path.name
    return on_disk(
        f"The disk is too full to convert {name}; free some space, or {ELSEWHERE}.",
        lambda why: f"{name} cannot be converted, since {cache_folder()} cannot be written ({why}); {ELSEWHERE}.",
    )
