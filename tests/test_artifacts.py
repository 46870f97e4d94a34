"""The artifact store: a local folder, fsspec's memory and a real S3 server behave alike."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactMissingError,
    ArtifactUnwritableError,
)


@pytest.fixture(params=["local", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder in each kind of store."""
    match request.param:
        case "local":
            return str(tmp_path / "store")
        case "file":
            return f"file://{tmp_path}/store"
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case _:
            return f"{request.getfixturevalue('s3')}/store"


@pytest.fixture(params=["memory", "s3"])
def remote_root(request: pytest.FixtureRequest) -> str:
    """An empty folder in each kind of store that is not the local disk."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue('s3')}/store"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local copies."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RLHFLESS_CACHE", str(folder))
    return folder


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Run as someone whom file permissions bind, whoever runs the tests."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def publish(uri: str, files: dict[str, bytes]) -> None:
    with artifacts.publish(uri) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def content(uri: str) -> dict[str, bytes]:
    folder = artifacts.local_folder(uri)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != artifacts.MANIFEST
    }


# --- files -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(root: str) -> None:
    uri = artifacts.join(root, "a", "b.bin")
    assert not artifacts.exists(uri)
    artifacts.write_bytes(uri, b"one")
    artifacts.write_bytes(uri, b"two")
    assert artifacts.exists(uri)
    assert artifacts.read_bytes(uri) == b"two"
    artifacts.write_json(uri, {"k": [1, 2.5, None]})
    assert artifacts.read_json(uri) == {"k": [1, 2.5, None]}


def test_files_are_listed_in_order_and_a_missing_folder_is_empty(root: str) -> None:
    assert artifacts.list_files(root) == []
    uris = [artifacts.join(root, name) for name in ("b", "a/2", "a/1")]
    for uri in uris:
        artifacts.write_bytes(uri, b"")
    assert artifacts.list_files(root) == sorted(uris)
    assert artifacts.list_files(artifacts.join(root, "a")) == sorted(uris[1:])


def test_a_removed_folder_or_file_is_gone_and_removing_nothing_is_fine(root: str) -> None:
    for name in ("keep/x", "gone/x", "gone/y/z", "file"):
        artifacts.write_bytes(artifacts.join(root, name), b"")
    for name in ("gone", "file", "never-there"):
        artifacts.remove(artifacts.join(root, name))
    assert artifacts.list_files(root) == [artifacts.join(root, "keep/x")]


def test_of_many_that_create_one_file_exactly_one_succeeds(root: str) -> None:
    uri = artifacts.join(root, "lease")
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return artifacts.create_exclusive(uri, str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    # fsspec's memory serves one process and one thread; it has no atomic creation.
    if not root.startswith("memory:"):
        assert sum(created) == 1
        assert artifacts.read_bytes(uri) == str(created.index(True)).encode()
    assert not artifacts.create_exclusive(uri, b"late")
    assert artifacts.list_files(root) == [uri]


def test_what_is_not_there_is_missing(root: str) -> None:
    uri = artifacts.join(root, "nothing")
    for read in (artifacts.read_bytes, artifacts.read_json, artifacts.local_folder):
        with pytest.raises(ArtifactMissingError, match=r"nothing does not exist.*check the URI"):
            read(uri)
    assert artifacts.manifest(uri) is None
    assert not artifacts.is_published(uri)


def test_what_is_no_json_is_corrupt(root: str) -> None:
    uri = artifacts.join(root, "x.json")
    artifacts.write_bytes(uri, b"{")
    with pytest.raises(ArtifactCorruptError, match=r"x\.json is no JSON.*restore it"):
        artifacts.read_json(uri)


@pytest.mark.parametrize("base", ["/a/b", "/a/b/", "a", "memory://x", "s3://bucket/x/", "s3://bucket", "file:///a"])
def test_joining_puts_one_slash_between_components(base: str) -> None:
    joined = artifacts.join(base, "c", "d.json")
    assert joined == f"{base.rstrip('/')}/c/d.json"
    assert artifacts.join(base) == base.rstrip("/")


def test_joining_keeps_the_root_of_a_store() -> None:
    assert artifacts.join("/", "a") == "/a"
    assert artifacts.join("memory://", "a") == "memory://a"


# --- published folders -------------------------------------------------------------------------------------------


def test_a_published_folder_has_a_manifest_of_sizes_and_checksums(root: str) -> None:
    uri = artifacts.join(root, "weights", "1")
    files = {"model.bin": b"abc" * 1000, "nested/settings.json": b"{}", "empty": b""}
    publish(uri, files)
    assert artifacts.is_published(uri)
    manifest = artifacts.manifest(uri)
    assert manifest is not None
    assert {name: (entry.size, entry.sha256) for name, entry in manifest.files.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
    }
    assert content(uri) == files
    assert json.loads(artifacts.read_bytes(artifacts.join(uri, "manifest.json")))["files"].keys() == files.keys()


def test_nothing_is_visible_before_the_end_and_nothing_after_an_exception(root: str) -> None:
    uri = artifacts.join(root, "1")
    with pytest.raises(RuntimeError, match="stop"), artifacts.publish(uri) as folder:
        (folder / "x").write_bytes(b"")
        assert artifacts.list_files(root) == []
        raise RuntimeError("stop")
    assert artifacts.list_files(root) == []
    assert not folder.exists()


def test_a_published_folder_is_immutable(root: str) -> None:
    uri = artifacts.join(root, "1")
    publish(uri, {"x": b"first"})
    publish(uri, {"x": b"second", "y": b""})
    assert content(uri) == {"x": b"first"}


def test_publishers_of_one_folder_never_mix(root: str) -> None:
    if root.startswith("memory:"):
        return  # It serves one thread.
    uri = artifacts.join(root, "1")
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


def test_what_an_interrupted_upload_left_is_neither_read_nor_overwritten(remote_root: str) -> None:
    uri = artifacts.join(remote_root, "1")
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

    root, operation = sys.argv[1], sys.argv[2]

    def operate(folder):
        match operation:
            case "publish":
                with artifacts.publish(f"{folder}/weights/2") as place:
                    (place / "a").write_bytes(b"new")
                    (place / "sub").mkdir()
                    (place / "sub" / "b").write_bytes(b"new")
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
        folder = f"{root}/{crash}"
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


@pytest.mark.parametrize("operation", ["publish", "write", "create", "remove", "sweep"])
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


# --- corruption --------------------------------------------------------------------------------------------------


def damage_flip(uri: str) -> None:
    data = bytearray(artifacts.read_bytes(uri))
    data[len(data) // 2] ^= 1
    artifacts.write_bytes(uri, bytes(data))


def damage_truncate(uri: str) -> None:
    artifacts.write_bytes(uri, artifacts.read_bytes(uri)[:-1])


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, artifacts.remove])
def test_a_damaged_file_is_named_with_the_remedy(root: str, damage: Callable[[str], None]) -> None:
    uri = artifacts.join(root, "1")
    publish(uri, {"good": b"x" * 100, "bad": b"y" * 100})
    damage(artifacts.join(uri, "bad"))
    with pytest.raises(ArtifactCorruptError, match=r"/1/bad .*manifest.*remove .*/1 so that it is made again"):
        artifacts.local_folder(uri)


def test_a_damaged_manifest_is_named(root: str) -> None:
    uri = artifacts.join(root, "1")
    for garbage in (b"{", b"[]", b'{"files": {"a": {"bytes": 1}}}'):
        artifacts.write_bytes(artifacts.join(uri, "manifest.json"), garbage)
        with pytest.raises(ArtifactCorruptError, match=r"1/manifest\.json is unreadable .*remove"):
            artifacts.local_folder(uri)


def test_verification_can_be_left_out(tmp_path: Path) -> None:
    uri = str(tmp_path / "1")
    publish(uri, {"x": b"123"})
    (tmp_path / "1" / "x").write_bytes(b"124")
    assert artifacts.local_folder(uri, verify=False) == tmp_path / "1"


# --- local copies ------------------------------------------------------------------------------------------------


def test_a_local_folder_is_its_own_copy(tmp_path: Path) -> None:
    publish(str(tmp_path / "1"), {"x": b""})
    assert artifacts.local_folder(str(tmp_path / "1")) == tmp_path / "1"
    assert artifacts.local_folder(f"file://{tmp_path}/1") == tmp_path / "1"


def test_a_copy_is_fetched_once(remote_root: str) -> None:
    uri = artifacts.join(remote_root, "1")
    publish(uri, {"x": b"abc", "sub/y": b""})
    first = artifacts.local_folder(uri)
    artifacts.remove(artifacts.join(uri, "x"))
    assert artifacts.local_folder(uri) == first
    assert (first / "x").read_bytes() == b"abc"


def test_another_publication_at_the_same_uri_is_fetched_anew(remote_root: str) -> None:
    uri = artifacts.join(remote_root, "1")
    publish(uri, {"x": b"abc"})
    assert content(uri) == {"x": b"abc"}
    artifacts.remove(uri)
    publish(uri, {"x": b"new"})
    assert content(uri) == {"x": b"new"}


def test_the_last_copies_stay_and_older_unused_ones_go(cache: Path) -> None:
    uris = [f"memory://{uuid.uuid4().hex}/{number}" for number in range(7)]
    copies = []
    for number, uri in enumerate(uris):
        publish(uri, {"x": bytes([number])})
        copies.append(artifacts.local_folder(uri))
        if number < 5:
            os.utime(copies[-1], (number, number))
    (cache / ".x.tmp-00000000000000000000000000000000").mkdir()
    os.utime(cache / ".x.tmp-00000000000000000000000000000000", (0, 0))
    publish(uris[0] + "b", {"x": b"b"})
    newest = artifacts.local_folder(uris[0] + "b")
    assert {path.name for path in cache.iterdir()} == {path.name for path in [copies[4], *copies[5:], newest]}
    assert content(uris[0]) == {"x": b"\0"}


def test_a_folder_of_the_users_own_needs_no_manifest_if_allowed(root: str) -> None:
    uri = artifacts.join(root, "model")
    artifacts.write_bytes(artifacts.join(uri, "config.json"), b"{}")
    with pytest.raises(ArtifactMissingError, match="has no manifest"):
        artifacts.local_folder(uri)
    assert (artifacts.local_folder(uri, published=False) / "config.json").read_bytes() == b"{}"
    artifacts.write_bytes(artifacts.join(uri, "config.json"), b'{"a": 1}')
    assert (artifacts.local_folder(uri, published=False) / "config.json").read_bytes() == b'{"a": 1}'
    with pytest.raises(ArtifactMissingError, match="does not exist"):
        artifacts.local_folder(artifacts.join(root, "nothing"), published=False)


# --- what cannot be written or read ------------------------------------------------------------------------------

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


def test_a_disk_that_fills_while_a_folder_is_written_is_named(root: str) -> None:
    with (
        pytest.raises(ArtifactUnwritableError, match=r"/1 cannot be written: no space is left"),
        artifacts.publish(artifacts.join(root, "1")),
    ):
        Path("/dev/full").write_bytes(b"x" * 10000)
    assert artifacts.list_files(root) == []


def test_a_local_disk_too_full_for_a_copy_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    publish(uri, {"x": b"x" * 100})

    def full(*_: object) -> None:
        Path("/dev/full").write_bytes(b"x")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    with pytest.raises(ArtifactUnwritableError, match=rf"{cache}/.* cannot be written: no space is left"):
        artifacts.local_folder(uri)
    assert list(cache.iterdir()) == []


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


# --- garbage collection ------------------------------------------------------------------------------------------


def test_everything_goes_that_nobody_names(root: str) -> None:
    for number in range(4):
        publish(artifacts.join(root, "weights", str(number)), {"x": b"", "deep/y": b""})
    for name in ("status.json", "rollouts/1/a", "rollouts/2/b", "weights/10"):
        artifacts.write_bytes(artifacts.join(root, name), b"")
    kept = [artifacts.join(root, name) for name in ("weights/1", "status.json", "rollouts/2/b", "weights/99")]
    removed = artifacts.sweep(root, kept)
    left = ["rollouts/2/b", "status.json", "weights/1/deep/y", "weights/1/manifest.json", "weights/1/x"]
    assert artifacts.list_files(root) == [artifacts.join(root, name) for name in left]
    assert artifacts.join(root, "weights/10") in removed
    assert len(removed) == 11
    assert artifacts.sweep(root, kept) == []
    assert artifacts.sweep(root, [root]) == []


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "a.b"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None)
@given(files=st.sets(NAMES, max_size=8), keep=st.sets(NAMES, max_size=4))
def test_a_sweep_keeps_exactly_what_is_at_or_below_a_kept_uri(files: set[str], keep: set[str]) -> None:
    files = {name for name in files if not any(other.startswith(f"{name}/") for other in files)}
    root = f"memory://{uuid.uuid4().hex}"
    for name in files:
        artifacts.write_bytes(artifacts.join(root, name), b"")
    removed = artifacts.sweep(root, [artifacts.join(root, name) for name in keep])
    expected = {name for name in files if any(f"{name}/".startswith(f"{kept}/") for kept in keep)}
    assert set(artifacts.list_files(root)) == {artifacts.join(root, name) for name in expected}
    assert set(removed) == {artifacts.join(root, name) for name in files - expected}


def test_kept_uris_may_be_spelled_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store", target_is_directory=True)
    names = ["relative", "scheme", "slash", "dots", "link"]
    for name in names:
        artifacts.write_bytes(f"store/{name}/x", b"")
    kept = [
        "store/relative",
        f"file://{tmp_path}/store/scheme",
        f"{tmp_path}/store/slash/",
        f"{tmp_path}/other/../store/dots",
        "link/link",
    ]
    assert artifacts.sweep(str(tmp_path / "store"), kept) == []


def test_folders_left_empty_are_removed_and_those_of_kept_uris_are_not(tmp_path: Path) -> None:
    for name in ("gone/deep", "weights/5", "kept"):
        (tmp_path / name).mkdir(parents=True)
    artifacts.sweep(str(tmp_path), [str(tmp_path / "weights" / "6"), str(tmp_path / "kept")])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["kept", "weights"]


def test_a_publication_under_way_is_not_swept(tmp_path: Path) -> None:
    uri = str(tmp_path / "store" / "1")
    with artifacts.publish(uri) as folder:
        (folder / "x").write_bytes(b"1")
        assert artifacts.sweep(str(tmp_path / "store"), []) == []
    assert content(uri) == {"x": b"1"}


def test_half_written_things_of_a_kept_uri_are_swept_once_their_writer_is_gone(tmp_path: Path) -> None:
    uri = str(tmp_path / "1")
    remains = tmp_path / f".1.tmp-{uuid.uuid4().hex}"
    publish(uri, {"x": b"1"})
    publish(str(remains), {"x": b"1"})
    (tmp_path / f".status.json.tmp-{uuid.uuid4().hex}").write_bytes(b"")
    assert len(artifacts.sweep(str(tmp_path), [uri, str(tmp_path)])) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["1"]


def test_a_file_may_be_replaced_while_the_store_is_swept(tmp_path: Path) -> None:
    status = str(tmp_path / "status.json")
    artifacts.write_bytes(status, b"0")
    with ThreadPoolExecutor(1) as pool:
        sweeping = pool.submit(lambda: [artifacts.sweep(str(tmp_path), [status]) for _ in range(50)])
        for number in range(50):
            artifacts.write_bytes(status, str(number).encode())
        sweeping.result()
    assert artifacts.read_bytes(status) == b"49"


def test_a_sweep_takes_nothing_that_is_just_being_written(tmp_path: Path) -> None:
    """Between its creation and its lock a temporary looks like one that a crash left."""
    kept = tmp_path / "kept"
    ended = threading.Event()

    def sweep_on_and_on() -> None:
        while not ended.is_set():
            artifacts.sweep(str(tmp_path), [str(kept)])

    with ThreadPoolExecutor(3) as threads:
        sweeping = [threads.submit(sweep_on_and_on) for _ in range(2)]
        try:
            for number in range(80):
                artifacts.write_bytes(str(kept / "sinks" / "part"), b"x")
                with artifacts.publish(str(kept / "versions" / str(number))) as folder:
                    (folder / "weights").write_text("x")
        finally:
            ended.set()
        for task in sweeping:
            task.result()
    assert all(artifacts.is_published(str(kept / "versions" / str(number))) for number in range(80))
