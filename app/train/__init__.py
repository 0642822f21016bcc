"""Tab: train a draft head for the pair's target, and watch it learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import gradio as gr

from app.assets import asset
from app.compare.figures import entitle
from app.insides import NEWEST, PRIVATE, QUIET, UNCHECKED, html_block, scripted
from app.parts import prompts_uploaded, status_line, tell_over
from app.serving import Engine
from app.serving.device import Device, in_background
from app.serving.stops import Stops
from app.serving.turns import Event, Stop, guarded, sentence, with_pair
from app.settings import NAMED, pair_from, settings_from
from app.sidebar import follow_pair
from app.sidebar.picker import OTHER, SENT, Choice, reasons_of, sent
from app.tokens import stream
from app.tokens.charts import SERIES, Chart, add_line, figure
from app.tokens.markup import json_text
from app.train.events import by_prompt, short, training_events
from app.train.example import example_html
from app.tune.production import Deployment, recipes
from app.tune.results import command, command_html
from core.drafting.methods import BLOCK, HEAD, method_of
from core.errors import UserError
from core.loading.pair import label_of
from core.progress import Progress, duration
from core.settings import POCKET_NAME, Settings
from core.text import prompts_in

if TYPE_CHECKING:
    from core.training.kept import Kept

OFF = (
    "Training is off on this public page: it would take the device from everybody else for minutes. Start the app on "
    "a machine of your own, or use python -m core train-head."
)
ENGINES = ("vLLM", "SGLang")
"""Those that draft with such a head."""
NEW, BUNDLED = "a new head", "the bundled head"
KINDS = {"eagle3": "EAGLE-3", "dspark": "DSpark", "dflash": "DFlash"}
MINUTES, TOKENS = "minutes", "thousand tokens"
STARTING_AMOUNT = 3
MOST_AMOUNT = 1_000_000
MOST_PROMPTS = 1_000_000
"""Characters of prompts that the box takes."""
LENT = ("pair", *NAMED, "method", "draft_length")
"""Controls that a race of the head takes, in the order in which they are given back."""
BREAK = "⏎"
"""A line break within a prompt, where every line is one."""
PURPOSE = "a draft head is being trained (tab Train)"
SPECULATIVE_TOKENS = 3
"""What the commands for other engines draft at a time with a head that drafts one by one."""


class Train:
    """The tab and the functions behind its buttons. On a `public` page it says why it is off."""

    def __init__(
        self, engine: Engine, device: Device, public: bool = False, choices: Mapping[str, Choice] | None = None
    ) -> None:
        self.engine = engine
        self.choices = choices or {}
        self.device = device
        self.public = public
        self.stops = Stops()
        self._lengths: dict[Path, int] = {}
        """What each head trained since the page was started would best draft at a time."""

    def start(
        self, amount: Any, unit: str, prompts: str, kind: str, begin: str, request: gr.Request, *values: Any
    ) -> Iterator[str]:
        """Train a new head, or the bundled one on; `values` are the sidebar's."""
        yield from self._run((amount, unit, prompts, kind, begin), values, request, resume=False)

    def resume(
        self, amount: Any, unit: str, prompts: str, kind: str, begin: str, request: gr.Request, *values: Any
    ) -> Iterator[str]:
        """Go on with the head that was last trained for this target, of whichever kind it is."""
        yield from self._run((amount, unit, prompts, None, NEW), values, request, resume=True)

    def _run(
        self, choices: tuple[Any, ...], values: tuple[Any, ...], request: gr.Request, resume: bool
    ) -> Iterator[str]:
        with self.stops.watch(request) as stop:
            yield from stream(guarded(self._events(choices, values, stop, resume)))

    def _events(self, choices: tuple[Any, ...], values: tuple[Any, ...], stop: Stop, resume: bool) -> Iterator[Event]:
        if self.public:
            raise UserError(OFF)
        settings = self._settings(values)
        plan = self._plan(settings, *choices)

        def work(pair: Any) -> Iterator[Event]:
            def begin(tell: Progress, halt: Stop) -> Any:
                return self.engine.training(pair, settings, plan, resume, tell)

            session = yield from in_background(begin, stop, "Loading the target to learn from…", self.device)
            for event in training_events(session, stop, self.device, lambda: self.engine.forget(session.folder)):
                if event["e"] == "outlook":
                    self._lengths[session.folder] = event["length"]
                yield event

        yield from with_pair(self.device, self.engine, settings, stop, work, PURPOSE)

    def _plan(
        self, settings: Settings, amount: Any, unit: str, prompts: str, kind: str | None, begin: str
    ) -> dict[str, Any]:
        """As `core.training.loop.Plan` takes it; the bundled head is of the first kind."""
        begins = begin == BUNDLED and kind == next(iter(KINDS))
        bundled = self.engine.bundled_head(settings) if begins else None
        return {**plan_from(amount, unit, prompts), "kind": kind, "head": bundled}

    def _settings(self, values: tuple[Any, ...]) -> Settings:
        return settings_from(self.engine.settings, **sent(self.choices, values))

    def stop(self, request: gr.Request) -> None:
        """Stop this visitor's training; what was learnt is saved."""
        self.stops.stop(request)

    def glance(self, amount: Any, unit: str, prompts: str, kind: str, begin: str, *values: Any) -> list[Any]:
        """What Start and Resume would do, whether there is a bundled head to begin with, and the head that is there
        already: the words, the beginning, Resume, the part below."""
        nothing: list[Any] = [gr.update(interactive=False), gr.update(visible=False), *[gr.skip()] * (2 + len(ENGINES))]
        try:
            settings = self._settings(values)
            bundled = self.engine.bundled_head(settings)
            plan = self._plan(settings, amount, unit, prompts, kind, begin)
            kept, folder = self.engine.kept_head(settings)
        except Exception as error:
            return [status_line("error", sentence(error)), gr.skip(), *nothing]
        words = [forecast(settings.target or POCKET_NAME, plan, folder, bundled is not None)]
        beginning = gr.update(visible=bundled is not None and kind == next(iter(KINDS)))
        if kept is None:
            return [status_line("idle", *words), beginning, *nothing]
        words.append(resumption(kept.standing, kept.folder))
        can = gr.update(interactive=True)
        if not kept.exported:
            return [status_line("idle", *words), beginning, can, *nothing[1:]]
        made = {recipe.engine: command_html(recipe) for recipe in recipes(self._deployment(settings, kept))}
        looks = self.engine.looks_by_kind(settings)
        kinds = gr.update(value=beside(looks), visible=len(looks) > 1)
        shown = [kept_html(kept.folder), kinds, *(made[engine] for engine in ENGINES)]
        return [status_line("idle", *words), beginning, can, gr.update(visible=True), *shown]

    def _deployment(self, settings: Settings, kept: Kept) -> Deployment:
        pair = self.engine.loaded(settings)
        precision = self.engine.environment(pair)["target"]["precision"] if pair is not None else "bf16"
        folder, algorithm = str(kept.folder), kept.config.algorithm
        length = kept.config.drafted if algorithm else SPECULATIVE_TOKENS
        head = Settings(target=settings.target, draft=folder, method=method_of(kind_of(kept)).name)
        return Deployment(head, length, precision, head_folder=folder, algorithm=algorithm)

    def race_method(self, own: list[Any] | None, *values: Any) -> list[Any]:
        """The method of a trained head, in the sidebar. It comes before the head itself: what follows the pair is sent
        with the method that is chosen, which must be one of those the new pair has. And what stood there, by LENT,
        unless that is a head of here already."""
        _, kept = self._newest(values)
        now = dict(zip(SENT, values))
        if own is None or now.get("draft") != str(kept.folder):
            own = [now.get(name) for name in LENT]
        kind = kind_of(kept)
        method = method_of(kind).name
        reasons = reasons_of({"draft": {"model_type": kind}, "likeness": None, "target": {"layers": 2}})
        return [{**follow_pair(reasons, method, 2, False)["method"], "value": method}, own]

    def race(self, *values: Any) -> list[Any]:
        """The newest head as the pair's draft, with as many tokens at a time as the promise is for, in the sidebar; the
        Playground, which is to run once the sidebar holds it; and there what was chosen."""
        settings, kept = self._newest(values)
        length = self._lengths.get(kept.folder, settings.draft_length)
        named = (settings.target or POCKET_NAME, str(kept.folder), settings.revision or "")
        fields = [gr.update(value=text, visible=True) for text in named]
        method = method_of(kind_of(kept))
        wanted = {"method": method.name, "draft_length": length, **dict(zip(NAMED, named))}
        said = f"“Race it” changed your settings: the new head as draft, method {method.label}, draft length {length}."
        run = json_text({"id": uuid4().hex, "controls": wanted})
        shown = gr.update(visible=True), f'<p role="status">{escape(said)}</p>'
        return [run, OTHER, *fields, length, gr.Tabs(selected="playground"), *shown]

    def give_back(self, own: list[Any]) -> list[Any]:
        """What stood in the sidebar before the race, by LENT; its method among those that its pair can use."""
        now = dict(zip(LENT, own))
        pair = self.engine.loaded(pair_from(self.engine.settings, **{name: now[name] for name in NAMED}))
        if pair is not None:
            following = follow_pair(self.engine.methods(pair), now["method"], 2, False)["method"]
            now["method"] = {**following, "value": now["method"]}
        return [*now.values(), None, gr.update(visible=False)]

    def _newest(self, values: tuple[Any, ...]) -> tuple[Settings, Kept]:
        settings = self._settings(values)
        kept, _ = self.engine.kept_head(settings)
        if kept is None or not kept.exported:
            raise gr.Error("There is no trained head of this target yet.", print_exception=False)
        return settings, kept

    def build(
        self, controls: dict[str, Any], tabs: gr.Tabs, tab: gr.Tab, page: gr.Blocks, lent: tuple[Any, ...]
    ) -> None:
        """Lay out the tab and wire its buttons; `tabs` lead to the Playground, `tab` is this one, `lent` see there."""
        if self.public:
            html_block(status_line("idle", OFF), elem_id="train-words")
            return
        sidebar = [controls[name] for name in SENT]
        words = html_block(elem_id="train-words")
        plan, upload, start, resume, stop = self._choices()
        training = component()
        html_block(example_html(), elem_id="train-example")
        with gr.Column(visible=False, elem_id="train-kept") as column:
            with gr.Row(elem_id="train-kept-row"):
                kept = html_block(elem_id="train-kept-words")
                race = gr.Button("Race it", variant="primary", elem_id="train-race", scale=0, min_width=110)
            kinds = gr.Plot(visible=False, show_label=False, elem_id="train-kinds", elem_classes="compare-plot")
            with gr.Accordion("Take it to production", open=False, elem_id="train-production"):
                commands = [_engine(name) for name in ENGINES]
        known = [words, plan[-1], resume, column, kept, kinds, *commands]
        for button, work in ((start, self.start), (resume, self.resume)):
            ended = button.click(
                work,
                [*plan, *sidebar],
                training,
                concurrency_limit=None,  # turns are taken in `Device`, which can say who is ahead
                **PRIVATE,
                **UNCHECKED,
            )
            tell_over(ended.then(self.glance, [*plan, *sidebar], known, **QUIET), "training")
        stop.click(self.stop, None, None, **QUIET)
        upload.upload(prompts_of_file, upload, plan[2], **PRIVATE)
        triggers = [page.load, tab.select, *(part.change for part in plan)]
        triggers += [controls[name].change for name in ("pair", "target", "draft", "precision")]
        gr.on(triggers, self.glance, [*plan, *sidebar], known, **NEWEST, **UNCHECKED)
        fields = [controls[name] for name in NAMED]
        wanted = scripted("<span hidden></span>", "train/race_it.js")
        own, (place, said, back) = gr.State(), lent
        race.click(self.race_method, [own, *sidebar], [controls["method"], own], **QUIET).success(
            self.race,
            sidebar,
            [wanted, controls["pair"], *fields, controls["draft_length"], tabs, place, said],
            **QUIET,
        )
        back.click(self.give_back, own, [*(controls[name] for name in LENT), own, place], **QUIET)
        chosen = [controls["pair"].input, *(field.input for field in fields)]
        gr.on(chosen, lambda: [None, gr.update(visible=False)], None, [own, place], **QUIET)

    def _choices(self) -> tuple[list[Any], gr.UploadButton, gr.Button, gr.Button, gr.Button]:
        with gr.Row(elem_id="train-row"):
            with gr.Row(elem_id="train-amount"):
                amount = gr.Number(
                    STARTING_AMOUNT,
                    label="Train for",
                    info="How long, or how many tokens of answers it is to learn from, each time counted.",
                    elem_id="train-number",
                    min_width=80,
                )
                unit = gr.Radio(
                    [MINUTES, TOKENS],
                    value=MINUTES,
                    label="Counted in",
                    info="Time with the writing of texts, or tokens of answers.",
                    elem_id="train-unit",
                    min_width=240,
                )
            prompts = gr.Textbox(
                label="Prompts of your own, one a line (optional)",
                info="What the target is to answer; \u23ce stands for a line break within a prompt. Without any it "
                "writes its own, which takes no data set.",
                lines=2,
                max_lines=2,
                max_length=MOST_PROMPTS,
                elem_id="train-prompts",
                placeholder="None: the target writes its own.",
                scale=1,
            )
            kind = gr.Radio(
                [(name, kind) for kind, name in KINDS.items()],
                value=next(iter(KINDS)),
                label="Kind of head",
                info="EAGLE-3 drafts token by token; DSpark and DFlash a block in one pass.",
                elem_id="train-kind",
                scale=0,
                min_width=300,
            )
            begin = gr.Radio(
                [NEW, BUNDLED],
                value=NEW,
                label="Begin with",
                info="A head that knows nothing yet, or the one that comes with this app.",
                elem_id="train-begin",
                visible=False,
                scale=0,
                min_width=240,
            )
            with gr.Column(elem_id="train-buttons", scale=0, min_width=220):
                with gr.Row():
                    start = gr.Button("Start", variant="primary", elem_id="train-start", min_width=64)
                    resume = gr.Button("Resume", elem_id="train-resume", interactive=False, min_width=64)
                    stop = gr.Button("Stop", elem_id="train-stop", min_width=64)
                upload = gr.UploadButton("Prompts from a file…", size="sm", elem_id="train-upload")
        return [amount, unit, prompts, kind, begin], upload, start, resume, stop


def forecast(target: str, plan: Mapping[str, Any], folder: Path, bundled: bool) -> str:
    """What Start would do; `bundled`: there are texts and a head that come with the app."""
    own = plan["prompts"]
    name = label_of(target, "target")
    texts = "the texts that come with the app, then its own" if bundled else "texts of its own"
    does = f"answers your {len(own)} prompts" if own else f"reads {texts}" if bundled else f"writes {texts}"
    a_new = f"{'an' if plan['kind'] == 'eagle3' else 'a'} {KINDS[plan['kind']]} head of one layer learns"
    which = "the bundled head goes on learning" if plan.get("head") else a_new
    long = duration(plan["seconds"]) if plan.get("seconds") else f"{plan['tokens']:,} tokens"
    return f"Start: {name} {does}, and {which} from them to guess its next tokens, for {long}. Kept in {short(folder)}."


def kind_of(kept: Kept) -> str:
    """The kind of a head that was trained here: it drafts one by one, or whole blocks."""
    return BLOCK if kept.config.algorithm else HEAD


def resumption(standing: Mapping[str, Any], folder: Path) -> str:
    """What Resume would do."""
    so_far = "that was just begun"
    if standing:
        so_far = f"of {duration(standing['seconds'])} ({standing['visits']:,} tokens learnt from)"
    return f"Resume: goes on with the training {so_far} in {short(folder)}, where it stopped."


def kept_html(folder: Path) -> str:
    """Where the newest head lies, whose it is, and how good it is."""
    from core.heads.checkpoint import MEASURED, read_config, trained_for

    config = read_config(folder)
    rate, whose = config.get(MEASURED) or {}, escape(trained_for(config) or "this target")
    spread = by_prompt(rate.get("between") or ())
    of = f" {rate['acceptance_rate']:.0%} of its guesses were accepted {rate['where']}{spread}." if rate else ""
    return f"<p>The newest head of {whose} is kept in <code>{escape(str(folder))}</code>.{escape(of)}</p>"


def beside(looks: Mapping[str, list[dict[str, Any]]]) -> Chart | None:
    """How kinds learnt, each a line; None where there is one at most."""
    if len(looks) < 2:
        return None
    chart = figure("thousand tokens learnt from", "tokens per target pass, on held-out answers", "kinds", height=320)
    entitle(chart, "Which kind learns faster?")
    for kind, style in zip(KINDS, SERIES):
        if told := [look for look in looks.get(kind, []) if look["agreement"]]:
            seen = [look["visits"] / 1000 for look in told]
            add_line(chart, KINDS[kind], seen, [1 + sum(look["agreement"]) for look in told], style)
    chart.update_layout(showlegend=True)
    return chart


def plan_from(amount: Any, unit: str, prompts: str) -> dict[str, Any]:
    """Tokens or seconds, and prompts, as `core.training.loop.Plan` takes them."""
    if not isinstance(amount, (int, float)) or not 0 < amount <= MOST_AMOUNT:
        raise UserError(f"Train for more than 0 minutes or tokens, and for at most {MOST_AMOUNT:,} of either.")
    own = [prompt.text.replace(BREAK, "\n") for prompt in prompts_in(prompts or "")] or None
    if unit == TOKENS:
        return {"tokens": max(1, round(amount * 1000)), "prompts": own}
    return {"seconds": 60.0 * amount, "prompts": own}


def prompts_of_file(path: str) -> str:
    """The prompts of a file, one a line; what is wrong with one, as a message on the page."""
    texts = [prompt.text for prompt in prompts_uploaded(path)]
    return "\n".join(text.strip("\n").replace("\n", BREAK) for text in texts)


def component() -> gr.HTML:
    """The training at work; its value is what `stream` makes of its events."""
    return scripted(asset("train/train.html"), "train/train.js", elem_id="training")


def _engine(engine: str) -> gr.HTML:
    with gr.Column(elem_classes="train-engine"):
        html_block(f"<h3>{engine}</h3>")
        return command(f"train-{engine.lower()}")
