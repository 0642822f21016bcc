"""The commands of "take it to production" for llama.cpp, run: on llama.cpp itself, as the package xllamacpp brings it.

The package is a library, so a command's flags are looked up among those that its build of llama-server knows, and set
on the parameters that they stand for. Without the package these tests are skipped.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from app.tune.production import Deployment, llama_cpp
from core.loading.gguf import read_header
from core.loading.pair import SMOLLM2_HEAD, smollm2_file
from core.servers import connect, open_lane
from core.servers.connection import Connection
from core.servers.dialects import counters
from core.servers.records import Server, ServerRun
from core.settings import SMOLLM2_NAME, Settings

xllamacpp: Any = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")

REPEATING = 6 * "one two three four five six. "
"""Text that goes on as it went before, so that an n-gram finds it."""
LENGTH = 3
SETTINGS = Settings(max_new_tokens=24, chat="off", ignore_eos=True)


def parse(command: str) -> argparse.Namespace:
    """The server's line of a recipe; a flag that is not named here, or that llama-server does not know, fails."""
    words = shlex.split(command.replace("\\\n", " ").splitlines()[-1])
    assert words[0] == "llama-server"
    library = Path(xllamacpp.xllamacpp.__file__).read_bytes()
    unknown = [word for word in words if word.startswith("-") and b"\0" + word.encode() + b"\0" not in library]
    assert not unknown, f"llama-server does not know {unknown}"
    flags = argparse.ArgumentParser(exit_on_error=False)
    flags.add_argument("-m")
    flags.add_argument("-md")
    flags.add_argument("--metrics", action="store_true")
    flags.add_argument("--spec-type")
    flags.add_argument("--spec-draft-n-max", type=int)
    flags.add_argument("--spec-draft-p-min", type=float)
    flags.add_argument("--spec-draft-sampling", default="greedy")
    flags.add_argument("--spec-ngram-simple-size-n", type=int)
    flags.add_argument("--spec-ngram-simple-size-m", type=int)
    return flags.parse_args(words[1:])


def speculations(found: argparse.Namespace) -> list[Any]:
    kinds = [f"COMMON_SPECULATIVE_TYPE_{kind.replace('-', '_').upper()}" for kind in found.spec_type.split(",")]
    return [getattr(xllamacpp.common_speculative_type, kind) for kind in kinds]


def parameters(found: argparse.Namespace, drafter: str) -> Any:
    """What a command's flags set, on the files that its conversions stand for."""
    weights, options = str(smollm2_file()), xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = weights, 512, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.ui, options.verbosity, options.endpoint_metrics = False, -1, found.metrics
    options.speculative.types = speculations(found)
    if found.md:
        options.speculative.draft.mparams.path = drafter
        options.speculative.draft.n_max = found.spec_draft_n_max
        options.speculative.draft.p_min = found.spec_draft_p_min
        options.speculative.draft.probabilistic = found.spec_draft_sampling == "probabilistic"
    if found.spec_ngram_simple_size_n:
        options.speculative.ngram_simple.size_n = found.spec_ngram_simple_size_n
        options.speculative.ngram_simple.size_m = found.spec_ngram_simple_size_m
    return options


@contextmanager
def serving(command: str, drafter: str) -> Iterator[Server]:
    server = xllamacpp.Server(parameters(parse(command), drafter))
    yield connect(server.listening_address)
    del server


def answer(server: Server, prompt: str, settings: Settings) -> ServerRun:
    with open_lane(server, prompt, settings) as lane:
        for _ in lane:
            pass
    return lane.run


TENSORS = {
    **{"fc": "fc", "lm_head": "output", "norm": "output_norm", "post_attention_layernorm": "ffn_norm"},
    **{"input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "o_proj": "attn_output"},
    **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
"""Of a head, as EAGLE-3 and as llama.cpp names them."""


def head_as_gguf(head: Path, target: str, file: Path) -> str:
    """A head in the file that llama.cpp reads: its tokens are the target's, `d2t` leads from a drafted id to the
    target's (EAGLE-3: by how much they differ), and what turns in rotary embedding are neighbours, not halves."""
    about, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    writer = gguf.GGUFWriter(file, "eagle3")
    adds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for name, value in read_header(Path(target)).settings.items():
        if name.startswith("tokenizer."):
            adds[type(value)](name, value)
    writer.add_vocab_size(about["vocab_size"])
    writer.add_context_length(about["max_position_embeddings"])
    writer.add_embedding_length(about["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(about["intermediate_size"])
    heads = {"q": about["num_attention_heads"], "k": about["num_key_value_heads"]}
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_layer_norm_rms_eps(about["rms_norm_eps"])
    writer.add_rope_freq_base(about["rope_theta"])
    writer.add_rope_dimension_count(about["head_dim"])
    writer.add_array("eagle3.target_layers", about["eagle_aux_hidden_state_layer_ids"])
    writer.add_uint32("eagle3.target_hidden_size", about["target_hidden_size"])
    writer.add_bool("eagle3.norm_before_residual", about["norm_before_residual"])
    writer.add_tensor("d2t", (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).numpy())
    for name in tensors.keys() - {"d2t", "t2d"}:
        short, weight = name.split(".")[-2], tensors[name].float()
        if short in ("q_proj", "k_proj"):
            weight = weight.unflatten(0, (heads[short[0]], 2, -1)).transpose(1, 2).flatten(0, 2)
        place = "blk.0." if name.startswith("midlayer.") else ""
        kind = "float16" if weight.dim() > 1 else "float32"
        writer.add_tensor(f"{place}{TENSORS[short]}.weight", weight.contiguous().numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


@pytest.mark.parametrize(
    "method, temperature, drafter",
    [("ngram", 0.0, "ngram-simple"), ("draft", 1.0, "draft-simple"), ("head", 0.0, "draft-eagle3")],
)
def test_the_command_starts_a_server_whose_drafter_is_on(
    method: str, temperature: float, drafter: str, tmp_path: Path
) -> None:
    """The target drafts for itself, or the bundled head does, on a message like those that it was made from."""
    settings = Settings(target=SMOLLM2_NAME, draft=SMOLLM2_NAME, method=method, temperature=temperature)
    file, asked, prompt = str(smollm2_file()), replace(SETTINGS, temperature=temperature), REPEATING
    if method == "head":
        settings = replace(settings, draft=None)
        file = head_as_gguf(SMOLLM2_HEAD, file, tmp_path / "head.gguf")
        asked, prompt = replace(asked, chat="auto"), "Give me three tips for sleeping better."
    recipe = llama_cpp(Deployment(settings, LENGTH, "bf16", "bf16", head=SMOLLM2_HEAD.name))
    assert any("--metrics" in note for note in recipe.notes)
    with serving(f"{recipe.command} --metrics", file) as server, Connection(server.address) as connection:
        assert server.engine == "llama.cpp" and server.metrics
        run, total = answer(server, prompt, asked), counters(connection, server)
    assert run.server.drafter == drafter and run.new_tokens == SETTINGS.max_new_tokens
    counted = run.speculation
    assert counted is not None and counted.drafted and counted.accepted and counted.passes and not counted.shared
    assert total is not None and (total["drafted"], total["accepted"]) == (counted.drafted, counted.accepted)
    assert counted.drafted <= LENGTH * counted.passes and (counted.tokens_per_pass or 0) > 1
    steps = [outcome for chunk in run.chunks for outcome in chunk.outcomes or ["unknown"]]
    assert "unknown" not in steps and len(steps) == run.new_tokens
    # The last pass may be cut short.
    assert counted.accepted - LENGTH <= steps.count("accepted") <= counted.accepted
    assert not run.missing


def test_the_command_for_two_drafters_names_what_llama_server_knows() -> None:
    settings = Settings(target=SMOLLM2_NAME, draft="org/drafter", method="ngram+draft")
    found = parse(llama_cpp(Deployment(settings, LENGTH, "bf16", "bf16")).command)
    assert found.md and len(speculations(found)) == 2
