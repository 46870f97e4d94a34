"""What the Helm chart renders: what the operator is told and given, and what is locked down."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.job.generated.crd import crd
from rlhfless_operator.platforms.cluster_settings import PREFIX, ClusterSettings, variable_of
from tests.charts.rendering import (
    CASES,
    CHART,
    MONITORING,
    NAMESPACE,
    case,
    cases,
    container,
    needs_helm,
    of_kind,
    rendered,
    settings,
    the,
)


@needs_helm
@cases
def test_the_operator_understands_its_environment(case: Path) -> None:
    manifests = rendered(case)
    values = yaml.safe_load(case.read_text())
    found = settings(manifests)
    assert found.artifacts == values["artifacts"].get("uri", "/artifacts")
    assert list(found.namespaces) == values.get("namespaces", [])
    assert found.operator_namespace == NAMESPACE
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    expected = {"metrics": found.metrics_port, "liveness": found.liveness_port, "admission": found.admission_port}
    assert ports == {name: port for name, port in expected.items() if port is not None}


@needs_helm
def test_every_setting_of_the_operator_has_a_value_of_the_chart() -> None:
    """Other variables of the operator are none of rlhfless' own."""
    seen = {entry["name"] for values in CASES for entry in container(rendered(values))["env"]}
    assert {name for name in seen if name.startswith(PREFIX)} == {
        variable_of(name) for name in ClusterSettings.model_fields
    }


@needs_helm
def test_function_pods_connect_anywhere_unless_they_are_restricted() -> None:
    assert settings(case("s3")).egress == "open"
    restricted = settings(case("restricted-network"))
    assert restricted.egress == "restricted"
    assert restricted.egress_rules[0]["to"] == [{"ipBlock": {"cidr": "169.254.169.254/32"}}]


@needs_helm
@pytest.mark.parametrize(
    ("name", "volumes"),
    [
        (
            "host-path",
            {
                "artifacts": (
                    {"persistentVolumeClaim": {"claimName": "training-rlhfless-artifacts", "readOnly": False}},
                    "/artifacts",
                ),
                "files": ({"hostPath": {"path": "/var/lib/rlhfless/files", "type": "Directory"}}, "/files"),
            },
        ),
        (
            "claim",
            {
                "artifacts": (
                    {"persistentVolumeClaim": {"claimName": "rlhfless-artifacts", "readOnly": False}},
                    "/mnt/runs",
                ),
                "files": ({"persistentVolumeClaim": {"claimName": "rlhfless-files", "readOnly": True}}, "/mnt/files"),
            },
        ),
        ("s3", {}),
    ],
)
def test_storage_is_mounted_in_the_operator_and_in_every_function(
    name: str, volumes: dict[str, tuple[dict[str, Any], str]]
) -> None:
    manifests = case(name)
    pod = the(manifests, "Deployment")["spec"]["template"]["spec"]
    mounted = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container(manifests)["volumeMounts"]}
    assert set(mounted) == set(mounts) == {"tmp", "admission", *volumes}
    given = {volume.name: volume for volume in settings(manifests).pods.volumes or []}
    assert set(given) == set(volumes)
    for volume, (source, path) in volumes.items():
        assert mounted[volume] == source
        assert mounts[volume]["mountPath"] == given[volume].mount_path == path
        read_only = volume == "files"
        assert mounts[volume]["readOnly"] == given[volume].read_only == read_only
        assert given[volume].claim == source.get("persistentVolumeClaim", {}).get("claimName")
        assert given[volume].host_path == source.get("hostPath", {}).get("path")


@needs_helm
def test_a_folder_of_the_nodes_is_given_by_a_claim_in_each_namespace() -> None:
    manifests = case("host-path")
    claims = {claim["metadata"]["namespace"]: claim for claim in of_kind(manifests, "PersistentVolumeClaim")}
    volumes = {volume["metadata"]["name"]: volume["spec"] for volume in of_kind(manifests, "PersistentVolume")}
    assert set(claims) == {"default", "kube-public"} and len(volumes) == 2
    for namespace, claim in claims.items():
        volume = volumes[claim["spec"]["volumeName"]]
        assert volume["claimRef"] == {"namespace": namespace, "name": claim["metadata"]["name"]}
        assert volume["hostPath"]["path"] == "/var/lib/rlhfless/artifacts"
        assert volume["persistentVolumeReclaimPolicy"] == "Retain"


@needs_helm
def test_secrets_of_an_object_store_reach_the_operator_and_every_function() -> None:
    manifests = case("s3")
    assert container(manifests)["envFrom"] == [{"secretRef": {"name": "rlhfless-s3"}}]
    assert settings(manifests).pods.env_from == ["rlhfless-s3"]


@needs_helm
def test_function_pods_get_the_values_and_the_charts_own_volumes() -> None:
    manifests = case("gpu-pods")
    pods = settings(manifests).pods
    assert [volume.mount_path for volume in pods.volumes or []] == ["/cache", "/artifacts", "/models"]
    assert pods.resources is not None and pods.resources.limits == {"nvidia.com/gpu": "1"}
    assert pods.image_pull_secrets == ["registry"]
    assert settings(manifests).pools["h100"].namespaces == {"research": 8}
    assert settings(manifests).functions_image == "registry.example/rlhfless-functions:0.1.0-cuda"
    assert container(manifests)["image"] == f"registry.example/rlhfless-operator@sha256:{'0' * 64}"


@needs_helm
def test_images_are_of_the_charts_release_unless_it_is_said_otherwise() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    manifests = case("s3")
    assert container(manifests)["image"] == f"ghcr.io/rlhfless/rlhfless-operator:{version}"
    assert settings(manifests).functions_image == f"ghcr.io/rlhfless/rlhfless-functions:{version}"


@needs_helm
def test_function_pods_alone_share_a_cache() -> None:
    manifests = case("gpu-pods")
    pods = settings(manifests).pods
    (cache,) = (volume for volume in pods.volumes or [] if volume.name == "cache")
    assert (cache.claim, cache.mount_path, cache.read_only) == ("rlhfless-cache", "/cache", False)
    assert pods.env == {"HF_HUB_OFFLINE": "1", "RLHFLESS_CACHE": "/cache"}
    assert "cache" not in {mount["name"] for mount in container(manifests)["volumeMounts"]}
    assert "RLHFLESS_CACHE" not in (settings(case("s3")).pods.env or {})
    chosen = rendered(CHART / "ci" / "gpu-pods.yaml", pods__env__RLHFLESS_CACHE="/models/cache")
    assert (settings(chosen).pods.env or {})["RLHFLESS_CACHE"] == "/models/cache"


@needs_helm
def test_the_definition_is_kept_when_the_chart_goes() -> None:
    manifest = the(case("s3"), "CustomResourceDefinition")
    assert manifest["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert manifest["spec"] == crd()["spec"]
    assert (
        "annotations" not in the(rendered(CHART / "ci" / "s3.yaml", crds__keep="false"), manifest["kind"])["metadata"]
    )
    assert not of_kind(case("own-roles"), manifest["kind"])


@needs_helm
def test_the_operators_container_is_locked_down() -> None:
    manifests = case("s3")
    pod = the(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert container(manifests)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container(manifests)["volumeMounts"]} == {"/tmp", "/etc/rlhfless/admission"}


@needs_helm
def test_a_drain_leaves_a_replica_where_there_are_two() -> None:
    assert the(case("s3"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert not of_kind(rendered(CHART / "ci" / "s3.yaml", replicas="1"), "PodDisruptionBudget")


@needs_helm
def test_only_the_metrics_and_the_webhook_can_be_reached() -> None:
    policy = the(case("monitoring-service"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {
            "ports": [{"port": "metrics"}],
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        {"ports": [{"port": "admission"}]},
    ]


@needs_helm
def test_monitoring_is_off_until_it_is_asked_for() -> None:
    assert not any(of_kind(case("s3"), kind) for kind in (*MONITORING, "ConfigMap"))


@needs_helm
def test_monitors_keep_the_labels_that_name_the_job() -> None:
    service = the(case("monitoring-service"), "ServiceMonitor")
    pod = the(case("monitoring-pod"), "PodMonitor")
    assert service["metadata"]["labels"]["release"] == "prometheus"
    assert service["spec"]["endpoints"][0]["honorLabels"] and pod["spec"]["podMetricsEndpoints"][0]["honorLabels"]
    selected = [
        each
        for each in of_kind(case("monitoring-service"), "Service")
        if service["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert [port["name"] for each in selected for port in each["spec"]["ports"]] == ["metrics"]


@needs_helm
def test_each_dashboard_is_a_config_map_that_grafana_finds() -> None:
    maps = of_kind(case("monitoring-service"), "ConfigMap")
    assert {name for manifest in maps for name in manifest["data"]} == {
        f"rlhfless-{file.name}" for file in (CHART / "dashboards").glob("*.json")
    }
    for manifest in maps:
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = manifest["data"].items()
        assert json.loads(text) == json.loads((CHART / "dashboards" / name.removeprefix("rlhfless-")).read_text())
