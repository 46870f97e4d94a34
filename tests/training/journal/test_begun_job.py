"""The document that a job was last driven with, and what another changes of it."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.begun_job import begun_job, changes_between, write_begun_job


def job(**algorithm: Any) -> RLHFJob:
    spec = {
        "model": {"source": "m"},
        "rewards": [{"name": "r", "math": {}}],
        "data": {"source": "d"},
        "steps": 1,
        "algorithm": algorithm,
    }
    document = {"apiVersion": "rlhfless.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "job"}, "spec": spec}
    return RLHFJob.model_validate(document, by_name=False)


@pytest.mark.parametrize("algorithm", [{}, {"name": "ppo", "critic": {"valueClip": None}}, {"clipHigh": None}])
def test_what_is_written_reads_as_the_same_job(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    folder, written = JobFolder(str(tmp_path)), job(**algorithm)
    assert begun_job(folder) is None
    write_begun_job(written, folder)
    read = begun_job(folder)
    assert read is not None and read.spec.algorithm == written.spec.algorithm
    assert changes_between(read, written) == []


@pytest.mark.parametrize("content", [b"a: [", b"spec: {}", b"- 1"])
def test_a_document_of_another_format_is_named(tmp_path: Path, content: bytes) -> None:
    folder = JobFolder(str(tmp_path))
    artifacts.write_bytes(folder.file("job.yaml"), content)
    with pytest.raises(artifacts.ArtifactCorruptError, match=r"job\.yaml is damaged or of another format"):
        begun_job(folder)


def test_a_changed_byte_is_no_changed_job(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    write_begun_job(job(), folder)
    file = tmp_path / "job.yaml"
    file.write_bytes(file.read_bytes().replace(b"steps: 1", b"steps: 3"))
    with pytest.raises(
        artifacts.ArtifactCorruptError, match=r"job\.yaml is damaged.*its checksum is another.*restore it"
    ):
        begun_job(folder)


def test_to_name_a_default_of_the_algorithm_changes_nothing() -> None:
    assert changes_between(job(), job(kl={"coefficient": 0.0})) == []


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        ({"clipLow": 0.1}, {"clipLow": 0.2}, ["spec.algorithm.clipLow"]),
        ({"name": "ppo", "critic": {"valueClip": None}}, {"name": "ppo"}, ["spec.algorithm.critic.valueClip"]),
        ({"importanceSampling": {"high": 3}}, {}, ["spec.algorithm.importanceSampling.high"]),
    ],
)
def test_a_change_is_named(one: dict[str, Any], other: dict[str, Any], paths: list[str]) -> None:
    assert [change.path for change in changes_between(job(**one), job(**other))] == paths
