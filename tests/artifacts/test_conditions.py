"""Google Cloud Storage and Azure replace a file only if it is the one that its writer has seen.

Their drivers are no dependencies. Stand-ins answer as gcsfs and adlfs do, with the store in memory.
"""

import sys
import types
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from rlhfless_functions import artifacts
from tests.artifacts.test_fencing import until_succeeded_by

_writes: Counter[str] = Counter()


class StoreInMemory(MemoryFileSystem):
    """A store that numbers the writes of each file."""

    protocol: Any = "memory"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.partition("://")[2] or path)
        return stripped

    def info(self, path: str, **named: Any) -> dict[str, Any]:
        number = str(_writes[self._strip_protocol(path)])
        return {**super().info(path, **named), "generation": number, "etag": number}

    def write(self, path: str, data: bytes) -> None:
        _writes[self._strip_protocol(path)] += 1
        super().pipe_file(path, data)


class PreconditionFailedError(Exception):
    """Azure's answer to a condition that does not hold."""

    status_code = 412


class Gcs(StoreInMemory):
    """gcsfs: it can create a file, and `call` takes any request."""

    protocol = ("gs", "gcs")
    base = "https://storage.googleapis.com/storage/v1/"

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.lstrip("/").partition("/")
        return bucket, key, None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **named: Any) -> None:
        assert not named
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        self.write(path, value)

    def call(self, method: str, path: str, **named: Any) -> None:
        prefix = "https://storage.googleapis.com/upload/storage/v1/b/"
        assert (method, path.startswith(prefix), named["uploadType"]) == ("POST", True, "media")
        place = f"{path.removeprefix(prefix).removesuffix('/o')}/{named['name']}"
        if self.info(place)["generation"] != named["ifGenerationMatch"]:
            raise FileExistsError(path)
        self.write(place, named["data"])


class Azure(StoreInMemory):
    """adlfs: it hands on what Azure's client takes."""

    protocol = ("abfs", "az", "abfss")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **condition: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        if condition and condition != {"etag": self.info(path)["etag"], "match_condition": "not modified"}:
            raise PreconditionFailedError
        self.write(path, value)


@pytest.fixture(params=["gs", "az"])
def uri(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of a file in each of the stores."""
    core: Any = types.ModuleType("azure.core")
    core.MatchConditions = types.SimpleNamespace(IfNotModified="not modified")
    monkeypatch.setitem(sys.modules, "azure", types.ModuleType("azure"))
    monkeypatch.setitem(sys.modules, "azure.core", core)
    monkeypatch.setitem(_registry, request.param, {"gs": Gcs, "az": Azure}[request.param])
    yield f"{request.param}://bucket/{uuid.uuid4().hex}/status.json"


def test_a_fence_that_holds_is_not_noticed(uri: str) -> None:
    with artifacts.fenced_by(lambda: None):
        for content in (b"1", b"2", b"2"):
            artifacts.write_bytes(uri, content)
            assert artifacts.read_bytes(uri) == content


@pytest.mark.parametrize("before", [b"step 1, running", None], ids=["replaces", "creates"])
def test_a_write_that_comes_too_late_changes_nothing(uri: str, before: bytes | None) -> None:
    if before is not None:
        artifacts.write_bytes(uri, before)
    fence = until_succeeded_by(lambda: artifacts.write_bytes(uri, b"step 3, succeeded"))
    with artifacts.fenced_by(fence), pytest.raises(artifacts.FencedOffError):
        artifacts.write_bytes(uri, b"step 2, running")
    assert artifacts.read_bytes(uri) == b"step 3, succeeded"


def test_a_lost_answer_is_no_other_writer(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = StoreInMemory.write

    def lost(self: StoreInMemory, path: str, data: bytes) -> None:
        write(self, path, data)
        # The client's second try is refused, since its first one has changed the file.
        raise PreconditionFailedError if isinstance(self, Azure) else FileExistsError

    monkeypatch.setattr(StoreInMemory, "write", lost)
    with artifacts.fenced_by(lambda: None):
        for content in (b"1", b"2"):
            artifacts.write_bytes(uri, content)
            assert artifacts.read_bytes(uri) == content
