"""Four ways to say the same: how each engine is recognised, asked for a stream, and understood.

vLLM     /v1/… with return_token_ids; the last event holds usage and, where the server counts, metrics
SGLang   /generate for text (meta_info, ids), /v1/chat/completions for messages (text alone while it streams)
llama.cpp  /completion with a time and an id for each token; /apply-template makes the prompt of a message
others   /v1/… and nothing but OpenAI's own fields
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from core.errors import UserError
from core.progress import Stop, never
from core.records import Outcome
from core.servers.connection import Connection, until_stopped
from core.servers.counters import NAMES, of_llama, of_sglang, of_vllm, read_counters
from core.servers.fields import amount, counts, name, text, token_ids, whole, within
from core.servers.records import Engine, Server, ServerChunk, ServerRun, Timings, speculation
from core.settings import LONGEST_DRAFT, Settings

OWNERS: dict[str, Engine] = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
"""`owned_by` of a model in /v1/models."""
MOST_MODELS = 256
LONGEST_TEXT = 1_000_000
"""Characters of an answer; a document that holds it can be opened again (app/history/parts.py)."""
ACCEPTED: Outcome = "accepted"
PLAIN: Outcome = "plain"


def connect(address: str, model: str | None = None, stop: Stop = never) -> Server:
    """Ask a server who it is. `model` is one of its models (default: the first it lists).

    Raises UserError where nobody answers, what answers is no language model's server, or it has no such model;
    Cancelled after `stop`.
    """
    return until_stopped(lambda connection: recognise(connection, model), address, stop)


def recognise(connection: Connection, model: str | None = None) -> Server:
    """The same over a connection."""
    listed = within(connection.get_json("/v1/models"), "data")
    entries = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    models = [found for each in entries[:MOST_MODELS] if (found := name(each.get("id")))]
    if not models:
        raise UserError(f"{connection.address} lists no models under /v1/models: is it a language model's server?")
    if model is not None and model not in models:
        raise UserError(f"{connection.address} serves no model {model!r}; it serves {', '.join(models[:5])}.")
    owner = next((owner for each in entries if (owner := name(each.get("owned_by")))), None)
    engine, version, drafter = _recognise(connection, OWNERS.get((owner or "").lower()))
    counting = bool(NAMES[engine]) and _metrics(connection) is not None
    return Server(connection.address, engine, version, model or models[0], tuple(models), drafter, counting)


def _recognise(connection: Connection, owner: Engine | None) -> tuple[Engine, str | None, str | None]:
    """Engine, version and drafter, from the page that each engine has of its own."""
    if owner in ("llama.cpp", None) and (props := _asked(connection, "/props")) and "build_info" in props:
        return "llama.cpp", name(props["build_info"]), None  # its answers name the drafter
    if owner in ("SGLang", None):
        for page in ("/server_info", "/get_server_info"):
            if (found := _asked(connection, page)) and (owner or "speculative_algorithm" in found):
                return "SGLang", name(found.get("version")), name(found.get("speculative_algorithm"))
    if owner == "vLLM":
        return "vLLM", name(within(_asked(connection, "/version"), "version")), None
    return owner or "OpenAI-compatible", None, None


def _asked(connection: Connection, page: str) -> Mapping[str, Any] | None:
    """A page that only some engines have, which may fail in any way on the others."""
    try:
        found = connection.get_json(page)
    except UserError:
        return None
    return found if isinstance(found, Mapping) else None


def _metrics(connection: Connection) -> str | None:
    try:
        return connection.get_text("/metrics")
    except UserError:
        return None


def split_passes(connection: Connection, run: ServerRun, stop: Stop = never) -> None:
    """Part each chunk that holds a pass's drafted tokens and the target's own: a server sends them as one text, and
    vLLM is asked for that of the drafted ones. A chunk stays whole where that is not how its text begins, and where
    several passes were sent at once."""
    found: list[ServerChunk] = []
    asking = run.server.engine == "vLLM"
    for chunk in run.chunks:
        outcomes = chunk.outcomes or []
        drafted = outcomes.count(ACCEPTED)
        if asking and not stop() and chunk.ids and chunk.outcome is None and drafted:
            said = _text_of(connection, run.server, chunk.ids[:drafted])
            asking = said is not None
            if said and chunk.text.startswith(said) and outcomes[:drafted] == [ACCEPTED] * drafted:
                found += chunk.split(drafted, len(said))
                continue
        found.append(chunk)
    run.chunks = found


def _text_of(connection: Connection, server: Server, ids: list[int]) -> str | None:
    """What tokens say; None where the server does not tell."""
    try:
        told = within(connection.post_json("/detokenize", {"model": server.model, "tokens": ids}), "prompt")
    except UserError:
        return None
    return None if told is None else text(told)


def counters(connection: Connection, server: Server) -> dict[str, float] | None:
    """The server's counters of speculation as they stand; None where it has none to be read."""
    found = _metrics(connection) if server.metrics else None
    return read_counters(server.engine, found) or None if found is not None else None


@dataclass
class Question:
    """A request for a stream: path and body, and what could not be asked of this server."""

    path: str
    body: dict[str, Any]
    missing: list[str] = field(default_factory=list)


def question(connection: Connection, server: Server, prompt: str, settings: Settings) -> Question:
    """How this server is asked to go on with a prompt (chat off), or to answer it as a message (chat auto)."""
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    messages.append({"role": "user", "content": prompt})
    chat = settings.chat == "auto"
    if server.engine == "llama.cpp":
        template = connection.post_json("/apply-template", {"messages": messages}) if chat else {"prompt": prompt}
        if isinstance(filled := within(template, "prompt"), str):
            return Question("/completion", _for_llama(filled, settings))
    if server.engine == "SGLang" and not chat:
        return Question("/generate", _for_sglang(prompt, settings))
    return _openai(server, messages if chat else prompt, settings)


def _openai(server: Server, asked: str | list[dict[str, str]], settings: Settings) -> Question:
    chat = not isinstance(asked, str)
    body: dict[str, Any] = {
        "model": server.model,
        "messages" if chat else "prompt": asked,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": settings.seed,
    }
    if server.engine == "OpenAI-compatible":
        given = {"top_k": settings.top_k, "min_p": settings.min_p, "ignore_eos": settings.ignore_eos}
        refused = [f"{each} (not asked for: only some servers know it)" for each, value in given.items() if value]
        return Question(f"/v1/{'chat/' if chat else ''}completions", body, refused)
    body |= {"top_k": settings.top_k or -1, "min_p": settings.min_p, "ignore_eos": settings.ignore_eos}
    if server.engine == "vLLM":
        body["return_token_ids"] = True
    if server.engine == "llama.cpp":
        body |= {"timings_per_token": True, "cache_prompt": False, "top_k": settings.top_k}
    return Question(f"/v1/{'chat/' if chat else ''}completions", body)


def _for_llama(prompt: str, settings: Settings) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "stream": True,
        "n_predict": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "seed": settings.seed,
        "ignore_eos": settings.ignore_eos,
        "cache_prompt": False,
        "timings_per_token": True,
        "return_tokens": True,
    }


def _for_sglang(prompt: str, settings: Settings) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k or -1,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "ignore_eos": settings.ignore_eos,
    }
    return {"text": prompt, "sampling_params": sampling, "stream": True}


class Listener:
    """Reads the events of one stream into a run; one for each dialect. `hear` may be given anything."""

    def __init__(self, run: ServerRun) -> None:
        self.run = run
        self.most = run.settings.max_new_tokens
        """No answer has more tokens than were asked for: a larger count is none."""
        self.ended = False
        """Whether the server said that the answer is complete."""
        self.plain = False
        """Whether the server said that nothing drafted for this answer."""
        self._heard = [0, 0]  # tokens, characters

    def hear(self, seconds: float, event: Any) -> ServerChunk | None:
        """Take one event; the chunk of text it brought, if any."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last event: what can be said of the whole."""

    def _add(self, chunk: ServerChunk) -> ServerChunk | None:
        if not chunk.text and not chunk.tokens:
            return None
        self._heard = [self._heard[0] + (chunk.tokens or 0), self._heard[1] + len(chunk.text)]
        for heard, most, unit in zip(self._heard, (self.most + LONGEST_DRAFT, LONGEST_TEXT), ("tokens", "characters")):
            if heard > most:
                raise UserError(f"{self.run.server.address} does not stop: it sent more than {most:,} {unit}.")
        self.run.chunks.append(chunk)
        return chunk

    def _end(self, reason: Any) -> None:
        if reason is not None:
            self.ended = True
            self.run.stop_reason = "length" if reason == "length" else "eos"


class OpenAIListener(Listener):
    """Chat and completions of OpenAI's protocol, with vLLM's token ids and metrics where they are sent."""

    def __init__(self, run: ServerRun) -> None:
        super().__init__(run)
        self._steps: tuple[list[int], list[int]] | None = None

    def hear(self, seconds: float, event: Any) -> ServerChunk | None:
        self._totals(event)
        choices = within(event, "choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta = within(choice, "delta")
        said = text(within(choice, "text"))
        said += text(within(delta, "reasoning_content") or within(delta, "reasoning")) + text(within(delta, "content"))
        ids = token_ids(within(choice, "token_ids"))
        self._end(within(choice, "finish_reason"))
        return self._add(ServerChunk(said, seconds, None if ids is None else len(ids), ids))

    def _totals(self, event: Any) -> None:
        run, usage, metrics = self.run, within(event, "usage"), within(event, "metrics")
        run.prompt_tokens = whole(within(usage, "prompt_tokens")) or run.prompt_tokens
        run.new_tokens = whole(within(usage, "completion_tokens"), self.most) or run.new_tokens
        if found := of_vllm(metrics):
            run.speculation = found
            steps = within(metrics, "speculative_decoding")
            accepted, drafted = counts(within(steps, "per_step_accepted")), counts(within(steps, "per_step_drafted"))
            self._steps = (accepted, drafted) if accepted and drafted and len(accepted) == len(drafted) else None
        generating = amount(within(metrics, "generation_time_ms"))
        first = amount(within(metrics, "time_to_first_token_ms"))
        if generating:  # from the first token to the last
            tokens = run.new_tokens - 1 if run.new_tokens else None
            run.timings = Timings(None if first is None else first / 1000, tokens, generating / 1000)
        if found := within(event, "timings"):
            run.timings, run.speculation = timings_of_llama(found), of_llama(found) or run.speculation

    def close(self) -> None:
        """Outcomes by token, where the server tells what each step accepted and its steps make up the text."""
        if self._steps is None or self.run.token_ids is None:
            return
        total = sum(chunk.tokens or 0 for chunk in self.run.chunks)
        if sum(self._steps[0]) > total + LONGEST_DRAFT:
            return
        outcomes: list[Outcome] = [PLAIN]  # the first token comes out of the prompt's own pass
        for accepted, drafted in zip(*self._steps):
            outcomes += judged(accepted, drafted)
        if not 0 <= len(outcomes) - total <= max(self._steps[0], default=0):  # the last step may be cut at the end
            return
        for chunk in self.run.chunks:
            chunk.outcomes, outcomes = outcomes[: chunk.tokens], outcomes[chunk.tokens :]


class LlamaListener(Listener):
    """llama.cpp's own stream: one event a token, with running counts of what was drafted and accepted.

    The counts move with the first token of a step and stand still for the rest of it, so that a step's first
    `accepted` tokens are the draft's and the one after them is the target's.
    """

    def __init__(self, run: ServerRun) -> None:
        super().__init__(run)
        self._before = (0, 0, 0)  # tokens, drafted, accepted
        self._queue: list[Outcome] = []
        self._known = True
        self._steps: list[int] = []  # how many tokens each verifying pass accepted

    def hear(self, seconds: float, event: Any) -> ServerChunk | None:
        timings, ids = within(event, "timings"), token_ids(within(event, "tokens"))
        final = within(event, "stop") is True
        tokens = whole(within(timings, "predicted_n"), self.most)
        chunk = ServerChunk(text(within(event, "content")), seconds)
        if tokens is not None and not final:
            chunk.tokens = max(tokens - self._before[0], 0)  # more than one: the first bytes of a character were held
            chunk.outcomes = self._judge(chunk.tokens, timings)
            chunk.ids = ids if ids is not None and len(ids) == chunk.tokens else None
            self._before = (tokens, *self._before[1:])
        if final:
            self._finish(event, timings, tokens)
        return self._add(chunk)

    def _judge(self, tokens: int, timings: Any) -> list[Outcome] | None:
        drafted = whole(within(timings, "draft_n")) or 0
        accepted = whole(within(timings, "draft_n_accepted"), self.most + LONGEST_DRAFT) or 0
        new, stood = drafted - self._before[1], accepted - self._before[2]
        self._before = (self._before[0], drafted, accepted)
        self._known = self._known and 0 <= stood <= new and not (new and self._queue)
        if new > 0 and self._known:
            self._queue = judged(stood, new)
            self._steps.append(stood)
        found: list[Outcome] = [self._queue.pop(0) if self._queue else PLAIN for _ in range(tokens)]
        return found if self._known and found else None

    def _finish(self, event: Any, timings: Any, tokens: int | None) -> None:
        run = self.run
        self._end("length" if within(event, "stop_type") == "limit" else "stop")
        drafter = name(within(within(event, "generation_settings"), "speculative.types"))
        run.server = replace(run.server, drafter=None if drafter == "none" else drafter)
        run.timings, run.speculation = timings_of_llama(timings), of_llama(timings)
        self.plain = drafter == "none" and run.speculation is None  # an older build says nothing of a drafter
        if run.speculation is None and run.server.drafter and run.timings:
            run.speculation = speculation("this answer's timings", 0, 0, 0, ())  # counts of nothing are left out
        elif run.speculation and self._known and sum(self._steps) == run.speculation.accepted:
            reached = tuple(sum(k > at for k in self._steps) for at in range(max(self._steps, default=0)))
            run.speculation = replace(run.speculation, passes=len(self._steps), by_position=reached)
        run.new_tokens = tokens if tokens is not None else whole(within(event, "tokens_predicted"), self.most)
        run.prompt_tokens = whole(within(event, "tokens_evaluated"))


class SGLangListener(Listener):
    """SGLang's /generate: each event repeats the text so far, or with --incremental-streaming-output only what is
    new. What was accepted it says at the end; step by step only with --speculative-decoding-stats detailed."""

    def __init__(self, run: ServerRun) -> None:
        super().__init__(run)
        self._text = ""
        self._ids = self._tokens = 0

    def hear(self, seconds: float, event: Any) -> ServerChunk | None:
        run, meta = self.run, within(event, "meta_info")
        said, ids = text(within(event, "text")), token_ids(within(event, "output_ids"), MOST_IDS)
        tokens = whole(within(meta, "completion_tokens"), self.most)
        fresh = ids is not None and tokens is not None and len(ids) < tokens
        if said.startswith(self._text) and not fresh:  # all of it again
            said, self._text = said[len(self._text) :], said
        else:
            self._text += said
        if ids is not None and tokens == len(ids):
            ids = ids[self._ids :]
        self._ids += len(ids or ())
        new = None if tokens is None else max(tokens - self._tokens, 0)
        chunk = ServerChunk(said, seconds, new, ids if ids is not None and len(ids) == new else None)
        self._tokens = tokens or self._tokens
        run.prompt_tokens = whole(within(meta, "prompt_tokens")) or run.prompt_tokens
        run.new_tokens = tokens or run.new_tokens
        if (reason := within(meta, "finish_reason")) is not None:
            self._end(within(reason, "type") or reason)
            run.speculation = of_sglang(meta)
        return self._add(chunk)


MOST_IDS = 200_000


def judged(accepted: int, drafted: int) -> list[Outcome]:
    """What became of a step's tokens: so many accepted of so many drafted, and the target's own after them."""
    found: list[Outcome] = [ACCEPTED for _ in range(accepted)]
    found.append(PLAIN if not drafted else "bonus" if accepted == drafted else "corrected")
    return found


def timings_of_llama(timings: Any) -> Timings | None:
    """The first token comes out of the prompt's pass, so it is left out, as everywhere here."""
    prompt, spent = amount(within(timings, "prompt_ms")), amount(within(timings, "predicted_ms"))
    tokens = whole(within(timings, "predicted_n"))
    if spent is None or tokens is None:
        return None
    return Timings(None if prompt is None else prompt / 1000, max(tokens - 1, 0), spent / 1000)


def listener(path: str, run: ServerRun) -> Listener:
    """Who understands the stream of a path."""
    return {"/completion": LlamaListener, "/generate": SGLangListener}.get(path, OpenAIListener)(run)
