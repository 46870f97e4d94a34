"""Names that a stranger wrote write and read nothing outside their folder."""

import json
import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactCorruptError, ArtifactUnwritableError
from rlhfless_functions.artifacts.copies import cache_folder
from rlhfless_functions.artifacts.manifest import ManifestEntry
from rlhfless_functions.artifacts.names import inside
from rlhfless_functions.weights.tensors import MismatchError, safetensors_files
from tests.artifacts.folders import publish

LEADING_OUT = [
    "../out",
    "a/../../out",
    "/out",
    "a//out",
    "./out",
    "a/.",
    "a/",
    "",
    "..",
    "a\\..\\out",
    "x::file:/out",
    "a\nb",
    "\x1b[2J",
    "a\x00",
    "x" * 2000,
    7,
    None,
]


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_that_leads_out_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"names no file|leads out|backslash"):
        inside(name)


@given(st.text(st.sampled_from("a./\\:é "), max_size=12))
def test_a_name_is_refused_or_stays_in_its_folder(name: str) -> None:
    try:
        path = PurePosixPath(os.path.normpath(PurePosixPath("/folder") / inside(name)))
    except ValueError:
        return
    assert PurePosixPath("/folder") in path.parents
    assert str(path) == f"/folder/{name}"


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("place", ["name", "stored", "delta", "delta stored"])
def test_a_manifest_that_names_files_elsewhere_writes_nothing(remote_store: str, tmp_path: Path, place: str) -> None:
    uri, out = artifacts.join(remote_store, "1"), tmp_path / "sitecustomize.py"
    publish(uri, {"good": b"import os"})
    entry = json.loads(artifacts.read_bytes(artifacts.join(uri, "manifest.json")))["files"]["good"]
    elsewhere = entry | {"stored": "../1/good"}
    files = {"name": {str(out): entry | {"stored": "good"}}, "stored": {"good": elsewhere}}.get(place, {"good": entry})
    content: dict[str, object] = {"format": 2, "files": files}
    if place.startswith("delta"):
        changed = {"good": elsewhere} if place == "delta stored" else {str(out): entry}
        content["delta"] = {"base": "0" * 64, "files": changed}
    artifacts.write_json(artifacts.join(uri, "manifest.json"), content)
    with pytest.raises(ArtifactCorruptError, match=r"manifest\.json is unreadable .*leads out of its folder"):
        artifacts.local_folder(uri)
    assert not out.exists()


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("key", ["../out", "a/../../out", "/tmp/out"])
def test_a_stores_keys_that_lead_out_are_refused(s3: str, key: str) -> None:
    import boto3

    bucket = s3.removeprefix("s3://")
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key="model/config.json", Body=b"{}")
    client.put_object(Bucket=bucket, Key="model/tokenizer/", Body=b"")
    assert artifacts.list_files(f"{s3}/model") == [f"{s3}/model/config.json"]
    client.put_object(Bucket=bucket, Key=f"model/{key}", Body=b"import os")
    with pytest.raises(ArtifactCorruptError, match=r"/model has an object that no folder can hold .*remove it"):
        artifacts.local_folder(f"{s3}/model", published=False)


def test_a_manifest_needs_sizes_and_checksums(remote_store: str) -> None:
    place = artifacts.join(remote_store, "1", "manifest.json")
    for entry in ({"size": -1, "checksum": "x"}, {"size": "1", "checksum": "x"}, {"size": 1, "checksum": None}):
        artifacts.write_json(place, {"format": 2, "files": {"a": entry}})
        with pytest.raises(ArtifactCorruptError, match="is unreadable"):
            artifacts.manifest(artifacts.join(remote_store, "1"))
    assert ManifestEntry(1, "x").stored is None


def test_an_index_that_names_other_folders_weights_is_refused(tmp_path: Path) -> None:
    for name in ("../other/model.safetensors", "/etc/passwd"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(MismatchError, match="not the model's"):
            safetensors_files(tmp_path)


@pytest.mark.parametrize("made", ["link", "open to all"])
def test_a_cache_that_others_may_fill_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    monkeypatch.delenv("RLHFLESS_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"rlhfless-cache-{os.getuid()}"
    if made == "link":
        (tmp_path / "planted").mkdir()
        folder.symlink_to(tmp_path / "planted")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ArtifactUnwritableError, match="remove it, or set RLHFLESS_CACHE"):
        cache_folder()
    folder.unlink() if made == "link" else folder.rmdir()
    assert cache_folder() == folder


def test_another_users_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHFLESS_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    user = os.getuid()
    folder.rename(tmp_path / f"rlhfless-cache-{user + 1}")
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    with pytest.raises(ArtifactUnwritableError, match="others may write to it"):
        cache_folder()
