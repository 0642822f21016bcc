"""Trained heads on disk: the published formats in, the original one out.

Known are the original format and SpecForge's and AngelSlim's (`midlayer.*`, a flat config), and that of vLLM's
speculators (`layers.0.*`, the shape in `transformer_layer_config`). `d2t` holds offsets in all of them: the target's
id of draft id i is i + d2t[i]. Weights are safetensors alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.disk import made_whole, write_whole
from core.errors import UserError, refused_pickle
from core.heads import DraftNetwork, HeadConfig, HeadNetwork, Shape
from core.heads.dflash import DFlashConfig, DFlashNetwork, usual_outputs
from core.heads.dflash_format import SPECULATORS, documents, is_block, layers_of, shape_of, what_else

CAN_RUN = "of trained drafters, EAGLE-3, P-EAGLE, DFlash and DSpark can be run"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
P_EAGLE_DEPTHS = 8
"""Tokens that speculators trains a P-EAGLE head to draft where nothing else is said."""
MEASURED = "measured"
"""The entry of config.json, and of the bundled pair's facts, that says how much was accepted, and where."""
OPTIONAL = {"d2t", "t2d"}
IGNORED = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""Copies of the target's own that speculators may have saved for its training."""


@dataclass(frozen=True)
class Description:
    """What the config and the weights' headers of a head say. `shape` has every field of `make` but `aux_layers`;
    `layers` are the target's layers it reads by the config's own count (None: the usual ones), and `open` tells that
    the config leaves open whether they are counted by what enters a layer or by what leaves it."""

    shape: dict[str, Any]
    features: int
    layers: tuple[int, ...] | None
    open: bool
    verifier: str | None
    make: type[HeadConfig | DFlashConfig] = HeadConfig

    def candidates(self, depth: int) -> list[tuple[int, ...]]:
        """The boundaries of a target of `depth` layers that may be meant, the likelier first."""
        if self.layers is None:
            if self.make is DFlashConfig:
                return [tuple(i + 1 for i in usual_outputs(depth, self.features))]
            return [usual_layers(depth)]
        both = [self.layers, tuple(i + 1 for i in self.layers)] if self.open else [self.layers]
        return [layers for layers in both if all(0 <= i <= depth for i in layers)]

    def config(self, layers: tuple[int, ...]) -> HeadConfig | DFlashConfig:
        return self.make(aux_layers=layers, **self.shape)

    @property
    def anywhere(self) -> HeadConfig | DFlashConfig:
        """The shape of the head, whatever layers of a target it reads."""
        return self.config(tuple(range(self.features)))

    @property
    def in_blocks(self) -> bool:
        """Whether it drafts several tokens in one pass."""
        return self.make is DFlashConfig or self.shape["mask_id"] is not None


def usual_layers(depth: int) -> tuple[int, ...]:
    """Low, middle and high, as EAGLE-3 takes them; distinct where there are layers enough for it."""
    return 2, depth // 2, depth - 3


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a draft head and not of a model that could write by itself."""
    names = " ".join(config.get("architectures") or ()).lower()
    named = any(kind in names for kind in ("eagle", "medusa", "mtp", "dflash", "dspark"))
    return bool(named or "draft_vocab_size" in config or SPECULATORS in config or "dflash_config" in config)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, empty where there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def trained_for(config: Mapping[str, Any]) -> str | None:
    """The name of the target that a head was trained for, where its config.json has it: a head is found by less, and
    runs with whatever target its shape fits."""
    target = config.get("target")
    name = target.get("name") if isinstance(target, dict) else None
    return name[:200] if isinstance(name, str) else None


def describe_head(folder: Path, name: str) -> Description:
    """What a folder with a head says of it. Raises UserError where it is none that can be run."""
    return describe(read_config(folder), _sizes(_weights_file(folder, name)), name)


def describe(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> Description:
    """The same from a config and the shapes of the tensors."""
    kind = config.get(SPECULATORS, "eagle3")
    if kind not in ("eagle3", "peagle", "dflash", "dspark"):
        raise UserError(f"{name} is a speculator of the kind {kind}; {CAN_RUN}.")
    sizes = {_of_block(key): shape for key, shape in shapes.items()}
    if is_block(sizes) != (kind in ("dflash", "dspark")) and SPECULATORS in config:
        raise UserError(f"{name} is said to be of the kind {kind}, and its weights are not; {CAN_RUN}.")
    if is_block(sizes):
        if other := what_else(config, sizes):
            raise UserError(f"{name} {other}; {CAN_RUN}.")
    else:
        sizes = {_original(key): shape for key, shape in shapes.items()}
        if any(key not in sizes for key in ("fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight")):
            raise UserError(f"{name} {_other_kind(sizes)}; {CAN_RUN}.")
    if lacking := [key for key in _norms_asked_for(config) if key not in sizes]:
        raise UserError(f"{name} is incomplete: its config.json asks for a norm that its weights lack ({lacking[0]}).")
    try:
        return _describe_block(config, sizes) if is_block(sizes) else _describe(config, sizes)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{name} cannot be read as a head: its config.json lacks or garbles {error}.") from error


def _other_kind(keys: Iterable[str]) -> str:
    """What weights are that no EAGLE-3 head has."""
    names = list(keys)
    if any(name.startswith("mtp.") or ".eh_proj." in f".{name}" or ".enorm." in f".{name}" for name in names):
        return "is a module for predicting several tokens (MTP), a part of the model it was trained with"
    if any(name.startswith("medusa_head.") or name.endswith(".0.linear.weight") for name in names):
        return "holds Medusa heads, which guess several positions at once from one hidden state"
    if "fc.weight" in names and "lm_head.weight" not in names:
        return "is a head of EAGLE-1 or 2, which drafts hidden states and reads them by its target's own head"
    return "has no weights of an EAGLE-3 head"


def _describe(config: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> Description:
    nested = config.get("eagle_config") or {}
    shape = _shape(config, sizes, "midlayer")
    plain = config.get(LAYER_IDS)
    layers = plain or nested.get(LAYER_IDS)
    fc_norm = bool(config.get("fc_norm"))
    fed_back = bool(config.get("norm_output"))
    if SPECULATORS not in config:
        # The same word means the norm before lm_head in SpecForge's configs, which every head has.
        fed_back = bool(config.get("norm_output_feedback", fed_back and fc_norm))
    parallel = "mask_hidden" in sizes
    mask = next((config[key] for key in ("mask_token_id", "pard_token") if config.get(key) is not None), None)
    if parallel and mask is None:
        raise KeyError("mask_token_id")
    return Description(
        shape={
            **shape,
            "norm_before_residual": bool(config.get("norm_before_residual", nested.get("norm_before_residual"))),
            "norm_before_fc": "input_norm.weight" in sizes,
            "fc_norm": "fc_norm.0.weight" in sizes,
            "norm_output": fed_back,
            "mask_id": int(mask) if parallel and mask is not None else None,
            "block_size": _told_length(config) if parallel else 1,
        },
        features=sizes["fc.weight"][1] // shape["target_hidden_size"],
        layers=tuple(map(int, layers)) if layers else None,
        open=plain is None,
        verifier=_verifier(config),
    )


def _describe_block(config: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> Description:
    shape = _shape(config, sizes, "layers.0")
    layers, open_ = layers_of(config)
    return Description(
        shape={**shape, **shape_of(config, sizes)},
        features=sizes["fc.weight"][1] // shape["target_hidden_size"],
        layers=layers,
        open=open_,
        verifier=_verifier(config),
        make=DFlashConfig,
    )


def _shape(config: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]], first: str) -> dict[str, Any]:
    """The fields of every drafter's shape; `first` is where the tensors of its first layer are."""
    shape = {**config, **config.get("transformer_layer_config", {})}
    hidden, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
    own = sizes["lm_head.weight"][0] if "lm_head.weight" in sizes else None
    depth = int(shape.get("num_hidden_layers") or 1)
    if depth > len(sizes):  # more layers than tensors; making them would take all memory
        raise ValueError("'num_hidden_layers'")
    vocabulary = sizes["t2d"][0] if "t2d" in sizes else shape.get("vocab_size", own)
    return {
        "hidden_size": hidden,
        "intermediate_size": int(shape["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(shape.get("num_key_value_heads") or heads),
        "head_dim": int(shape.get("head_dim") or hidden // heads),
        "vocab_size": int(vocabulary),
        "draft_vocab_size": own or int(vocabulary),
        "target_hidden_size": int(config.get("target_hidden_size") or hidden),
        "depth": depth,
        "rms_norm_eps": float(shape.get("rms_norm_eps", 1e-6)),
        "rope": _rope(shape),
        "max_positions": int(shape.get("max_position_embeddings", 2048)),
        "attention_bias": f"{first}.self_attn.q_proj.bias" in sizes,
        "qk_norm": f"{first}.self_attn.q_norm.weight" in sizes,
        "own_embedding": "embed_tokens.weight" in sizes,
    }


def _verifier(config: Mapping[str, Any]) -> str | None:
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def _told_length(config: Mapping[str, Any]) -> int:
    """How many tokens a P-EAGLE head was made to draft in a pass."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or config.get("num_speculative_tokens") or P_EAGLE_DEPTHS)


def _norms_asked_for(config: Mapping[str, Any]) -> list[str]:
    """The weights of the norms on features that a config speaks of. A file that has them although its config is silent
    is run with them."""
    nested = config.get("eagle_config") or {}
    joined = config.get("norm_before_fc", nested.get("norm_before_fc"))
    return ["input_norm.weight"] * bool(joined) + ["fc_norm.0.weight"] * bool(config.get("fc_norm"))


def _rope(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The head's own rotary positions, whatever its target's are, as transformers 5 writes them."""
    rope = dict(shape.get("rope_parameters") or shape.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", float(shape.get("rope_theta") or 10000.0))
    return rope


def _weights_file(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"{name} has its weights in {len(files)} files; a head's are expected in one.")
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
        raise UserError(refused_pickle(name, pickles[0].name))
    raise UserError(f"{name} has no .safetensors weights.")


def _sizes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="pt") as weights:
        return {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118


FUSED = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.", "lm_head.")


def bytes_in_memory(folder: Path, name: str, dtype: torch.dtype) -> int:
    """What loading a head takes: its weights, and beside them those that passes read fused with others, or cut."""
    sizes = _sizes(_weights_file(folder, name))
    counted = sum(
        math.prod(s) * (2 if any(f in k for f in FUSED) else 1) for k, s in sizes.items() if k not in OPTIONAL
    )
    return counted * dtype.itemsize


def _original(key: str) -> str:
    """The name of a tensor as networks here have it: `midlayer.*`, and `further.*` from the second layer on."""
    if not (found := re.match(r"layers\.(\d+)\.", key)):
        return key
    layer = int(found[1])
    return f"further.{layer - 1}.{key[found.end() :]}" if layer else f"midlayer.{key[found.end() :]}"


def _of_block(key: str) -> str:
    """The name of a block drafter's tensor; early files of SpecForge have two modules in a container."""
    return key.removeprefix("logit_head.")


def _published(key: str) -> str:
    """The same as files have it, `layers.1.*` for the second layer."""
    if not (found := re.match(r"further\.(\d+)\.", key)):
        return key
    return f"layers.{int(found[1]) + 1}.{key[found.end() :]}"


def load_weights(
    folder: Path, name: str, config: HeadConfig | DFlashConfig, dtype: torch.dtype, device: torch.device
) -> HeadNetwork | DFlashNetwork:
    """The drafter of a folder on a device. Raises UserError where weights and config do not fit each other."""
    in_blocks = isinstance(config, DFlashConfig)
    named = _of_block if in_blocks else _original
    tensors = {named(key): value for key, value in load_file(_weights_file(folder, name)).items()}
    network = _cast(DFlashNetwork(config) if in_blocks else HeadNetwork(config), dtype)
    if "d2t" not in tensors and config.draft_vocab_size != config.vocab_size:
        raise UserError(f"{name} proposes {config.draft_vocab_size:,} tokens and does not say which (d2t is missing).")
    own = {key: value for key, value in tensors.items() if key not in IGNORED | OPTIONAL}
    try:
        missing, unexpected = network.load_state_dict(own, strict=False)
    except RuntimeError as error:
        raise UserError(f"{name} cannot be loaded: its weights do not have the shapes its config says.") from error
    if lost := [*sorted(set(missing) - OPTIONAL - {k for k in missing if k.startswith("rotary.")}), *unexpected]:
        raise UserError(f"{name} cannot be loaded: its weights do not fit its config ({_published(lost[0])}).")
    offsets = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long)).long()
    ids = torch.arange(config.draft_vocab_size) + offsets
    if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise UserError(f"{name} maps its draft tokens to ids that its target cannot have (d2t is not of offsets).")
    network.set_draft_ids(ids)
    return network.to(device).eval().requires_grad_(False)


Network = TypeVar("Network", bound=DraftNetwork)


def _cast(network: Network, dtype: torch.dtype) -> Network:
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def save_head(network: HeadNetwork, folder: Path, dtype: torch.dtype = torch.bfloat16, **entries: Any) -> None:
    """Write a head in the original format, which vLLM, SGLang and this project read; `entries` go to its config.json
    (such as `target`, whose model it is for)."""
    _save(network, folder, dtype, {**config_document(network.config, dtype), **entries})


def save_block(
    network: DFlashNetwork,
    folder: Path,
    depth: int,
    dtype: torch.dtype = torch.bfloat16,
    copies: Mapping[str, Tensor] | None = None,
    **entries: Any,
) -> None:
    """Write a block drafter for a target of `depth` layers in DeepSpec's layout where it predicts the next token
    (DSpark), else in z-lab's (DFlash). `copies` of the target's tensors (`embed_tokens.weight`, `lm_head.weight`) are
    what servers want beside a DSpark; here the target's own are used where they are left out."""
    config = network.config
    document = {**_shape_document(config, dtype), **documents(config, depth), **entries}
    _save(network, folder, dtype, document, copies or {}, maps=config.draft_vocab_size != config.vocab_size)


def _save(
    network: DraftNetwork,
    folder: Path,
    dtype: torch.dtype,
    document: Mapping[str, Any],
    copies: Mapping[str, Tensor] | None = None,
    maps: bool = True,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v for k, v in network.state_dict().items() if not k.startswith("rotary")} | dict(copies or {})
    if not maps:
        tensors = {k: v for k, v in tensors.items() if k not in OPTIONAL}
    kept = {_published(k): (v.to(dtype) if v.is_floating_point() else v).cpu().contiguous() for k, v in tensors.items()}
    with made_whole(folder / "model.safetensors") as file:  # whoever drafts with the one before reads on in it
        save_file(kept, file, metadata={"format": "pt"})
    write_whole(folder / "config.json", json.dumps(document, indent=2) + "\n")


def config_document(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the original format. The layers are named at its top, where vLLM reads them as boundaries; it
    does not count them there."""
    parallel = {"mask_token_id": config.mask_id, "num_speculative_tokens": config.block_size}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_shape_document(config, dtype),
        LAYER_IDS: list(config.aux_layers),
        "num_aux_hidden_states": len(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_output_feedback": config.norm_output,
        "tie_word_embeddings": False,
        **({} if config.mask_id is None else parallel),
    }


def _shape_document(config: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The entries of every drafter's shape, as transformers names them."""
    rope = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "attention_bias": config.attention_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
