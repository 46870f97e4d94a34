"""Digests of what a job's document names: equal for equal content, wherever it lies, and without reading twice."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.records import input_digests
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.input_digests import (
    InputChange,
    InputDigest,
    changed,
    read_changes,
    read_digests,
    record_change,
    take_digest,
    write_digests,
)


def taken(source: object, known: InputDigest | None = None, **options: Any) -> InputDigest:
    digest = take_digest(str(source), known, **options)
    assert digest is not None
    return digest


def test_a_changed_file_has_another_digest_and_a_copy_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1")
    (tmp_path / "b.jsonl").write_text("1")
    before = taken(tmp_path / "a.jsonl")
    assert before.same(taken(tmp_path / "b.jsonl"))
    (tmp_path / "a.jsonl").write_text("2")
    now = taken(tmp_path / "a.jsonl", before)
    assert changed({"x": before, "y": before}, {"x": now, "y": before, "z": now}) == ["x"]


def test_an_untouched_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("1")
    before = taken(tmp_path / "a.jsonl")
    monkeypatch.setattr(input_digests, "_whole", lambda path: pytest.fail("read"))
    assert taken(tmp_path / "a.jsonl", before) == before


def test_a_touched_file_of_the_same_content_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1")
    before = taken(tmp_path / "a.jsonl")
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert before.same(taken(tmp_path / "a.jsonl", before))


@pytest.mark.parametrize("source", ["data", "data/train-*.jsonl"])
def test_every_shard_of_a_folder_or_pattern_counts(tmp_path: Path, source: str) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        (tmp_path / "data" / f"train-{number}.jsonl").write_text(str(number))
    before = taken(tmp_path / source)
    (tmp_path / "data" / "train-1.jsonl").write_text("3")
    assert not before.same(taken(tmp_path / source, before))
    (tmp_path / "data" / "train-1.jsonl").write_text("1")
    (tmp_path / "data" / "train-2.jsonl").write_text("2")
    assert not before.same(taken(tmp_path / source, before))


def test_a_model_is_its_own_files_and_large_ones_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_digests, "_LARGE", 100)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(200_000))
    before = taken(tmp_path, model=True)
    (tmp_path / "notes.md").write_text("x")
    assert before.same(taken(tmp_path, model=True))
    weights.write_bytes(bytes([1]) * 200_000)
    assert not before.same(taken(tmp_path, model=True))


def test_code_counts_with_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import math\nfrom helper import score\n")
    (tmp_path / "helper.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("score = 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    before = taken(tmp_path / "reward.py", code=True)
    (tmp_path / "other.py").write_text("x = 2\n")
    assert before.same(taken(tmp_path / "reward.py", code=True))
    (tmp_path / "deeper.py").write_text("score = 2\n")
    assert not before.same(taken(tmp_path / "reward.py", code=True))


def test_settings_count_where_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1")
    assert not taken(tmp_path / "a.jsonl", settings="x").same(taken(tmp_path / "a.jsonl", settings="y"))


@pytest.mark.parametrize("source", ["org/model", "s3://no-such-bucket-here/x", "nowhere://x/y"])
def test_what_is_not_here_has_no_digest(source: str, s3: str) -> None:
    assert take_digest(source, None, model=True) is None


def test_objects_of_a_store_are_told_apart(remote_store: str) -> None:
    uri = artifacts.join(remote_store, "data", "a.jsonl")
    artifacts.write_bytes(uri, b"1")
    before = taken(uri)
    assert before.same(taken(uri))
    artifacts.write_bytes(uri, b"2")
    assert not before.same(taken(uri))
    assert len(taken(artifacts.join(remote_store, "data")).files) == 1


def test_digests_and_changes_are_read_as_they_were_written(store: str) -> None:
    folder = JobFolder(store)
    assert read_digests(folder) is None and read_changes(folder) == []
    digests = {"spec.data.source": InputDigest(source="a", files={})}
    write_digests(folder, digests)
    for step in (2, 3):
        record_change(folder, InputChange(from_step=step, inputs=["x"]))
    assert read_digests(folder) == digests
    assert [change.from_step for change in read_changes(folder)] == [2, 3]
