"""The manifests of a job's functions: what every pod has, what a job can change, and that a cluster takes them."""

import asyncio
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import STAGES
from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods import manifests
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction
from tests.prerequisites import needs_cluster

JOB = JobIdentity("team", "chat", "0b1f", "rlhfless.io/v1alpha1", "RLHFJob")
SETTINGS = ClusterSettings(functions_image="dev.local/rlhfless-functions:1")
EVERYTHING: dict[str, Any] = {
    "image": "registry.local/mine:2",
    "imagePullSecrets": ["registry"],
    "resources": {"requests": {"cpu": "1500m"}, "limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClass": "low",
    "runtimeClass": "nvidia",
    "sharedMemory": "2Gi",
    "volumes": [
        {"claim": "runs", "mountPath": "/artifacts"},
        {"name": "files", "hostPath": "/srv/files", "mountPath": "/files", "readOnly": True},
        {"secret": "hub", "mountPath": "/hub"},
        {"configMap": "prompts", "mountPath": "/prompts"},
    ],
    "env": {"HF_HOME": "/artifacts/hub", "RLHFLESS_THREADS": "7"},
    "envFrom": ["s3"],
    "template": {"spec": {"schedulerName": "other", "containers": [{"name": "function", "workingDir": "/tmp"}]}},
}

ON_ANY_CLUSTER = {
    **{name: value for name, value in EVERYTHING.items() if name != "runtimeClass"},
    "priorityClass": "system-cluster-critical",
}


def function(stage: Any = "generation", pods: dict[str, Any] | None = None, name: str = "chat") -> StageFunction:
    job = JobIdentity(JOB.namespace, name, JOB.uid, JOB.api_version, JOB.kind)
    return StageFunction(job, stage, PodsSpec.model_validate(pods or {}), "s3://bucket/runs/chat")


def service(pods: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return manifests.service(function(pods=pods), SETTINGS.model_copy(update=settings))


def template(pods: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = service(pods, **settings)["spec"]["template"]
    return found


def container(pods: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = template(pods)["spec"]["containers"]
    return dict(found)


def env(pods: dict[str, Any] | None = None) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in container(pods)["env"]}


def test_everything_belongs_to_the_job_and_says_so() -> None:
    made = [
        service(),
        manifests.token_secret(JOB, "t"),
        manifests.network_policy(JOB, SETTINGS),
    ]
    for manifest in made:
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "team"
        assert metadata["labels"].items() >= {MANAGED_BY: "rlhfless", "rlhfless.io/job": "chat"}.items()
        (owner,) = metadata["ownerReferences"]
        assert owner == {
            "apiVersion": "rlhfless.io/v1alpha1",
            "kind": "RLHFJob",
            "name": "chat",
            "uid": "0b1f",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    assert template()["metadata"]["labels"]["rlhfless.io/stage"] == "generation"


MANAGED_BY = "app.kubernetes.io/managed-by"


def test_a_service_is_for_its_own_cluster_and_takes_one_request_a_pod() -> None:
    assert service()["metadata"]["name"] == "chat-generation"
    assert service()["metadata"]["labels"]["networking.knative.dev/visibility"] == "cluster-local"
    spec = template(request_timeout=3600.0)["spec"]
    assert spec["containerConcurrency"] == 1
    assert spec["timeoutSeconds"] == spec["responseStartTimeoutSeconds"] == 3600


def test_pods_are_restricted() -> None:
    spec = template()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert {mount["mountPath"] for mount in container()["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert all("emptyDir" in volume for volume in spec["volumes"])


def test_a_cache_on_a_volume_that_pods_share_is_a_variable_and_a_mount() -> None:
    """As the chart's `cache` gives it, or a job in `spec.pods`."""
    shared = {
        "volumes": [{"name": "cache", "claim": "models", "mountPath": "/cache"}],
        "env": {"RLHFLESS_CACHE": "/cache"},
    }
    assert env(shared)["RLHFLESS_CACHE"] == "/cache"
    assert {"name": "cache", "mountPath": "/cache", "readOnly": False} in container(shared)["volumeMounts"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models", "readOnly": False}} in template(shared)[
        "spec"
    ]["volumes"]


def test_the_token_is_nowhere_but_in_the_secret() -> None:
    assert "secret-token" not in yaml.safe_dump(service())
    assert manifests.token_secret(JOB, "secret-token")["stringData"] == {"token": "secret-token"}
    (token,) = (item for item in container()["env"] if item["name"] == "RLHFLESS_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "chat-token", "key": "token"}}


def test_only_knative_reaches_the_pods_and_the_operator_where_it_is_known() -> None:
    (rule,) = manifests.network_policy(JOB, SETTINGS)["spec"]["ingress"]
    knative = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "knative-serving"}}}
    assert rule == {"from": [knative]}
    known = SETTINGS.model_copy(update={"operator_namespace": "rlhfless-system"})
    (rule,) = manifests.network_policy(JOB, known)["spec"]["ingress"]
    assert rule["from"] == [
        knative,
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "rlhfless-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "rlhfless"}},
        },
    ]


def test_pods_that_learn_together_reach_each_other_and_nobody_else_does() -> None:
    spec = manifests.gang_policy(function("learning"), SETTINGS)["spec"]
    labels = {"app.kubernetes.io/managed-by": "rlhfless", "rlhfless.io/job": "chat", "rlhfless.io/stage": "learning"}
    learners = {"podSelector": {"matchLabels": labels}}
    assert spec == {**learners, "policyTypes": ["Ingress"], "ingress": [{"from": [learners]}]}
    restricted = SETTINGS.model_copy(update={"egress": "restricted"})
    spec = manifests.gang_policy(function("learning"), restricted)["spec"]
    assert (spec["policyTypes"], spec["egress"]) == (["Ingress", "Egress"], [{"to": [learners]}])


def test_generation_pods_that_pass_weights_on_reach_each_other() -> None:
    made = manifests.gang_policy(function("generation"), SETTINGS)
    stage = {"rlhfless.io/job": "chat", "rlhfless.io/stage": "generation"}
    (rule,) = made["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "rlhfless", **stage}}}]
    # The learners' policy is another object.
    assert made["metadata"]["name"] == "chat-relays" != manifests.gang_policy_name("chat", "learning")


def test_restricted_pods_reach_names_what_their_job_needs_and_what_the_cluster_allows() -> None:
    spec = manifests.network_policy(JOB, SETTINGS, {"http://judge:8000"})["spec"]
    assert spec["policyTypes"] == ["Ingress"] and "egress" not in spec
    metadata = {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}
    restricted = SETTINGS.model_copy(update={"egress": "restricted", "egress_rules": [metadata]})
    spec = manifests.network_policy(JOB, restricted, {"http://judge:8000"})["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    names, judge, further = spec["egress"]
    assert {port["port"] for port in names["ports"]} == {53} and "to" not in names
    assert judge == {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}]}
    assert further == metadata


def test_what_a_job_says_is_in_its_pods() -> None:
    spec = template(EVERYTHING)["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (spec["priorityClassName"], spec["runtimeClassName"], spec["schedulerName"]) == ("low", "nvidia", "other")
    assert spec["affinity"] == EVERYTHING["affinity"]
    volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
    assert volumes == {
        "rlhfless-tmp": {"emptyDir": {}},
        "rlhfless-shm": {"emptyDir": {"medium": "Memory", "sizeLimit": str(2 * 2**30)}},
        "volume-0": {"persistentVolumeClaim": {"claimName": "runs", "readOnly": False}},
        "files": {"hostPath": {"path": "/srv/files"}},
        "volume-2": {"secret": {"secretName": "hub"}},
        "volume-3": {"configMap": {"name": "prompts"}},
    }
    found = container(EVERYTHING)
    assert (found["image"], found["workingDir"]) == ("registry.local/mine:2", "/tmp")
    assert found["resources"] == {
        "requests": {"cpu": "1500m"},
        "limits": {"nvidia.com/gpu": "1", "memory": "16Gi"},
    }
    assert found["envFrom"] == [{"secretRef": {"name": "s3"}}]
    mounts = {mount["name"]: (mount["mountPath"], mount.get("readOnly")) for mount in found["volumeMounts"]}
    assert mounts["files"] == ("/files", True)
    assert mounts["volume-0"] == ("/artifacts", False)


def test_variables_say_what_an_instance_needs_and_a_job_may_add_to_them() -> None:
    assert env() == {
        "RLHFLESS_TOKEN": None,
        "HOME": "/tmp",
        "RLHFLESS_PRELOAD": "s3://bucket/runs/chat/preload/generation.json",
        "RLHFLESS_STAGE": "generation",
        "RLHFLESS_THREADS": "1",
    }
    assert env(EVERYTHING).items() >= {"HF_HOME": "/artifacts/hub", "RLHFLESS_THREADS": "7"}.items()


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        (None, 1),
        ({}, 1),
        ({"limits": {"cpu": 4}}, 4),
        ({"requests": {"cpu": "1500m"}}, 2),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2.5"}}, 3),
        ({"requests": {"memory": "1Gi"}}, 1),
        ({"requests": {"cpu": "10m"}}, 1),
    ],
)
def test_threads_are_the_pods_cores(resources: dict[str, Any] | None, threads: int) -> None:
    spec = None if resources is None else ResourcesSpec.model_validate(resources)
    assert manifests.threads_of(spec) == threads


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?", fullmatch=True), st.sampled_from(STAGES))
def test_a_services_name_is_one_that_kubernetes_takes(job: str, stage: Any) -> None:
    name = manifests.service_name(job, stage)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-00001") <= 63
    assert name.endswith(f"-{stage}")
    if job[0].isalpha() and len(job) <= 45:
        assert name == f"{job}-{stage}"


def test_long_names_stay_apart() -> None:
    names = {manifests.service_name("a" * 52 + last, "generation") for last in "abc"}
    assert len(names) == 3


@given(st.builds(PodsSpec, env=st.none() | st.dictionaries(st.sampled_from(["HOME", "A"]), st.text(max_size=3))))
def test_the_same_job_makes_the_same_manifest(pods: PodsSpec) -> None:
    one, two = (manifests.service(StageFunction(JOB, "learning", pods, "/runs/chat"), SETTINGS) for _ in range(2))
    assert one == two
    names = [item["name"] for item in one["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert len(names) == len(set(names))


@needs_cluster("the manifests are not shown to a cluster")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pods", [{}, ON_ANY_CLUSTER], ids=["nothing", "everything"])
def test_a_real_cluster_takes_them(stage: Any, pods: dict[str, Any]) -> None:
    from rlhfless_operator.controller.main import connect
    from rlhfless_operator.knative import Kind, KnativeClient, KubernetesObject

    async def ask() -> None:
        # The objects would be the default namespace's own: dry runs need one that is there.
        job = JobIdentity("default", "chat", "0b1f", JOB.api_version, JOB.kind)
        made = StageFunction(job, stage, PodsSpec.model_validate(pods), "s3://bucket/runs/chat")
        async with connect() as api:
            client = KnativeClient(api, field_manager="rlhfless-tests")
            await client.services.apply(manifests.service(made, SETTINGS), dry_run=True)
            secrets = client.resource(Kind("", "v1", "secrets", KubernetesObject))
            await secrets.create(manifests.token_secret(job, "t"), dry_run=True)
            policies = client.resource(Kind("networking.k8s.io", "v1", "networkpolicies", KubernetesObject))
            await policies.apply(manifests.network_policy(job, SETTINGS), dry_run=True)
            await policies.apply(manifests.gang_policy(made, SETTINGS), dry_run=True)

    asyncio.run(ask())
