"""A hub of our own on 127.0.0.1: as much of the real one's protocol as a download needs.

    commit = hub.push("model", "owner/name", {"config.json": b"{}"})

The fixture `hub` starts it, and makes huggingface_hub ask it alone. Repositories are kept in
memory. Faults are set by file name: `cut`, `spoiled`, `gated`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".bin", ".parquet")  # kept outside git, as .gitattributes says on the hub
Files = dict[str, bytes]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, Files]] = {}
        self.branches: dict[tuple[str, str], dict[str, str]] = {}
        self.requests: list[str] = []  # paths; those of a HEAD with that word before them
        self.sent: Counter[str] = Counter()  # bytes of content, by file name
        self.cut: dict[str, int] = {}  # the file breaks off there; without a byte more afterwards
        self.spoiled: set[str] = set()  # one byte of the file is wrong
        self.gated: set[str] = set()  # repositories whose files need a login

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def push(
        self, kind: str, name: str, files: Mapping[str, bytes] | Path, branch: str = "main"
    ) -> str:
        """Make the files (or all that lie in a folder) the branch's new commit, and return it."""
        if isinstance(files, Path):
            paths = (path for path in sorted(files.rglob("*")) if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        commits = self.commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits[commit] = dict(files)
        self.branches.setdefault((kind, name), {})[branch] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal: the tests read `hub.requests`."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(path if self.command == "GET" else f"HEAD {path}")
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/revision/(.+)", path):
            self.info(*match.groups())
        elif match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.tree(*match.groups())
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file("dataset" if match[1] else "model", match[2], match[3], match[4])
        else:
            self.refuse(404, "EntryNotFound")

    def snapshot(self, kind: str, name: str, revision: str) -> tuple[str, Files] | None:
        if (kind, name) not in self.hub.commits:
            self.refuse(404, "RepoNotFound")
            return None
        commit = self.hub.branches[kind, name].get(revision, revision)
        if commit not in self.hub.commits[kind, name]:
            self.refuse(404, "RevisionNotFound")
            return None
        return commit, self.hub.commits[kind, name][commit]

    def info(self, kind: str, name: str, revision: str) -> None:
        if snapshot := self.snapshot(kind, name, revision):
            siblings = [{"rfilename": path} for path in snapshot[1]]
            self.json({"id": name, "sha": snapshot[0], "siblings": siblings})

    def tree(self, kind: str, name: str, revision: str) -> None:
        if not (snapshot := self.snapshot(kind, name, revision)):
            return
        entries = []
        for path, content in snapshot[1].items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if path.endswith(LFS):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            entries.append(entry)
        self.json(entries)

    def file(self, kind: str, name: str, revision: str, path: str) -> None:
        if not (snapshot := self.snapshot(kind, name, revision)):
            return
        if name in self.hub.gated:
            self.refuse(403, "GatedRepo")
        elif path not in snapshot[1]:
            self.refuse(404, "EntryNotFound")
        elif self.command == "HEAD":
            headers = {"X-Repo-Commit": snapshot[0], "ETag": f'"{git_hash(snapshot[1][path])}"'}
            self.answer(200, b"", **headers, **{"Content-Length": str(len(snapshot[1][path]))})
        else:
            self.content(snapshot[1][path], path)

    def content(self, content: bytes, path: str) -> None:
        """The bytes of the requested range, as far as the faults allow."""
        if path in self.hub.spoiled:
            content = content[:-1] + bytes([content[-1] ^ 1])
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(byte_range[1]) if byte_range else 0
        last = self.hub.cut.get(path, len(content))
        if first >= last and path in self.hub.cut:
            self.refuse(503, "Overloaded")
            return
        headers = {"Content-Length": str(len(content) - first)}
        if byte_range:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.answer(206 if byte_range else 200, b"", **headers)
        self.close_connection = last < len(content)
        for start in range(first, last, 1 << 16):
            piece = content[start : min(start + (1 << 16), last)]
            try:
                self.wfile.write(piece)
            except ConnectionError:  # the client is gone
                self.close_connection = True
                return
            self.hub.sent[path] += len(piece)

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"", **{"X-Error-Code": code})

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
