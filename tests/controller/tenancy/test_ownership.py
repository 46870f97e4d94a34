"""Whose work is in a folder."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.controller.tenancy.ownership import FolderTakenError, claim
from rlhfless_operator.records.folder import JobFolder
from tests.jobs import small_job


def resource(uid: str, *, adopt: bool = False, namespace: str = "ns") -> JobResource:
    body = small_job()
    body["metadata"] |= {"namespace": namespace, "uid": uid}
    if adopt:
        body["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
    return JobResource.of(body)


@pytest.fixture(params=["folder", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> JobFolder:
    root = str(tmp_path) if request.param == "folder" else request.getfixturevalue("s3")
    return JobFolder(artifacts.join(root, "job"))


def test_the_first_resource_owns_an_empty_folder(folder: JobFolder) -> None:
    claim(folder, resource("a"))
    claim(folder, resource("a"))
    with pytest.raises(FolderTakenError, match=r"work of the RLHFJob ns/job \(uid a\).*rlhfless.io/adopt"):
        claim(folder, resource("b"))


def test_a_laptops_folder_is_not_empty(folder: JobFolder) -> None:
    artifacts.write_json(folder.file("status.json"), {})
    with pytest.raises(FolderTakenError, match="work of `rlhfless run`"):
        claim(folder, resource("a"))
    claim(folder, resource("a", adopt=True))
    claim(folder, resource("a"))


def test_adoption_takes_the_folder_from_its_owner(folder: JobFolder) -> None:
    claim(folder, resource("a"))
    claim(folder, resource("b", adopt=True))
    with pytest.raises(FolderTakenError):
        claim(folder, resource("a"))


def test_an_owners_file_that_nobody_can_read_is_somebody_elses(folder: JobFolder) -> None:
    artifacts.write_bytes(folder.file("owner.json"), b"{}")
    with pytest.raises(FolderTakenError):
        claim(folder, resource("a"))


@pytest.mark.parametrize("adopt", [False, True])
def test_no_annotation_takes_the_work_of_another_namespace(folder: JobFolder, adopt: bool) -> None:
    claim(folder, resource("a"))
    with pytest.raises(FolderTakenError, match="a job of another namespace; choose") as taken:
        claim(folder, resource("b", namespace="theirs", adopt=adopt))
    assert "adopt" not in str(taken.value)
    claim(folder, resource("a"))
