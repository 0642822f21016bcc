"""Running servers: recognised, understood, bounded, and measured, each against a stand-in that speaks its dialect."""

import json
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import httpx
import pytest
from stand_in_servers import STEPS, WORDS, stand_in_server

from app.history.run_file import open_file
from core.__main__ import main
from core.errors import Cancelled, UserError
from core.records import SCHEMA
from core.servers import (
    KEY_VARIABLE,
    SERVERS_VARIABLE,
    Server,
    ServerChunk,
    ServerRun,
    connect,
    describe_gains,
    finish,
    first_parting,
    gains,
    load,
    load_document,
    measure_run,
    name_servers,
    open_lane,
    refuse_public,
    server_run_from_dict,
)
from core.servers import connection as connection_module
from core.servers.connection import Connection, is_owners, read_address
from core.servers.counters import at_least, between, read_counters
from core.servers.dialects import listener, recognise
from core.servers.fields import amount, whole
from core.servers.lane import ask
from core.servers.load import Load, _Answer, _sum_up, check_readers, measure_level
from core.servers.report import Gain, describe_crossing, roles, server_table
from core.settings import Settings

DIALECTS = ("vLLM", "SGLang", "llama.cpp", "OpenAI-compatible")
VERSIONS = {"vLLM": "0.32.0", "SGLang": "0.5.9", "llama.cpp": "b11549-abc"}
DRAFTED, ACCEPTED = sum(drafted for drafted, _ in STEPS), sum(accepted for _, accepted in STEPS)
BY_POSITION = (3, 2)
"""Of the stand-in's steps: three accepted at least one token, two at least two."""
OUTCOMES = (
    *("plain", "accepted", "accepted", "corrected", "corrected"),
    *("accepted", "accepted", "bonus", "accepted", "corrected"),
)
SETTINGS = Settings(max_new_tokens=16)
A_SERVER = Server("http://127.0.0.1:1", "vLLM", "0.32.0", "tiny", ("tiny",))


def answer(address, settings=SETTINGS, prompt="Why is the sky blue?", **options):
    with open_lane(connect(address), prompt, settings, **options) as lane:
        for _ in lane:
            pass
    return lane.run


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("chat", ["auto", "off"])
def test_each_dialect_is_recognised_and_its_answer_understood(dialect, chat):
    with stand_in_server(dialect) as it:
        run = answer(it.address + "/v1/", replace(SETTINGS, chat=chat))
    assert (run.server.engine, run.server.version, run.server.models) == (dialect, VERSIONS.get(dialect), ("tiny",))
    assert run.text == "".join(WORDS) and run.stop_reason == "eos"
    assert run.new_tokens == len(WORDS) and measure_run(run).tokens == len(WORDS)
    assert [chunk.seconds for chunk in run.chunks] == sorted(chunk.seconds for chunk in run.chunks)
    exact = dialect == "vLLM" or dialect == "llama.cpp" or (dialect == "SGLang" and chat == "off")
    assert (run.token_ids == list(range(100, 110))) == exact
    if dialect == "OpenAI-compatible":
        assert run.speculation is None and "speculation" in run.missing
        return
    counted = run.speculation
    assert (counted.drafted, counted.accepted, counted.passes) == (DRAFTED, ACCEPTED, len(STEPS))
    assert counted.acceptance_rate == ACCEPTED / DRAFTED
    assert counted.shared == (not exact)
    assert counted.tokens_per_pass == pytest.approx((len(WORDS) - 1) / len(STEPS))
    assert "speculation" not in run.missing
    if exact:
        assert counted.by_position[:2] == BY_POSITION and sum(counted.by_position[2:]) == 0
    if dialect in ("vLLM", "llama.cpp"):
        assert tuple(outcome for chunk in run.chunks for outcome in chunk.outcomes) == OUTCOMES
        assert all(chunk.outcome for chunk in run.chunks)
    else:
        assert "which tokens were drafted" in run.missing
    assert it.streams[-1]["stream"] is True


def test_a_passs_tokens_are_parted_where_the_server_tells_their_texts():
    with stand_in_server("vLLM") as it:
        told = answer(it.address)
        it.detokenizes = False
        whole = answer(it.address)
        asked = sum(path == "/detokenize" for _, path, _ in it.requests)
    parts = [(chunk.text, chunk.outcome) for chunk in told.chunks]
    assert parts[:4] == [("The", "plain"), (" sky is", "accepted"), (" blue", "corrected"), (" be", "corrected")]
    assert told.text == whole.text and measure_run(told).tokens == measure_run(whole).tokens
    assert [chunk.text for chunk in whole.chunks][:3] == ["The", " sky is blue", " be"]
    assert whole.chunks[1].outcome is None and "where the drafted tokens end" in " ".join(whole.missing)
    assert asked == 4  # once more, and then no more
    assert not any("where the drafted tokens end" in word for word in told.missing)


def test_own_timings_of_the_server_are_used_and_named():
    with stand_in_server("llama.cpp") as one, stand_in_server("SGLang") as other:
        own, read = answer(one.address), answer(other.address)
    assert measure_run(own).clock == "server" and measure_run(read).clock == "reader"
    assert measure_run(own).tokens_per_second == pytest.approx((len(WORDS) - 1) / 0.1)  # the first is the prompt's
    assert own.server.drafter == "draft-simple" and "the server's own timings" in read.missing


def test_of_plain_decoding_nothing_is_missing_where_the_server_says_that_it_drafts_with_nothing():
    with stand_in_server("llama.cpp", steps=()) as it:
        run = answer(it.address)
        asked = [path for _, path, _ in it.requests]
        it.named = False  # as older builds, which may draft all the same
        unsaid = answer(it.address)
    assert (run.server.drafter, run.speculation) == (None, None) and "speculation" not in run.missing
    assert {outcome for chunk in run.chunks for outcome in chunk.outcomes} == {"plain"}
    assert asked[-1] == "/completion"  # its counters are not asked again
    assert unsaid.speculation is None and "speculation" in unsaid.missing


def test_settings_reach_the_server_as_it_calls_them():
    settings = Settings(
        max_new_tokens=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, ignore_eos=True, system="Be brief."
    )
    with stand_in_server("llama.cpp") as it:
        answer(it.address, settings)
        asked, template = it.streams[-1], next(body for _, path, body in it.requests if path == "/apply-template")
    assert [message["role"] for message in template["messages"]] == ["system", "user"]
    assert (asked["n_predict"], asked["top_k"], asked["min_p"], asked["ignore_eos"]) == (7, 3, 0.1, True)
    with stand_in_server("OpenAI-compatible") as it:
        run = answer(it.address, settings)
        assert "top_k" not in it.streams[-1] and it.streams[-1]["top_p"] == 0.9
    assert any(word.startswith("top_k") for word in run.missing)


def test_sglang_may_send_only_what_is_new_though_it_begins_like_the_text():
    run = ServerRun(Server("http://x", "SGLang", None, "m", ("m",)), SETTINGS, "p")
    heard = listener("/generate", run)
    for tokens, said in enumerate(["1", "1", "10"], 1):
        heard.hear(0.0, {"text": said, "output_ids": [5], "meta_info": {"completion_tokens": tokens}})
    assert (run.text, run.token_ids) == ("1110", [5, 5, 5])


def test_counters_are_read_before_and_after_where_the_answer_tells_nothing():
    with stand_in_server("vLLM", detailed=False) as it:
        answer(it.address)
        run = answer(it.address)
        silent = stand_in_server("vLLM", detailed=False, counters=False)
        with silent as other:
            nothing = answer(other.address)
    assert (run.speculation.drafted, run.speculation.shared) == (DRAFTED, True)
    assert run.speculation.by_position == BY_POSITION and all(chunk.outcomes is None for chunk in run.chunks)
    assert nothing.speculation is None and "speculation" in nothing.missing
    assert between({"drafted": 5, "accepted": 3}, {"drafted": 1, "accepted": 1}) is None  # the server began anew
    assert read_counters(
        "vLLM", 'vllm:spec_decode_num_draft_tokens{a="}"} NaN\nvllm:spec_decode_num_drafts 2 17\n'
    ) == {"passes": 2}


STRANGE = (
    None,
    -1,
    1e308,
    10**400,
    "<script>",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
    True,
    "\x00\x1b[2J",
    -0.5,
    float("inf"),
)

FAULTS = {
    "hang up at once": "hung up",
    "html": "an HTML page",
    "redirect": "sends on to",
    "500": "status 500: out of memory",
    "not a stream": "does not stream",
    "error inside": "gave up: the slot is gone",
    "not JSON": "not JSON",
    "deep JSON": "not JSON",
    "not UTF-8": "not UTF-8",
    "long line": "a line of more than",
    "endless": "does not stop",
    "hang up mid-token": "hung up",
    "no end": "hung up before the answer was complete",
}


def hear_all(server, runs):
    """An answer to its end; its run is among `runs` from the beginning."""
    with open_lane(server, "Hello", SETTINGS) as lane:
        runs.append(lane.run)
        for _ in lane:
            pass


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_server_does_wrong_is_one_sentence(fault):
    with stand_in_server("llama.cpp") as elsewhere, stand_in_server("llama.cpp", elsewhere=elsewhere.address) as it:
        server = None if fault in ("html", "redirect", "hang up at once") else connect(it.address)
        it.fault, runs = fault, []
        with pytest.raises(UserError, match=FAULTS[fault]) as raised:
            hear_all(server or connect(it.address), runs)
        assert not elsewhere.requests  # nobody is asked but the address that was given
    message = str(raised.value)
    assert message[-1] in ".?" and not message.endswith("..") and message.isprintable()
    assert all(run.stop_reason == "cancelled" for run in runs) and bool(runs) == (server is not None)


def test_silence_is_bounded_and_stop_is_heard_in_it():
    with stand_in_server("llama.cpp") as it:
        server = connect(it.address)
        it.fault = "silent"
        with Connection(it.address, silent_seconds=0.2) as connection, pytest.raises(UserError, match=r"0\.2 seconds"):
            list(ask(connection, ServerRun(server, SETTINGS, "Hello"), counted=False))
        pressed = []
        with open_lane(server, "Hello", SETTINGS, stop=lambda: bool(pressed)) as lane:
            next(lane)
            pressed.append(True)
            assert list(lane) == [] and lane.run.stop_reason == "cancelled"  # the server is silent for 3 seconds


DRIPS = {
    "nothing": (b"", b""),
    "informational answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", b" "),
    "a stream": (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b":\n"),
}
"""What a slow peer begins with, and then sends a little of every now and then, for ever."""


@contextmanager
def tarpit(drip):
    """The address of such a server."""
    begins, goes_on = DRIPS[drip]

    def answer(listening):
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.sendall(begins)
                while True:
                    connection.sendall(goes_on)
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def is_left():
    """Whether nobody of ours waits for a server any more, in a moment."""
    until = time.monotonic() + 5
    while waiting := any(each.name in ("answer", "connecting") for each in threading.enumerate()):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return not waiting


@pytest.mark.parametrize("drip", DRIPS)
def test_stop_is_heard_while_a_server_is_being_connected_to(drip):
    with tarpit(drip) as address:
        begun = time.monotonic()
        with pytest.raises(Cancelled):
            connect(address, stop=lambda: time.monotonic() - begun > 0.3)
        assert is_left()


@pytest.mark.parametrize("drip", DRIPS)
def test_a_request_is_over_in_its_time_however_slowly_the_answer_drips(drip):
    with tarpit(drip) as address, Connection(address, longest_seconds=0.3) as connection:
        ask = partial(connection.events, "/", {}, 9) if drip == "a stream" else partial(connection.get_text, "/")
        with pytest.raises(UserError, match=r"longer than 0\.3 seconds"):
            list(ask() or ())


@pytest.mark.parametrize("drip", DRIPS)
def test_who_goes_away_hangs_up(drip):
    """Of a lane and of a level, whatever part of an answer they wait for: no thread and no connection stays."""
    with tarpit(drip) as address:
        with open_lane(replace(A_SERVER, address=address), "Hello", SETTINGS):
            time.sleep(0.1)
        assert is_left()
    with tarpit(drip) as address:
        begun = time.monotonic()
        with suppress(Cancelled):
            over = lambda: time.monotonic() - begun > 0.2  # noqa: E731
            measure_level(replace(A_SERVER, address=address), ["Hello"], [0, 0], SETTINGS, 2, over)
        assert is_left()


@pytest.mark.parametrize("value", [*STRANGE, float("nan"), 1e9 + 1])
def test_what_is_no_amount_is_none(value):
    assert amount(value) is None
    assert whole(value) is None


def test_an_amount_of_next_to_nothing_is_none_at_all():
    """What is divided by it stays a number."""
    assert amount(5e-324) == amount(1e-200) == 0 and amount(1e-30) == 1e-30


FLOODS = {
    "an endless word among labels": "vllm:spec_decode_num_accepted_tokens_per_pos{" + "a" * 3_000_000 + "} 1",
    "spaces": "vllm:spec_decode_num_drafts" + " " * 3_000_000 + "x",
    "quotes": "vllm:spec_decode_num_accepted_tokens_per_pos{" + 'a="\\' * 700_000 + "} 1",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_counters_are_read_in_the_time_of_their_bytes(flood):
    """A pattern that goes back over what it read would take hours, and hold up every thread meanwhile."""
    assert read_counters("vLLM", FLOODS[flood]) == {}
    assert at_least([1] * 4096) == list(range(4095, 0, -1))


@pytest.mark.parametrize("field, value", [("token_ids", [1] * 4000), ("text", "x" * 400_000)])
def test_an_answer_is_no_longer_than_was_asked_for(field, value):
    heard = listener("/v1/completions", ServerRun(A_SERVER, SETTINGS, "Hello"))
    with pytest.raises(UserError, match="does not stop: it sent more than"):
        [heard.hear(0.1, {"choices": [{field: value}]}) for _ in range(4)]


def test_time_and_sizes_are_bounded(monkeypatch):
    with stand_in_server("llama.cpp") as it:
        server, clock = connect(it.address), iter(range(0, 100_000, 400))
        with (
            Connection(it.address, clock=lambda: next(clock)) as connection,
            pytest.raises(UserError, match="longer than"),
        ):
            list(ask(connection, ServerRun(server, SETTINGS, "Hello"), counted=False))
        monkeypatch.setattr(connection_module, "LONGEST_ANSWER", 10)
        with pytest.raises(UserError, match="an answer of more than 10 bytes"):
            connect(it.address)


def test_the_key_is_sent_and_never_kept(monkeypatch, capsys):
    key = "sk-very-secret-key"
    with stand_in_server("vLLM", key=key) as it:
        with pytest.raises(UserError, match=KEY_VARIABLE):
            answer(it.address)
        monkeypatch.setenv(KEY_VARIABLE, key)
        with pytest.raises(UserError, match=SERVERS_VARIABLE):
            answer(it.address)  # which anybody may have typed
        assert it.authorisations[-1] is None
        monkeypatch.setenv(SERVERS_VARIABLE, f"http://127.0.0.1:1/v1, {it.address}/")
        it.words = ["I was given ", key, "."]
        it.steps = ()
        run = answer(it.address)
        assert run.text == "I was given ***."
        it.fault = "500"
        with pytest.raises(UserError) as raised:
            answer(it.address)
    assert key not in str(raised.value) and "out of memory" in str(raised.value)
    assert key not in json.dumps(run.to_dict()) and key not in repr(run)
    assert it.authorisations[-1] == f"Bearer {key}"
    monkeypatch.delenv(SERVERS_VARIABLE)
    monkeypatch.setattr(connection_module, "_named", set())
    name_servers([f"{it.address}/v1"])
    assert is_owners(it.address) and not is_owners("http://127.0.0.1:1")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert KEY_VARIABLE in capsys.readouterr().out  # which says whom it is sent to
    monkeypatch.setenv(KEY_VARIABLE, "two\nlines")
    with pytest.raises(UserError, match="no key has") as raised:
        Connection(it.address)
    assert "two" not in str(raised.value)


ECHOES = {
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/?key=%s\r\n\r\n", "sends on to"),
    "a header that is none": (b"HTTP/1.1 200 OK\r\nyour key was %s\r\n\r\n", "hung up"),
    "a first line that is none": (b"HTTX %s\r\n\r\n", "hung up"),
    "a status": (b"HTTP/1.1 500 %s\r\nContent-Length: 0\r\n\r\n", "status 500"),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_a_key_that_comes_back_beside_the_answer_is_not_told(echo, monkeypatch):
    """By a proxy, say, that puts what it was sent into where to log in."""
    key, (reply, words) = "sk-very-secret-key", ECHOES[echo]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once():
            asking, _ = listening.accept()
            with asking:
                assert key.encode() in asking.recv(65536)
                asking.sendall(reply % key.encode())

        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv(KEY_VARIABLE, key)
        monkeypatch.setenv(SERVERS_VARIABLE, address)
        threading.Thread(target=once, daemon=True).start()
        with Connection(address) as connection, pytest.raises(UserError, match=words) as raised:
            connection.get_json("/v1/models")
    assert key not in str(raised.value)


@pytest.mark.parametrize(
    "given, read",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" https://host/proxy/v1/ ", "https://host/proxy"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses(given, read):
    assert read_address(given) == read_address(read) == read


@pytest.mark.parametrize(
    "given",
    [
        *("", "127.0.0.1:8000", "ftp://host", "file:///etc/passwd", "http://", "http://host:99999", "http://[::1"),
        *(
            "http://user:secret@host",
            "http://host/?key=secret",
            "http://a b",
            "http://host/\n",
            "http://h/" + "x" * 400,
        ),
    ],
)
def test_what_is_no_address_is_refused(given):
    if given == "http://host/\n":
        given = "http://ho\nst/"
    with pytest.raises(UserError) as raised:
        read_address(given)
    assert "secret" not in str(raised.value)


def test_an_address_of_millions_of_characters_is_not_looked_into(monkeypatch):
    """What parts addresses remembers the last hundred of them."""
    lengths = []
    monkeypatch.setattr(connection_module, "urlsplit", lambda text: lengths.append(len(text)) or urlsplit(text))
    with pytest.raises(UserError, match="is not the address"):
        read_address("http://" + "x" * 5_000_000)
    assert lengths == [301]


def test_nothing_is_connected_to_on_a_public_page():
    refuse_public(False)
    with pytest.raises(UserError, match="public"):
        refuse_public(True)


def test_a_server_that_is_not_there_or_has_no_such_model():
    with stand_in_server("vLLM") as it:
        with pytest.raises(UserError, match="serves no model 'huge'; it serves tiny"):
            connect(it.address, "huge")
        gone = it.address
    with pytest.raises(UserError, match="cannot be reached"):
        connect(gone)


def chunks(*texts, ids=None):
    return [ServerChunk(text, 0.1 * at, 1, [ids[at]] if ids else None) for at, text in enumerate(texts)]


def test_time_per_token_shares_the_wait_among_tokens_that_arrive_together():
    run = ServerRun(A_SERVER, SETTINGS, "Hello")
    arrivals = [(0.5, 1), (0.6, 1), (0.9, 2), (0.9002, 1), (1.3, None)]
    run.chunks = [ServerChunk("x", seconds, tokens) for seconds, tokens in arrivals]
    found = measure_run(run)
    assert found.first_token_seconds == 0.5 and found.counted == "chunks"  # one chunk does not say how many it holds
    assert found.token_seconds == pytest.approx(0.1) and found.token_seconds_p95 == pytest.approx(0.4, abs=1e-3)
    assert found.reader_tokens_per_second == pytest.approx(5 / 0.8)


def test_two_texts_part_at_a_token_or_at_a_character():
    one = ServerRun(A_SERVER, SETTINGS, "Hello", chunks("The", " sky", " is", ids=[1, 2, 3]))
    other = ServerRun(A_SERVER, SETTINGS, "Hello", chunks("The", " sea", " is", ids=[1, 9, 3]))
    bare = ServerRun(A_SERVER, SETTINGS, "Hello", chunks("The", " sea"))
    found = first_parting(one, other)
    assert (found.unit, found.position, found.shared, found.first, found.second) == (
        "token",
        1,
        "The",
        " sky is",
        " sea is",
    )
    found = first_parting(one, bare)
    assert (found.unit, found.position, found.first, found.second) == ("character", 5, "ky is", "ea")
    assert first_parting(one, one) is None and first_parting(other, bare) is None  # the same as far as both go


@pytest.mark.parametrize(
    "ratios, sentence",
    [
        ([2.0, 1.5, 1.1], "Speculation pays up to 4 readers: 1.10× there."),
        ([2.0, 1.5, 0.9], "From 4 readers on, speculation costs you: 0.90× the plain server, 1.50× at 2."),
        ([1.2, 0.8, 0.7], "From 2 readers on, speculation costs you: 0.80× the plain server, 1.20× at 1."),
        (
            [0.9, 0.8, 0.7],
            "Speculation costs you at every number of readers measured: 0.90× the plain server at 1 reader.",
        ),
        ([0.9, 1.2, 0.9], "Speculation costs you at 1 and 4 readers and pays at the others: there is no one crossing."),
        ([1.3], "Speculation pays at 1 reader: 1.30× there."),
        ([], ""),
    ],
)
def test_where_speculation_turns_into_a_loss_is_a_sentence(ratios, sentence):
    assert describe_crossing([Gain(1, 0, 2**at, ratio) for at, ratio in enumerate(ratios)]) == sentence


def test_load_is_measured_level_by_level():
    with (
        stand_in_server("vLLM", seconds_per_word=0.004, steps=()) as plain,
        stand_in_server("vLLM", seconds_per_word=0.004) as speculative,
    ):
        servers, steps = [connect(plain.address), connect(speculative.address)], []
        found = finish(load(servers, ["one", "two", "three"], SETTINGS, [4, 1, 4]), steps.append)
        assert (plain.most_reading, speculative.most_reading) == (4, 4)
    assert [(level.server, level.readers) for level in found.levels] == [(0, 1), (1, 1), (1, 4), (0, 4)]
    assert [step.done for step in steps] == [1, 2, 3, 4, 5, 6] and steps[-1].total == 6
    assert [level.answers for level in found.levels] == [3, 3, 8, 8]
    assert all(level.counted == "tokens" and level.failed == 0 for level in found.levels)
    assert [run.prompt for run in found.runs[1]] == ["one", "two", "three"]
    drafting = found.of(1)[-1].speculation
    assert (drafting.drafted, drafting.tokens_per_pass) == (8 * DRAFTED, pytest.approx(9 / 4))
    assert [gain.readers for gain in gains(found)] == [1, 4]
    for gain in gains(found):
        plainly, drafted = (next(at for at in found.of(n) if at.readers == gain.readers) for n in (0, 1))
        assert gain.ratio == drafted.tokens_per_second / plainly.tokens_per_second
    document = json.loads(json.dumps(load_document(found), allow_nan=False))
    assert document["crossing"] == describe_gains(found) == describe_crossing(gains(found)) != ""
    assert document["same_text"][0]["same"] == 3 and len(document["server_runs"]) == 6
    assert any("sent up to 3 times" in note for note in document["notes"])
    shown = server_table(found)
    assert "wrote the same for all 3 prompts" in shown and document["crossing"] in shown


def test_of_two_servers_that_both_draft_neither_is_called_plain():
    drafting = replace(A_SERVER, drafter="eagle")
    both, one = (Load([first, drafting], 1, SETTINGS, [1], 1) for first in (drafting, A_SERVER))
    assert roles(both) is None and describe_gains(both).startswith("Both servers draft")
    assert roles(one) == (1, 0) and describe_gains(one) == ""  # nothing is measured yet


def test_what_had_come_of_answers_that_a_level_cuts_off_counts_with_their_time():
    server = Server("http://x", "vLLM", None, "m", ("m",))

    def answer(*arrivals):
        run = ServerRun(server, SETTINGS, "p", [ServerChunk("a", at, 1) for at in arrivals], "eos", new_tokens=None)
        return _Answer(0, run, list(arrivals))

    whole, cut_off = answer(0.5, 1.0), answer(1.5, 2.0, 2.5)
    level = _sum_up(1, [whole], [whole, cut_off], 2.0, cut=True)
    assert (level.answers, level.tokens_per_second) == (1, 4 / 2.0)


def test_failures_under_load_are_counted_and_stop_ends_it():
    with stand_in_server("vLLM") as it:
        server = connect(it.address)
        steps = load([server], ["one", "two", "three"], SETTINGS, [1, 2])
        next(steps)
        it.failing = 1
        level = next(steps).load.levels[0]
        assert (level.answers, level.failed) == (2, 1) and "overloaded" in level.errors[0]
        pressed = []
        steps = load([server], ["one"], SETTINGS, [1, 2], stop=lambda: bool(pressed))
        next(steps)
        pressed.append(True)
        last = list(steps)[-1]
        assert last.load.stopped and not last.load.levels
    with pytest.raises(UserError, match="between 1 and"):
        check_readers([0, 4])


def test_bench_of_servers_on_the_command_line(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    with stand_in_server("vLLM", steps=()) as plain, stand_in_server("llama.cpp") as speculative:
        urls = ["--server", plain.address, "--server", speculative.address]
        asked = ["bench", *urls, "--prompts", str(prompts), "--max-new-tokens", "16", "--concurrency", "1,2"]
        assert main([*asked, "--json", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(asked) == 0
        shown = capsys.readouterr()
    assert [found["engine"] for found in document["servers"]["servers"]] == ["vLLM", "llama.cpp"]
    assert document["schema"] == SCHEMA and [level["readers"] for level in document["servers"]["levels"]] == [
        1,
        1,
        2,
        2,
    ]
    assert "llama.cpp b11549-abc, draft-simple" in shown.out and "6 of 6" in shown.err
    assert main(["bench", "--concurrency", "2"]) == 2 and "--server" in capsys.readouterr().err
    assert main(["bench", "--server", "ftp://x"]) == 2


def test_documents_with_servers_answers_reopen():
    with stand_in_server("llama.cpp") as it:
        run = answer(it.address)
    document = run.to_dict()
    assert server_run_from_dict(json.loads(json.dumps(document))) == run
    race = {"schema": SCHEMA, "runs": [], "server_runs": [document]}
    assert open_file(json.dumps(race)).server_runs == [run] == open_file(json.dumps(document)).server_runs
    for wrong in (
        {**document, "text": "another"},
        {**document, "chunks": [{**document["chunks"][0], "outcomes": ["rejected"]}, *document["chunks"][1:]]},
        {**document, "server": {**document["server"], "address": "http://user:key@host"}},
        {**document, "seconds": float("inf")},
    ):
        with pytest.raises(UserError):
            open_file(json.dumps({**race, "server_runs": [wrong]}))
    with pytest.raises(ValueError, match="incomplete"):
        server_run_from_dict({**document, "server": {}})


def spoilt(value, chance, draw):
    """The same document with some of its parts replaced by what does not belong there."""
    if draw.random() < chance:
        return draw.choice(STRANGE)
    if isinstance(value, dict):
        return {key: spoilt(each, chance, draw) for key, each in value.items() if draw.random() > chance / 4}
    return [spoilt(each, chance, draw) for each in value] if isinstance(value, list) else value


def recorded(dialect):
    """What a stand-in answers to each page and request, as (path, content type) -> bytes."""
    found = {}
    with stand_in_server(dialect) as it:
        run = answer(it.address, replace(SETTINGS, chat="off"))
        for method, path, body in list(it.requests):
            reply = httpx.request(method, it.address + path, json=body or None)
            found[path] = reply.status_code, reply.headers["content-type"], reply.content
    return run, found


def test_a_thousand_spoilt_responses_are_understood_or_one_sentence(monkeypatch):
    """Wrong types, wrong bytes, cuts: never a trace-back, and whatever is kept can be written and opened again."""
    draw, original = random.Random(17), {dialect: recorded(dialect) for dialect in DIALECTS}
    replies = {}

    def reply(request):
        status, kind, content = replies.get(request.url.path, (404, "text/plain", b""))
        way = draw.choice(("json", "json", "bytes", "cut", "status", "whole"))
        if way == "json":
            lines = content.split(b"\n")
            for at, line in enumerate(lines):
                head, body = (b"data: ", line[6:]) if line.startswith(b"data: {") else (b"", line)
                if body.startswith((b"{", b"[")) and draw.random() < 0.5:
                    lines[at] = head + json.dumps(spoilt(json.loads(body), 0.15, draw)).encode()
            content = b"\n".join(lines)
        elif way == "bytes" and content:
            spoiling = bytearray(content)
            for _ in range(draw.randint(1, 4)):
                spoiling[draw.randrange(len(spoiling))] = draw.randrange(256)
            content = bytes(spoiling)
        elif way == "cut":
            content = content[: draw.randrange(len(content) + 1)]
        elif way == "status" and draw.random() < 0.2:
            status = draw.choice((204, 301, 400, 500, 503))
        return httpx.Response(status, headers={"content-type": kind}, stream=httpx.ByteStream(content))

    client = partial(httpx.Client, transport=httpx.MockTransport(reply))
    monkeypatch.setattr(connection_module.httpx, "Client", client)
    ways, said = {"understood": 0, "refused": 0}, []
    for at in range(1000):
        run, replies = original[DIALECTS[at % 4]]
        heard = ServerRun(run.server, run.settings, run.prompt)
        with Connection(run.server.address) as connection:
            try:
                if at % 3 == 0:
                    heard.server = recognise(connection)
                list(ask(connection, heard))
                ways["understood"] += 1
            except UserError as error:
                ways["refused"] += 1
                said.append(str(error))
        heard.stop_reason = heard.stop_reason or "cancelled"
        text = json.dumps({"schema": SCHEMA, "server_runs": [heard.to_dict()]}, allow_nan=False)
        assert open_file(text).server_runs == [heard]
    assert min(ways.values()) > 200, ways
    assert all("\n" not in sentence and len(sentence) < 700 for sentence in said)
