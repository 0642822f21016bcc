"""Block drafters on disk: what the published configs mean, and the layouts of z-lab and DeepSpec written.

z-lab's and SpecForge's files have the network's tensors and `dflash_config`; DeepSpec's the same entries at the top and
copies of the target's embedding and head; speculators' the shape in `transformer_layer_config`. A layer is counted by
its output in the first three (`target_layer_ids`), by the boundary in the last (`aux_hidden_state_layer_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.heads.dflash import MARKOV_HEADS, DFlashConfig

OUTPUTS, BOUNDARIES = "target_layer_ids", "aux_hidden_state_layer_ids"
SPECULATORS = "speculators_model_type"
Sizes = Mapping[str, tuple[int, ...]]


def is_block(sizes: Sizes) -> bool:
    """Whether tensors of these names are a block drafter's: features are normed once, for every layer."""
    return "fc.weight" in sizes and "hidden_norm.weight" in sizes


def what_else(config: Mapping[str, Any], sizes: Sizes) -> str | None:
    """What it is, where it is of this kind and has parts that are not run here."""
    if any(name.startswith(("candidate_selector.", "layers.0.attention_conv.")) for name in sizes):
        return "is a DFlash2 drafter, with convolutions and a selector of candidates"
    if any(name.startswith(("prefix_gru.", "embed_proj.")) for name in sizes):
        return "is a Domino drafter, with a recurrent net over its block"
    if "layers.0.pre_feedforward_layernorm.weight" in sizes:
        return "is a drafter whose layers are of Gemma 4's kind"
    if entry(config, "markov_head_type", "vanilla") not in MARKOV_HEADS:
        return f"biases its tokens in a way called {entry(config, 'markov_head_type')}"
    return None


def entry(config: Mapping[str, Any], key: str, otherwise: Any = None) -> Any:
    """What a config says, in `dflash_config` or at its top."""
    nested = config.get("dflash_config") or {}
    return nested.get(key, config.get(key, otherwise))


def shape_of(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The fields that DFlashConfig has beside Shape's. Raises KeyError, TypeError or ValueError for a config that lacks
    or garbles one."""
    shape = {**config, **config.get("transformer_layer_config", {})}
    depth, hidden = int(shape["num_hidden_layers"]), int(shape["hidden_size"])
    kinds = list(shape.get("layer_types") or ["full_attention"] * depth)[:depth]
    sliding = [kind == "sliding_attention" for kind in kinds]
    markov = sizes.get("markov_head.markov_w1.weight", (0, 0))[1]
    confidence = sizes.get("confidence_head.proj.weight")
    return {
        "block_size": int(entry(config, "block_size") or shape["block_size"]),
        "mask_id": int(_given(config, "mask_token_id")),
        "sample_from_anchor": _anchor_first(config, sizes),
        "causal": tuple(_causal(config, slides) for slides in sliding),
        "windows": tuple(int(shape["sliding_window"]) if slides else None for slides in sliding),
        "markov_rank": markov,
        "markov_head": entry(config, "markov_head_type", "vanilla"),
        "confidence": confidence is not None,
        "confidence_with_markov": confidence is not None and confidence[1] > hidden,
        "own_head": "lm_head.weight" in sizes,
        "softcap": shape.get("final_logit_softcapping"),
    }


def _given(config: Mapping[str, Any], key: str) -> Any:
    if (found := entry(config, key)) is None:
        raise KeyError(key)
    return found


def _anchor_first(config: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether rows predict the token after their own place: as a config says, else as its kind does."""
    told = entry(config, "sample_from_anchor", entry(config, "shift_label"))
    if told is not None:
        return bool(told)
    names = " ".join([config.get(SPECULATORS) or "", *(config.get("architectures") or ())]).lower()
    return "dspark" in names or entry(config, "projector_type") == "dspark" or "markov_head.markov_w1.weight" in sizes


def _causal(config: Mapping[str, Any], slides: bool) -> bool:
    """Whether the rows of a layer see of their block only those before them. speculators' files say it of sliding
    layers, others of all; where they are silent, sliding layers are causal."""
    if SPECULATORS in config:
        return slides and not config.get("sliding_window_non_causal", False)
    told = config.get("is_causal", (config.get("dflash_config") or {}).get("causal"))
    return slides if told is None else bool(told)


def layers_of(config: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, bool]:
    """The target's boundaries that a config names (None: the usual ones), and whether it leaves open how they are
    counted: an entry of one layout in the other may mean either."""
    outputs, boundaries = entry(config, OUTPUTS), entry(config, BOUNDARIES)
    if SPECULATORS in config:
        named = boundaries or outputs
        return (tuple(map(int, named)) if named else None), boundaries is None
    if outputs:
        return tuple(int(i) + 1 for i in outputs), False
    return (tuple(map(int, boundaries)), True) if boundaries else (None, False)


def documents(config: DFlashConfig, depth: int) -> dict[str, Any]:
    """The entries of config.json beside the shape's, for a target of `depth` layers: those of DeepSpec's layout where
    rows predict the next token, else of z-lab's."""
    layers = [boundary - 1 for boundary in config.aux_layers]
    sliding = next((window for window in config.windows if window), None)
    shared: dict[str, Any] = {
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": depth,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "sliding_window": sliding,
        "use_sliding_window": sliding is not None,
        "tie_word_embeddings": False,
    }
    if len(set(config.causal)) == 1 and config.causal != tuple(window is not None for window in config.windows):
        shared["is_causal"] = config.causal[0]
    if not config.sample_from_anchor:
        own = {"mask_token_id": config.mask_id, OUTPUTS: layers}
        return {"architectures": ["DFlashDraftModel"], **shared, "dflash_config": own}
    return {
        "architectures": ["Qwen3DSparkModel"],
        **shared,
        "mask_token_id": config.mask_id,
        OUTPUTS: layers,
        "num_anchors": 512,
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
