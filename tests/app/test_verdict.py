import pytest

from app.playground.race import inactive, verdict, why_easy, why_slower
from core.measuring.deciding import speedup_range
from core.records import Divergence, Round, Run, Settings, Token


def token(outcome: str) -> Token:
    return Token(1, "a", outcome, p=1.0)  # type: ignore[arg-type]


def plain_run(steps: int = 10, seconds: float = 0.010) -> Run:
    rounds = [Round(i, [], token("plain"), 0.0, seconds) for i in range(steps)]
    return Run(Settings(method="plain"), {}, "", [], [1] * steps, rounds=rounds, stop_reason="length")


def speculative_run(accepted: int, drafted: int, draft: float, verify: float, temperature: float = 0.0) -> Run:
    tokens = [token("accepted")] * accepted
    if accepted < drafted:
        tokens += [token("rejected"), *[token("ignored")] * (drafted - accepted - 1)]
    last = token("bonus" if accepted == drafted else "corrected")
    rounds = [Round(i, tokens, last, draft, verify) for i in range(5)]
    ids = [1] * (5 * (accepted + 1))
    return Run(Settings(temperature=temperature), {}, "", [], ids, rounds=rounds, stop_reason="length")


def test_greedy_texts_are_identical_or_part_somewhere() -> None:
    fast, slow = speculative_run(3, 4, 0.001, 0.010), plain_run()
    assert verdict(fast, slow, None).text == "Identical to plain decoding, all 20 tokens."
    parted = verdict(fast, slow, Divergence(6, "a", "b", 0.0004))
    assert parted.kind == "diverged"
    assert parted.text == "Same rule, same law; the texts part at token 7, where the target's two best tokens tie."
    assert "'a'" in parted.more and "0.0004" in parted.more
    assert verdict(fast, slow, Divergence(6, "a", "b", 0.0)).text.endswith("tie to the last digit.")
    assert verdict(fast, slow, Divergence(6, "a", "b", 0.8)).text.endswith("two best tokens lie 0.8 apart.")


def test_where_rows_are_exact_a_difference_is_an_alarm_and_none_is_bit_for_bit() -> None:
    fast, slow = speculative_run(3, 4, 0.001, 0.010), plain_run()
    fast.environment["target"] = {"exact_rows": True}
    assert verdict(fast, slow, None).text == "Identical, bit for bit."
    assert verdict(fast, slow, Divergence(6, "a", "b", 0.0)).kind == "wrong"


def test_a_speed_up_is_told_with_what_its_own_passes_leave_open() -> None:
    fast, slow = speculative_run(3, 4, 0.001, 0.010), plain_run(40)
    low, high = speedup_range(fast, slow)
    speedup = 4 * 0.010 / 0.011
    assert (low, high) == pytest.approx((speedup * 0.97, speedup * 1.03)), "even passes: what nobody feels"
    for round_ in slow.rounds[:20]:
        round_.verify_seconds = 0.020
    assert speedup_range(fast, slow)[1] / speedup_range(fast, slow)[0] > 1.3, "another program ran beside"


def test_a_difference_within_the_noise_is_not_explained() -> None:
    slow = plain_run(40)
    nearly = speculative_run(0, 1, 0.0, 0.0102)
    assert speedup_range(nearly, slow)[1] > 1 and why_slower(nearly, slow) is None
    silent = speculative_run(0, 0, 0.0, 0.008)
    assert speedup_range(silent, slow)[0] <= 1, "what drafted nothing is not faster"


def test_sampled_texts_differ_by_chance() -> None:
    assert verdict(speculative_run(3, 4, 0.001, 0.010, temperature=1.0), plain_run(), None).kind == "chance"


def test_a_stopped_race_speaks_of_what_both_wrote() -> None:
    stopped = plain_run(4)
    stopped.stop_reason = "cancelled"
    found = verdict(speculative_run(3, 4, 0.001, 0.010), stopped, None)
    assert found.text == "Stopped. Both lanes began with the same 4 tokens."


def test_nothing_is_explained_where_speculation_won() -> None:
    assert why_slower(speculative_run(3, 4, 0.001, 0.012), plain_run()) is None


def test_the_main_cost_is_named() -> None:
    assert "acceptance" in (why_slower(speculative_run(0, 5, 0.001, 0.012), plain_run()) or "")
    assert "verification" in (why_slower(speculative_run(4, 4, 0.002, 0.080), plain_run()) or "")
    assert "drafting" in (why_slower(speculative_run(4, 4, 0.080, 0.011), plain_run()) or "")


def test_rounds_without_drafts_are_named() -> None:
    silent = speculative_run(0, 0, 0.0, 0.011)
    assert "proposed nothing in 5 rounds" in (inactive(silent) or "")
    assert inactive(speculative_run(3, 4, 0.001, 0.012)) is None
    mostly = speculative_run(0, 1, 0.001, 0.012)
    for round_ in mostly.rounds[1:]:
        round_.drafted = []
    assert "4 of 5 rounds were plain steps" in (why_slower(mostly, plain_run()) or "")


def test_a_text_that_goes_in_circles_says_so_beside_its_speed_up() -> None:
    run = speculative_run(3, 4, 0.001, 0.010)
    assert why_easy(run) is None  # twenty tokens are too few to tell
    run.token_ids = [1, 2] * 40
    assert why_easy(run) == "The text repeats itself: drafting is easy here."
