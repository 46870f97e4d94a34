"""What the preflight makes of a cluster's settings, quotas, nodes and roles, and what it says to do."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.generated.crd import crd
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.preflight import Finding, describe, failed, stages_of
from rlhfless_operator.preflight.checks import (
    Knative,
    StagePods,
    check_autoscaler,
    check_capacity,
    check_definition,
    check_deployment,
    check_features,
    check_options,
    check_quota,
    check_release,
    check_timeouts,
    check_version,
    check_volumes,
    quantity,
)
from rlhfless_operator.preflight.cluster import pod_spec_of
from rlhfless_operator.preflight.permissions import PERMISSIONS, check_permissions

SETTINGS = ClusterSettings(functions_image="functions")

# Knative as it is installed: every ConfigMap has but an example.
FRESH = Knative("knative-serving", "1.21.0", {}, {}, {}, {})
# Knative as docs/install.md says to set it.
SET_UP = replace(
    FRESH,
    features={
        "kubernetes.podspec-affinity": "enabled",
        "kubernetes.podspec-nodeselector": "enabled",
        "kubernetes.podspec-persistent-volume-claim": "enabled",
        "kubernetes.podspec-persistent-volume-write": "enabled",
        "kubernetes.podspec-priorityclassname": "enabled",
        "kubernetes.podspec-runtimeclassname": "enabled",
        "kubernetes.podspec-tolerations": "enabled",
    },
    autoscaler={"allow-zero-initial-scale": "true"},
    defaults={"max-revision-timeout-seconds": "43200"},
    deployment={"pod-is-always-schedulable": "true", "default-affinity-type": "none"},
)


def pods(**fields: Any) -> list[StagePods]:
    return [StagePods("generation", PodsSpec.model_validate(fields), most=4)]


def specs(**fields: Any) -> list[Mapping[str, Any]]:
    return [pod_spec_of(PodsSpec.model_validate(fields), SETTINGS)]


GPU = pods(resources={"limits": {"nvidia.com/gpu": "2"}})


def patch_of(finding: Finding) -> dict[str, str]:
    """What the remedy's command would set."""
    command = finding.remedy.splitlines()[0]
    assert command.startswith("kubectl patch configmap/") and "--namespace knative-serving" in command
    data: dict[str, str] = json.loads(command.split("--patch ")[1].strip("'"))["data"]
    return data


# --- Knative ---


@pytest.mark.parametrize("version", ["1.21.0", "v1.23.1", "0.48.0", "0.50.0", "2.0.0"])
def test_a_knative_with_scalable_revisions_is_new_enough(version: str) -> None:
    assert check_version(version).verdict == "ok"


@pytest.mark.parametrize("version", ["1.20.3", "0.47.0"])
def test_an_older_one_is_to_be_upgraded(version: str) -> None:
    finding = check_version(version)
    assert finding.verdict == "error" and "Upgrade" in finding.remedy


def test_a_version_that_nobody_tells_is_unknown() -> None:
    assert check_version("").verdict == "unknown"


def test_a_knative_as_installed_takes_plain_pods() -> None:
    assert check_features(FRESH, specs()).verdict == "ok"


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"nodeSelector": {"pool": "gpu"}}, {"kubernetes.podspec-nodeselector"}),
        ({"tolerations": [{"operator": "Exists"}]}, {"kubernetes.podspec-tolerations"}),
        ({"affinity": {"nodeAffinity": {}}}, {"kubernetes.podspec-affinity"}),
        ({"priorityClass": "high"}, {"kubernetes.podspec-priorityclassname"}),
        ({"runtimeClass": "nvidia"}, {"kubernetes.podspec-runtimeclassname"}),
        ({"volumes": [{"hostPath": "/data", "mountPath": "/data"}]}, {"kubernetes.podspec-volumes-hostpath"}),
        (
            {"volumes": [{"claim": "data", "mountPath": "/data", "readOnly": True}]},
            {"kubernetes.podspec-persistent-volume-claim"},
        ),
        (
            {"volumes": [{"claim": "data", "mountPath": "/data"}]},
            {"kubernetes.podspec-persistent-volume-claim", "kubernetes.podspec-persistent-volume-write"},
        ),
        ({"volumes": [{"secret": "keys", "mountPath": "/keys"}]}, set()),
        ({"template": {"spec": {"schedulerName": "volcano"}}}, {"kubernetes.podspec-schedulername"}),
        ({"template": {"spec": {"runtimeClassName": "gvisor"}}}, {"kubernetes.podspec-runtimeclassname"}),
        ({"template": {"spec": {"initContainers": [{"name": "i"}]}}}, {"kubernetes.podspec-init-containers"}),
        (
            {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "function",
                                "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                            }
                        ]
                    }
                }
            },
            {"kubernetes.podspec-fieldref"},
        ),
        (
            {
                "template": {
                    "spec": {
                        "containers": [{"name": "function", "securityContext": {"capabilities": {"add": ["SYS_NICE"]}}}]
                    }
                }
            },
            {"kubernetes.containerspec-addcapabilities"},
        ),
    ],
)
def test_a_pod_field_that_knative_refuses_is_told_with_its_flag(fields: dict[str, Any], flags: set[str]) -> None:
    finding = check_features(FRESH, specs(**fields))
    assert finding.verdict == ("error" if flags else "ok")
    if flags:
        assert patch_of(finding) == dict.fromkeys(flags, "enabled")


def test_one_command_sets_all_flags_that_all_stages_need() -> None:
    both = [*specs(nodeSelector={"a": "b"}), *specs(priorityClass="high", nodeSelector={"a": "b"})]
    assert set(patch_of(check_features(FRESH, both))) == {
        "kubernetes.podspec-nodeselector",
        "kubernetes.podspec-priorityclassname",
    }


def test_an_empty_dir_is_told_only_where_it_was_switched_off() -> None:
    off = replace(FRESH, features={"kubernetes.podspec-volumes-emptydir": "disabled"})
    assert check_features(off, specs()).verdict == "error"


def test_zero_pods_have_to_be_allowed_unless_functions_begin_with_one() -> None:
    finding = check_autoscaler(FRESH, initial_scale=0)
    assert finding.verdict == "error" and patch_of(finding) == {"allow-zero-initial-scale": "true"}
    assert check_autoscaler(FRESH, initial_scale=1).verdict == "ok"
    assert check_autoscaler(SET_UP, initial_scale=0).verdict == "ok"


def test_a_cluster_that_never_scales_to_zero_is_told_so() -> None:
    never = replace(SET_UP, autoscaler={"enable-scale-to-zero": "false", "allow-zero-initial-scale": "true"})
    assert patch_of(check_autoscaler(never, initial_scale=0)) == {"enable-scale-to-zero": "true"}


def test_requests_have_to_fit_knatives_longest() -> None:
    finding = check_timeouts(FRESH, request_timeout=3600)
    assert finding.verdict == "error" and patch_of(finding) == {"max-revision-timeout-seconds": "3600"}
    assert '"terminationGracePeriodSeconds":3600' in finding.remedy
    assert check_timeouts(FRESH, 600).verdict == "ok"
    assert check_timeouts(SET_UP, 3600).verdict == "ok"


def test_pods_that_go_slowly_are_told_of_where_that_is_known() -> None:
    def release(**settings: Any) -> tuple[str, str]:
        finding = check_release(ClusterSettings(functions_image="i", **settings))
        return finding.verdict, finding.message

    assert release(admission_port=9443, admission_grace_seconds=5) == (
        "ok",
        "released pods hold their GPU for at most 5 s (quickRelease)",
    )
    assert release(operator_namespace="rlhfless")[0] == "warning"
    assert release()[0] == "unknown"


def test_settings_that_only_make_jobs_worse_are_warnings() -> None:
    finding = check_deployment(FRESH)
    assert finding.verdict == "warning"
    assert patch_of(finding) == {"pod-is-always-schedulable": "true", "default-affinity-type": "none"}
    assert check_deployment(SET_UP).verdict == "ok"
    half = replace(SET_UP, deployment={"pod-is-always-schedulable": "true"})
    assert patch_of(check_deployment(half)) == {"default-affinity-type": "none"}


def test_a_folder_of_the_node_that_is_to_be_written_to_is_told() -> None:
    folder = {"hostPath": "/data", "mountPath": "/data"}
    finding = check_volumes(pods(volumes=[folder]))
    assert finding.verdict == "warning" and "/data" in finding.message
    assert check_volumes(pods(volumes=[folder | {"readOnly": True}])).verdict == "ok"
    assert check_volumes(pods(volumes=[{"claim": "data", "mountPath": "/data"}])).verdict == "ok"


# --- room ---


@pytest.mark.parametrize(
    ("text", "number"), [("8", 8), ("500m", 0.5), ("16Gi", 16 * 2**30), ("2k", 2000), ("1.5", 1.5), ("1Pi", 2**50)]
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, number: float) -> None:
    assert quantity(text) == number


def test_what_is_no_quantity_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="'lots' is not a quantity"):
        quantity("lots")


def test_nodes_without_the_gpus_of_one_pod_are_told() -> None:
    finding = check_capacity([{"nvidia.com/gpu": "1"}, {"cpu": "8"}], GPU)
    assert finding.verdict == "warning" and "2 nvidia.com/gpu per pod, but no node has more than 1" in finding.message


def test_nodes_with_fewer_gpus_than_a_step_may_use_are_told() -> None:
    finding = check_capacity([{"nvidia.com/gpu": "4"}], GPU)
    assert finding.verdict == "warning" and "may use 8" in finding.message
    assert check_capacity([{"nvidia.com/gpu": "4"}] * 2, GPU).verdict == "ok"


def quota(hard: dict[str, str], used: dict[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": {"used": used or {}}}


def test_a_quota_below_one_pod_is_an_error_and_one_below_a_step_a_warning() -> None:
    key = "requests.nvidia.com/gpu"
    assert check_quota([quota({key: "1"})], GPU, "ns").verdict == "error"
    assert check_quota([quota({key: "10"}, {key: "4"})], GPU, "ns").verdict == "warning"
    assert check_quota([quota({key: "12"}, {key: "4"})], GPU, "ns").verdict == "ok"
    assert check_quota([], GPU, "ns").verdict == "ok"


def test_where_a_quota_limits_memory_pods_have_to_say_theirs() -> None:
    finding = check_quota([quota({"limits.memory": "64Gi"})], GPU, "ns")
    assert finding.verdict == "error" and "limits.memory" in finding.message
    said = pods(resources={"limits": {"memory": "8Gi"}})
    assert check_quota([quota({"limits.memory": "64Gi", "requests.memory": "64Gi"})], said, "ns").verdict == "ok"


def test_a_jobs_stages_get_the_clusters_defaults_under_what_the_job_says(tmp_path: Path, tiny_job: Any) -> None:
    settings = SETTINGS.model_copy(update={"pods": PodsSpec(node_selector={"pool": "gpu"})})
    file = tiny_job(
        generation={"instances": {"max": 3}, "pods": {"nodeSelector": {"size": "large"}}},
        preparation={"instances": {"max": 2}},
    )
    generation, preparation, _ = stages_of(settings, load_job(file), "team")
    assert (generation.most, generation.pods.node_selector) == (3, {"pool": "gpu", "size": "large"})
    assert (preparation.most, preparation.pods.node_selector) == (2, {"pool": "gpu"})


def test_the_pods_that_run_tested_code_may_alone_be_in_a_sandbox(tiny_job: Any) -> None:
    for sandbox in ({"runtimeClass": "gvisor"}, {"template": {"spec": {"runtimeClassName": "gvisor"}}}):
        stages = stages_of(SETTINGS, load_job(tiny_job(preparation={"pods": sandbox})), "team")
        assert [pod_spec_of(stage.pods, SETTINGS).get("runtimeClassName") for stage in stages] == [None, "gvisor", None]


def test_an_asynchronous_job_needs_gpus_for_two_stages_at_once(tiny_job: Any) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    sync, ahead = load_job(tiny_job("sync", pods=gpu)), load_job(tiny_job("ahead", pods=gpu, **{"async": {}}))
    two, three = (SETTINGS.model_copy(update={"pools": {"default": PoolSettings(gpus=gpus)}}) for gpus in (2, 3))
    assert check_options(None, two, "team") == check_options(sync, two, "team") == []
    assert check_options(ahead, three, "team") == check_options(ahead, SETTINGS, "team") == []
    (finding,) = check_options(ahead, two, "team")
    assert (finding.check, finding.verdict) == ("spec.async", "error")
    assert "takes 3 GPUs at once, and the job may have 2 of pool default: remove async" in finding.message
    (finding,) = check_options(load_job(tiny_job("many", pods=gpu, preparation={"instances": {"max": 3}})), two, "team")
    assert (finding.check, finding.verdict) == ("spec.preparation.instances", "error")


# --- permissions, definition ---


def test_missing_permissions_are_listed_by_resource() -> None:
    allowed = {permission: permission.resource != "secrets" for permission in PERMISSIONS}
    finding = check_permissions(allowed, "team")
    assert finding.verdict == "error"
    assert "not allowed in namespace team: get, create secrets (core)" in finding.message
    assert check_permissions(dict.fromkeys(PERMISSIONS, True), None).verdict == "ok"


def test_a_definition_that_lacks_a_field_is_older_than_the_operator() -> None:
    older = crd()
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["limits"]
    finding = check_definition(older, crd())
    assert finding.verdict == "error" and "spec.limits" in finding.message and "rlhfless crd |" in finding.remedy
    assert check_definition(None, crd()).verdict == "error"
    assert check_definition(crd(), crd()).verdict == "ok"
    other = crd()
    other["spec"]["versions"][0]["name"] = "v1"
    assert "has no version" in check_definition(other, crd()).message


# --- text ---


def test_only_errors_keep_jobs_from_running() -> None:
    fine = [
        Finding("a", "ok", "fine"),
        Finding("b", "warning", "so-so", "mend it"),
        Finding("c", "unknown", "who knows"),
    ]
    assert not failed(fine) and failed([*fine, Finding("d", "error", "bad")])
    assert describe(fine).splitlines()[:3] == ["ok       a: fine", "warning  b: so-so", "             mend it"]
