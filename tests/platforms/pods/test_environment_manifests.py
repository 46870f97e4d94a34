"""The manifests of an environment's servers: scaled by sessions, without what the job's other pods know."""

import asyncio
from typing import Any

import pytest
import yaml

from rlhfless_functions.settings import EnvironmentSettings, OpenEnvEnvironment
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.platforms.pods import manifests
from rlhfless_operator.platforms.pods.environment_manifests import (
    EnvironmentFunction,
    environment_pods,
    environment_policy,
    environment_service,
)
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from tests.platforms.pods.test_manifests import EVERYTHING, JOB, ON_ANY_CLUSTER, SETTINGS
from tests.prerequisites import needs_cluster


def service(pods: dict[str, Any] | None = None, **server: Any) -> dict[str, Any]:
    given = OpenEnvEnvironment.model_validate(server or {"image": "maze:1"})
    function = EnvironmentFunction(JOB, given, PodsSpec.model_validate(pods or {}))
    return environment_service(function, SETTINGS)


def container(pods: dict[str, Any] | None = None, **server: Any) -> dict[str, Any]:
    (found,) = service(pods, **server)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_it_belongs_to_the_job_and_only_the_cluster_reaches_it() -> None:
    for made in (service(), environment_policy(JOB, SETTINGS)):
        metadata = made["metadata"]
        assert (metadata["namespace"], metadata["name"]) == ("team", "chat-environment")
        assert metadata["labels"].items() >= manifests.job_selector("chat").items()
        assert metadata["ownerReferences"][0]["uid"] == JOB.uid
    assert service()["metadata"]["labels"]["networking.knative.dev/visibility"] == "cluster-local"


def test_knative_scales_it_with_the_sessions_from_and_to_none() -> None:
    template = service(image="maze:1", sessions=8, containers=5)["spec"]["template"]
    annotations = {name.rpartition("/")[2]: value for name, value in template["metadata"]["annotations"].items()}
    bounds = {"min-scale": "0", "max-scale": "5", "initial-scale": "0"}
    assert annotations.items() >= (bounds | {"metric": "concurrency", "target": "8"}).items()
    assert annotations["target-burst-capacity"] == "-1", "sessions wait at the activator for a pod with room"
    spec = template["spec"]
    # A WebSocket is one request for as long as it lasts.
    assert (spec["containerConcurrency"], spec["timeoutSeconds"], spec["responseStartTimeoutSeconds"]) == (8, 600, 600)
    assert "idleTimeoutSeconds" not in spec


def test_an_image_needs_nothing_else() -> None:
    found = container(image="maze:1")
    assert (found["image"], found["ports"][0]["containerPort"]) == ("maze:1", 8000)
    assert found["readinessProbe"]["tcpSocket"] == {"port": 8000}
    assert "command" not in found
    env = {each["name"]: each["value"] for each in found["env"]}
    assert env == {"HOME": "/tmp", "HOST": "0.0.0.0", "MAX_CONCURRENT_ENVS": "1"}


def test_a_command_alone_runs_in_the_image_of_the_functions() -> None:
    found = container(command=["serve", "--port", "$(PORT)"], port=9000, sessions=4)
    assert found["image"] == SETTINGS.functions_image
    assert found["command"] == ["serve", "--port", "$(PORT)"]
    assert found["ports"][0]["containerPort"] == found["readinessProbe"]["tcpSocket"]["port"] == 9000
    assert {"name": "MAX_CONCURRENT_ENVS", "value": "4"} in found["env"]


def test_a_class_of_ones_own_is_served_in_the_image_of_the_functions() -> None:
    own = {"python": {"file": "/code/env.py", "class": "Env"}, "served": {"containers": 3}}
    server = EnvironmentSettings.model_validate(own).server
    assert server is not None
    template = environment_service(EnvironmentFunction(JOB, server, PodsSpec()), SETTINGS)["spec"]["template"]
    (found,) = template["spec"]["containers"]
    assert found["image"] == SETTINGS.functions_image
    assert found["command"][-2] == "rlhfless_functions.environments.server" and "/code/env.py" in found["command"][-1]
    assert template["spec"]["containerConcurrency"] == 16
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/max-scale"] == "3"


def test_its_pods_have_no_privileges_no_token_and_no_store() -> None:
    spec = service()["spec"]["template"]["spec"]
    (found,) = spec["containers"]
    assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
    context = found["securityContext"]
    assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "secretKeyRef" not in yaml.safe_dump(spec)
    assert [volume["name"] for volume in spec["volumes"]] == ["rlhfless-tmp", "rlhfless-shm"]


def test_of_the_clusters_defaults_it_has_only_where_pods_run() -> None:
    merged = environment_pods(PodsSpec.model_validate({"env": {"A": "1"}}), PodsSpec.model_validate(EVERYTHING))
    spec = environment_service(EnvironmentFunction(JOB, OpenEnvEnvironment(image="maze:1"), merged), SETTINGS)
    spec = spec["spec"]["template"]["spec"]
    assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (found,) = spec["containers"]
    assert found["image"] == "maze:1"
    assert not {"resources", "envFrom"} & found.keys()
    assert {each["name"] for each in found["env"]} == {"A", "HOME", "HOST", "MAX_CONCURRENT_ENVS"}
    assert "schedulerName" not in spec


def test_its_own_settings_say_what_else_it_has() -> None:
    found = container({"resources": {"requests": {"cpu": 2}}, "env": {"HOST": "::"}, "envFrom": ["search"]})
    assert found["resources"] == {"requests": {"cpu": "2"}}
    assert {"name": "HOST", "value": "::"} in found["env"]
    assert found["envFrom"] == [{"secretRef": {"name": "search"}}]


def test_only_knative_reaches_it_and_a_restricted_one_reaches_nothing() -> None:
    spec = environment_policy(JOB, SETTINGS)["spec"]
    labels = spec["podSelector"]["matchLabels"]
    assert labels == service()["spec"]["template"]["metadata"]["labels"]
    names = [source["namespaceSelector"]["matchLabels"] for source in spec["ingress"][0]["from"]]
    assert names == [{"kubernetes.io/metadata.name": "knative-serving"}]
    assert "egress" not in spec
    restricted = environment_policy(JOB, SETTINGS.model_copy(update={"egress": "restricted"}))["spec"]
    assert (restricted["policyTypes"], restricted["egress"]) == (["Ingress", "Egress"], [])


def test_the_policy_of_the_other_pods_leaves_it_out() -> None:
    # Policies add up: it would open the stores to the environment.
    selector = manifests.network_policy(JOB, SETTINGS, {"http://store:9000"})["spec"]["podSelector"]
    assert selector["matchExpressions"] == [
        {"key": manifests.STAGE_LABEL, "operator": "NotIn", "values": ["environment"]}
    ]


@needs_cluster("the manifests are not shown to a cluster")
@pytest.mark.parametrize("pods", [{}, ON_ANY_CLUSTER], ids=["nothing", "everything"])
def test_a_real_cluster_takes_them(pods: dict[str, Any]) -> None:
    from rlhfless_operator.controller.main import connect
    from rlhfless_operator.knative import Kind, KnativeClient, KubernetesObject

    async def ask() -> None:
        job = JobIdentity("default", "chat", "0b1f", JOB.api_version, JOB.kind)
        server = OpenEnvEnvironment(image="maze:1", command=["serve", "$(PORT)"], port=9000, sessions=4)
        made = EnvironmentFunction(job, server, PodsSpec.model_validate(pods))
        async with connect() as api:
            client = KnativeClient(api, field_manager="rlhfless-tests")
            await client.services.apply(environment_service(made, SETTINGS), dry_run=True)
            policies = client.resource(Kind("networking.k8s.io", "v1", "networkpolicies", KubernetesObject))
            restricted = SETTINGS.model_copy(update={"egress": "restricted"})
            await policies.apply(environment_policy(job, restricted), dry_run=True)

    asyncio.run(ask())
