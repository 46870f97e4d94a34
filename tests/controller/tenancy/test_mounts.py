"""A job that is refused for its mounts leaves no trace in the store: the mended one finds its folder free."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_operator.controller.job import Supervisor
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.pods import PodsSpec, VolumeSpec
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.store_mounts import ForeignFoldersError
from rlhfless_operator.records.folder import JobFolder
from tests.jobs import job

STORE = VolumeSpec(name="artifacts", claim="store", mount_path="/artifacts")
SETTINGS = ClusterSettings(functions_image="image", pods=PodsSpec(volumes=[STORE]))


def look(folder: Path, uid: str, **spec: Any) -> object:
    """Look at a job's folder, as its supervisor does first."""
    asked = job(**spec).on_cluster(SETTINGS.pods_in("team"))
    resource = JobResource.of({"metadata": {"namespace": "team", "name": "mine", "uid": uid}})
    supervisor = object.__new__(Supervisor)
    supervisor._context = SimpleNamespace(settings=SETTINGS)  # type: ignore[assignment]
    return supervisor._look_at_folder(JobFolder(str(folder)), resource, asked)


@pytest.mark.parametrize("where", ["pods", "learning", "environment"])
def test_a_job_that_is_refused_for_its_mounts_has_not_claimed_its_folder(tmp_path: Path, where: str) -> None:
    foreign = {"volumes": [{"claim": "store", "mountPath": "/all"}]}
    given: dict[str, Any] = {"pods": foreign} if where == "pods" else {where: {"pods": foreign}}
    if where == "environment":
        given[where]["openenv"] = {"image": "maze:1"}
    with pytest.raises(ForeignFoldersError, match=r"^spec\.(environment\.)?pods: "):
        look(tmp_path / "mine", "one", **given)
    assert not (tmp_path / "mine").exists()
    assert look(tmp_path / "mine", "another") is None, "the job that was created anew has the folder"
    assert (tmp_path / "mine").exists()
