"""A faulty S3 store: moto's server behind faults that a seed draws.

    python -m tests.artifacts.faulty_s3 SEED SHARE KIND,KIND

It prints its URL, and serves until its standard input ends. Then it prints how many faults of each kind there were.

A fault is drawn from the seed and from what is asked for how many times, so the order of concurrent requests does not
matter. Clients try a failed request again, as a user's do.
"""

import ast
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("lost answer", "second answer", "stale list", "error", "error after all", "slow", "cut body")
"""What goes wrong: an answer never arrives; a write is told that it came second (412), though it came first; a list
lacks what was written last; an error, before or after the work; a delay; the end of a body is missing."""
SHARE = 0.05
"""Part of the requests with a fault."""
_STALE_SECONDS = 2.0
_SLOW_SECONDS = 0.3
_ENTRY = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>drawn by chance</Message>%s</Error>"


class Faults:
    """A WSGI application around another one.

    Args:
        application: the store.
        seed: the faults follow from it.
        share: part of the requests with a fault.
        kinds: the faults that may be drawn.
    """

    def __init__(
        self, application: Callable[..., Iterable[bytes]], seed: int, share: float, kinds: Collection[str]
    ) -> None:
        self._application = application
        self._seed, self._share, self._kinds = seed, share, sorted(kinds)
        self._asked: Counter[str] = Counter()
        self._written: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Faults by kind."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        kind = self._drawn(environ)
        status, headers, body = self._answered(environ, kind)
        if environ["REQUEST_METHOD"] == "PUT" and status.startswith("200"):
            self._written[environ["PATH_INFO"].split("/", 2)[-1]] = time.monotonic()
        if kind == "lost answer":
            _hang_up(environ)
            raise ConnectionResetError("lost")
        start_response(status, headers)
        if kind != "cut body" or len(body) < 2:
            return [body]
        return _half(environ, body)

    def _drawn(self, environ: dict[str, Any]) -> str:
        """Return the fault of this request; empty for none."""
        what = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].strip("/").count("/") == 0:
            return ""  # A test makes its bucket.
        with self._lock:
            self._asked[what] += 1
            chance = random.Random(f"{self._seed} {what} {self._asked[what]}")
            possible = [kind for kind in self._kinds if _is_possible(kind, environ)]
            if not possible or chance.random() >= self._share:
                return ""
            kind = chance.choice(possible)
            self.counts[kind] += 1
        return kind

    def _answered(self, environ: dict[str, Any], kind: str) -> tuple[str, list[tuple[str, str]], bytes]:
        if kind == "slow":
            time.sleep(_SLOW_SECONDS)
        if kind == "error":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error("503 Slow Down", b"SlowDown")
        status, headers, body = _asked(self._application, environ)
        if kind == "error after all":
            return _error("500 Internal Server Error", b"InternalError")
        if kind == "second answer":
            return _error("412 Precondition Failed", b"PreconditionFailed", b"<Condition>If-None-Match</Condition>")
        if kind == "stale list":
            since = time.monotonic() - _STALE_SECONDS
            body = _ENTRY.sub(lambda entry: b"" if self._written[entry[1].decode()] > since else entry[0], body)
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        return status, headers, body


def _is_possible(kind: str, environ: dict[str, Any]) -> bool:
    method, lists = environ["REQUEST_METHOD"], "list-type" in environ["QUERY_STRING"]
    match kind:
        case "second answer":
            return method == "PUT" and environ.get("HTTP_IF_NONE_MATCH") == "*"
        case "stale list":
            return lists
        case "cut body":
            return method == "GET" and not lists
    return True


def _asked(
    application: Callable[..., Iterable[bytes]], environ: dict[str, Any]
) -> tuple[str, list[tuple[str, str]], bytes]:
    answer: list[Any] = []
    body = application(environ, lambda status, headers, error=None: answer.append((status, headers)))
    try:
        content = b"".join(body)
    finally:
        getattr(body, "close", lambda: None)()
    status, headers = answer[-1]
    return status, headers, content


def _error(status: str, code: bytes, more: bytes = b"") -> tuple[str, list[tuple[str, str]], bytes]:
    return status, [("content-type", "application/xml")], _ERROR % (code, more)


def _half(environ: dict[str, Any], body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    _hang_up(environ)


def _hang_up(environ: dict[str, Any]) -> None:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def serve(seed: int, share: float, kinds: Collection[str]) -> None:
    """Serve until standard input ends."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *arguments: Any) -> None:
            """Say nothing of requests."""

    faults = Faults(DomainDispatcherApplication(create_backend_app), seed, share, kinds)
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    print(dict(faults.counts), flush=True)


@contextmanager
def faulty_store(seed: int, share: float = SHARE, kinds: Collection[str] = KINDS) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the URL of a faulty store, and the faults by kind, which are known once it has ended."""
    counts: Counter[str] = Counter()
    command = [sys.executable, "-m", "tests.artifacts.faulty_s3", str(seed), str(share), ",".join(kinds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), counts
        finally:
            server.stdin.close()
            counts.update(ast.literal_eval(server.stdout.readline() or "{}"))


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split(","))
