import threading
import time
import weakref
from collections.abc import Iterator
from threading import Event
from typing import Any

import fastapi
import gradio as gr
import pytest

from app.serving.device import Device, in_background, when_free
from app.serving.limits import cost_in_tokens
from app.serving.stops import ARRIVED, LONGEST_WAIT, Stops, address_of
from app.serving.turns import guarded, with_device
from core.errors import UserError


def test_turns_come_in_order_of_arrival() -> None:
    device = Device()
    with device.turn() as first:
        assert first.wait(0)
        assert first.ahead == 0
        with device.turn() as second, device.turn() as third:
            assert (second.ahead, third.ahead) == (1, 2)
            assert not second.wait(0.01)
    with device.turn() as again:
        assert again.wait(0)


def test_what_a_start_left_for_later_is_done_when_the_device_is_free() -> None:
    device, measured = Device(), threading.Event()
    with device.turn() as run:
        assert run.wait(0)
        thread = threading.Thread(target=when_free, args=(device, measured.set))
        thread.start()
        assert not measured.wait(0.05)
    assert measured.wait(60)
    thread.join()
    measured.clear()
    device.close()
    when_free(device, measured.set)
    assert not measured.is_set()


def test_a_turn_is_told_when_the_device_is_free() -> None:
    device = Device()
    entered = threading.Event()

    def visitor() -> None:
        with device.turn() as turn:
            while not turn.wait(5):
                pass
            entered.set()

    with device.turn():
        thread = threading.Thread(target=visitor)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(60)
    thread.join()


def test_leaving_frees_the_place_also_after_an_error() -> None:
    device = Device()
    with pytest.raises(RuntimeError), device.turn():
        raise RuntimeError
    with device.turn() as turn:
        assert turn.ahead == 0


def test_a_job_that_cannot_begin_gives_the_device_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device = Device()
    with monkeypatch.context() as patch, device.turn() as turn:
        patch.setattr(threading.Thread, "start", no_more)
        assert turn.wait(0)
        with pytest.raises(RuntimeError):
            list(in_background(lambda tell, halt: None, lambda: False, "Loading…", device))
    assert device.drain(0)


def test_what_a_long_job_tells_is_not_kept() -> None:
    kept = weakref.WeakSet[Any]()

    class Line(str):
        __slots__ = ("__weakref__",)

    def work(tell: Any, halt: Any) -> None:
        for number in range(100):
            line = Line(f"{number} of 100")
            kept.add(line)
            tell(line)
        del line
        assert len(kept) <= 3  # the newest, and what is shown

    for _ in in_background(work, lambda: False, "Loading…"):
        pass


def test_a_full_queue_says_so() -> None:
    device = Device(longest=1)
    with device.turn(), pytest.raises(UserError, match="waiting already"), device.turn():
        pass


def request_of(visitor: str, arrived: float | None = None) -> Any:
    state = {} if arrived is None else {ARRIVED: arrived}
    return gr.Request(request=fastapi.Request({"type": "http", "state": state}), session_hash=visitor)


def test_stop_reaches_ones_own_runs_only() -> None:
    stops = Stops()
    ann, bob = request_of("ann"), request_of("bob")
    with stops.watch(ann) as first, stops.watch(ann) as second, stops.watch(bob) as other:
        assert stops.stop(ann) == 2
        assert first()
        assert second()
        assert not other()
    assert stops.stop(ann) == 0


def test_a_stop_reaches_a_run_that_was_asked_for_before_it_and_begins_after_it() -> None:
    stops = Stops()
    stops.stop(request_of("ann", arrived=2.0))
    for visitor, arrived, stopped in (("ann", 1.0, True), ("ann", 3.0, False), ("bob", 1.0, False)):
        with stops.watch(request_of(visitor, arrived)) as event:
            assert event() == stopped
    stops.stop(request_of("bob", arrived=2.0 + LONGEST_WAIT))
    with stops.watch(request_of("ann", arrived=1.0)) as event:
        assert not event()  # forgotten: a page may have many visitors


def test_the_wait_is_told_from_how_long_the_last_turns_took() -> None:
    now = [0.0]
    device = Device(clock=lambda: now[0])

    def turn_of(seconds: float) -> None:
        with device.turn() as turn:
            turn.wait(0)
            now[0] += seconds

    with device.turn() as first, device.turn() as second:
        first.wait(0)
        assert (first.expected_wait, second.expected_wait) == (0.0, None)  # nobody has finished yet
    for seconds in (4.0, 6.0, 5.0):
        turn_of(seconds)
    with device.turn() as first, device.turn() as second, device.turn() as third:
        first.wait(0)
        now[0] += 2.0
        assert second.expected_wait == pytest.approx(4.5 - 2.0)  # median of 0, 4, 6 and 5
        assert third.expected_wait == pytest.approx(2.5 + 4.5)
        now[0] += 60.0
        assert second.expected_wait == 0.0


def test_a_job_keeps_the_device_when_its_reader_goes_away() -> None:
    """Nobody waits for it: Gradio closes the events of a tab that closed on the loop that answers everybody."""
    device, go_on = Device(), Event()
    with device.turn() as turn:
        assert turn.wait(0)
        events = in_background(lambda tell, halt: go_on.wait(10), lambda: False, "Loading…", device)
        next(events)
        begun = time.monotonic()
        events.close()
    assert time.monotonic() - begun < 1
    with device.turn() as theirs:
        assert not theirs.wait(0.05)
        go_on.set()
        assert theirs.wait(5)
    assert device.drain(0)


def test_what_goes_wrong_in_a_job_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device, go_on = Device(), Event()

    def job(tell: Any, halt: Any) -> None:
        go_on.wait(10)
        raise RuntimeError("lost")

    with device.turn() as turn:
        assert turn.wait(0)
        events = in_background(job, lambda: False, "Loading…", device)
        next(events)
        events.close()
        go_on.set()
    assert device.drain(5)
    until = time.monotonic() + 5
    while "nobody waits for" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert "RuntimeError: lost" in caplog.text


def test_one_visitor_takes_only_so_many_places() -> None:
    device = Device()
    device.of_one = 2
    with device.turn(visitor="ann"), device.turn(visitor="bob"), device.turn(visitor="ann"):
        third = device.turn(visitor="ann")
        with pytest.raises(UserError, match="Your earlier runs"):
            third.__enter__()
    with device.turn(visitor="ann"):
        pass


def test_a_turn_ends_when_it_has_lasted_too_long() -> None:
    now = [0.0]
    device = Device(clock=lambda: now[0])
    device.seconds = 60.0

    def work() -> Iterator[dict[str, Any]]:
        while now[0] < 1000:
            now[0] += 25.0
            yield {"e": "progress"}

    events = list(guarded(with_device(device, lambda: False, work)))
    assert now[0] == 75.0
    assert "ends after 60 seconds" in events[-2]["text"]
    assert device.drain(0)


@pytest.mark.parametrize(
    ("client", "forwarded", "address"),
    [
        ("93.184.216.34", "8.8.8.8", "93.184.216.34"),  # nobody stands between: what is claimed is not believed
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "8.8.8.8, 1.1.1.1", "1.1.1.1"),
        ("10.0.0.7", "8.8.8.8, 1.1.1.1, 10.1.2.3", "1.1.1.1"),
        ("10.0.0.7", "nonsense", "10.0.0.7"),
    ],
)
def test_a_visitor_is_an_address(client: str, forwarded: str, address: str) -> None:
    scope = {"type": "http", "client": (client, 5000), "headers": [(b"x-forwarded-for", forwarded.encode())]}
    assert address_of(gr.Request(request=fastapi.Request(scope))) == address


def test_prompts_count_as_well_as_answers() -> None:
    """Fifty prompts of 8,000 tokens with one new token each, in 400 variants, are no small sweep."""
    assert cost_in_tokens(["x" * 24_000] * 50, 400, 1) > 40_000_000
    assert cost_in_tokens(["def f():"], 10, 48) == pytest.approx(480, abs=10)
