"""Documents of strangers, read in a process of their own that is killed if one takes too long.

Few lines can say a pattern that takes a minute to compile, or aliases that stand for a terabyte. The operator reads the
documents of all jobs, so it has a reader: a process that forks a child for each document, with limits of processor time
and memory. Where no reader was started, as for `rlhfless run`, documents are read here.
"""

import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rlhfless_operator.job.reading.validation import Fault, InvalidJobError, parse_content
from rlhfless_operator.job.reading.yaml_document import MOST_DEPTH
from rlhfless_operator.job.spec import RLHFJob

_PROCESSOR_SECONDS = 3
_SECONDS = 20.0
"""Longest wait for an answer, in seconds. A busy machine gives the reader its processor time late."""
_MEMORY = 2**30
"""Most address space of a child in bytes, besides what the reader has."""
MOST_BYTES = 2**18
"""Longest document, in bytes of JSON or YAML."""
_MOST_NODES = 20_000
_MOST_FAULTS = 50
_LONGEST_ERROR = 2000

_reader: "Reader | None" = None


class SlowDocumentError(ValueError):
    """A document could not be read within the limits."""


def read_content(content: dict[str, Any], source: str) -> RLHFJob:
    """Read a job from plain data, within limits; see `validation.parse_content`.

    Raises:
        InvalidJobError: the job is invalid, too large, or takes too long.
    """
    if (excess := excess_of(content)) is not None:
        raise _refused(source, excess, "write less: a job needs no more than a few pages")
    try:
        return _read("content", (content, source))
    except SlowDocumentError as error:
        raise _refused(source, str(error), "shorten its patterns and lists") from None


def read_begun(text: bytes) -> RLHFJob:
    """Read a job from the YAML that a driver wrote down, within limits.

    Raises:
        ValueError, yaml.YAMLError: it is not such a job, or exceeds a limit.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has {len(text)} bytes, more than {MOST_BYTES}")
    return _read("begun", text)


def excess_of(content: Any) -> str | None:
    """Return how plain data is larger or deeper than a document may be; None if it is not. It does not recur."""
    nodes, size, level = 0, 0, [content]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in level:
            nodes += 1
            if isinstance(value, dict):
                size += sum(map(len, value))
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, str):
                size += len(value)
            if nodes + len(inner) > _MOST_NODES:
                return f"the document has more than {_MOST_NODES} values"
            if size > MOST_BYTES:
                return f"the document has more than {MOST_BYTES} characters"
        if not inner:
            return None
        level = inner
    return f"the document is nested more than {MOST_DEPTH} deep"


def _refused(source: str, message: str, remedy: str) -> InvalidJobError:
    return InvalidJobError(source, [Fault("spec", 0, None, message, remedy)])


def _read(kind: str, what: Any) -> RLHFJob:
    if _reader is None:
        return _READ[kind](what)
    return _reader.read(kind, what)


def _content(what: tuple[dict[str, Any], str]) -> RLHFJob:
    return parse_content(*what)


def _begun(text: bytes) -> RLHFJob:
    content = yaml.safe_load(text)
    # Aliases share what they stand for. Whoever walks through the data does so once for each of them.
    if (excess := excess_of(content)) is not None:
        raise ValueError(excess)
    return RLHFJob.model_validate(content, by_alias=True, by_name=False)


_READ: dict[str, Callable[[Any], RLHFJob]] = {"content": _content, "begun": _begun}


# --- the operator's side -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading_elsewhere() -> Iterator[None]:
    """Read all documents of this process in a reader, as long as the context lasts."""
    global _reader
    before, _reader = _reader, Reader()
    try:
        yield
    finally:
        _reader.close()
        _reader = before


class Reader:
    """The reader's process. It is started for the first document, and again if it has ended."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlhfless-reader-")
        self._socket = Path(self._folder.name) / "socket"
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def read(self, kind: str, what: Any) -> RLHFJob:
        """Read a document. Blocks.

        Raises:
            SlowDocumentError: its child was killed.
            Exception: the error of reading it.
        """
        question = pickle.dumps((kind, what))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            try:
                self._start()
                connection.connect(str(self._socket))
                connection.sendall(question)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(2**16), b""))
            except OSError as error:
                raise SlowDocumentError(f"the document could not be read within {_SECONDS:g} s ({error})") from error
        if not answer:
            raise SlowDocumentError(f"reading the document takes more than {_PROCESSOR_SECONDS} s, or too much memory")
        match pickle.loads(answer):
            case RLHFJob() as job:
                return job
            case (str(source), list(faults)):
                raise InvalidJobError(source, faults)
            case problem:
                raise ValueError(problem)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _start(self) -> None:
        with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            self._socket.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            with listener:
                listener.bind(str(self._socket))
                listener.listen(128)
                command = [sys.executable, "-m", __name__, str(listener.fileno())]
                self._process = subprocess.Popen(
                    command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, env=_environment()
                )


def _environment() -> dict[str, str]:
    """Return what the reader needs of this environment, which has the store's credentials."""
    kept = ("PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
    return {name: os.environ[name] for name in kept if name in os.environ}


# --- the reader's side -------------------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_operator, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            try:
                _answer(connection)
            finally:
                os._exit(0)
        connection.close()


def _end_with_the_operator() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _answer(connection: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + _MEMORY, present + _MEMORY))
    signal.alarm(int(_SECONDS))
    kind, what = pickle.loads(b"".join(iter(lambda: connection.recv(2**16), b"")))
    answer: RLHFJob | tuple[str, list[Fault]] | str
    try:
        answer = _READ[kind](what)
    except InvalidJobError as invalid:
        answer = invalid.source, invalid.faults[:_MOST_FAULTS]
    except Exception as error:
        answer = str(error)[:_LONGEST_ERROR]
    connection.sendall(pickle.dumps(answer))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
