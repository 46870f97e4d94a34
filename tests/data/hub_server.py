"""A small hub of the tests' own: the part of the Hugging Face hub's HTTP interface that `datasets` reads."""

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Files = dict[str, bytes]

GSM8K_CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
  - {split: test, path: socratic/test-*}
---
"""
"""Card of openai/gsm8k, which has two configurations."""


def parquet(rows: list[Any]) -> bytes:
    """Return a Parquet file of rows."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def _commit(files: Files) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + files[name])
    return digest.hexdigest()


class Hub:
    """Datasets by name, each with its versions, the newest of which is `main`."""

    def __init__(self) -> None:
        self.versions: dict[str, list[Files]] = {}
        self.asked: list[str] = []
        """Paths of all requests."""
        self.url = ""

    def push(self, name: str, files: Files) -> str:
        """Add a version; return its commit."""
        self.versions.setdefault(name, []).append(files)
        return _commit(files)

    def version(self, name: str, revision: str) -> Files | None:
        """Return the files of a version."""
        versions = self.versions.get(name, [])
        if revision == "main":
            return versions[-1] if versions else None
        return next((files for files in versions if _commit(files) == revision), None)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub on a port of its own."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            self._answer(body=True)

        def log_message(self, *arguments: Any) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(length)
            url = urlsplit(self.path)
            hub.asked.append(unquote(url.path))
            status, headers, content = _respond(hub, unquote(url.path), parse_qs(url.query), sent)
            if (wanted := self.headers.get("Range")) and status == 200:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
                status, content = 206, content[start : end + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub for the tests of a module, which import this fixture."""
    with serve_hub() as hub:
        yield hub


def _respond(hub: Hub, path: str, query: dict[str, list[str]], sent: bytes) -> tuple[int, dict[str, str], bytes]:
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
        name, rest = "/".join(parts[2:4]), parts[4:]
        revision = rest[1] if len(rest) > 1 else "main"
        files = hub.version(name, revision)
        if files is None:
            return _missing("RevisionNotFound" if name in hub.versions else "RepoNotFound")
        if rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": each} for each in files]
            about = {"id": name, "sha": _commit(files), "siblings": siblings, "private": False, "tags": []}
            return _json(about)
        if rest[0] == "tree":
            folder = "/".join(rest[2:])
            return _tree(files, folder, recursive=query.get("recursive", [""])[0].lower() == "true")
        if rest[0] == "paths-info":
            asked = json.loads(sent)["paths"] if sent[:1] == b"{" else parse_qs(sent.decode())["paths"]
            found = [_entry(files, each.strip("/")) for each in asked]
            return _json([each for each in found if each is not None])
        return _missing("EntryNotFound")
    if parts[:1] == ["datasets"] and len(parts) > 5 and parts[3] == "resolve":
        files = hub.version("/".join(parts[1:3]), parts[4])
        if files is None:
            return _missing("RepoNotFound")
        content = files.get("/".join(parts[5:]))
        if content is None:
            return _missing("EntryNotFound", {"X-Repo-Commit": _commit(files)})
        tag = hashlib.sha1(content).hexdigest()
        return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": _commit(files), "Accept-Ranges": "bytes"}, content
    return _missing("RepoNotFound")


def _tree(files: Files, folder: str, *, recursive: bool) -> tuple[int, dict[str, str], bytes]:
    prefix = f"{folder}/" if folder else ""
    below = [name for name in files if name.startswith(prefix)]
    if folder and not below:
        return _missing("EntryNotFound")
    names = below if recursive else [name for name in below if "/" not in name.removeprefix(prefix)]
    folders = {
        f"{prefix}{name.removeprefix(prefix).split('/')[0]}" for name in below if "/" in name.removeprefix(prefix)
    }
    if recursive:
        folders = {"/".join(name.split("/")[:depth]) for name in below for depth in range(1, name.count("/") + 1)}
        folders = {each for each in folders if each.startswith(prefix)}
    return _json([_entry(files, name) for name in sorted({*names, *folders})])


def _entry(files: Files, name: str) -> dict[str, Any] | None:
    if name in files:
        return {
            "type": "file",
            "path": name,
            "size": len(files[name]),
            "oid": hashlib.sha1(files[name]).hexdigest(),
        }
    if any(each.startswith(f"{name}/") for each in files):
        return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
    return None


def _json(content: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _missing(code: str, more: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    return 404, {"X-Error-Code": code, **(more or {})}, b"{}"
