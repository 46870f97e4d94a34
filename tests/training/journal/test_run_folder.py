"""A job claims an empty folder or one of its own, and nothing of a user is ever removed."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.lease import Lease
from rlhfless_operator.training.journal.run_folder import MARKER, FolderOfOthersError, claim_folder, is_claimed
from tests.jobs import job


def files_in(root: str) -> dict[str, bytes]:
    return {uri: artifacts.read_bytes(uri) for uri in artifacts.list_files(root)}


def test_an_empty_folder_is_claimed_once_and_for_all(store: str) -> None:
    folder = JobFolder(artifacts.join(store, "job"))
    assert not is_claimed(folder)
    claim_folder(job(), folder)
    artifacts.write_bytes(artifacts.join(folder.export, "model.safetensors"), b"trained")
    claim_folder(job(), folder)
    assert is_claimed(folder)


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "checkpoints/mine", "results/table.csv", "job.yaml", ".keep"]
)
def test_a_folder_with_files_of_a_user_is_refused_and_stays(store: str, name: str) -> None:
    folder = JobFolder(artifacts.join(store, "job"))
    artifacts.write_bytes(folder.file(name), b"precious")
    before = files_in(store)
    with pytest.raises(FolderOfOthersError, match=rf"is not empty \({name.split('/')[0]}\).*metadata.name or spec.art"):
        claim_folder(job(), folder)
    assert files_in(store) == before


def test_a_lease_and_an_owner_may_come_first(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    Lease.acquire(folder.root)
    artifacts.write_json(folder.file("owner.json"), {})
    claim_folder(job(), folder)
    assert is_claimed(folder)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.model.source", {"model": {"source": "./model"}}),
        ("spec.data.source", {"data": {"source": "model"}}),
        (r"spec.rewards\[0\].python.file", {"rewards": [{"name": "own", "python": {"file": "model"}}]}),
    ],
)
def test_what_a_job_reads_is_not_in_its_folder(tmp_path: Path, field: str, spec: dict[str, object]) -> None:
    given = job(artifacts={"uri": str(tmp_path)}, **spec).resolve_paths(tmp_path / "runs")
    folder = JobFolder(str(tmp_path / "runs"))
    artifacts.write_bytes(folder.file(MARKER), b"")
    claim_folder(given, folder)
    artifacts.write_bytes(folder.file("model"), b"x")
    with pytest.raises(FolderOfOthersError, match=rf"{field}: .*/runs/model is in the job's own folder.*copy it"):
        claim_folder(given, folder)
    (tmp_path / "alias").symlink_to(tmp_path / "runs")
    with pytest.raises(FolderOfOthersError, match=field):
        claim_folder(given, JobFolder(str(tmp_path / "alias")))
