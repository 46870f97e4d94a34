"""The functions of a job on a cluster, as its pods are told of them."""

from typing import Any

import pytest

from rlhfless_operator.controller.environments import NoWayToServersError, environment_of, shelter_of
from rlhfless_operator.controller.functions import functions_of
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from rlhfless_operator.platforms.pods.shelter_manifests import ShelterFunction
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


SERVED = job(
    environment={"openenv": {"image": "maze:1", "sessions": 4}, "pods": {"env": {"A": "1"}}},
    rewards=[{"name": "solved", "environment": {}}],
    pods={"env": {"B": "2"}},
)


def test_an_environment_has_nothing_of_the_jobs_other_pods() -> None:
    function = environment_of(IDENTITY, SERVED, SETTINGS.model_copy(update={"pods": PodsSpec(runtime_class="gvisor")}))
    assert function is not None
    assert (function.server.image, function.name) == ("maze:1", "job-environment")
    assert (function.pods.env, function.pods.runtime_class) == ({"A": "1"}, "gvisor")


@pytest.mark.parametrize("ingress", [None, "http://kourier-internal.kourier-system.svc"])
def test_restricted_pods_reach_the_gateway_of_its_environment_or_the_job_is_refused(ingress: str | None) -> None:
    restricted = SETTINGS.model_copy(update={"egress": "restricted", "ingress": ingress})
    member = PoolMember("uid", "team", "job", {})
    for stage in functions_of(IDENTITY, member, SERVED, "/artifacts/team/runs/job", restricted, {}).values():
        assert stage.connects_to == ({"https://huggingface.co"} | ({ingress} if ingress else set()))
    if ingress is None:
        with pytest.raises(NoWayToServersError, match=r"^spec.environment: .* listed in networkPolicy"):
            environment_of(IDENTITY, SERVED, restricted)
        allowed = restricted.model_copy(update={"egress_rules": [{"to": [{"namespaceSelector": {}}]}]})
        assert environment_of(IDENTITY, SERVED, allowed) is not None
    else:
        assert environment_of(IDENTITY, SERVED, restricted) is not None


@pytest.mark.parametrize(
    "environment", [None, {"openenv": {"url": "http://maze.environments.svc:8000"}, "letGo": "never"}]
)
def test_other_jobs_run_none(environment: dict[str, Any] | None) -> None:
    score = [{"name": "solved", "environment": {}}]
    other = job() if environment is None else job(environment=environment, rewards=score)
    known = SETTINGS.model_copy(update={"egress": "restricted", "ingress": "http://gateway.knative.svc"})
    assert environment_of(IDENTITY, other, known) is None
    assert shelter(other, known) is None
    member = PoolMember("uid", "team", "job", {})
    for stage in functions_of(IDENTITY, member, other, "/artifacts/team/runs/job", known, {}).values():
        assert "http://gateway.knative.svc" not in stage.connects_to


ACTING = job(
    environment={"python": {"file": "/code/env.py", "class": "Env"}},
    rewards=[{"name": "solved", "environment": {}}],
    pods={"volumes": [{"configMap": "code", "mountPath": "/code"}], "envFrom": ["keys"]},
    generation={
        "pods": {
            "image": "ours:2",
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "90Gi"}},
            "nodeSelector": {"gpu": "h100"},
            "runtimeClass": "nvidia",
        }
    },
)


def shelter(acting: RLHFJob, settings: ClusterSettings) -> ShelterFunction | None:
    """What keeps a job's episodes."""
    member = PoolMember("uid", "team", "job", {})
    stages = functions_of(IDENTITY, member, acting, "/artifacts/team/runs/job", settings, {})
    return shelter_of(IDENTITY, acting, stages["generation"], settings)


def test_what_keeps_the_episodes_of_a_rehearsal_emulates_them() -> None:
    rehearsal = {"gpu": "H100", "trace": "/files/trace", "model": "Qwen2.5-7B"}
    rehearsed = job(environment={"openenv": {"image": "maze:1"}}, rehearsal=rehearsal)
    emulation = emulation_of(rehearsed)
    assert emulation is not None and emulation.acts
    member = PoolMember("uid", "team", "job", {}, emulation=emulation)
    stages = functions_of(IDENTITY, member, rehearsed, "/artifacts/team/runs/job", SETTINGS, {})
    assert environment_of(IDENTITY, rehearsed, SETTINGS) is None
    found = shelter_of(IDENTITY, rehearsed, stages["generation"], SETTINGS)
    assert found is not None and found.env["RLHFLESS_EMULATION"] == emulation.model_dump_json()


def test_what_keeps_episodes_has_what_actors_have_but_their_gpu() -> None:
    found = shelter(ACTING, SETTINGS)
    assert found is not None
    assert found.pods == PodsSpec.model_validate(
        {
            "image": "ours:2",
            "envFrom": ["keys"],
            "volumes": [{"configMap": "code", "mountPath": "/code"}],
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        }
    )
    own = {"nodeSelector": {"pool": "cpu"}, "resources": {"requests": {"cpu": "4"}}}
    environment = {**ACTING.spec.environment.model_dump(by_alias=True, exclude_unset=True), "pods": own}  # type: ignore[union-attr]
    chosen = shelter(job(environment=environment, rewards=[{"name": "solved", "environment": {}}]), SETTINGS)
    assert chosen is not None and chosen.pods.node_selector == {"pool": "cpu"}
    assert chosen.pods.resources is not None and chosen.pods.resources.requests == {"cpu": "4", "memory": "1Gi"}


def test_the_settings_of_a_servers_pods_are_not_those_of_what_keeps_its_episodes() -> None:
    found = shelter(SERVED, SETTINGS)
    assert found is not None and found.pods.env == {"B": "2"}


def test_actors_are_kept_where_restricted_pods_reach_nothing_that_keeps_their_episodes() -> None:
    restricted = SETTINGS.model_copy(update={"egress": "restricted"})
    assert shelter(ACTING, restricted) is None
    known = restricted.model_copy(update={"ingress": "http://gateway.knative.svc"})
    assert shelter(ACTING, known) is not None
    member = PoolMember("uid", "team", "job", {})
    stages = functions_of(IDENTITY, member, ACTING, "/artifacts/team/runs/job", known, {})
    assert all("http://gateway.knative.svc" in stage.connects_to for stage in stages.values())


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
