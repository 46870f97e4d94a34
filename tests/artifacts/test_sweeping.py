"""The removal of artifacts that nothing names any more."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from tests.artifacts.folders import content, publish

pytestmark = pytest.mark.usefixtures("artifact_cache")


def test_everything_goes_that_nobody_names(store: str) -> None:
    for number in range(4):
        publish(artifacts.join(store, "weights", str(number)), {"x": b"", "deep/y": b""})
    for name in ("status.json", "rollouts/1/a", "rollouts/2/b", "weights/10"):
        artifacts.write_bytes(artifacts.join(store, name), b"")
    kept = [artifacts.join(store, name) for name in ("weights/1", "status.json", "rollouts/2/b", "weights/99")]
    removed = artifacts.sweep(store, kept)
    left = ["rollouts/2/b", "status.json", "weights/1/deep/y", "weights/1/manifest.json", "weights/1/x"]
    assert artifacts.list_files(store) == [artifacts.join(store, name) for name in left]
    assert artifacts.join(store, "weights/10") in removed
    assert len(removed) == 11
    assert artifacts.sweep(store, kept) == []
    assert artifacts.sweep(store, [store]) == []


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "a.b"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None)
@given(files=st.sets(NAMES, max_size=8), keep=st.sets(NAMES, max_size=4))
def test_a_sweep_keeps_exactly_what_is_at_or_below_a_kept_uri(files: set[str], keep: set[str]) -> None:
    files = {name for name in files if not any(other.startswith(f"{name}/") for other in files)}
    store = f"memory://{uuid.uuid4().hex}"
    for name in files:
        artifacts.write_bytes(artifacts.join(store, name), b"")
    removed = artifacts.sweep(store, [artifacts.join(store, name) for name in keep])
    expected = {name for name in files if any(f"{name}/".startswith(f"{kept}/") for kept in keep)}
    assert set(artifacts.list_files(store)) == {artifacts.join(store, name) for name in expected}
    assert set(removed) == {artifacts.join(store, name) for name in files - expected}


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
