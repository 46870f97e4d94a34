"""The functions of a job on a cluster, as its pods are told of them."""

from typing import Any

import pytest

from rlhfless_operator.controller.functions import environment_of, functions_of
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import API_VERSION, KIND
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from rlhfless_operator.platforms.pods.store_mounts import ForeignFoldersError
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.training.requests.rehearsal import emulation_of
from tests.jobs import job

IDENTITY = JobIdentity("team", "job", "uid", API_VERSION, KIND)
SETTINGS = ClusterSettings(functions_image="image")


def test_the_pods_of_a_rehearsal_are_told_which_gpus_they_emulate() -> None:
    rehearsal = {"gpu": "H100", "trace": "/files/trace", "model": "Qwen2.5-7B"}
    rehearsed = job(rehearsal=rehearsal, generation={"instances": {"max": 2}})
    emulation = emulation_of(rehearsed)
    assert emulation is not None
    member = PoolMember("uid", "team", "job", {}, emulation=emulation)
    for function in functions_of(IDENTITY, member, rehearsed, "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert function.env == {"RLHFLESS_EMULATION": emulation.model_dump_json()}
    member.emulation = None
    for function in functions_of(IDENTITY, member, job(), "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert function.env == {}


def test_a_job_that_runs_its_environment_reaches_it_through_knative() -> None:
    served = job(
        environment={"openenv": {"image": "maze:1", "sessions": 4}, "pods": {"env": {"A": "1"}}},
        rewards=[{"name": "solved", "environment": {}}],
        pods={"env": {"B": "2"}},
    )
    function = environment_of(IDENTITY, served, SETTINGS.model_copy(update={"pods": PodsSpec(runtime_class="gvisor")}))
    assert function is not None
    assert (function.server.image, function.name) == ("maze:1", "job-environment")
    # Of the job's other pods it has nothing.
    assert (function.pods.env, function.pods.runtime_class) == ({"A": "1"}, "gvisor")
    member = PoolMember("uid", "team", "job", {})
    for stage in functions_of(IDENTITY, member, served, "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert "http://activator.knative-serving.svc" in stage.connects_to


@pytest.mark.parametrize("environment", [None, {"openenv": {"url": "http://maze.environments.svc:8000"}}])
def test_other_jobs_run_none(environment: dict[str, Any] | None) -> None:
    score = [{"name": "solved", "environment": {}}]
    other = job() if environment is None else job(environment=environment, rewards=score)
    assert environment_of(IDENTITY, other, SETTINGS) is None
    member = PoolMember("uid", "team", "job", {})
    for stage in functions_of(IDENTITY, member, other, "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert "http://activator.knative-serving.svc" not in stage.connects_to


def test_its_pods_mount_no_folder_of_another_namespace() -> None:
    settings = SETTINGS.model_copy(
        update={"pods": PodsSpec.model_validate({"volumes": [{"claim": "store", "mountPath": "/artifacts"}]})}
    )
    pods = {"volumes": [{"claim": "store", "mountPath": "/all"}]}
    greedy = job(
        environment={"openenv": {"image": "maze:1"}, "pods": pods}, rewards=[{"name": "solved", "environment": {}}]
    )
    with pytest.raises(ForeignFoldersError):
        environment_of(IDENTITY, greedy, settings)
