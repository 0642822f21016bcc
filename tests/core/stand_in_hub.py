"""A model hub on the loopback interface: as much of the Hub's HTTP as its client asks for, and faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from loopback import answering

COMMIT = "c0ffee" + "0" * 34


@dataclass
class StandInHub:
    """Serves folders as repositories. Its fields are the faults: what it does to the requests that come."""

    address: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    """Who sends it may read gated repositories."""
    drop_after: int | None = None
    """Close the connection of a file of more than so many bytes after so many of them."""
    drops: int = 1
    """How often."""
    cut: dict[str, bytes] = field(default_factory=dict)
    """What is sent in place of files of these names."""
    seconds_per_piece: float = 0.0
    piece: int = 4096
    ranges: bool = True
    xet: bool = False
    """Have weights fetched by the client's own transfers, not from here."""
    broken: int | None = None
    """Answer everything with this status."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header of every request."""
    tokens: set[str] = field(default_factory=set)

    def file_requests(self, name: str) -> list[str | None]:
        """The ranges asked for of files of this name."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(name)]


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    hub = StandInHub()
    with answering(_Handler, hub):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    it: StandInHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.it, self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if sent := self.headers.get("Authorization"):
            hub.tokens.add(sent.removeprefix("Bearer "))
        if hub.broken:
            return self._refuse(hub.broken, "", "the hub is broken")
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/(.+))?", path)
        if path == "/xet-token":
            return self._xet_token()
        if found:
            return self._listing(found[1], found[2] or "main", "/tree/" in path)
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        return self._file(*found.groups()) if found else self._refuse(404, "EntryNotFound", "no such page")

    def _known(self, repository: str, revision: str) -> Path | None:
        """The folder of a repository; None after having refused."""
        if repository not in self.it.repositories:
            self._refuse(401, "RepoNotFound", "no such repository")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", "no such revision")
        else:
            return self.it.repositories[repository]
        return None

    def _listing(self, repository: str, revision: str, tree: bool) -> None:
        if (folder := self._known(repository, revision)) is None:
            return None
        files = [self._describe(file) for file in sorted(folder.iterdir()) if file.is_file()]
        if tree:
            return self._json([{"type": "file", "path": f["rfilename"], "oid": f["blobId"], **f} for f in files])
        return self._json({"id": repository, "sha": COMMIT, "siblings": files, "tags": [], "gated": False})

    def _describe(self, file: Path) -> dict:
        data = file.read_bytes()
        entry = {"rfilename": file.name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
        if file.suffix == ".safetensors":
            entry["lfs"] = {"sha256": _sha256(data), "oid": _sha256(data), "size": len(data), "pointerSize": 100}
        return entry

    def _file(self, repository: str, revision: str, name: str) -> None:
        if (folder := self._known(repository, revision)) is None:
            return None
        if repository in self.it.gated and f"Bearer {self.it.token}" != self.headers.get("Authorization"):
            return self._refuse(403, "GatedRepo", f"Access to {repository} is restricted")
        if not (folder / name).is_file():
            return self._refuse(404, "EntryNotFound", "no such file")
        entry = self._describe(folder / name)
        data, start = (folder / name).read_bytes(), 0
        if self.command == "GET":
            data = self.it.cut.get(name, data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.it.ranges:
            start = int(asked[1])
        end = min(int(asked[2]) + 1, len(data)) if asked and self.it.ranges and asked[2] else len(data)
        self.send_response(206 if asked and self.it.ranges else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{entry["lfs"]["sha256"] if "lfs" in entry else entry["blobId"]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if self.it.xet and "lfs" in entry:
            self.send_header("X-Xet-Hash", entry["lfs"]["sha256"])
            self.send_header("X-Xet-Refresh-Route", f"{self.it.address}/xet-token")
        if start or end < len(data):
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send(data[start:end])
        return None

    def _send(self, data: bytes) -> None:
        """The bytes of a file, in pieces, until a fault that was asked for."""
        drop, hub = None, self.it
        if hub.drop_after is not None and hub.drops and len(data) > hub.drop_after:
            drop, hub.drops = hub.drop_after, hub.drops - 1
        try:
            for start in range(0, len(data), hub.piece):
                if drop is not None and start >= drop:
                    self.close_connection = True
                    return
                self.wfile.write(data[start : start + hub.piece])
                if hub.seconds_per_piece:
                    self.wfile.flush()
                    time.sleep(hub.seconds_per_piece)
        except OSError:  # the client went away
            self.close_connection = True

    def _xet_token(self) -> None:
        self.send_response(200)
        said = {"Cas-Url": self.it.address, "Access-Token": "x", "Token-Expiration": str(2**40)}
        for name, value in {**{f"X-Xet-{name}": value for name, value in said.items()}, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _json(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
