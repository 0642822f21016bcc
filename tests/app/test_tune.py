"""The tab Tune without a browser: what it asks of the engine, what it says, and the commands for other engines."""

import contextlib
import io
import json
import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fake_sweep import fake_sweep
from fakes import ENVIRONMENT, FakeEngine
from transformers.modeling_layers import MtpModel

from app.playground.example import example_of
from app.serving.device import Device
from app.serving.visit import Visit
from app.settings import CONTROLS
from app.sidebar.picker import Picker
from app.tune import PUBLIC_BUDGET, Tune, own_prompts
from app.tune.example import example_html
from app.tune.fastest import fastest, keep
from app.tune.many_texts import ManyTexts
from app.tune.production import Deployment, llama_cpp, placeholders, recipes, sglang, transformers, vllm
from app.tune.results import ENGINES, QUESTIONS, best_settings, details, fastest_settings
from core.errors import UserError
from core.measuring.sweep import finish
from core.records import Settings
from core.text import Prompt

HUB = Settings(target="org/target-8B", draft="org/draft-1B")


@pytest.fixture
def tune():
    return Tune(FakeEngine(pace=0.0), Device())


def sweep_document(acceptance=0.8, settings=HUB):
    plan = ([Prompt("one", "x", "kind")], settings, [1, 2, 4], [0.0, 1.0], 1, lambda: False)
    return finish(fake_sweep(ENVIRONMENT, acceptance, 0.0, *plan))


def controls(**changes):
    values = Settings().to_dict() | changes
    return [values[name] for name in CONTROLS]


def test_the_api_sweeps_and_ends_with_the_document(tune):
    *progress, last = tune.sweep([2, 4], [0.0], ["class"], 16)
    assert progress and all(step["status"] and step["document"] is None for step in progress)
    document = last["document"]
    assert [point["draft_length"] for point in document["points"]] == [2, 4, "auto"]
    assert [prompt["kind"] for prompt in document["prompts"]] == ["class"]
    assert document["settings"]["max_new_tokens"] == 16


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (([2], [0.0], [], 16, 1), "needs prompts"),
        (([2], [0.0], ["poems"], 16, 1), "no prompts of the kind 'poems'"),
        (([2], [0.0], ["class"], 0, 1), "New tokens must be a whole number between 1"),
        (([2], [0.0], ["class"], 16, 11), "Repeats must be between 1 and 10"),
        (([2], [0.0], ["class"], 16, None), "Repeats must be a number"),
        (([2.5], [0.0], ["class"], 16, 1), "A draft length must be a whole number"),
        (([2], ["hot"], ["class"], 16, 1), "A temperature must be a number"),
        ((None, [0.0], ["class"], 16, 1), "A draft length must be a number"),
    ],
)
def test_bad_choices_are_answered_in_a_sentence(tune, plan, sentence):
    values = dict(zip(CONTROLS, controls()))
    with pytest.raises(Exception, match=sentence):
        list(tune._events(*plan, "", values, lambda: False))


def test_strangers_have_a_budget():
    public = Tune(FakeEngine(pace=0.0), Device(), public=True)
    values = dict(zip(CONTROLS, controls()))
    with pytest.raises(Exception, match=f"{PUBLIC_BUDGET:,} of this public page"):
        list(public._events([1, 2, 3], [0.0, 1.0], ["class", "function"], 512, 10, "", values, lambda: False))


def test_the_forecast_counts_runs_and_follows_the_method(tune):
    said = tune.forecast([1, 2], [0.0, 1.0], ["class"], 32, 3, "", *controls(method="ngram"))
    assert "N-gram: 8 runs of 32 tokens, about 6 seconds" in said and "3 times at most (about 19 seconds)" in said
    assert "Choose at least one of each" in tune.forecast([], [0.0], ["class"], 32, 1, "", *controls())
    assert "New tokens must be a whole number" in tune.forecast([1], [0.0], ["class"], None, 1, "", *controls())


def test_a_pair_just_chosen_is_swept_by_a_method_that_it_can_use():
    """Its fields, and the method, follow a moment later."""
    engine = FakeEngine(pace=0.0)
    tune = Tune(engine, Device(), choices=Picker(engine, Device()).choices)
    values = controls(target=None, draft=None, method="early-exit")
    *_, (_, document) = tune.run([2], [0.0], ["class"], 16, 1, "", Asking(), *values, "small-pair")
    ran = document["settings"]
    assert (ran["target"], ran["draft"], ran["method"]) == ("owner/small", "owner/tiny", "draft")


def test_ones_own_prompts_are_swept_too(tune):
    values = dict(zip(CONTROLS, controls()))
    own = "class A:\n    pass\n---\n\nAnother, please.\n--- \n\n"
    events = list(tune._events([2], [0.0], ["class"], 16, 1, own, values, lambda: False))
    document = next(event["document"] for event in events if event["e"] == "document")
    assert [prompt["name"] for prompt in document["prompts"]][1:] == ["your prompt 1", "your prompt 2"]
    assert own_prompts(own)[0].text == "class A:\n    pass"
    assert "N-gram: 12 runs" in tune.forecast([1, 2], [0.0], ["class"], 32, 1, own, *controls(method="ngram"))
    with pytest.raises(UserError, match="50 prompts of your own, not 51"):
        own_prompts("x\n---\n" * 51)


def test_the_verdict_says_tokens_per_second_the_interval_and_the_batch_limit():
    document = sweep_document()
    said = details(document, 0.0)[0]
    point = next(p for p in document["points"] if p["draft_length"] == document["best"][0]["recommended"])
    assert (
        f"{point['tokens_per_second']['median']:.0f} tokens/s" in said
        and "from about 8 at once on, the cost curve predicts a loss" in said
    )
    assert f"({0.95 * point['ratio_to_plain']['median']:.2f} to" in said and "longest pause" in said
    document["best"][0] |= {"recommended": None, "pays": True}
    assert "Recommended" not in (open_ := details(document, 0.0)[0]) and "lies within the noise" in open_
    assert "Speculation pays; which length is best is open" in open_
    document["best"][0] |= {"pays": None}
    for point in document["points"]:
        point["ratio_to_plain"]["min"] = 1.01
    few = details(document, 0.0)[0]
    assert "Faster in every run; too few of them to be sure" in few and "cannot be told from noise" not in few
    document["points"][0]["ratio_to_plain"]["min"] = 0.99
    assert "Not decided" in (few := details(document, 0.0)[0]) and "cannot be told from noise" in few
    assert best_settings(document, 0.0)[0]["__type__"] == "update" and not details(document, 0.0)[2]["interactive"]
    document["best"][0] |= {"recommended": "auto"}
    document["costs"]["64"] = 0.5 * document["costs"]["1"]
    shown = details(document, 0.0)
    assert shown[2]["interactive"] and "predicts" not in shown[0]
    assert "A pass over 64 tokens took 0.5× one over a single token" in shown[7]


def test_commands_are_offered_as_what_they_are():
    """Those of a setting that is recommended, and those of one that is not, with the reason."""
    document, losing = sweep_document(), sweep_document(acceptance=0.06)

    def told(document):
        return details(document, 0.0)[-1 - len(ENGINES)]

    assert "Take it to production" in told(document) and "recommended" not in told(document)
    document["best"][0] |= {"recommended": None, "pays": None}
    assert "If you try one anyway" in told(document) and "Which setting is fastest here is not decided" in told(
        document
    )
    assert "If you try one anyway" in told(losing) and "Plain decoding is recommended here" in told(losing)


def test_the_fastest_of_all_precisions_is_one_that_was_measured():
    """Sweeps of the same work are held against each other; of other work, or another temperature, they say nothing."""
    slow, fast, other = sweep_document(0.5), sweep_document(0.9), sweep_document(0.95)
    slow["settings"]["precision"], fast["settings"]["precision"] = "nf4", "int4"
    fast["environment"] = {**ENVIRONMENT, "target": {**ENVIRONMENT["target"], "precision": "int4"}}
    other["settings"]["max_new_tokens"] += 1
    measured = keep(keep(keep([], other), fast), slow)
    best = fastest(slow, 0.0, measured)
    assert best.asked == "int4" and best.tokens_per_second == max(
        p["tokens_per_second"]["median"] for p in fast["points"] if p["temperature"] == 0
    )
    shown = details(slow, 0.0, measured)
    assert "of all that was measured here (int4, nf4)" in shown[0] and shown[1]["visible"]
    assert fastest_settings(slow, 0.0, measured)[:3] == ["int4", "draft", best.setting]
    assert not details(fast, 0.0, measured)[1]["visible"]
    assert len(keep(measured, slow)) == len(measured)
    assert "Only nf4 was measured" in details(slow, 0.0, keep([], slow))[0]


def test_the_recommended_setting_goes_to_the_sidebar():
    document = sweep_document()
    best = document["best"][1]
    method, length, temperature, tabs = best_settings(document, 1.0)
    assert (method, length, temperature) == ("draft", best["recommended"], 1.0)
    assert tabs.selected == "playground"


def test_where_speculation_loses_it_says_so_and_offers_plain():
    document = sweep_document(acceptance=0.06)
    shown = details(document, 0.0)
    assert "Plain decoding" in shown[0]
    assert "Plain decoding is faster here" in shown[0] and "because" in shown[0]
    assert best_settings(document, 0.0)[0] == "plain"


def test_every_chart_has_a_reading():
    shown = details(sweep_document(), 0.0)
    readings = shown[3 + len(QUESTIONS) : 3 + 2 * len(QUESTIONS)]
    assert all(reading.startswith("<p>") and reading.endswith(".</p>") for reading in readings)


def test_names_from_settings_stay_text_in_the_page():
    document = sweep_document(settings=replace(HUB, target="<img src=x onerror=alert(1)>"))
    assert "<img" not in "".join(value for value in details(document, 0.0) if isinstance(value, str))


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def test_vllm_takes_the_pair_and_the_length_as_json():
    command = words(vllm(Deployment(HUB, 4, "nf4", "nf4")).command)
    assert command[:3] == ["vllm", "serve", "org/target-8B"]
    assert command[command.index("--quantization") + 1] == "bitsandbytes"
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": "org/draft-1B", "num_speculative_tokens": 4}


def test_vllm_draws_its_drafts_where_ours_are_drawn():
    warm = replace(HUB, temperature=0.7)
    assert '"draft_sample_method": "probabilistic"' in vllm(Deployment(warm, 4, "bf16", "bf16")).command
    other_words = vllm(Deployment(warm, 4, "bf16", "bf16", same_tokens=False)).command
    assert "use_heterogeneous_vocab" in other_words and "draft_sample_method" not in other_words
    ngram = replace(warm, method="ngram", draft=None)
    assert "draft_sample_method" not in vllm(Deployment(ngram, 4, "bf16")).command


def test_what_vllm_does_otherwise_at_a_temperature_is_said():
    def notes(**changes):
        return " ".join(vllm(Deployment(replace(HUB, **changes), 4, "bf16", "bf16")).notes)

    assert "wrong temperature" not in notes() and "min-p" not in notes(min_p=0.1)
    assert "wrong temperature" in notes(temperature=0.7) and "min-p" not in notes(temperature=0.7)
    assert "min-p" in notes(temperature=0.7, min_p=0.1)


def test_sglang_verifies_the_draft_and_the_token_before_it():
    command = words(sglang(Deployment(HUB, 4, "bf16", "bf16")).command)
    options = dict(pairwise(command))
    assert options["--speculative-algorithm"] == "STANDALONE"
    assert options["--speculative-draft-model-path"] == "org/draft-1B"
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("4", "5")
    assert not sglang(Deployment(HUB, 4, "bf16", "bf16", same_tokens=False)).command


def test_llama_cpp_mixes_ngrams_with_a_head_and_says_nothing_else():
    own = Deployment(replace(HUB, draft="/a/head", method="ngram+head"), 4, "bf16", "bf16", head_folder="/a/head")
    mixed, alone = llama_cpp(own), vllm(own)
    assert "--spec-type ngram-simple,draft-eagle3" in mixed.command
    assert not any("one drafter at a time" in note for note in mixed.notes)
    assert any("one drafter at a time" in note for note in alone.notes)


def test_llama_cpp_converts_both_models_first():
    recipe = llama_cpp(Deployment(HUB, 4, "nf4", "nf4"))
    *conversions, serve = recipe.command.split("\nllama-server")
    assert conversions[0].count("convert_hf_to_gguf.py") == conversions[0].count("Q4_K_M") == 2
    assert "-md draft-q4_k_m.gguf" in serve and "--spec-draft-n-max 4" in serve
    assert "--draft-max" not in recipe.command  # removed from llama-server
    mixed = llama_cpp(Deployment(replace(HUB, method="ngram+draft"), 4, "bf16", "bf16")).command
    assert "--spec-type ngram-simple,draft-simple" in mixed and "--spec-draft-sampling" not in mixed
    warm = llama_cpp(Deployment(replace(HUB, temperature=0.7), 4, "bf16", "bf16"))
    assert "--spec-draft-sampling probabilistic" in warm.command


def test_a_trained_head_is_eagle3_elsewhere():
    head = Deployment(replace(HUB, method="head", draft="org/head"), 4, "bf16", head="a head")
    command = words(vllm(head).command)
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 4}
    warm = replace(head, settings=replace(head.settings, temperature=0.7))
    assert '"draft_sample_method": "probabilistic"' in vllm(warm).command
    options = dict(pairwise(words(sglang(head).command)))
    assert options["--speculative-algorithm"] == "EAGLE3"
    assert options["--speculative-draft-model-path"] == "org/head"
    bundled = replace(head, settings=replace(head.settings, draft=None), head="small")
    assert '"model": "assets/heads/small"' in vllm(bundled).command
    assert "from this repository's folder" in placeholders(bundled)
    tree = replace(head, settings=replace(head.settings, method="head-tree"))
    assert '"method": "eagle3"' in vllm(tree).command and any("chain" in note for note in vllm(tree).notes)
    *conversions, serve = llama_cpp(tree).command.replace(" \\\n   ", "").splitlines()
    assert "hf download org/head --local-dir head" in conversions
    assert "convert_hf_to_gguf.py head --target-model-dir target" in conversions[-1]
    assert "-md head-bf16.gguf --spec-type draft-eagle3 --spec-draft-n-max 4" in serve
    assert any("the conversion is unproven" in note for note in llama_cpp(tree).notes)
    assert not transformers(head).command and transformers(head).notes


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory):
    sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
    from mtp import mtp_target, save_with_mtp

    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("transformers before 5.20 does not know this family's MTP layer")
    folder = tmp_path_factory.mktemp("mtp")
    save_with_mtp(*mtp_target("mellum", 384, torch.float32), folder)
    return str(folder)


def test_a_target_s_own_layer_is_mtp_elsewhere(mtp_folder, monkeypatch):
    """No draft is named but the target, which has it; the script of transformers is run as it is."""
    own = Deployment(replace(HUB, method="head", draft=HUB.target), 3, "bf16", head=HUB.target, mtp=True)
    command = words(vllm(own).command)
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "mtp", "num_speculative_tokens": 3}
    options = dict(pairwise(words(sglang(own).command)))
    assert (options["--speculative-algorithm"], options["--speculative-num-draft-tokens"]) == ("EAGLE", "4")
    assert "--speculative-draft-model-path" not in options
    *conversions, serve = llama_cpp(own).command.replace(" \\\n   ", "").splitlines()
    assert len(conversions) == 1 and "--spec-type draft-mtp --spec-draft-n-max 3" in serve and "-md" not in serve
    monkeypatch.setattr("app.tune.production._place", lambda name, role: mtp_folder)
    script = transformers(replace(own, precision="fp32", settings=replace(own.settings, max_new_tokens=6)))
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(script.command, "recipe", "exec"), {})
    assert written.getvalue().startswith("Your prompt") and "use_mtp=True" in script.command


def test_where_each_engine_counts_is_said():
    for engine, flag in ((vllm, "--per-request-spec-decode-metrics detailed"), (sglang, "--enable-metrics")):
        assert any(flag in note for note in engine(Deployment(HUB, 4, "bf16", "bf16")).notes)
    assert any("--metrics" in note for note in llama_cpp(Deployment(HUB, 4, "bf16", "bf16")).notes)


@pytest.mark.parametrize("method", ["early-exit", "tree"])
def test_what_an_engine_cannot_do_is_said_and_not_invented(method):
    deployment = Deployment(replace(HUB, method=method), 4, "bf16", exit_layer=2)
    for recipe in recipes(deployment):
        assert recipe.notes
        if not (method == "early-exit" and recipe.engine == "transformers"):
            assert not recipe.command


def test_names_are_quoted_and_folders_are_not_told():
    hostile = replace(HUB, target="/home/me/a model; rm -rf ~", draft="org/it's")
    for recipe in recipes(Deployment(hostile, 4, "bf16", "bf16")):
        assert "/home/me" not in recipe.command
        if recipe.language == "shell":
            assert "/path/to/a model; rm -rf ~" in words(recipe.command)
    assert "in place of /path/to/" in placeholders(Deployment(hostile, 4, "bf16"))
    assert "assets/pocket" in placeholders(Deployment(Settings("pocket"), 4, "nf4"))
    assert placeholders(Deployment(HUB, 4, "nf4")) is None


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))
    from tiny_pair import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("method", ["draft", "ngram", "early-exit"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_transformers_script_runs(pair_folder, monkeypatch, method, temperature):
    """Each flag is one that transformers knows: the script is run as it is, on a pair in a folder."""
    target, draft = pair_folder
    monkeypatch.setattr("app.tune.production._place", lambda name, role: str({"target": target, "draft": draft}[role]))
    settings = Settings(method=method, temperature=temperature, top_p=0.9, min_p=0.05, max_new_tokens=6)
    recipe = transformers(Deployment(settings, 3, "fp32", "fp32", exit_layer=1))
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(recipe.command, "recipe", "exec"), {})
    assert written.getvalue().startswith("Your prompt")


@pytest.mark.parametrize("name", ["smollm2", "pocket"])
def test_before_the_first_sweep_an_example_answers_in_small(name):
    """From the race that is shipped, labelled with where that was recorded; nothing where there is none."""
    found = example_of(Settings(name))
    assert found is not None
    run = found[0]["runs"][0]
    html = example_html(found)
    assert f"An example, from one race recorded {found[1]}" in html and html.count("<svg") == 3
    assert f"stands in {run['metrics']['accepted_by_position'][0]:.0%} of rounds" in html
    assert html.count("<rect") == len(run["metrics"]["accepted_by_position"])
    assert example_html(None) == ""


class Asking:
    """A request of one visitor."""

    session_hash = "one"
    client = None


def measured_together(tune, visit, sizes, **changes):
    many = ManyTexts(tune.engine, tune.device, tune._of_many, tune.budget)
    kinds = [prompt.kind for prompt in tune.prompts]
    values = [changes.get(name, getattr(tune.engine.settings, name)) for name in CONTROLS]
    return list(many.run(sizes, visit, Asking(), kinds, 48, "", *values))


def test_many_texts_at_once_are_measured_and_drawn(tune):
    """`auto` and a fixed length beside it: what was measured, what was predicted, and where it loses."""
    visit = Visit()
    *_, (said, plot) = measured_together(tune, visit, [1, 2, 4, 8], method="draft", draft_length="auto")
    assert "auto: 1.50× plain with one text" in said and "drafts next to nothing" in said
    assert "always 3" in said and "from 4 at once on it loses" in said
    assert [line.name for line in plot["value"].data] == [
        *("auto", "always 3", "always 3, predicted", "loses from 4"),
    ]
    assert visit.many["loses_from"] == {"auto": None, "always 3": 4}


@pytest.mark.parametrize(
    ("sizes", "changes", "sentence"),
    [([], {}, "at least one number of texts"), ([1], {"method": "plain"}, "Plain decoding drafts nothing")],
)
def test_what_cannot_be_measured_of_many_texts_is_said(tune, sizes, changes, sentence):
    visit = Visit()
    *_, (said, _) = measured_together(tune, visit, sizes, **{"method": "draft", **changes})
    assert sentence in said and "data-kind='error'" in said
    assert visit.many is None


def test_the_verdict_tells_what_many_texts_at_once_gave(tune):
    """Measured in place of what the cost curve predicts; of another method it says nothing."""
    document, visit = sweep_document(), Visit()
    measured_together(tune, visit, [1, 4], method="draft", draft_length=3)
    visit.many["environment"] = document["environment"]
    predicted, *_ = details(document, 0.0)
    told, *_ = details(document, 0.0, (), visit)
    assert "the cost curve predicts" in predicted and "measured here" not in predicted
    assert "Many texts at once, measured here: auto" in told and "the cost curve predicts" not in told
    visit.many["settings"] = {"auto": Settings(method="ngram").to_dict()}
    assert "measured here" not in details(document, 0.0, (), visit)[0]
