"""Published folders that are used while they are fetched, and what can go wrong meanwhile."""

import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from rlhfless_functions.artifacts import Arriving, BegunAgainError, arrive, local_folder, retrieval
from rlhfless_functions.artifacts.copies import forget_old_copies
from tests.artifacts.folders import publish

WEIGHTS = bytes(range(256)) * 100

pytestmark = pytest.mark.usefixtures("artifact_cache")


@pytest.fixture
def uri(monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a store, with a file of several parts."""
    monkeypatch.setattr(retrieval, "_RANGE", 10_000)
    monkeypatch.setattr(retrieval, "_MOST_RANGE", 10_000)
    made = f"memory://{uuid.uuid4().hex}/1"
    publish(made, {"config.json": b"{}", "model.safetensors": WEIGHTS})
    return made


def on_each_part(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> None:
    """Call something with the beginning of each part of a weights' file before the store sends it."""
    memory = type(fsspec.filesystem("memory"))
    cat_file = memory.cat_file

    def told(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if path.endswith("model.safetensors"):
            do(start or 0)
        return cast(bytes, cat_file(self, path, start=start, end=end, **more))

    monkeypatch.setattr(memory, "cat_file", told)


def test_a_file_that_breaks_off_in_its_middle_makes_what_was_read_of_it_unsound(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()

    def breaks_off(start: int) -> None:
        if start:
            assert read.wait(60)
            raise ConnectionResetError("the store is gone for a moment")

    on_each_part(monkeypatch, breaks_off)
    arriving = arrive(uri)
    arriving.wait("model.safetensors", 10_000)
    assert arriving.sound
    read.set()
    assert (arriving.result() / "model.safetensors").read_bytes() == WEIGHTS
    assert not arriving.sound, "a plain fetch may fill the file in any order"
    with pytest.raises(BegunAgainError):
        arriving.wait("model.safetensors", 1)


def test_what_cannot_be_read_in_a_complete_folder_is_told(uri: str) -> None:
    arriving = arrive(uri)
    (arriving.result() / "config.json").unlink()
    told: list[Exception] = []

    def read() -> None:
        try:
            arriving.read(lambda folder: (folder / "config.json").read_bytes())
        except FileNotFoundError as error:
            told.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(30)
    assert told


def test_a_copy_on_its_way_is_not_taken_for_one_that_was_broken_off(
    uri: str, artifact_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_process_tidies_up(start: int) -> None:
        (folder,) = artifact_cache.glob(".*")
        os.utime(folder, (0, 0))
        forget_old_copies()

    on_each_part(monkeypatch, another_process_tidies_up)
    assert (arrive(uri).result() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_folder_on_its_way_is_fetched_once_and_leaves_nothing_behind(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    go_on = threading.Event()

    def held_up(start: int) -> None:
        parts.append(start)
        assert go_on.wait(60)

    on_each_part(monkeypatch, held_up)
    found: list[Arriving] = []
    asking = [threading.Thread(target=lambda: found.append(arrive(uri))) for _ in range(4)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert len(set(found)) == 1
    assert found[0].names() == {"config.json", "model.safetensors"}
    go_on.set()
    assert local_folder(uri) == found[0].result()
    assert sorted(parts) == [0, 10_000, 20_000]
    assert found[0].result() not in retrieval._making


@pytest.mark.parametrize("fails", [False, True])
def test_who_needs_a_whole_folder_waits_for_the_thread_that_fetches_it_already(
    uri: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_of, known = retrieval.manifest, threading.Event()

    def late(uri: str) -> object:
        found = manifest_of(uri)
        if threading.current_thread() is threading.main_thread():
            known.set()
        else:
            assert known.wait(60)
            threading.Event().wait(0.2)
            if fails:
                raise ConnectionResetError("the store is gone for a moment")
        return found

    monkeypatch.setattr(retrieval, "manifest", late)
    joined: list[object] = []
    monkeypatch.setattr(retrieval, "Peer", lambda sources, copy: joined.append(copy))
    arriving = arrive(uri, sources=retrieval.Sources())
    # A load without sources must join the fetch that is under way, and not begin one from the store.
    folder = local_folder(uri)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert joined == ([] if fails else [folder.name])
    if not fails:
        assert arriving.result() == folder
