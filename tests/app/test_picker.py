"""The picker: which pairs it lists, what its fields mean on the server, what its card says, and who may load what."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import pytest
from fakes import CONTROLS as VALUES
from fakes import FakeEngine, inspection

from app.header import facts_before_loading, header_html, notes
from app.serving import Engine, Offer
from app.serving.device import Device, in_background
from app.serving.turns import guarded, with_pair
from app.serving.visit import Visit
from app.settings import settings_from
from app.sidebar.card import card_html, facts, trouble_html
from app.sidebar.picker import OTHER, Picker, choices, measured_acceptance, reasons_of
from core.drafting.methods import HEAD, METHODS, MTP
from core.errors import Cancelled, UserError
from core.inspecting.acceptance import Acceptance
from core.inspecting.catalogue import Found
from core.measuring.deciding import gain_of
from core.progress import never
from core.records import summarise
from core.settings import Settings

BASE = {**VALUES, "max_new_tokens": 8}
ASKED = ("small-pair", "", "", "", "auto", "auto")
STARTED = Settings("own/target", "own/draft", revision="v1")


HEAD_METHODS = [name for name, method in METHODS.items() if method.network == "head"]


def named(base=STARTED, **controls):
    found = settings_from(base, **{**BASE, **controls})
    return found.target, found.draft, found.revision


@pytest.mark.parametrize(
    "controls, expected",
    [
        ({}, ("own/target", "own/draft", "v1")),
        ({"target": "", "draft": "", "revision": ""}, ("own/target", "own/draft", "v1")),
        ({"target": "pocket", "draft": "pocket"}, ("pocket", None, None)),
        ({"target": "pocket"}, ("pocket", None, None)),
        ({"target": " a/b ", "draft": "c/d", "revision": "main"}, ("a/b", "c/d", "main")),
        ({"target": "a/b"}, ("a/b", None, None)),
        ({"draft": "c/d"}, ("own/target", "c/d", "v1")),
        ({"target": "own/target", "draft": "own/draft"}, ("own/target", "own/draft", "v1")),
    ],
)
def test_fields_name_the_pair(controls, expected):
    assert named(**controls) == expected


def test_chat_and_draft_precision_reach_the_settings():
    found = settings_from(STARTED, **BASE, draft_precision="bf16", chat="off", system="  Be brief. ")
    assert (found.draft_precision, found.chat, found.system) == ("bf16", "off", "Be brief.")
    assert settings_from(STARTED, **BASE, system="  ").system is None


@pytest.mark.parametrize(
    "name, value",
    [("target", 5), ("target", "a\0b"), ("draft", "x" * 301), ("draft_precision", "int1"), ("chat", "loud")],
)
def test_what_cannot_be_is_one_sentence(name, value):
    with pytest.raises(UserError, match=r"\.$"):
        settings_from(STARTED, **{**BASE, name: value})


def test_the_list_begins_with_the_pair_of_the_start():
    offers = FakeEngine().offers()
    found = choices(STARTED, offers, public=False)
    assert list(found) == ["default", "pocket", "small-pair", "large-pair", OTHER]
    assert found["default"].label == "target + draft"
    assert found["large-pair"].label == "large-pair (24 GB GPU, gated)"
    assert list(choices(Settings("pocket"), offers, public=True)) == ["default", "small-pair", "large-pair"]


def test_models_of_other_programs_are_offered_to_the_owner_only():
    here = [Found("tiny.Q4_0.gguf", "/models/tiny.Q4_0.gguf", "LM Studio", 2_100_000_000)]
    offers = FakeEngine().offers()
    found = choices(Settings(), offers, False, here)
    assert found["/models/tiny.Q4_0.gguf"].label == "tiny.Q4_0.gguf (LM Studio, 2.1 GB)"
    assert found["/models/tiny.Q4_0.gguf"].target == "/models/tiny.Q4_0.gguf"
    assert list(found)[-1] == OTHER
    assert "/models/tiny.Q4_0.gguf" not in choices(Settings(), offers, True, here)
    engine = Engine(Settings())
    engine.public = True
    assert engine.found() == []


def test_the_pair_of_the_start_is_listed_once():
    offers = [Offer("smollm2-135m", "smollm2", None, 0, False, "A chat model.", True, True)]
    found = choices(Settings("smollm2"), offers, public=True)
    assert [(value, choice.label) for value, choice in found.items()] == [
        ("default", "smollm2-135m (here)"),
        ("pocket", "pocket (bundled)"),
    ]


def test_the_catalogue_offers_what_is_here_first_then_what_fits(monkeypatch):
    monkeypatch.setattr(
        "core.loading.hub.cached", lambda name, revision=None: name if "14B" in name or "0.6B" in name else None
    )
    monkeypatch.setattr("core.loading.pair.at_hand", lambda name: "14B" in name or "0.6B" in name)
    offers = Engine(Settings(device="cpu")).offers()
    assert (offers[0].name, offers[0].cached) == ("qwen3-14b", True)
    fits = [offer.fits for offer in offers[1:]]
    assert fits == sorted(fits, reverse=True)
    assert all(offer.memory_gb == 0 for offer in offers if offer.fits)
    assert "pocket" not in [offer.name for offer in offers]


def test_the_card_escapes_names_and_tells_the_facts():
    found = inspection(Settings("owner/large"))
    found["verdict"] = ["<b>bad</b>", "second"]
    html = card_html(found, why="<i>why</i>", gated=True)
    assert "<b>bad" not in html
    assert "<i>why" not in html
    assert "3 more to know" in html
    assert "accept its terms" in html
    told = dict(facts(found, "draft"))
    assert told["Download"] == "8.1 GB"
    assert told["Memory"] == "20 GB of 12 GB free"
    assert told["Speed-up"].startswith("1.6× to 2.6× predicted if 60% to 80% were accepted, a usual range for")
    assert "<script" not in trouble_html("<script>")


def test_methods_follow_from_the_inspection_as_from_the_loaded_pair():
    found = inspection(Settings())
    refused = {method: reason for method, reason in reasons_of(found).items() if reason}
    assert refused == dict.fromkeys(HEAD_METHODS, "no trained head of the target is named")
    head = reasons_of({**found, "draft": {**found["draft"], "model_type": HEAD}})
    used = {method for method, reason in head.items() if reason is None}
    assert used == {"plain", "ngram", "early-exit", "head", "head-tree", "ngram+head"}
    assert "trained head" in head["draft"]
    own = reasons_of({**found, "draft": {**found["draft"], "model_type": MTP}})
    assert own["head"] is None and own["draft"] == head["draft"] and "no trees" in own["head-tree"]
    other = reasons_of({**found, "likeness": {"same": False, "usable": True}})
    assert other["draft"] is None
    assert "own tokens" in other["tree"]
    alone = reasons_of({**found, "draft": None, "likeness": None})
    assert [m for m, reason in alone.items() if reason is None] == ["plain", "ngram", "early-exit"]


def test_the_card_of_a_pair_that_is_not_there_is_its_sentence():
    picker = Picker(FakeEngine(), Device())
    shown = [values[0] for values in picker.look(Visit(), OTHER, "owner/missing", "", "", "auto", "auto", "draft")]
    assert "Looking at" in shown[0]
    assert "The Hub has no model" in shown[-1]
    (first,) = [values[0] for values in picker.look(Visit(), OTHER, "", "", "", "auto", "auto", "draft")]
    assert "Name a target" in first
    (unknown,) = [values[0] for values in picker.look(Visit(), "nonsense", "", "", "", "auto", "auto", "draft")]
    assert "no pair" in unknown


def test_drafts_for_a_typed_target_are_named_the_best_first():
    picker = Picker(FakeEngine(), Device())
    *_, last = [values[0] for values in picker.look(Visit(), OTHER, "owner/own", "", "", "auto", "auto", "draft")]
    assert last.index("owner/tiny, 2.1×") < last.index("owner/&lt;b&gt;small&lt;/b&gt;, 1.4×")
    *_, listed = [values[0] for values in picker.look(Visit(), "small-pair", "", "", "", "auto", "auto", "draft")]
    assert "Drafts with its tokens" not in listed


def test_models_from_a_link_find_their_entry():
    picker = Picker(FakeEngine(), Device())
    assert picker.recognise("default", ("owner/small", "owner/tiny"))[0] == "small-pair"
    assert picker.recognise("default", ("some/where", ""))[0] == OTHER
    assert picker.recognise("small-pair", ("", ""))[0] == gr.skip(), "chosen, and its fields are still being filled"
    assert Picker(FakeEngine(), Device(), public=True).recognise("default", ("some/where", ""))[0] == "default"


@pytest.mark.parametrize(
    "asked, allowed",
    [
        (Settings(), True),
        (Settings("Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"), True),
        (Settings("Qwen/Qwen3-4B", "someone/else"), False),
        (Settings("someone/else"), False),
        (Settings("/etc"), False),
        (Settings("Qwen/Qwen3-4B", revision="main"), False),
        (STARTED, True),
        (Settings("own/target", "own/draft", revision="v2"), False),
    ],
)
@pytest.mark.parametrize("way", ["admit", "fetch", "load", "inspect"])
def test_strangers_get_what_is_offered_by_every_way(monkeypatch, asked, allowed, way):
    """Whatever page or function asks: nothing is downloaded, loaded or looked at for them."""
    engine = Engine(STARTED)
    engine.public = True
    reached = []
    pair = SimpleNamespace(
        target=SimpleNamespace(device=SimpleNamespace(type="cpu"), weight_bytes=int), draft=None, head=None
    )
    monkeypatch.setattr("core.loading.fetch_pair", lambda *_: reached.append(1))
    monkeypatch.setattr("core.loading.load_pair", lambda *_, **__: reached.append(1) or pair)
    report = SimpleNamespace(to_dict=dict)
    monkeypatch.setattr("core.inspecting.inspect_pair", lambda *_, **__: reached.append(1) or report)
    if allowed:
        getattr(engine, way)(asked)
        return
    with pytest.raises(UserError, match="This page is public"):
        getattr(engine, way)(asked)
    assert not reached


class Loads:
    """`core.loading.load_pair` as a test wants it."""

    def __init__(self, monkeypatch, device="cpu"):
        self.asked, self.going, self.most = [], 0, 0
        self.device = device
        self.error = None
        self.seconds = 0.0
        self.go_on = threading.Event()
        self.go_on.set()
        monkeypatch.setattr("core.loading.load_pair", self)
        monkeypatch.setattr("core.loading.fetch_pair", lambda *_: None)

    def __call__(self, settings, progress, stop, make_room, measure=True):
        self.asked.append(settings.target)
        self.going += 1
        self.most = max(self.most, self.going)
        progress("Reading it: 1.0 MB of 2.0 MB")
        assert self.go_on.wait(60)
        time.sleep(self.seconds)
        self.going -= 1
        if self.error:
            raise self.error
        model = SimpleNamespace(device=SimpleNamespace(type=self.device), weight_bytes=lambda: 1000)
        return SimpleNamespace(target=model, draft=None, head=None, name=settings.target, make_room=make_room)


def test_two_loads_at_once_take_turns_and_share_what_is_the_same(monkeypatch):
    loads = Loads(monkeypatch)
    loads.seconds = 0.05
    engine = Engine(Settings())
    found = []
    names = ("a/a", "b/b", "a/a")
    threads = [threading.Thread(target=lambda n=n: found.append(engine.load(Settings(n)))) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads.most == 1
    assert sorted(loads.asked) == ["a/a", "b/b"]
    assert len({id(pair) for pair in found}) == 2


@pytest.mark.parametrize("device, kept", [("cpu", ["b/b", "c/c"]), ("cuda", ["c/c"])])
def test_pairs_nobody_used_for_longest_are_let_go(monkeypatch, device, kept):
    Loads(monkeypatch, device)
    engine = Engine(Settings())
    for name in ("a/a", "b/b", "c/c"):
        engine.load(Settings(name))
    assert [name for name in ("a/a", "b/b", "c/c") if engine.is_loaded(Settings(name))] == kept
    assert engine.unload() == 1000 * len(kept)
    assert not any(engine.is_loaded(Settings(name)) for name in kept)


def test_a_load_makes_room_only_where_memory_is_short_and_only_as_much(monkeypatch):
    Loads(monkeypatch)
    engine = Engine(Settings())
    first, second = engine.load(Settings("a/a")), engine.load(Settings("b/b"))
    first.make_room(500)
    assert not engine.is_loaded(Settings("a/a"))
    assert engine.is_loaded(Settings("b/b"))
    second.make_room(10**6)
    assert not engine.is_loaded(Settings("b/b"))


def test_a_failed_load_leaves_the_good_one(monkeypatch):
    loads = Loads(monkeypatch)
    engine = Engine(Settings())
    good = engine.load(Settings("a/a"))
    loads.error = UserError("It cannot be read.")
    with pytest.raises(UserError):
        engine.load(Settings("b/b"))
    assert engine.load(Settings("a/a")) is good
    assert not engine.is_loaded(Settings("b/b"))


def test_progress_of_a_load_is_shown_before_the_work(monkeypatch):
    loads = Loads(monkeypatch)
    loads.seconds = 0.5
    events = list(
        guarded(with_pair(Device(), Engine(Settings()), Settings("a/a"), lambda: False, lambda pair: iter([])))
    )
    texts = [event["text"] for event in events if event["e"] == "status"]
    assert texts[-1] == "Reading it: 1.0 MB of 2.0 MB"
    assert events[-1] == {"e": "done"}


def test_a_load_that_began_is_finished_and_freed_when_it_is_stopped(monkeypatch):
    loads = Loads(monkeypatch)
    loads.seconds = 0.3
    loads.go_on.clear()
    engine, device, worked = Engine(Settings()), Device(), []
    settings = Settings("a/a")

    def pressed():
        """Once the load has begun, which goes on only then."""
        if loads.going:
            loads.go_on.set()
        return loads.go_on.is_set()

    events = list(guarded(with_pair(device, engine, settings, pressed, lambda pair: worked.append(pair) or iter([]))))
    assert events[-2]["text"] == "Stopped; the models that had just been loaded are freed."
    assert any(event.get("text", "").startswith("Stopping") for event in events)
    assert not worked
    assert not engine.is_loaded(settings)
    assert loads.going == 0


def test_a_download_is_left_at_once_and_holds_nobody_up(monkeypatch):
    """Others use the device meanwhile; Stop does not wait for a network that is silent."""
    Loads(monkeypatch)
    over, ended = threading.Event(), []

    def silent_network(settings, progress, stop):
        progress("Downloading a/a: 1.0 GB of 9.0 GB")
        over.wait(60)
        ended.append(True)

    monkeypatch.setattr("core.loading.fetch_pair", silent_network)
    device, pressed = Device(), []
    events = guarded(
        with_pair(device, Engine(Settings()), Settings("a/a"), lambda: bool(pressed), lambda pair: iter([]))
    )
    texts = []
    for event in events:
        texts.append(event.get("text"))
        if "1.0 GB of 9.0 GB" in (event.get("text") or "") and not pressed:
            with device.turn() as turn:
                assert turn.wait(10)
            pressed.append(True)
    assert pressed and not ended
    assert texts[-2].startswith("Stopped while downloading; the files that came whole are kept")
    over.set()


def test_a_job_is_told_when_its_reader_goes_away():
    seen = threading.Event()

    def job(tell, halt):
        while not halt():
            time.sleep(0.01)
        seen.set()
        raise Cancelled

    events = in_background(job, lambda: False, "Going…")
    next(events)
    events.close()
    assert seen.wait(5)


def test_the_header_of_a_pair_that_is_not_loaded_and_remarks_on_one_that_is():
    environment = {"device": "cpu", "device_name": "2 CPU cores"}
    found = facts_before_loading(environment, Settings("owner/<b>x</b>", "owner/y", draft_length=4))
    assert found[2] == "loads with the next run"
    assert "<b>" not in header_html("<b>", found, ["<b>"])
    models = {"target": {"notes": ["bf16 instead"]}, "draft": {"notes": ["bf16 instead"]}}
    assert notes(models) == ["bf16 instead"]


def test_another_gpu_is_a_prediction_by_precision_and_acceptance() -> None:
    """What was measured of this very pair is named beside what is assumed; another pair's runs say nothing of it."""
    picker, visit = Picker(FakeEngine(), Device()), Visit()
    hidden = picker.predict([], visit, "default", "", "", "")
    assert hidden["visible"] is False
    shown = picker.predict(["RTX 4070"], visit, "small-pair", "", "", "")["value"]
    assert "not a measurement" in shown and "accepted, measured" not in shown
    assert (
        "<td>15,872</td><td>does not fit</td>" in shown and "<td>1.70×<small>4 drafted</small></td><td>–</td>" in shown
    )
    two = picker.predict(["RTX 4070", "<b>"], visit, "small-pair", "", "", "")["value"]
    assert two.count("not a measurement") == 2 and "writes 1.5× as fast as &lt;b&gt;" in two
    for pair, rate in ((("owner/small", "owner/tiny"), 0.5), (("owner/large", "owner/tiny"), 0.9)):
        settings = Settings(target=pair[0], draft=pair[1], method="draft", max_new_tokens=96)
        engine = FakeEngine(pace=0, acceptance=rate)
        lane = engine.open_lane(None, "def f():", settings, lambda: False)
        list(lane)
        visit.add("race", [lane.run])
    found = measured_acceptance(visit, Settings(target="owner/small", draft="owner/tiny"))
    assert found is not None and found.rate == summarise(visit.entries[0].runs[0]).acceptance_rate
    shown = picker.predict(["RTX 4070"], visit, "small-pair", "", "", "")["value"]
    assert f"{found.rate:.0%} accepted, measured" in shown


@pytest.mark.parametrize("method", METHODS)
def test_the_card_predicts_by_the_method_that_is_chosen(method) -> None:
    """What is known of the pair's own draft says nothing of n-grams, of early exit and of plain decoding."""
    told = dict(facts(inspection(Settings(), Acceptance(0.6, "on eight texts", (0.5, 0.7))), method))
    by_draft = METHODS[method].network in ("draft", "head")
    assert ("1.6× (1.5× to 1.7×) predicted, 60% accepted as measured on eight texts" in told["Speed-up"]) == by_draft
    assert ("Draft" in told) == by_draft
    if not METHODS[method].simple or not by_draft:
        assert any(words in told["Speed-up"] for words in ("your first run tells", "repeats itself", "held against"))


def test_from_the_first_run_on_the_card_goes_by_the_visitors_own() -> None:
    """By those of this pair and method alone: another method has brought nothing yet."""
    picker, visit, engine = Picker(FakeEngine(), Device()), Visit(), FakeEngine(pace=0)
    assert "predicted" in picker.learn(visit, *ASKED, "draft")
    settings = Settings(target="owner/small", draft="owner/tiny", max_new_tokens=96)
    races = []
    for _ in range(2):
        lanes = [engine.open_lane(None, "x", replace(settings, method=m), never) for m in ("draft", "plain")]
        for lane in lanes:
            list(lane)
        races.append((lanes[0].run, lanes[1].run))
        visit.add("race", races[-1])
    gain = gain_of(races)
    assert gain and gain.low < gain.speedup < gain.high and not gain.same
    card = picker.learn(visit, *ASKED, "draft")
    assert f"{gain.speedup:.2f}× ({gain.low:.2f} to {gain.high:.2f}) in your last 2 runs here" in card
    assert "predicted" not in card
    for method, words in (("ngram", "your first run tells"), ("plain", "held against")):
        assert words in picker.learn(visit, *ASKED, method)
    drew = gain_of([(races[0][1], races[0][1])])
    assert drew and drew.same
    assert "about the same as plain: 1.00× (" in dict(facts(inspection(settings), "draft", drew))["Speed-up"]


def test_strangers_do_not_unload_what_others_use():
    engine = FakeEngine()
    device = Device(longest=1)
    assert "Freed 33 MB" in list(Picker(engine, device).unload())[-1]
    with device.turn():
        assert "waiting already" in list(Picker(engine, device).unload())[-1]
    engine.public = True
    assert "stay loaded" in list(Picker(engine, device, public=True).unload())[-1]


def test_nothing_is_downloaded_for_a_pair_that_does_not_fit(monkeypatch):
    """Told by the header of its weights, before the first of its gigabytes."""
    Loads(monkeypatch)
    fetched = []
    monkeypatch.setattr("core.loading.fetch_pair", lambda *_: fetched.append(True))
    engine = Engine(Settings())
    fits = {"fits": "no"}
    engine.inspect = lambda settings: {"memory": fits, "verdict": ["It needs about 90 GB of RAM."]}
    with pytest.raises(UserError, match=r"Nothing was downloaded\. It needs about 90 GB"):
        engine.fetch(Settings("a/a"))
    assert not fetched
    fits["fits"] = "yes"
    engine.fetch(Settings("a/a"))
    assert fetched


def test_a_card_that_cannot_be_drawn_anew_says_so(caplog):
    engine = FakeEngine()
    engine.inspect = lambda *_: {}["memory"]
    assert "failed on our side" in Picker(engine, Device()).learn(Visit(), *ASKED, "draft")
    assert "KeyError" in caplog.text
