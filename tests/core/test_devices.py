"""Predictions for a GPU that is not here: they follow from the data sheet, and say so."""

import json

import pytest

from core.__main__ import main
from core.errors import UserError
from core.inspecting.acceptance import USUAL, Acceptance
from core.inspecting.devices import (
    LAYER_SECONDS,
    REACHED,
    UNPACKING,
    Card,
    cards,
    find_card,
    pass_seconds,
    predict_on,
    prediction_card,
)
from core.inspecting.files import preview, size_up

QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
ENDLESS = 1e9


def on_cuda(name, precision):
    import torch

    return size_up(preview(name, "target"), torch.device("cuda"), precision)


def test_a_card_is_found_however_it_is_written():
    assert find_card("RTX 4070").name == find_card("NVIDIA GeForce rtx4070").name == "RTX 4070"
    assert len({card.name for card in cards()}) == len(cards()) >= 30
    for card in cards():
        assert find_card(card.name) == card
        assert 4 <= card.memory <= 300 and 100 <= card.bandwidth <= 10_000 and 10 <= card.compute <= 5_000


def test_a_card_of_ones_own():
    own = find_card("16GB 700 GB/s, 90 tflops")
    assert (own.memory, own.bandwidth, own.compute) == (16, 700, 90)


@pytest.mark.parametrize("text", ["RTX 4075", "", "12 GB", "0 GB, 504 GB/s, 58 TFLOPS", "<script>"])
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
    nf4, bf16 = predict_on(card, *QWEN).outlooks
    at = {context: predict_on(card, *QWEN, context).outlooks[0] for context in (nf4.longest, nf4.longest + 256)}
    assert [outlook.fits for outlook in at.values()] == [True, False]
    assert not bf16.fits and bf16.longest == 0


def test_a_measured_acceptance_decides_and_is_named():
    good, poor = (
        predict_on(find_card("RTX 4090"), *QWEN, acceptance=Acceptance(alpha, "in a test")) for alpha in (0.9, 0.05)
    )
    assert good.go and "90% are accepted, as measured in a test" in good.sentence and not poor.go
    assert [gain.acceptance for gain in good.outlooks[0].gains] == [*USUAL, 0.9]
    assert good.sources["90% accepted"] == "measured in a test"
    assert "90% accepted" not in predict_on(good.card, *QWEN).sources


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
