"""A language model's server on the loopback interface in four dialects: as much of each as a reader asks for, in the
shapes that vLLM 0.32 and llama.cpp's server sent and SGLang's source describes; and faults on request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock

from loopback import answering

WORDS = ["The", " sky", " is", " blue", " be", "cause", " of", " the", " light", "."]
STEPS = [(3, 2), (3, 0), (2, 2), (3, 1)]
"""Drafted and accepted tokens of each verifying pass: with the prompt's own token, the ten words."""


@dataclass
class StandInServer:
    """What it is, and what it does to the requests that come. `steps=()` decodes plainly."""

    dialect: str = "llama.cpp"
    address: str = ""
    words: list[str] = field(default_factory=lambda: list(WORDS))
    steps: tuple[tuple[int, int], ...] = tuple(STEPS)
    key: str | None = None
    """Who sends it may ask."""
    fault: str | None = None
    """What goes wrong with a stream; see `_Handler._broken`."""
    elsewhere: str = ""
    seconds_per_word: float = 0.0
    detailed: bool = True
    """Whether answers count their own speculation, step by step."""
    counters: bool = True
    """Whether /metrics is served."""
    detokenizes: bool = True
    """Whether vLLM tells the text of tokens."""
    named: bool = True
    """Whether llama.cpp's answers name what drafted, "none" included."""
    failing: int = 0
    """So many streams answer 503 first."""
    requests: list[tuple[str, str, dict]] = field(default_factory=list)
    authorisations: list[str | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    reading: int = 0
    most_reading: int = 0
    lock: Lock = field(default_factory=Lock)

    @property
    def streams(self) -> list[dict]:
        """The bodies of the requests for a stream."""
        return [body for method, path, body in self.requests if method == "POST" and body.get("stream")]


@contextmanager
def stand_in_server(dialect: str, **faults: object) -> Iterator[StandInServer]:
    stand_in = StandInServer(dialect, **faults)  # type: ignore[arg-type]
    with answering(_Handler, stand_in):
        yield stand_in


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    it: StandInServer

    def do_GET(self) -> None:
        self._take({})
        if self.it.fault in ("html", "redirect", "hang up at once"):
            return self._broken()
        pages = {
            "/v1/models": lambda: {"object": "list", "data": [{"id": "tiny", "owned_by": self._owner()}]},
            "/metrics": self._metrics if self.it.counters else None,
            **self._own_pages(),
        }
        found = pages.get(self.path)
        return self._refuse(404, "no such page") if found is None else self._json(found())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._take(body)
        if self.it.key and f"Bearer {self.it.key}" != self.headers.get("Authorization"):
            return self._refuse(401, "no key")
        if self.path == "/apply-template" and self.it.dialect == "llama.cpp":
            return self._json({"prompt": f"<user>{body['messages'][-1]['content']}<assistant>"})
        if self.path == "/detokenize" and self.it.dialect == "vLLM" and self.it.detokenizes:
            return self._json({"prompt": "".join(self.it.words[id - 100] for id in body["tokens"])})
        paths = {"llama.cpp": "/completion", "SGLang": "/generate"}
        if self.path not in ("/v1/chat/completions", "/v1/completions", paths.get(self.it.dialect)):
            return self._refuse(404, "no such page")
        with self.it.lock:
            self.it.reading += 1
            self.it.most_reading = max(self.it.most_reading, self.it.reading)
            failing, self.it.failing = self.it.failing > 0, self.it.failing - 1
        try:
            return self._refuse(503, "overloaded") if failing else self._stream(body)
        except OSError:  # the reader went away
            self.close_connection = True
        finally:
            with self.it.lock:
                self.it.reading -= 1

    def _take(self, body: dict) -> None:
        self.it.requests.append((self.command, self.path, body))
        self.it.authorisations.append(self.headers.get("Authorization"))

    def _owner(self) -> str:
        return {"vLLM": "vllm", "SGLang": "sglang", "llama.cpp": "llamacpp"}.get(self.it.dialect, "somebody")

    def _own_pages(self) -> dict:
        algorithm = "EAGLE3" if self.it.steps else None
        return {
            "vLLM": {"/version": lambda: {"version": "0.32.0"}},
            "SGLang": {"/server_info": lambda: {"version": "0.5.9", "speculative_algorithm": algorithm}},
            "llama.cpp": {"/props": lambda: {"build_info": "b11549-abc", "total_slots": 4}},
        }.get(self.it.dialect, {})

    def _metrics(self) -> str:
        it, prefix = self.it, {"vLLM": "vllm", "llama.cpp": "llamacpp", "SGLang": "sglang"}.get(self.it.dialect)
        if prefix is None or not it.steps:
            return "# nothing of speculation\n"
        if prefix == "sglang":
            names = ("spec_verify_calls_total", "spec_num_proposed_drafts_total", "spec_num_correct_drafts_total")
        else:
            names = tuple(f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens"))
        labels = '{engine="0",model_name="a \\"tiny\\" one"}'
        lines = [f"{prefix}:{name}{labels} {float(n)}" for name, n in zip(names, (it.passes, it.drafted, it.accepted))]
        if prefix == "vllm":
            times = it.passes // len(it.steps)
            for at in range(2):
                count = times * sum(accepted > at for _, accepted in it.steps)
                lines.append(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{at}"}} {count}'
                )
        return "# TYPE of what follows counter\nnot a sample\n" + "\n".join(lines) + "\n"

    def _stream(self, body: dict) -> None:
        if self.it.fault:
            return self._broken()
        self._begin()
        for event in self._events(body):
            self._send(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.path != "/completion":
            self._send(b"data: [DONE]\n\n")
        with self.it.lock:
            self.it.passes += len(self.it.steps)
            self.it.drafted += sum(drafted for drafted, _ in self.it.steps)
            self.it.accepted += sum(accepted for _, accepted in self.it.steps)
        return self._finish()

    def _events(self, body: dict) -> Iterator[dict]:
        if self.path == "/completion":
            return self._of_llama(body)
        return self._of_sglang() if self.path == "/generate" else self._of_openai(body)

    def _groups(self) -> list[list[int]]:
        """The numbers of the words that leave together: a pass's tokens."""
        sizes = [1, *(accepted + 1 for _, accepted in self.it.steps)]
        if not self.it.steps:
            sizes = [1] * len(self.it.words)
        groups, at = [], 0
        for size in sizes:
            groups.append(list(range(at, min(at + size, len(self.it.words)))))
            at += size
        return [group for group in groups if group]

    def _of_openai(self, body: dict) -> Iterator[dict]:
        chat = "chat" in self.path
        it = self.it
        for group in self._groups():
            time.sleep(it.seconds_per_word)
            said = "".join(it.words[at] for at in group)
            choice: dict = {"delta": {"content": said}} if chat else {"text": said}
            choice |= {"index": 0, "finish_reason": "stop" if group[-1] == len(it.words) - 1 else None}
            if it.dialect == "vLLM" and body.get("return_token_ids"):
                choice["token_ids"] = [100 + at for at in group]
            yield {"object": "chunk", "choices": [choice]}
        last: dict = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(it.words)}}
        if it.dialect == "vLLM" and it.steps and it.detailed:
            accepted = [stood for _, stood in it.steps]
            last["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": [sum(stood == k for stood in accepted) for k in range(4)],
                    "num_spec_steps": len(accepted),
                    "num_accepted_draft_tokens": sum(accepted),
                    "num_draft_tokens": sum(drafted for drafted, _ in it.steps),
                    "per_step_accepted": accepted,
                    "per_step_drafted": [drafted for drafted, _ in it.steps],
                }
            }
        if (body.get("stream_options") or {}).get("include_usage"):
            yield last

    def _of_llama(self, body: dict) -> Iterator[dict]:
        it, drafted, accepted, at = self.it, 0, 0, 0
        kind = "draft-simple" if it.steps else "none"
        passes = iter([(0, 0), *it.steps] if it.steps else [(0, 0)] * len(it.words))
        timings: dict = {}
        for group in self._groups():
            time.sleep(it.seconds_per_word)
            new, stood = next(passes)
            drafted, accepted = drafted + new, accepted + stood
            for _ in group:
                at += 1
                timings = {"prompt_n": 5, "prompt_ms": 40.0, "predicted_n": at, "predicted_ms": 10.0 * at}
                timings |= {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
                tokens = [100 + at - 1] if body.get("return_tokens") else []
                yield {"content": it.words[at - 1], "tokens": tokens, "stop": False, "timings": timings}
        settings = {"speculative.types": kind} if it.named else {}
        yield {
            **{"content": "", "tokens": [], "stop": True, "stop_type": "eos", "tokens_evaluated": 5},
            **{"generation_settings": settings, "timings": timings},
        }

    def _of_sglang(self) -> Iterator[dict]:
        it, said, ids = self.it, "", []
        for group in self._groups():
            time.sleep(it.seconds_per_word)
            said += "".join(it.words[at] for at in group)
            ids += [100 + at for at in group]
            meta: dict = {"prompt_tokens": 5, "completion_tokens": len(ids), "finish_reason": None}
            if len(ids) == len(it.words):
                meta["finish_reason"] = {"type": "stop", "matched": 2}
                if it.steps:
                    accepted = [stood for _, stood in it.steps]
                    meta |= {"spec_verify_ct": len(accepted), "spec_num_correct_drafts": sum(accepted)}
                    meta["spec_num_proposed_drafts"] = sum(drafted for drafted, _ in it.steps)
                    meta["spec_correct_drafts_histogram"] = [sum(stood == k for stood in accepted) for k in range(4)]
            yield {"text": said, "output_ids": list(ids), "meta_info": meta}

    def _broken(self) -> None:
        """One thing that a server can do wrong."""
        fault, word = self.it.fault, b'data: {"content": "The", "text": "The", "stop": false}\n\n'
        if fault == "hang up at once":
            self.close_connection = True
            return None
        if fault == "html":
            return self._answer(200, b"<html><script>alert(1)</script></html>", "text/html")
        if fault == "redirect":
            self.send_response(307)
            self.send_header("Location", self.it.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if fault == "500":
            body = json.dumps({"error": {"message": f"out of memory\n\x1b[31m{self.it.key or ''}"}}).encode()
            return self._answer(500, body, "application/json")
        if fault == "not a stream":
            return self._answer(200, b'{"choices": []}', "application/json")
        self._begin()
        if fault == "error inside":
            self._send(word + b'data: {"error": {"message": "the slot is gone"}}\n\n')
        elif fault == "not JSON":
            self._send(b"data: {oops\n\n")
        elif fault == "deep JSON":
            self._send(b"data: " + b"[" * 100_000 + b"\n\n")
        elif fault == "not UTF-8":
            self._send(b'data: {"content": "\xff\xfe"}\n\n')
        elif fault == "long line":
            for _ in range(20):
                self._send(b"x" * 100_000)
        elif fault == "endless":
            for _ in range(100_000):
                self._send(word)
        elif fault == "silent":
            self._send(word)
            time.sleep(3)
        elif fault == "hang up mid-token":
            self._send(word + b'data: {"content": "hal')
        elif fault == "no end":
            self._send(word)
        self._finish() if fault == "no end" else self._drop()
        return None

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _finish(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _drop(self) -> None:
        self.close_connection = True

    def _json(self, document: object) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        self._answer(200, text.encode(), "text/plain" if isinstance(document, str) else "application/json")

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
