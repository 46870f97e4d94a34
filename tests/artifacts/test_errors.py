"""What cannot be written or read is named, and nothing is left half-written."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactError, ArtifactMissingError, ArtifactUnwritableError
from tests.artifacts.folders import publish

pytestmark = pytest.mark.usefixtures("artifact_cache")


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Run as a user whom file permissions bind, also if root runs the tests."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


WRITERS: dict[str, Callable[[str], object]] = {
    "write": lambda uri: artifacts.write_bytes(uri, b"x"),
    "create": lambda uri: artifacts.create_exclusive(uri, b"x"),
    "publish": lambda uri: publish(uri, {"x": b"x"}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_named_and_nothing_is_left(
    write: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts.write_bytes(str(tmp_path / "store" / "old"), b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactUnwritableError, match=r"store/new cannot be written: no space is left.*free some"):
        write(str(tmp_path / "store" / "new"))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["old"]


def test_a_disk_that_fills_while_a_folder_is_written_is_named(store: str) -> None:
    with (
        pytest.raises(ArtifactUnwritableError, match=r"/1 cannot be written: no space is left"),
        artifacts.publish(artifacts.join(store, "1")),
    ):
        Path("/dev/full").write_bytes(b"x" * 10000)
    assert artifacts.list_files(store) == []


def test_a_local_disk_too_full_for_a_copy_is_named(artifact_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    publish(uri, {"x": b"x" * 100})

    def full(*_: object) -> None:
        Path("/dev/full").write_bytes(b"x")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    with pytest.raises(ArtifactUnwritableError, match=rf"{artifact_cache}/.* cannot be written: no space is left"):
        artifacts.local_folder(uri)
    assert list(artifact_cache.iterdir()) == []


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_without_permission_is_named(write: Callable[[str], object], tmp_path: Path) -> None:
    (tmp_path / "sealed").mkdir(mode=0o555)
    with (
        ordinary_user(),
        pytest.raises(
            ArtifactUnwritableError, match=r"sealed/x cannot be written: no permission; give this user"
        ) as it,
    ):
        write(str(tmp_path / "sealed" / "x"))
    assert it.value.reason == "artifact_unwritable"


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / "secret").chmod(0)
    with ordinary_user(), pytest.raises(ArtifactMissingError, match=r"secret may not be read: give this user"):
        artifacts.read_bytes(str(tmp_path / "secret"))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_path_below_a_file_cannot_be_written(write: Callable[[str], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactUnwritableError, match=r"file/x cannot be written: a part of it is missing or not a"):
        write(str(tmp_path / "file" / "x"))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_missing_bucket_is_named(write: Callable[[str], object], s3: str) -> None:
    with pytest.raises(ArtifactUnwritableError, match=r"s3://no-such-bucket/x cannot be written: .*make the bucket"):
        write("s3://no-such-bucket/x")


READERS: dict[str, Callable[[str], object]] = {
    "read": artifacts.read_bytes,
    "list": artifacts.list_files,
    "folder": artifacts.local_folder,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_way_of_reading_names_a_missing_bucket(read: Callable[[str], object], s3: str) -> None:
    with pytest.raises(
        ArtifactMissingError, match=r"s3://no-such-bucket/x .*the bucket no-such-bucket cannot be found"
    ):
        read("s3://no-such-bucket/x")


def test_a_file_that_is_missing_in_a_bucket_that_is_there_says_nothing_of_the_bucket(s3: str) -> None:
    with pytest.raises(ArtifactMissingError, match=r"/x does not exist: check the URI"):
        artifacts.read_bytes(f"{s3}/x")


@pytest.mark.slow
def test_a_store_that_is_not_there_is_named_and_may_be_tried_again(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    try:
        with pytest.raises(ArtifactError, match=r"s3://b/x cannot be read: .*AWS_ENDPOINT_URL") as caught:
            artifacts.read_bytes("s3://b/x")
        assert caught.value.retryable
    finally:
        fsspec.filesystem("s3").clear_instance_cache()


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(ArtifactMissingError, match=r"nonsense://x/y cannot be read"):
        artifacts.read_bytes("nonsense://x/y")
