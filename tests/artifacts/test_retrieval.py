"""Local copies of published folders, and what is wrong with damaged ones."""

import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactCorruptError, ArtifactMissingError, arrive, retrieval
from tests.artifacts.folders import content, publish

FOREIGN = b'{"files": {}, "delta": {"base": "../elsewhere", "files": {}}}'

pytestmark = pytest.mark.usefixtures("artifact_cache")


# --- corruption --------------------------------------------------------------------------------------------------


def damage_flip(uri: str) -> None:
    data = bytearray(artifacts.read_bytes(uri))
    data[len(data) // 2] ^= 1
    artifacts.write_bytes(uri, bytes(data))


def damage_truncate(uri: str) -> None:
    artifacts.write_bytes(uri, artifacts.read_bytes(uri)[:-1])


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, artifacts.remove])
def test_a_damaged_file_is_named_with_the_remedy(store: str, damage: Callable[[str], None]) -> None:
    uri = artifacts.join(store, "1")
    publish(uri, {"good": b"x" * 100, "bad": b"y" * 100})
    damage(artifacts.join(uri, "bad"))
    with pytest.raises(ArtifactCorruptError, match=r"/1/bad .*manifest.*restore .*/1 from a copy"):
        artifacts.local_folder(uri)


def test_a_damaged_manifest_is_named(store: str) -> None:
    uri = artifacts.join(store, "1")
    for garbage in (b"{", b"[]", b'{"files": {"a": {"bytes": 1}}}', b'{"files": {"a": {"size": 1}}}', FOREIGN):
        artifacts.write_bytes(artifacts.join(uri, "manifest.json"), garbage)
        with pytest.raises(ArtifactCorruptError, match=r"1/manifest\.json is unreadable .*restore"):
            artifacts.local_folder(uri)


def test_a_manifest_of_another_format_is_named(store: str) -> None:
    uri = artifacts.join(store, "1")
    artifacts.write_json(artifacts.join(uri, "manifest.json"), {"format": 3, "files": {}})
    with pytest.raises(ArtifactCorruptError, match=r"manifest\.json is unreadable \(its format is 3, and 2 is known"):
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


def test_a_copy_is_fetched_once(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "1")
    publish(uri, {"x": b"abc", "sub/y": b""})
    first = artifacts.local_folder(uri)
    artifacts.remove(artifacts.join(uri, "x"))
    assert artifacts.local_folder(uri) == first
    assert (first / "x").read_bytes() == b"abc"


@pytest.mark.parametrize("quick", [True, False])
def test_a_file_that_is_used_as_it_arrives_is_fetched_in_parts_that_grow_on_a_fast_link(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_RANGE", 1000)
    monkeypatch.setattr(retrieval, "_MOST_RANGE", 4000)
    monkeypatch.setattr(retrieval, "_QUICK_SECONDS", 60.0 if quick else 0.0)
    memory, content = fsspec.filesystem("memory"), random.Random(0).randbytes(50_500)
    parts: list[tuple[int, int]] = []
    cat_file = type(memory).cat_file

    def counted(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if path.endswith("model.safetensors"):
            parts.append((start or 0, end or 0))
        return cast(bytes, cat_file(self, path, start=start, end=end, **more))

    monkeypatch.setattr(type(memory), "cat_file", counted)
    uri = f"memory://parts-{quick}"
    publish(uri, {"model.safetensors": content})
    assert (arrive(uri).result() / "model.safetensors").read_bytes() == content
    parts.sort()
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert max(end - start for start, end in parts) == (4000 if quick else 1000)


def test_another_publication_at_the_same_uri_is_fetched_anew(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "1")
    publish(uri, {"x": b"abc"})
    assert content(uri) == {"x": b"abc"}
    artifacts.remove(uri)
    publish(uri, {"x": b"new"})
    assert content(uri) == {"x": b"new"}


def test_the_last_copies_stay_and_older_unused_ones_go(artifact_cache: Path) -> None:
    uris = [f"memory://{uuid.uuid4().hex}/{number}" for number in range(7)]
    copies = []
    for number, uri in enumerate(uris):
        publish(uri, {"x": bytes([number])})
        copies.append(artifacts.local_folder(uri))
        if number < 5:
            os.utime(copies[-1], (number, number))
    (artifact_cache / ".x.tmp-00000000000000000000000000000000").mkdir()
    os.utime(artifact_cache / ".x.tmp-00000000000000000000000000000000", (0, 0))
    publish(uris[0] + "b", {"x": b"b"})
    newest = artifacts.local_folder(uris[0] + "b")
    assert {path.name for path in artifact_cache.iterdir()} == {path.name for path in [copies[4], *copies[5:], newest]}
    assert content(uris[0]) == {"x": b"\0"}


def test_a_folder_of_the_users_own_needs_no_manifest_if_allowed(store: str) -> None:
    uri = artifacts.join(store, "model")
    artifacts.write_bytes(artifacts.join(uri, "config.json"), b"{}")
    with pytest.raises(ArtifactMissingError, match="has no manifest"):
        artifacts.local_folder(uri)
    assert (artifacts.local_folder(uri, published=False) / "config.json").read_bytes() == b"{}"
    artifacts.write_bytes(artifacts.join(uri, "config.json"), b'{"a": 1}')
    assert (artifacts.local_folder(uri, published=False) / "config.json").read_bytes() == b'{"a": 1}'
    with pytest.raises(ArtifactMissingError, match="does not exist"):
        artifacts.local_folder(artifacts.join(store, "nothing"), published=False)
