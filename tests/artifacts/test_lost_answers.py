"""A store that says no to a write that it has made: what exists is read, and equal bytes are the writer's own."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from tests.artifacts.faulty_s3 import faulty_store
from tests.artifacts.folders import content, publish

pytestmark = pytest.mark.usefixtures("artifact_cache")


@pytest.fixture(scope="module")
def refusing_endpoint() -> Iterator[str]:
    """URL of a store that tells each first writer that it came second."""
    with faulty_store(1, 1.0, ["second answer"]) as (url, _):
        yield url


@pytest.fixture
def refusing(refusing_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of an empty bucket in that store."""
    import boto3
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ENDPOINT_URL", refusing_endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    # fsspec keeps its connections, whatever the variables say by then.
    S3FileSystem.clear_instance_cache()
    yield f"s3://{bucket}"
    S3FileSystem.clear_instance_cache()


def test_a_file_that_was_created_is_its_writers(refusing: str) -> None:
    uri = artifacts.join(refusing, "lease")
    assert artifacts.create_exclusive(uri, b"mine")
    assert not artifacts.create_exclusive(uri, b"another's")
    assert artifacts.read_bytes(uri) == b"mine"


def test_a_folder_that_was_published_stays(refusing: str) -> None:
    uri, files = artifacts.join(refusing, "weights"), {"model.bin": b"abc" * 1000, "nested/settings.json": b"{}"}
    publish(uri, files)
    assert content(uri) == files
    assert {entry.stored for entry in artifacts.manifest(uri).files.values()} == {None}
    publish(uri, {"model.bin": b"late"})
    assert content(uri) == files


def test_a_publisher_that_comes_second_removes_nothing_that_the_first_names(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "weights")
    same = {"same": b"1" * 1000, "other": b"first"}
    with artifacts.uploading(uri) as first, artifacts.uploading(uri) as second:
        for upload, other in ((first, b"first"), (second, b"second")):
            (upload.folder / "same").write_bytes(same["same"])
            (upload.folder / "other").write_bytes(other)
        sent = first.send(), second.send()
        assert artifacts.complete(uri, sent[0])
        assert not artifacts.complete(uri, sent[1])
    assert content(uri) == same
    assert len(artifacts.list_files(uri)) == 3


def test_parts_of_an_upload_that_was_completed_already_are_the_file(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 knows no such upload any more when a completion whose answer was lost is sent again."""
    from s3fs import S3FileSystem

    put_file = S3FileSystem._put_file

    async def lost(self: S3FileSystem, *arguments: object, **named: object) -> None:
        await put_file(self, *arguments, **named)
        raise FileNotFoundError("The specified upload does not exist")

    monkeypatch.setattr(S3FileSystem, "_put_file", lost)
    publish(artifacts.join(s3, "weights"), {"model.bin": b"large"})
    assert content(artifacts.join(s3, "weights")) == {"model.bin": b"large"}
