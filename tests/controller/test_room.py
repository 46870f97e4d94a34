"""How many actors a job gets that names no number: on a real API server where KUBEBUILDER_ASSETS names one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from tests.controller.api_server_jobs import jobs as jobs  # A fixture.
from tests.controller.api_server_jobs import server as server  # A fixture.
from tests.controller.operator_harness import Jobs, condition, running_operator
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

ONE_GPU = PodsSpec(resources=ResourcesSpec(limits={"nvidia.com/gpu": "1"}))
POOLS = {"default": PoolSettings(gpus=3)}
EVEN = {"policy": "even"}


def actors_of(jobs: Jobs, artifacts: Path, pools: dict[str, PoolSettings], **spec: Any) -> int:
    """Run a job to its end; how many actors its last step had."""
    with running_operator(artifacts, pods=ONE_GPU, pools=pools):
        jobs.apply(small_job(planning=EVEN, **spec))
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    return int(status["actors"])


def limit(jobs: Jobs, gpus: str) -> None:
    """Give the namespace a quota."""
    body = {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": gpus}}}
    status, answer = jobs.server.request("POST", f"/api/v1/namespaces/{jobs.namespace}/resourcequotas", body)
    assert status == 201, answer


def test_a_job_has_as_many_actors_as_its_pool_has_gpus_for(jobs: Jobs, tmp_path: Path) -> None:
    assert actors_of(jobs, tmp_path, POOLS) == 3
    recorded = yaml.safe_load((tmp_path / jobs.namespace / "runs" / "job" / "job.yaml").read_text())
    assert recorded["spec"]["generation"]["instances"] == {"min": 1}, "the number is no part of the job"


def test_a_number_that_the_job_names_counts(jobs: Jobs, tmp_path: Path) -> None:
    assert actors_of(jobs, tmp_path, POOLS, generation={"instances": {"max": 2}}) == 2


def test_no_more_actors_are_planned_than_the_pool_can_ever_have_at_a_time(jobs: Jobs, tmp_path: Path) -> None:
    """The others would wait for them, and the plan would be wrong."""
    assert actors_of(jobs, tmp_path, POOLS, generation={"instances": {"min": 4, "max": 8}}) == 3


def test_where_nothing_says_what_there_is_a_job_has_one_actor(jobs: Jobs, tmp_path: Path) -> None:
    assert actors_of(jobs, tmp_path, {}) == 1


@needs_api_server("no quota is read")
@pytest.mark.parametrize(("pools", "gpus", "actors"), [({}, "4", 2), (POOLS, "4", 2), (POOLS, "16", 3)])
def test_a_quota_of_the_namespace_counts_too(
    jobs: Jobs, tmp_path: Path, pools: dict[str, PoolSettings], gpus: str, actors: int
) -> None:
    limit(jobs, gpus)
    assert actors_of(jobs, tmp_path, pools) == actors


@needs_api_server("no quota is read")
def test_an_asynchronous_job_waits_for_a_quota_that_has_room_for_all_of_its_stages(jobs: Jobs, tmp_path: Path) -> None:
    limit(jobs, "2")
    with running_operator(tmp_path, pods=ONE_GPU):
        jobs.apply(small_job(**{"async": {}}, generation={"instances": {"max": 1}}))
        status = jobs.wait("job", lambda status: condition(status, "ServicesReady").get("status") == "False")
        assert status["phase"] == "Pending"
        told = "takes 3 nvidia.com/gpu at once, and quota gpus of the namespace allows 2: remove async"
        assert told in condition(status, "ServicesReady")["message"]
        path = f"/api/v1/namespaces/{jobs.namespace}/resourcequotas/gpus"
        raised = {"spec": {"hard": {"requests.nvidia.com/gpu": "3"}}}
        assert jobs.server.request("PATCH", path, raised, "application/merge-patch+json")[0] == 200
        assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
