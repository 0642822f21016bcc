"""Id or folder -> Model on a device, in the precision asked for. Safetensors only, never code from a repository."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from core.costs import CostTable
from core.errors import Cancelled, UserError, first_line, out_of_memory, release_memory
from core.loading import memory
from core.loading.conversion import convert, find_gguf, origin
from core.loading.fastest import fastest_precision, largest_product
from core.loading.head import bundled_head, bytes_needed, head_folder, load_head
from core.loading.hub import as_path, fetch
from core.loading.model import Model
from core.loading.mtp import load_mtp, mtp_bytes, speaks_of_mtp
from core.loading.pair import (
    SMOLLM2_ID,
    SMOLLM2_REVISION,
    Pair,
    choose_pair,
    label_of,
    same_tokens,
    smollm2_cached,
    smollm2_file,
    translate,
)
from core.loading.precision import (
    POCKET,
    Format,
    Placement,
    choose_format,
    load_network,
    packed_for_cpu,
    placed,
    product_shapes,
    quantisation_of,
    refuse_int4,
    tensor_bytes,
    why_not_int4,
)
from core.progress import Progress, Stop, in_bytes, never, silent
from core.settings import POCKET_NAME, SMOLLM2_NAME, SPECS, Settings

MOST_LAYERS = 1000
MakeRoom = Callable[[int], None]
"""Asked to free so many bytes on the device, if it can."""

transformers_logging.disable_progress_bar()  # progress is ours to show
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # tells of a kernel it does without


@dataclass(frozen=True)
class Source:
    """A model on this machine, ready to be loaded; `bytes` is what its weights will take in memory, `origin` how they
    were quantised in the GGUF file they came from, if they came from one."""

    label: str
    folder: Path
    config: Any
    format: Format
    bytes: int
    origin: str | None = None


def load_pair(
    settings: Settings,
    progress: Progress = silent,
    stop: Stop = never,
    make_room: MakeRoom = lambda lacking: None,
    costs: Mapping[str, CostTable] | None = None,
    dynamic: str | None = None,
    measure: bool = True,
) -> Pair:
    """The target and, where one is named, the draft of these settings; with no target, this machine's
    default pair: SmolLM2 where its weights are at hand, else the bundled one.

    `costs` are tables measured before, by role ("target", "draft"); `dynamic` is the reason, where there is one, why
    transformers' own forward is to be used whatever else could be. Without `measure`, nothing is timed: what passes
    cost is measured when it is first asked for (`Pair.measure_costs`), and the caller has the threads chosen when the
    machine is quiet (`Model.choose_threads`).

    Downloads what is missing, reads what it will take, and only then, after `make_room` where memory is short,
    allocates anything. Raises UserError with one sentence for whatever a person can mend, and Cancelled after `stop`.
    """
    device = resolve_device(settings.device)
    target_name, draft_name, draft_precision = names_of(settings)
    sources = [read_source(target_name, device, settings.precision, settings.revision, "target", progress, stop)]
    head = None
    own = draft_name == target_name and speaks_of_mtp(sources[0].config)
    if draft_name is not None and not own:
        head = (
            None if draft_name == POCKET_NAME else head_folder(find_folder(draft_name, None, "draft", progress, stop))
        )
        if head is None:
            sources.append(read_source(draft_name, device, draft_precision, None, "draft", progress, stop))
    beside = 0
    if own:
        beside = mtp_bytes(target_name, sources[0].folder, sources[0].config, sources[0].format.dtype)
    elif head is not None and draft_name is not None:
        beside = bytes_needed(draft_name, head, device, settings.draft_precision)
    placement = _find_room(sources, device, make_room, beside)
    try:
        models = _load_sources(sources, device, placement, progress, stop)
        pair = _ready(models, costs or {}, dynamic, measure)
        if head is not None and draft_name is not None:
            progress(f"Reading {draft_name}")
            pair.head = load_head(draft_name, head, pair.target, settings.draft_precision)
        elif own:
            progress(f"Reading the MTP layer of {target_name}")
            pair.head = load_mtp(target_name, pair.target)
        elif folder := bundled_head(pair.target.config, pair.target.tokenizer):
            pair.head = load_head(folder.name, folder, pair.target, settings.draft_precision)
        if stop():
            raise Cancelled
        if measure:
            if any(model.costs is None for model in models):
                progress("Measuring what a pass costs here")
            pair.measure_all()
        return pair
    except Exception as error:
        if not out_of_memory(error):
            raise
    release_memory()  # outside the handler: the error's own frames held what had been allocated
    raise UserError(_no_room(sources, device, beside))


def fetch_pair(settings: Settings, progress: Progress = silent, stop: Stop = never) -> None:
    """Bring the files of both models to this machine; loading then needs no network. The same errors as `load_pair`."""
    target, draft, _ = names_of(settings)
    for name, revision in ((target, settings.revision), (draft, None)):
        if name is not None:
            find_folder(name, revision, "target", progress, stop)


def find_folder(name: str, revision: str | None, role: str, progress: Progress = silent, stop: Stop = never) -> Path:
    """The folder of safetensors of a name: a model that is bundled, a folder, a GGUF file (converted where it is not
    yet), or a Hub id (downloaded where it is not here). The same errors as `load_pair`."""
    if name == POCKET_NAME:
        return POCKET / role
    if (file := find_file(name)) is not None:
        return convert(file, progress, stop)
    if name == SMOLLM2_NAME:
        return smollm2_cached() or fetch(SMOLLM2_ID, SMOLLM2_REVISION, progress, stop)
    return fetch(name, revision, progress, stop)


def find_file(name: str | None) -> Path | None:
    """The GGUF file that a name means, None where it means something else."""
    if name in (None, POCKET_NAME):
        return None
    return smollm2_file() if name == SMOLLM2_NAME else find_gguf(as_path(name))


def names_of(settings: Settings) -> tuple[str, str | None, str]:
    """Target, draft and the draft's precision that settings mean."""
    draft_precision = settings.precision if settings.draft_precision == "auto" else settings.draft_precision
    return *choose_pair(settings.target, settings.draft), draft_precision


def load_model(
    name: str,
    device: torch.device,
    precision: str = "auto",
    revision: str | None = None,
    role: str = "target",
    progress: Progress = silent,
    make_room: MakeRoom | None = None,
) -> Model:
    """Load one model on one device; with `make_room`, where there is room for it. Raises UserError with one sentence
    for whatever a person can mend."""
    source = read_source(name, device, precision, revision, role, progress)
    placement = "one" if make_room is None else _find_room([source], device, make_room)
    try:
        return _load(source, device, placement, progress)
    except Exception as error:
        if not out_of_memory(error):
            raise
    release_memory()  # outside the handler, as for a pair
    raise UserError(_no_room([source], device))


def read_source(
    name: str,
    device: torch.device,
    precision: str,
    revision: str | None,
    role: str,
    progress: Progress = silent,
    stop: Stop = never,
) -> Source:
    """Download a model where it is not on this machine, and decide how to load it. Allocates nothing."""
    SPECS["precision"].read(precision)
    label = label_of(name, role)
    folder = find_folder(name, revision, role, progress, stop)
    with in_one_sentence(label):
        refuse_endless(folder, label)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsupported(config, label)
        bundled = name == POCKET_NAME
        measured = fastest_precision(config, device, True, bundled) if precision == "auto" else None
        format_ = choose_format(
            precision, device, quantisation_of(config), bundled, measured, packs=why_not_int4(config) is None
        )
        if format_.precision == "int4":
            refuse_int4(config, label)
        needed = _bytes_in_memory(folder, config, device, format_)
        return Source(label, folder, config, format_, needed, origin(folder))


def _bytes_in_memory(folder: Path, config: Any, device: torch.device, format_: Format) -> int:
    """What loading a folder's weights takes: counted from the config, or as they were saved where they stay so. Those
    of int4 are read in 16 bits first, on a GPU product by product."""
    if format_.taken_as_saved and format_.precision != "nf4":
        return sum(tensor_bytes(folder).values())
    layout = None
    if format_.precision == "nf4":
        layout = memory.NF4.of(quantisation_of(config), packed_for_cpu(device))
    network = memory.skeleton(config)
    counted = memory.weights(network, format_.dtype, layout)
    fused = memory.as_fused(counted, network, device, format_.precision, format_.dtype).total
    if format_.precision == "int4" and device.type == "cuda":
        return fused + largest_product(tuple((name, *shape) for name, shape in product_shapes(config).items()))
    return max(counted.total, fused)


def _find_room(sources: Sequence[Source], device: torch.device, make_room: MakeRoom, head: int = 0) -> Placement:
    """Where the models go, with `head` bytes of a trained head; UserError where they do not fit, also after
    `make_room`."""
    needed = sum(source.bytes for source in sources) + head
    free = free_by_device(device)
    if not free or (placement := placed(needed, free)):
        return placement if free else "one"
    make_room(needed - max(free))
    release_memory()
    placement = placed(needed, free_by_device(device))
    if placement is None:
        raise UserError(_no_room(sources, device, head))
    return placement


def free_by_device(device: torch.device) -> list[int]:
    """Free bytes of the device, and on CUDA of the other GPUs after it; empty where the system does not tell."""
    devices = [device]
    if device.type == "cuda":
        first = device.index or 0
        others = [i for i in range(torch.cuda.device_count()) if i != first]
        devices = [torch.device("cuda", i) for i in (first, *others)]
    return [free for each in devices if (free := memory.free_memory(each).free) is not None]


def _no_room(sources: Sequence[Source], device: torch.device, head: int = 0) -> str:
    labels = [f"{source.label} ({source.format.precision})" for source in sources]
    names = " and ".join([*labels, "its trained head"] if head else labels)
    needed, free = sum(source.bytes for source in sources) + head, sum(free_by_device(device))
    where = {"cuda": "the GPU", "mps": "the Apple GPU"}.get(device.type, "this machine")
    need = "needs" if len(sources) == 1 and not head else "need"
    return (
        f"{names} {need} {in_bytes(needed)} of memory for weights alone, and {in_bytes(free)} are free on {where}; "
        "choose a smaller precision or a smaller pair, or free some memory."
    )


def _load_sources(
    sources: Sequence[Source], device: torch.device, placement: Placement, progress: Progress, stop: Stop
) -> list[Model]:
    models: list[Model] = []
    for source in sources:
        if stop():
            raise Cancelled
        models.append(_load(source, device, placement, progress))
    return models


def _ready(models: Sequence[Model], costs: Mapping[str, CostTable], dynamic: str | None, measure: bool) -> Pair:
    """The pair, with what has to be known of it before anything runs: threads and the translation of tokens."""
    target, draft = models[0], models[1] if len(models) > 1 else None
    for model in models:
        if dynamic:
            model.fall_back(dynamic)
    if measure:
        target.choose_threads()
    translation = None if draft is None or same_tokens(target, draft) else translate(target, draft)
    pair = Pair(target, draft, translation)
    for role, model in zip(("target", "draft"), models):
        model.costs = costs.get(role)
    return pair


def _load(source: Source, device: torch.device, placement: Placement, progress: Progress) -> Model:
    label, folder, config = source.label, source.folder, source.config
    with in_one_sentence(label, source.format):
        network: Any = load_network(folder, label, config, device, source.format, placement, progress)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        network.eval().requires_grad_(False)
        return Model(
            name=label,
            network=network,
            tokenizer=tokenizer,
            precision=source.format.precision,
            stop_ids=_stop_ids(folder, tokenizer, config),
            context_length=getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 2048,
            vocab_size=min(max(tokenizer.get_vocab().values()) + 1, config.get_text_config(decoder=True).vocab_size),
            notes=[*([source.format.why] if source.format.why else []), *source.format.notes],
            load_again=lambda: load_network(folder, label, config, device, source.format, placement, silent).eval(),
            origin=source.origin,
            folder=folder,
        )


@contextmanager
def in_one_sentence(label: str, format_: Format | None = None) -> Iterator[None]:
    """What the libraries raise about a model, as a sentence that names it. Running out of memory stays what it is."""
    try:
        yield
    except (UserError, Cancelled):
        raise
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise UserError(f"{label} cannot be read: {first_line(error)}") from error
    except ImportError as error:
        if format_ is None or not format_.taken_as_saved:
            raise UserError(f"{label} cannot be loaded: {first_line(error)}") from error
        raise UserError(
            f"{label} was quantised with {format_.precision}, which needs a package that is not installed here: "
            f"{first_line(error)} Install it, or choose the checkpoint that is not quantised."
        ) from error
    except Exception as error:  # whatever they make of a stranger's files
        if out_of_memory(error):
            raise
        raise UserError(f"{label} cannot be loaded: {first_line(error)}") from error


def resolve_device(device: str) -> torch.device:
    if SPECS["device"].read(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("No CUDA device is available to this PyTorch; use --device cpu or auto.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("No Apple GPU is available to this PyTorch; use --device cpu or auto.")
    return torch.device(device)


def refuse_endless(folder: Path, name: str) -> None:
    """Raise UserError where a config names more layers than any model has, before transformers begins to make them: a
    line of JSON would keep a processor busy for as long as there is memory."""
    with suppress(OSError, ValueError, RecursionError):  # whoever reads the config says it
        if any(number > MOST_LAYERS for number in _layers_in(json.loads((folder / "config.json").read_bytes()))):
            raise UserError(f"{name} says that it has more than {MOST_LAYERS:,} layers, which no model has.")


def _layers_in(config: Any) -> Iterator[float]:
    """Every number of layers that a config names, those of its parts too."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith(("layers", "layer")) and isinstance(value, int | float):
            yield value
        yield from _layers_in(value)


def refuse_unsupported(config: Any, name: str) -> None:
    """Speculation takes tokens back, so every layer's cache must be able to forget its newest entries exactly."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; speculative decoding here needs a decoder-only one.")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{name} is a {config.model_type} model, which is not one that generates text from text.")
    layers = DynamicCache(config=config).layers
    kinds = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    stateful = getattr(AutoModelForCausalLM._model_mapping[type(config)], "_is_stateful", False)
    if kinds or stateful:
        raise UserError(
            f"{name} ({config.model_type}) keeps a running state instead of one cache entry per token (recurrent or "
            "linear attention), and a state cannot be rolled back when a draft is rejected; choose a model whose "
            "layers all use attention."
        )


def _stop_ids(folder: Path, tokenizer: Any, config: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config (one or several), the config and the tokenizer."""
    saved = (
        GenerationConfig.from_pretrained(folder).eos_token_id if (folder / "generation_config.json").is_file() else None
    )
    found: set[int] = set()
    for ids in (saved, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
