"""Published folders are complete or absent, even after a failure in between."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactMissingError
from tests.artifacts.folders import content, publish

pytestmark = pytest.mark.usefixtures("artifact_cache")


def test_a_published_folder_has_a_manifest_of_sizes_and_checksums(store: str) -> None:
    uri = artifacts.join(store, "weights", "1")
    files = {"model.bin": b"abc" * 1000, "nested/settings.json": b"{}", "empty": b""}
    publish(uri, files)
    assert artifacts.is_published(uri)
    manifest = artifacts.manifest(uri)
    assert manifest is not None
    assert {name: (entry.size, entry.checksum) for name, entry in manifest.files.items()} == {
        name: (len(data), f"xxh3-128:{xxhash.xxh3_128(data).hexdigest()}") for name, data in files.items()
    }
    assert content(uri) == files
    assert json.loads(artifacts.read_bytes(artifacts.join(uri, "manifest.json")))["files"].keys() == files.keys()


def test_files_can_be_read_by_all_who_may_read_the_folder(tmp_path: Path) -> None:
    with artifacts.publish(str(tmp_path / "1")) as folder:
        (folder / "private").write_bytes(b"")
        (folder / "private").chmod(0o600)
        readers = folder.stat().st_mode & 0o444
    assert (tmp_path / "1" / "private").stat().st_mode & 0o777 == 0o600 | readers


def test_nothing_is_visible_before_the_end_and_nothing_after_an_exception(store: str) -> None:
    uri = artifacts.join(store, "1")
    with pytest.raises(RuntimeError, match="stop"), artifacts.publish(uri) as folder:
        (folder / "x").write_bytes(b"")
        assert artifacts.list_files(store) == []
        raise RuntimeError("stop")
    assert artifacts.list_files(store) == []
    assert not folder.exists()


def test_files_that_are_complete_early_are_published_with_the_rest(store: str) -> None:
    uri = artifacts.join(store, "1")
    with artifacts.publishing(uri) as publication:
        for name in ("a", "b", "sub/c", "last"):
            (publication.folder / name).parent.mkdir(exist_ok=True)
            (publication.folder / name).write_bytes(name.encode())
            if name != "last":
                publication.finish(name)
        assert not artifacts.is_published(uri)
    assert content(uri) == {"a": b"a", "b": b"b", "sub/c": b"sub/c", "last": b"last"}


def test_a_file_that_is_complete_is_uploaded_before_the_others_are_written(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "1")
    with artifacts.publishing(uri) as publication:
        (publication.folder / "a").write_bytes(b"a")
        publication.finish("a")
        while not artifacts.exists(artifacts.join(uri, "a")):
            time.sleep(0.01)
        (publication.folder / "b").write_bytes(b"b")
    assert content(uri) == {"a": b"a", "b": b"b"}


def test_after_an_exception_nothing_is_published_of_what_was_complete(store: str) -> None:
    uri = artifacts.join(store, "1")
    with pytest.raises(RuntimeError, match="stop"), artifacts.publishing(uri) as publication:
        (publication.folder / "a").write_bytes(b"half")
        publication.finish("a")
        raise RuntimeError("stop")
    assert not publication.folder.exists()
    assert not artifacts.is_published(uri)
    publish(uri, {"a": b"whole"})
    assert content(uri) == {"a": b"whole"}


def test_what_is_complete_is_dropped_where_another_publisher_was_faster(store: str) -> None:
    uri = artifacts.join(store, "1")
    with artifacts.publishing(uri) as slower:
        for name in ("a", "b"):
            (slower.folder / name).write_bytes(b"slower")
        slower.finish("a")
        publish(uri, {"a": b"faster"})
        slower.finish("b")
    assert content(uri) == {"a": b"faster"}
    manifest = artifacts.manifest(uri)
    assert manifest is not None
    named = {entry.stored or name for name, entry in manifest.files.items()}
    found = {file.removeprefix(f"{uri}/") for file in artifacts.list_files(uri)}
    assert found == {*named, "manifest.json"}


def test_a_published_folder_is_immutable(store: str) -> None:
    uri = artifacts.join(store, "1")
    publish(uri, {"x": b"first"})
    publish(uri, {"x": b"second", "y": b""})
    assert content(uri) == {"x": b"first"}


def test_publishers_of_one_folder_never_mix(store: str) -> None:
    if store.startswith("memory:"):
        return  # It serves one thread.
    uri = artifacts.join(store, "1")
    start = threading.Barrier(4)

    def run(number: int) -> None:
        with artifacts.publish(uri) as folder:
            for name in ("a", "b", "c"):
                (folder / name).write_text(f"{number}")
            start.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(set(content(uri).values())) == 1
    assert len(content(uri)) == 3


def test_what_an_interrupted_upload_left_is_neither_read_nor_overwritten(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "1")
    artifacts.write_bytes(artifacts.join(uri, "model.bin"), b"half")
    assert not artifacts.is_published(uri)
    with pytest.raises(ArtifactMissingError, match=r"/1 has no manifest: its publication was never finished"):
        artifacts.local_folder(uri)
    publish(uri, {"model.bin": b"whole", "other": b"x"})
    assert content(uri) == {"model.bin": b"whole", "other": b"x"}
    assert artifacts.read_bytes(artifacts.join(uri, "model.bin")) == b"half"


def test_a_folder_that_someone_made_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    publish(str(tmp_path / "mine"), {"a": b"1", "sub/b": b"2"})
    assert artifacts.is_published(str(tmp_path / "mine"))
    assert content(str(tmp_path / "mine")) == {"a": b"1", "sub/b": b"2", "notes.txt": b"keep me"}


CRASHES = """
    import json, os, sys
    from pathlib import Path
    from rlhfless_functions import artifacts

    store, operation = sys.argv[1], sys.argv[2]

    def operate(folder):
        match operation:
            case "publish":
                with artifacts.publish(f"{folder}/weights/2") as place:
                    (place / "a").write_bytes(b"new")
                    (place / "sub").mkdir()
                    (place / "sub" / "b").write_bytes(b"new")
            case "publish early":
                with artifacts.publishing(f"{folder}/weights/2") as publication:
                    (publication.folder / "a").write_bytes(b"new")
                    publication.finish("a")
                    (publication.folder / "sub").mkdir()
                    (publication.folder / "sub" / "b").write_bytes(b"new")
            case "write":
                artifacts.write_bytes(f"{folder}/status.json", b"new")
            case "create":
                artifacts.create_exclusive(f"{folder}/lease", b"new")
            case "remove":
                artifacts.remove(f"{folder}/weights/1")
            case "sweep":
                artifacts.sweep(folder, [f"{folder}/status.json"])

    # Every change to the file system is an audit event: the n-th child dies, as by kill -9, before its n-th event.
    for crash in range(1000):
        folder = f"{store}/{crash}"
        with artifacts.publish(f"{folder}/weights/1") as place:
            (place / "a").write_bytes(b"old")
        artifacts.write_bytes(f"{folder}/status.json", b"old")
        child = os.fork()
        if child == 0:
            left = crash

            def die_later(event, arguments):
                global left
                if event == "open" or event.startswith(("os.", "shutil.")):
                    left -= 1
                    if left < 0:
                        os._exit(9)

            sys.addaudithook(die_later)
            operate(folder)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            print(crash)
            break
"""


@pytest.mark.parametrize("operation", ["publish", "publish early", "write", "create", "remove", "sweep"])
def test_a_crash_at_any_moment_leaves_the_old_state_or_the_new(operation: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CRASHES), str(tmp_path), operation],
        capture_output=True,
        text=True,
        check=True,
    )
    crashes = int(ran.stdout)
    assert crashes >= 4
    for crash in range(crashes + 1):
        folder = str(tmp_path / str(crash))
        old, new = artifacts.join(folder, "weights/1"), artifacts.join(folder, "weights/2")
        status, lease = artifacts.join(folder, "status.json"), artifacts.join(folder, "lease")
        kept = [status, *(uri for uri in (old, new) if artifacts.is_published(uri))]
        if artifacts.exists(lease):
            assert artifacts.read_bytes(lease) == b"new"
            kept.append(lease)
        if old in kept:
            assert content(old) == {"a": b"old"}
        else:
            assert operation in ("remove", "sweep")
        if new in kept:
            assert content(new) == {"a": b"new", "sub/b": b"new"}
        assert artifacts.read_bytes(status) in ((b"old", b"new") if operation == "write" else (b"old",))
        artifacts.sweep(folder, kept)
        expected = {status: 1, lease: 1, old: 2, new: 3}
        present = [path for path in Path(folder).rglob("*") if path.is_file()]
        assert len(present) == sum(expected[uri] for uri in kept)
