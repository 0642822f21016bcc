"""Predictions for a GPU that is not here: they follow from the data sheet, and say so."""

import json

import pytest
import torch

from core.__main__ import main
from core.errors import UserError
from core.inspecting.acceptance import USUAL, Acceptance, of_runs, shipped
from core.inspecting.devices import (
    LAYER_SECONDS,
    PRECISIONS,
    REACHED,
    UNPACKING,
    Card,
    cards,
    compare,
    find_card,
    pass_seconds,
    predict,
    predict_on,
    prediction_card,
)
from core.inspecting.files import preview, size_up

QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
ENDLESS = 1e9


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def on_cuda(name, precision):
    return size_up(preview(name, "target"), CUDA, precision)


def test_a_card_is_found_however_it_is_written():
    assert find_card("RTX 4070").name == find_card("NVIDIA GeForce rtx4070").name == "RTX 4070"
    assert len({card.name for card in cards()}) == len(cards()) >= 30
    for card in cards():
        assert find_card(card.name) == card
        assert 4 <= card.memory <= 300 and 100 <= card.bandwidth <= 10_000 and 10 <= card.compute <= 5_000


def test_a_card_of_ones_own():
    assert find_card("24 GB, 1,008 GB/s, 1,165.5 TFLOPS") == find_card("24GB,1008GB/s,1165.5TFLOPS")
    own = find_card("16GB 700 GB/s, 90 tflops")
    assert (own.memory, own.bandwidth, own.compute) == (16, 700, 90)


@pytest.mark.parametrize("text", ["RTX 4075", "", "12 GB", "0 GB, 504 GB/s, 58 TFLOPS", "<script>", "9" * 100_000])
def test_no_card_is_made_up(text):
    with pytest.raises(UserError, match="12 GB, 504 GB/s, 58 TFLOPS"):
        find_card(text)


def test_a_pass_is_bound_by_what_it_reads():
    """With endless arithmetic: bytes ÷ bandwidth and the kernels of its layers, for one row as for nine."""
    model = on_cuda(QWEN[0], "bf16")
    card = Card("x", 24, 1000, ENDLESS, 4)
    read = (model.weights.read + model.cache_bytes(512)) / (REACHED * 1e12)
    for rows in (1, 9):
        assert pass_seconds(card, model, rows, 512) == pytest.approx(read + model.layers * LAYER_SECONDS)


def test_a_pass_is_bound_by_its_arithmetic():
    """With little of it, every row adds the same."""
    model = on_cuda(QWEN[0], "bf16")
    card = Card("x", 24, ENDLESS, 1, 4)
    one, two, nine = (pass_seconds(card, model, rows, 512) for rows in (1, 2, 9))
    assert nine - one == pytest.approx(8 * (two - one)) and two > 1.9 * one - model.layers * LAYER_SECONDS


def test_four_bits_are_unpacked_past_the_rows_the_kernel_takes():
    model = on_cuda(QWEN[0], "nf4")
    card = Card("x", 24, 1000, ENDLESS, 4)
    within, past = (pass_seconds(card, model, rows, 1) - model.layers * LAYER_SECONDS for rows in (4, 5))
    cache = model.cache_bytes(1) / (REACHED * 1e12)
    assert past - cache == pytest.approx(UNPACKING * (within - cache))


def test_what_does_not_fit_is_a_no_go():
    found = predict_on(find_card("RTX 4060"), "Qwen/Qwen3-14B", QWEN[1])
    assert not found.go and found.sentence.startswith("No-go") and "leaves about" in found.sentence
    assert not any(outlook.fits for outlook in found.outlooks)


def test_a_draft_as_large_as_its_target_is_a_no_go():
    found = predict_on(find_card("H100"), QWEN[1], QWEN[1])
    assert not found.go
    assert all(gain.speedup >= 1 for outlook in found.outlooks for gain in outlook.gains)  # length 0 is plain


def test_more_acceptance_is_never_slower():
    for outlook in predict_on(find_card("RTX 4090"), *QWEN).outlooks:
        speedups = [gain.speedup for gain in outlook.gains]
        assert [gain.acceptance for gain in outlook.gains] == list(USUAL)
        assert speedups == sorted(speedups)


def test_the_longest_text_is_the_last_that_fits():
    card = find_card("RTX 4070")
    _, nf4, bf16 = predict_on(card, *QWEN).outlooks
    at = {context: predict_on(card, *QWEN, context).outlooks[1] for context in (nf4.longest, nf4.longest + 256)}
    assert [outlook.fits for outlook in at.values()] == [True, False]
    assert not bf16.fits and bf16.longest == 0


def test_a_measured_acceptance_decides_and_is_named():
    good, poor = (
        predict_on(find_card("RTX 4090"), *QWEN, acceptance=Acceptance(alpha, "in a test")) for alpha in (0.9, 0.05)
    )
    assert good.go and "90% of what it guesses is accepted, as measured in a test" in good.sentence and not poor.go
    assert f"with {QWEN[1]}," in good.sentence
    assert "measured" not in predict_on(good.card, *QWEN).sentence.replace("which was not measured of it", "")
    assert [gain.acceptance for gain in good.outlooks[0].gains] == [*USUAL, 0.9]
    assert good.sources["90% accepted"] == "measured in a test"
    assert "90% accepted" not in predict_on(good.card, *QWEN).sources


def test_int4_where_its_kernel_runs():
    """A card before Ampere has none, and what it reads is what its packed weights take, however many rows."""
    assert [outlook.precision for outlook in predict_on(find_card("RTX 4090"), *QWEN).outlooks] == list(PRECISIONS)
    assert [outlook.precision for outlook in predict_on(find_card("T4"), *QWEN).outlooks] == ["nf4", "bf16"]
    model, card = size_up(preview(QWEN[0], "target"), CUDA, "int4", here=False), Card("x", 24, 1000, ENDLESS, 4)
    assert model.precision == "int4" and model.weights.read < 0.4 * on_cuda(QWEN[0], "bf16").weights.read
    assert pass_seconds(card, model, 9, 512) == pass_seconds(card, model, 1, 512)


def test_two_cards_are_compared_each_at_its_best():
    slow, fast = (predict_on(find_card(name), *QWEN) for name in ("RTX 4070", "RTX 4090"))
    assert compare(slow, fast) == compare(fast, slow)
    assert f"RTX 4090 writes {fast.fastest / slow.fastest:.1f}× as fast as RTX 4070" in compare(slow, fast)
    assert "about as fast" in compare(slow, slow)
    large = predict_on(find_card("RTX 4060"), "Qwen/Qwen3-14B", QWEN[1])
    assert compare(large, fast) == "It fits RTX 4090 and does not fit RTX 4060."
    assert fast.best in PRECISIONS and large.best is None


def test_the_command_compares_two_cards(tmp_path, capsys):
    file = tmp_path / "found.json"
    cards = ["--device-like", "rtx 4090", "--device-like", "T4"]
    assert main(["inspect", "--target", QWEN[0], "--draft", QWEN[1], *cards, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["comparison"] in capsys.readouterr().out
    assert (document["device_like"]["card"]["name"], document["compared_with"]["card"]["name"]) == ("RTX 4090", "T4")


def test_an_acceptance_has_the_range_of_its_texts():
    """Of a file that states it, and of runs: all together, and the lowest and highest of those that say something."""

    def run(accepted, rejected):
        outcomes = ["accepted"] * accepted + ["rejected"] * rejected + ["ignored"] * 5
        return {"rounds": [{"drafted": [{"outcome": outcome} for outcome in outcomes]}]}

    assert of_runs([run(10, 10), run(30, 10), run(0, 2)], "here") == Acceptance(40 / 62, "here", (0.5, 0.75))
    assert of_runs([run(30, 10)], "here") == Acceptance(0.75, "here")
    found = {**run(0, 40)["rounds"][0], "source": "ngram"}
    assert of_runs([{"rounds": [*run(30, 10)["rounds"], found]}], "here") == Acceptance(0.75, "here")
    assert of_runs([run(5, 5)], "here") is None and of_runs([], "here") is None
    stated = {"acceptance_rate": 0.54, "where": "there", "between": [0.3, 0.8]}
    assert shipped({"measured": stated}) == Acceptance(0.54, "there", (0.3, 0.8))
    for wrong in ([0.6, 0.8], [0.3], ["a", "b"], [0.3, 2], None, 7):
        assert shipped({"measured": {**stated, "between": wrong}}) == Acceptance(0.54, "there")
    (found,) = predict(on_cuda(QWEN[0], "bf16"), on_cuda(QWEN[1], "bf16"), CPU, shipped({"measured": stated}))
    assert [end.acceptance for end in found.between] == [0.3, 0.8]
    assert found.between[0].speedup < found.measured.speedup < found.between[1].speedup


def test_the_command_says_it_is_a_prediction(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert (
        main(["inspect", "--target", QWEN[0], "--draft", QWEN[1], "--device-like", "rtx 4090", "--json", str(file)])
        == 0
    )
    printed = capsys.readouterr().out
    document = json.loads(file.read_text())["device_like"]
    assert "predicted, not measured" in printed and document["sentence"] in printed
    assert document["kind"] == "prediction" and set(document["sources"]) >= {"acceptance", "memory, bandwidth, compute"}
    assert prediction_card(predict_on(find_card("rtx 4090"), *QWEN)) in printed


def test_an_unknown_card_is_one_sentence(capsys):
    assert main(["inspect", "--device-like", "RTX 9"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
