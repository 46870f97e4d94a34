"""A writer that has lost its right changes nothing that its successor has written."""

import threading
from collections.abc import Callable

import pytest

from rlhfless_functions import artifacts


def until_succeeded_by(successor: Callable[[], object]) -> Callable[[], None]:
    """A fence that holds once. Right after that the successor comes, in a thread of its own without a fence."""
    held = False

    def check() -> None:
        nonlocal held
        if held:
            raise artifacts.FencedOffError
        held = True
        thread = threading.Thread(target=successor)
        thread.start()
        thread.join()

    return check


def test_a_fence_that_holds_is_not_noticed(store: str) -> None:
    uri = artifacts.join(store, "status.json")
    with artifacts.fenced_by(lambda: None):
        for content in (b"1", b"2", b"2"):
            artifacts.write_bytes(uri, content)
            assert artifacts.read_bytes(uri) == content
        artifacts.write_bytes(artifacts.join(store, "folder", "file"), b"")
        artifacts.remove(uri)
        artifacts.remove(artifacts.join(store, "folder"))
    assert artifacts.list_files(store) == []


@pytest.mark.parametrize("before", [b"step 1, running", None], ids=["replaces", "creates"])
def test_a_write_that_comes_too_late_changes_nothing(s3: str, before: bytes | None) -> None:
    uri = artifacts.join(s3, "status.json")
    if before is not None:
        artifacts.write_bytes(uri, before)
    fence = until_succeeded_by(lambda: artifacts.write_bytes(uri, b"step 3, succeeded"))
    with artifacts.fenced_by(fence), pytest.raises(artifacts.FencedOffError):
        artifacts.write_bytes(uri, b"step 2, running")
    assert artifacts.read_bytes(uri) == b"step 3, succeeded"


@pytest.mark.parametrize("function", [artifacts.remove, lambda uri: artifacts.sweep(uri, [])], ids=["remove", "sweep"])
def test_a_removal_that_comes_too_late_removes_nothing_new(s3: str, function: Callable[[str], object]) -> None:
    artifacts.write_bytes(artifacts.join(s3, "weights", "step-000001"), b"")
    newer = artifacts.join(s3, "weights", "step-000003")
    fence = until_succeeded_by(lambda: artifacts.write_bytes(newer, b""))
    with artifacts.fenced_by(fence):
        function(artifacts.join(s3, "weights"))
    assert artifacts.list_files(s3) == [newer]


def test_a_lost_answer_is_no_other_writer(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    from s3fs import S3FileSystem

    pipe_file = S3FileSystem._pipe_file

    async def lost(self: S3FileSystem, path: str, data: bytes, **named: object) -> None:
        await pipe_file(self, path, data, **named)
        # The client's second try is refused, since its first one has changed the file.
        raise FileExistsError("PreconditionFailed")

    monkeypatch.setattr(S3FileSystem, "_pipe_file", lost)
    uri = artifacts.join(s3, "status.json")
    with artifacts.fenced_by(lambda: None):
        for content in (b"1", b"2"):
            artifacts.write_bytes(uri, content)
            assert artifacts.read_bytes(uri) == content


def test_a_store_that_knows_no_conditions_is_written(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    from botocore.exceptions import ClientError
    from s3fs import S3FileSystem

    pipe_file = S3FileSystem._pipe_file

    async def unknown(self: S3FileSystem, path: str, data: bytes, **condition: object) -> None:
        if condition:
            refused = ClientError({"Error": {"Code": "NotImplemented"}}, "PutObject")
            raise OSError(5, "A header is not implemented") from refused
        await pipe_file(self, path, data)

    monkeypatch.setattr(S3FileSystem, "_pipe_file", unknown)
    uri = artifacts.join(s3, "status.json")
    with artifacts.fenced_by(lambda: None):
        artifacts.write_bytes(uri, b"1")
    assert artifacts.read_bytes(uri) == b"1"
