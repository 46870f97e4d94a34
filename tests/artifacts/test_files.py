"""Files and folders: a local disk, fsspec's memory and a real S3 server behave alike, for any thread and process."""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactCorruptError, ArtifactMissingError

pytestmark = pytest.mark.usefixtures("artifact_cache")


# --- files -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(store: str) -> None:
    uri = artifacts.join(store, "a", "b.bin")
    assert not artifacts.exists(uri)
    artifacts.write_bytes(uri, b"one")
    artifacts.write_bytes(uri, b"two")
    assert artifacts.exists(uri)
    assert artifacts.read_bytes(uri) == b"two"
    artifacts.write_json(uri, {"k": [1, 2.5, None]})
    assert artifacts.read_json(uri) == {"k": [1, 2.5, None]}


def test_files_are_listed_in_order_and_a_missing_folder_is_empty(store: str) -> None:
    assert artifacts.list_files(store) == []
    uris = [artifacts.join(store, name) for name in ("b", "a/2", "a/1")]
    for uri in uris:
        artifacts.write_bytes(uri, b"")
    assert artifacts.list_files(store) == sorted(uris)
    assert artifacts.list_files(artifacts.join(store, "a")) == sorted(uris[1:])


def test_a_removed_folder_or_file_is_gone_and_removing_nothing_is_fine(store: str) -> None:
    for name in ("keep/x", "gone/x", "gone/y/z", "file"):
        artifacts.write_bytes(artifacts.join(store, name), b"")
    for name in ("gone", "file", "never-there"):
        artifacts.remove(artifacts.join(store, name))
    assert artifacts.list_files(store) == [artifacts.join(store, "keep/x")]


def test_of_many_that_create_one_file_exactly_one_succeeds(store: str) -> None:
    uri = artifacts.join(store, "lease")
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return artifacts.create_exclusive(uri, str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    # fsspec's memory serves one process and one thread; it has no atomic creation.
    if not store.startswith("memory:"):
        assert sum(created) == 1
        assert artifacts.read_bytes(uri) == str(created.index(True)).encode()
    assert not artifacts.create_exclusive(uri, b"late")
    assert artifacts.list_files(store) == [uri]


def test_what_is_not_there_is_missing(store: str) -> None:
    uri = artifacts.join(store, "nothing")
    for read in (artifacts.read_bytes, artifacts.read_json, artifacts.local_folder):
        with pytest.raises(ArtifactMissingError, match=r"nothing does not exist.*check the URI"):
            read(uri)
    assert artifacts.manifest(uri) is None
    assert not artifacts.is_published(uri)


def test_what_is_no_json_is_corrupt(store: str) -> None:
    uri = artifacts.join(store, "x.json")
    artifacts.write_bytes(uri, b"{")
    with pytest.raises(ArtifactCorruptError, match=r"x\.json is damaged.*restore it"):
        artifacts.read_json(uri)


@pytest.mark.parametrize("base", ["/a/b", "/a/b/", "a", "memory://x", "s3://bucket/x/", "s3://bucket", "file:///a"])
def test_joining_puts_one_slash_between_components(base: str) -> None:
    joined = artifacts.join(base, "c", "d.json")
    assert joined == f"{base.rstrip('/')}/c/d.json"
    assert artifacts.join(base) == base.rstrip("/")


def test_joining_keeps_the_root_of_a_store() -> None:
    assert artifacts.join("/", "a") == "/a"
    assert artifacts.join("memory://", "a") == "memory://a"


# --- processes and threads ---------------------------------------------------------------------------------------


def test_the_store_serves_any_thread(s3: str) -> None:
    def work(number: int) -> bytes:
        uri = artifacts.join(s3, str(number))
        artifacts.write_bytes(uri, str(number).encode())
        return artifacts.read_bytes(uri)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(16))) == [str(number).encode() for number in range(16)]


def test_the_store_serves_a_forked_child_and_then_its_parent(s3: str) -> None:
    program = """
        import os, sys
        from rlhfless_functions import artifacts
        artifacts.write_bytes(sys.argv[1] + "/parent", b"1")
        if (child := os.fork()) == 0:
            artifacts.write_bytes(sys.argv[1] + "/child", artifacts.read_bytes(sys.argv[1] + "/parent") + b"2")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(artifacts.read_bytes(sys.argv[1] + "/child").decode())
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), s3], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == ["12"]


def test_a_file_is_read_up_to_its_bound(store: str) -> None:
    uri = artifacts.join(store, "file")
    artifacts.write_bytes(uri, b"x" * 100)
    assert artifacts.read_bytes(uri, most=100) == b"x" * 100
    with pytest.raises(ArtifactCorruptError, match="has 100 bytes, more than 99: restore it"):
        artifacts.read_bytes(uri, most=99)
    artifacts.write_bytes(uri, b"")
    assert artifacts.read_bytes(uri, most=99) == b""


def test_a_sparse_file_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    sparse, pipe = tmp_path / "sparse.json", tmp_path / "pipe.json"
    sparse.touch()
    os.truncate(sparse, 2**30)
    os.mkfifo(pipe)
    with pytest.raises(ArtifactCorruptError, match="has 1073741824 bytes"):
        artifacts.read_json(str(sparse))
    with pytest.raises(ArtifactCorruptError, match="is no regular file"):
        artifacts.read_json(str(pipe))


@pytest.mark.parametrize("bomb", [b"[" + b"{}," * 600_000 + b"0]", b"[" * 100_000, b"[" + b"0," * 6_000_000 + b"0]"])
def test_json_of_too_many_values_is_not_parsed(tmp_path: Path, bomb: bytes) -> None:
    file = tmp_path / "bomb.json"
    file.write_bytes(bomb)
    with pytest.raises(ArtifactCorruptError, match="is damaged"):
        artifacts.read_json(str(file))
