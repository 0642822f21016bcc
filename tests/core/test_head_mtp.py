"""A target drafts with its own MTP layer: as transformers would, from exact caches, and without changing its text."""

from types import SimpleNamespace

import pytest
import torch
from mtp import AFTER_TWO, MTP_KINDS, mtp_target, needs_single_layers, save_with_mtp, teach
from tiny import CONTEXT, PADDED, VOCABULARY, make_tokenizer, random_model, random_prompt
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from core.decoding import speculative, take_step
from core.drafting.build import available
from core.drafting.head import HeadDrafter
from core.drafting.length import Fixed
from core.drafting.methods import MTP
from core.errors import UserError
from core.explaining.lossless import check_law
from core.heads.mtp import MtpHead, MtpRunner
from core.inspecting import inspect_pair
from core.inspecting.devices import find_card, predict_on
from core.lanes import open_lane
from core.loading import load_pair
from core.loading.mtp import check_mtp
from core.progress import never
from core.records import Run
from core.runners import prefill
from core.runners.dynamic import DynamicRunner
from core.sampling import Sampling, Uniforms
from core.settings import Settings

pytestmark = needs_single_layers
PROMPT, MORE = 24, 24
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=MTP_KINDS)
def loaded(request, tmp_path_factory):
    """A target in float64 as transformers loads it from its folder, what it writes, and its layer, which has learnt
    half of that."""
    folder = tmp_path_factory.mktemp(request.param)
    network, mtp = mtp_target(request.param, VOCABULARY, torch.float64)
    text = network.generate(torch.tensor([random_prompt(PROMPT)]), do_sample=False, max_new_tokens=MORE)[0].tolist()
    teach(network, mtp, text[: PROMPT + MORE // 2])
    save_with_mtp(network, mtp, folder)
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "mellum":
            patch.setattr(type(network), "_keys_to_ignore_on_load_unexpected", AFTER_TWO)
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        layer = MtpModel.from_pretrained(network).eval().requires_grad_(False)
        yield SimpleNamespace(network=network, text=text, head=MtpHead(layer, network, VOCABULARY))


def drafting(loaded, sampling):
    target = DynamicRunner(loaded.network, VOCABULARY)
    return target, HeadDrafter(MtpRunner(loaded.head), target.watch(loaded.head.layers), sampling)


def outputs_afresh(loaded, context, drafted=()):
    """What the layer gives for every token of a text but the first and then for its own guesses, by transformers alone:
    its cache with a window where there is one, and the hidden states that it hands over itself."""
    cache = MtpCache(config=loaded.network.config.get_mtp_config())
    ids = torch.tensor([context])
    states = loaded.network(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    layer = loaded.head.model
    outputs = layer.forward_layer(0, states, torch.arange(1, len(context))[None], cache, input_ids=ids[:, 1:])
    for i, token in enumerate(drafted):
        at, last = torch.tensor([[len(context) + i]]), torch.tensor([[token]])
        outputs = torch.cat([outputs, layer.forward_layer(0, outputs[:, -1:], at, cache, input_ids=last)], 1)
    return outputs[0]


def test_drafts_are_those_of_transformers(loaded, monkeypatch):
    """Round by round: what `generate(use_mtp=True)` proposes after the same text, one token where it has one layer."""
    asked, propose = {}, MTPCandidateGenerator.get_candidates

    def noting(self, input_ids, *args, **options):
        found = propose(self, input_ids, *args, **options)
        asked[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noting)
    written = loaded.network.generate(
        torch.tensor([loaded.text[:PROMPT]]), do_sample=False, max_new_tokens=MORE, use_mtp=True
    )
    assert written[0].tolist() == loaded.text
    target, drafter = drafting(loaded, Sampling())
    run = Run(Settings(max_new_tokens=MORE), {}, "", loaded.text[:PROMPT])
    proposed, length = {}, PROMPT
    for round_ in speculative(target, drafter, run, length=Fixed(1)):
        proposed[length] = [token.id for token in round_.drafted]
        length = PROMPT + len(run.token_ids)
    assert run.token_ids == loaded.text[PROMPT:]
    shared = [
        at for at in proposed if proposed[at] and asked.get(at)
    ]  # it begins with a plain step, and is out of step
    assert len(shared) > 5 and [proposed[at] for at in shared] == [asked[at] for at in shared]
    assert {"accepted", "rejected"} <= {token.outcome for round_ in run.rounds for token in round_.drafted}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_cache_and_drafts_after_every_round(loaded, sampling):
    """Rounds of several lengths with plain ones between: the layer's rows and its guesses, its own output fed back, are
    those of a fresh pass over the text; a greedy text is the target's."""
    target, drafter = drafting(loaded, sampling)
    numbers, context = Uniforms(2, torch.device("cpu")), loaded.text[:PROMPT]
    prefill(target, context[:-1], never)
    drafter.prefill(context[:-1], never)
    kept = set()
    for gamma in (3, 1, 0, 0, 4, 2, 5, 1):
        drafts = []
        if gamma:
            drafts = drafter.propose(context, gamma, torch.full((gamma,), 0.5))
            expected = outputs_afresh(loaded, context, drafts.tokens.tolist()[:-1])
            logits = loaded.network.lm_head(expected)[len(context) - 2 :]
            torch.testing.assert_close(torch.cat(drafts.logits), logits, **CLOSE)
        step = take_step(target, drafter if gamma else None, context, gamma, sampling, numbers)
        kept.add(len(step.kept))
        context = context + step.kept
        if gamma:
            assert drafter.runner.length == drafter._stable == drafter.runner._cache.get_seq_length()
    assert len(kept) > 1
    output = drafter._refresh(context)
    assert drafter.runner.length == len(context) - 1
    torch.testing.assert_close(output[0], outputs_afresh(loaded, context)[-1], **CLOSE)
    if sampling.greedy:
        assert context[: len(loaded.text)] == loaded.text[: len(context)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mellum")
    save_with_mtp(*mtp_target("mellum", PADDED, torch.float32), folder)
    return str(folder)


def settings(folder, **changes):
    return Settings(folder, folder, device="cpu", precision="fp32", chat="off", max_new_tokens=12, **changes)


def test_a_target_named_as_its_own_draft_drafts_with_its_layer(folder):
    """Nothing is loaded twice; the run records the layer; inspected before, it is told and weighed as it is loaded."""
    found = inspect_pair(folder, folder, device="cpu", precision="fp32")
    pair = load_pair(settings(folder))
    assert pair.draft is None and pair.head.kind == MTP and pair.head.layers == (2,)
    reasons = available(pair)
    assert reasons["head"] is None and "trained head" in reasons["draft"] and "no trees" in reasons["head-tree"]
    with open_lane(pair, "the quick brown fox", settings(folder, draft_length=3)) as lane:
        assert all(len(round_.drafted) <= 3 for round_ in lane)
    assert (lane.run.settings.method, lane.run.environment["head"]["kind"]) == ("head", MTP)
    assert any(len(round_.drafted) == 3 for round_ in lane.run.rounds)
    assert pair.head.costs.read(2) > 0 and pair.head.costs.draft(1) > 0
    assert (found.draft.model_type, found.draft.layers, found.draft.name) == (MTP, 1, folder)
    assert (found.draft.parameters, found.draft.weight_bytes) == (pair.head.parameter_count(), pair.head.weight_bytes())
    assert "its own MTP layer" in found.likeness.sentence and found.draft.download_bytes == 0
    assert not any("costs as much" in sentence for sentence in found.verdict) and found.predictions
    assert predict_on(find_card("12 GB, 504 GB/s, 58 TFLOPS"), folder, folder).outlooks[0].gains[0].speedup > 1
    alone = inspect_pair(folder, device="cpu", precision="fp32")
    assert any("name it as its own draft" in sentence for sentence in alone.verdict)


def test_its_samples_have_the_target_s_law(folder):
    """Two tokens at a time against the law of the target's own passes; drafts that are taken unjudged are often what it
    would never say."""
    pair = load_pair(settings(folder), measure=False)
    chosen = settings(folder, method="head", temperature=1.5, top_k=6, draft_length=2, ignore_eos=True)
    *_, right = check_law(pair, None, "the quick brown fox", chosen, 200)
    *_, wrong = check_law(pair, None, "the quick brown fox", chosen, 100, broken=True)
    assert right.p_value > 1e-4 and not right.excluded and right.drafted > 200 and right.rejected
    assert wrong.excluded


def test_what_cannot_be_run_is_a_sentence(folder, tmp_path, monkeypatch):
    """Weights that are not there, several layers, quantised checkpoints, and a transformers that is too old."""
    network, _ = mtp_target("mellum", PADDED, torch.float32)
    network.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no MTP layer in its files"):
        load_pair(settings(str(tmp_path)))
    with pytest.raises(UserError, match="has no MTP layer in its files"):
        inspect_pair(str(tmp_path), str(tmp_path), device="cpu", precision="fp32")
    network.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match="was saved quantised"):
        check_mtp("it", network.config, network, ["mtp.fc.weight"])
    several = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_mtp_layers=3))
    with pytest.raises(UserError, match="has 3 MTP layers"):
        check_mtp("it", several, network, ["mtp.fc.weight"])
    monkeypatch.delattr(MtpModel, "forward_layer")
    with pytest.raises(UserError, match=r"transformers 5\.20 or newer"):
        load_pair(settings(folder))


def test_a_target_without_such_a_layer_is_its_own_draft_as_a_whole(tmp_path):
    random_model("llama", 7, PADDED, torch.float32, max_position_embeddings=CONTEXT).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    pair = load_pair(settings(str(tmp_path)), measure=False)
    assert pair.draft is not None and pair.head is None
