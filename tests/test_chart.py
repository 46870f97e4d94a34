"""The Helm chart: what it renders, what it refuses, what it grants, and whether API servers take it.

Needs helm. With KUBEBUILDER_ASSETS the manifests go to a control plane of the tests' own, with KUBECONFIG also to that
cluster, as dry runs.
"""

import asyncio
import base64
import functools
import itertools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from control_plane import ApiServer, control_plane
from rlhfless_operator.cluster_settings import PREFIX, ClusterSettings, variable_of
from rlhfless_operator.controller.endpoints import ADMISSION_PATH, serve_admission
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.crd import crd
from rlhfless_operator.platforms.manifests import JOB_LABEL
from rlhfless_operator.preflight.permissions import PERMISSIONS

REPOSITORY = Path(__file__).resolve().parents[1]
CHART = REPOSITORY / "charts" / "rlhfless"
CASES = sorted((CHART / "ci").glob("*.yaml"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ASSETS = os.environ.get("KUBEBUILDER_ASSETS")
NAMESPACE = "default"
MONITORING = ("PodMonitor", "PrometheusRule", "ServiceMonitor")

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="the chart is not rendered: there is no helm")
needs_assets = pytest.mark.skipif(
    ASSETS is None,
    reason="the chart is not given to an API server: KUBEBUILDER_ASSETS names no etcd and kube-apiserver",
)
needs_cluster = pytest.mark.skipif(
    "KUBECONFIG" not in os.environ, reason="the chart is not given to a cluster: KUBECONFIG names none"
)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)

Manifest = dict[str, Any]


class Loader(yaml.SafeLoader):
    """Reads `1e-06` as a number, as Kubernetes does."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^-?\d+e[-+]?\d+$"), list("-0123456789"))


@functools.cache
def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)


def rendered(*values: Path, **sets: str) -> list[Manifest]:
    """The manifests of a release named `training`."""
    files = [part for file in values for part in ("--values", file)]
    settings = [part for name, value in sets.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
    done = helm("template", "training", CHART, "--namespace", NAMESPACE, *files, *settings)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.load_all(done.stdout, Loader) if manifest]


def case(name: str) -> list[Manifest]:
    return rendered(CHART / "ci" / f"{name}.yaml")


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def the(manifests: list[Manifest], kind: str) -> Manifest:
    (manifest,) = of_kind(manifests, kind)
    return manifest


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = the(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def settings(manifests: list[Manifest]) -> ClusterSettings:
    """What the operator makes of its environment."""
    environment = {entry["name"]: entry["value"] for entry in container(manifests)["env"] if "value" in entry}
    return ClusterSettings.from_environment(environment)


# --- nothing is stale ---


def test_everything_that_is_generated_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "rlhfless"
    shutil.copytree(CHART, copy)
    subprocess.run([sys.executable, REPOSITORY / "charts" / "tools", copy], check=True)
    for made in (path for path in copy.rglob("*") if path.is_file()):
        assert (CHART / made.relative_to(copy)).read_text() == made.read_text(), f"{made.name} is stale; run: make docs"


def test_the_chart_has_the_definition_of_the_jobs() -> None:
    assert yaml.safe_load((CHART / "files" / "rlhfjobs.rlhfless.io.yaml").read_text()) == crd()


def leaves(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for name, value in values.items():
        assert name in schema["properties"], f"{path}{name} is not in values.schema.json"
        inner = schema["properties"][name]
        if isinstance(value, dict) and inner.get("properties"):
            yield from leaves(value, inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", value, inner


def test_every_value_is_in_the_schema_and_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()
    for path, value, schema in leaves(VALUES, SCHEMA):
        assert schema.get("description") or "$ref" in schema or path.startswith("strategy."), path
        top = path if not path.startswith("strategy.") else "strategy"
        assert f"| `{top}` |" in readme or f"| `{top.rpartition('.')[0]}` |" in readme, path
        jsonschema.validate(value, {**schema, "$defs": SCHEMA["$defs"]})


def test_the_schema_has_no_value_that_there_is_not() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any]) -> None:
        assert set(schema["properties"]) - {"global"} == set(values)
        for name, value in values.items():
            if isinstance(value, dict) and schema["properties"][name].get("properties") and value:
                compare(value, schema["properties"][name])

    compare(VALUES, SCHEMA)


# --- what is refused ---


@needs_helm
def test_it_passes_lint() -> None:
    for values in CASES:
        done = helm("lint", "--strict", CHART, "--values", values)
        assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ("nonsense=1", "nonsense"),
        ("image.tagg=x", "tagg"),
        ("image.digest=abc", "/image/digest"),
        ("replicas=0", "/replicas"),
        ("artifacts.uri=runs", "/artifacts/uri"),
        ("namespaces={A_B}", "/namespaces/0"),
        ("operator.metricsPort=80", "/operator/metricsPort"),
        ("dashboards.enabled=sometimes", "/dashboards/enabled"),
        ("monitoring.prometheusRule.idleShare=2", "/monitoring/prometheusRule/idleShare"),
        ("knative.initialScale=3", "/knative/initialScale"),
        ("knative.requestTimeout=soon", "/knative/requestTimeout"),
        ("pods.image_pull_secrets={a}", "image_pull_secrets"),
        ("pods.sharedMemoryy=1Gi", "sharedMemoryy"),
        ("pools.a.gpu=1", "gpu"),
        ("quickRelease.graceSeconds=0", "/quickRelease/graceSeconds"),
        ("quickRelease.certificate.caBundle=-----BEGIN", "/quickRelease/certificate/caBundle"),
        ("quickRelease.certificate.caBundle=LS0t", "give quickRelease.certificate.secretName"),
        ("quickRelease.enabled=true,quickRelease.certificate.secretName=a", "give quickRelease.certificate.caBundle"),
        ("quickRelease.enabled=true,quickRelease.port=9090", "quickRelease.port is 9090"),
        ("networkPolicy.functions.egress=closed", "/networkPolicy/functions/egress"),
        ("artifacts.uri=/artifacts", "give artifacts.existingClaim or artifacts.hostPath"),
        ("artifacts.uri=/a,artifacts.hostPath=/data", "list them in namespaces"),
        ("artifacts.hostPath=/data", "remove artifacts.existingClaim and artifacts.hostPath"),
        ("files.hostPath=/a,files.existingClaim=b", "files.existingClaim and files.hostPath are both given"),
        ("monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true", "disable one"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(sets: str, complaint: str) -> None:
    done = helm("template", "training", CHART, "--values", CHART / "ci" / "s3.yaml", "--set", sets)
    assert done.returncode != 0
    assert complaint in done.stderr


@needs_helm
def test_an_installation_without_storage_is_told_what_to_give() -> None:
    done = helm("template", "training", CHART)
    assert "artifacts.existingClaim" in done.stderr


# --- what the operator is told and given ---


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
    assert set(mounted) == set(mounts) == {"tmp", *volumes}
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
    assert [volume.mount_path for volume in pods.volumes or []] == ["/artifacts", "/models"]
    assert pods.resources is not None and pods.resources.limits == {"nvidia.com/gpu": "1"}
    assert pods.image_pull_secrets == ["registry"]
    assert settings(manifests).pools["h100"].namespaces == {"research": 8}
    assert settings(manifests).functions_image == "registry.example/rlhfless-functions:0.1.0-cuda"
    assert container(manifests)["image"] == f"registry.example/rlhfless-operator@sha256:{'0' * 64}"


@needs_helm
def test_images_are_of_the_charts_release_unless_it_is_said_otherwise() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    manifests = case("s3")
    assert container(manifests)["image"] == f"rlhfless-operator:{version}"
    assert settings(manifests).functions_image == f"rlhfless-functions:{version}"


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
    assert {mount["mountPath"] for mount in container(manifests)["volumeMounts"]} == {"/tmp"}


@needs_helm
def test_a_drain_leaves_a_replica_where_there_are_two() -> None:
    assert the(case("s3"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert not of_kind(rendered(CHART / "ci" / "s3.yaml", replicas="1"), "PodDisruptionBudget")


@needs_helm
def test_only_the_metrics_can_be_reached() -> None:
    policy = the(case("monitoring-service"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {
            "ports": [{"port": "metrics"}],
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        }
    ]


def webhook(manifests: list[Manifest]) -> Manifest:
    (found,) = the(manifests, "MutatingWebhookConfiguration")["webhooks"]
    return found


@needs_helm
def test_no_webhook_is_served_until_it_is_asked_for() -> None:
    manifests = case("s3")
    assert settings(manifests).admission_port is None
    assert not any(of_kind(manifests, kind) for kind in ("MutatingWebhookConfiguration", "Secret", "Service"))


@needs_helm
def test_a_webhook_that_does_not_answer_keeps_no_pod_from_being_made() -> None:
    for name in ("quick-release", "cert-manager"):
        found = webhook(case(name))
        assert (found["failurePolicy"], found["sideEffects"]) == ("Ignore", "None")
        assert found["timeoutSeconds"] <= 2


@needs_helm
def test_the_webhook_is_asked_about_new_function_pods_alone() -> None:
    found = webhook(case("quick-release"))
    (rule,) = found["rules"]
    assert (rule["operations"], rule["resources"], rule["apiGroups"]) == (["CREATE"], ["pods"], [""])
    assert found["objectSelector"] == {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]}
    (namespaces,) = found["namespaceSelector"]["matchExpressions"]
    assert namespaces == {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": ["default", "kube-public"],
    }
    assert "namespaceSelector" not in webhook(case("cert-manager"))


@needs_helm
def test_the_webhook_is_where_the_operator_serves_it() -> None:
    manifests = case("quick-release")
    found = settings(manifests)
    assert (found.admission_port, found.admission_grace_seconds) == (9444, 5)
    service, client = the(manifests, "Service"), webhook(manifests)["clientConfig"]["service"]
    assert (client["name"], client["namespace"]) == (service["metadata"]["name"], service["metadata"]["namespace"])
    (port,) = service["spec"]["ports"]
    assert (client["port"], client["path"]) == (port["port"], ADMISSION_PATH)
    template = the(manifests, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (listening,) = (each for each in container(manifests)["ports"] if each["name"] == port["targetPort"])
    assert listening["containerPort"] == found.admission_port
    assert {"ports": [{"port": port["targetPort"]}]} in the(manifests, "NetworkPolicy")["spec"]["ingress"]
    (mount,) = (each for each in container(manifests)["volumeMounts"] if each["name"] == "admission")
    assert (mount["mountPath"], mount["readOnly"]) == (found.admission_certificate, True)


@needs_helm
async def test_an_api_server_can_trust_the_certificate_that_the_chart_makes(tmp_path: Path) -> None:
    manifests = case("quick-release")
    secret = the(manifests, "Secret")
    for name, content in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    (volume,) = (
        each
        for each in the(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "admission"
    )
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    client = webhook(manifests)["clientConfig"]
    trust = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    host = f"{client['service']['name']}.{client['service']['namespace']}.svc"
    async with serve_admission(0, tmp_path, 10) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=host)
        writer.close()


@needs_helm
def test_a_certificate_of_ones_own_is_mounted_instead() -> None:
    manifests = case("cert-manager")
    assert not of_kind(manifests, "Secret")
    volumes = the(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "admission", "secret": {"secretName": "rlhfless-webhook"}} in volumes
    annotations = the(manifests, "MutatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": "default/rlhfless-webhook"}
    own = {"quickRelease__enabled": "true", "quickRelease__certificate__secretName": "mine"}
    given = rendered(CHART / "ci" / "s3.yaml", **own, quickRelease__certificate__caBundle="LS0tLS1CRUdJTg==")
    assert webhook(given)["clientConfig"]["caBundle"] == "LS0tLS1CRUdJTg=="


@needs_helm
def test_monitoring_is_off_until_it_is_asked_for() -> None:
    assert not any(of_kind(case("s3"), kind) for kind in (*MONITORING, "ConfigMap", "Service"))


@needs_helm
def test_monitors_keep_the_labels_that_name_the_job() -> None:
    service = the(case("monitoring-service"), "ServiceMonitor")
    pod = the(case("monitoring-pod"), "PodMonitor")
    assert service["metadata"]["labels"]["release"] == "prometheus"
    assert service["spec"]["endpoints"][0]["honorLabels"] and pod["spec"]["podMetricsEndpoints"][0]["honorLabels"]
    labels = the(case("monitoring-service"), "Service")["metadata"]["labels"]
    assert service["spec"]["selector"]["matchLabels"].items() <= labels.items()


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


# --- what is granted ---

JOB_RIGHTS = {
    ("rlhfless.io", "rlhfjobs"): {"get", "list", "watch", "patch", "delete"},
    ("rlhfless.io", "rlhfjobs/status"): {"patch"},
    ("rlhfless.io", "rlhfjobs/finalizers"): {"update"},
    ("serving.knative.dev", "services"): {"get", "create", "patch", "delete"},
    ("serving.knative.dev", "revisions"): {"get", "patch"},
    ("", "pods"): {"list", "watch", "patch", "delete"},
    ("", "secrets"): {"get", "create"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create", "patch", "delete"},
    ("", "resourcequotas"): {"list"},
    ("", "events"): {"create"},
}
CLUSTER_RIGHTS = {
    ("apiextensions.k8s.io", "customresourcedefinitions"): {"get"},
    ("", "nodes"): {"list"},
}
KUEUE_RIGHTS = {
    ("kueue.x-k8s.io", "workloads"): {"get", "create", "patch", "delete"},
    ("kueue.x-k8s.io", "workloads/status"): {"patch"},
}
LEADER_RIGHTS = {("coordination.k8s.io", "leases"): {"get", "create", "update"}}


def rights(role: Manifest) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            found[group, resource] |= set(rule["verbs"])
    return found


def named(manifests: list[Manifest], kind: str, name: str) -> list[Manifest]:
    return [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]


@needs_helm
def test_cluster_wide_the_operator_has_these_rights_and_no_others() -> None:
    manifests = case("s3")
    (role,) = named(manifests, "ClusterRole", "training-rlhfless")
    assert rights(role) == {**JOB_RIGHTS, **CLUSTER_RIGHTS}
    assert len(of_kind(manifests, "ClusterRoleBinding")) == 1
    roles = {role["metadata"]["name"]: role for role in of_kind(manifests, "Role")}
    assert set(roles) == {"training-rlhfless-leader", "training-rlhfless-preflight"}
    assert rights(roles["training-rlhfless-leader"]) == LEADER_RIGHTS
    assert roles["training-rlhfless-leader"]["rules"][1]["resourceNames"] == [Election("").name]
    (rule,) = roles["training-rlhfless-preflight"]["rules"]
    assert rule["verbs"] == ["get"] and len(rule["resourceNames"]) == 4


@needs_helm
def test_with_listed_namespaces_it_has_no_rights_elsewhere() -> None:
    manifests = case("namespaces")
    assert not named(manifests, "ClusterRole", "training-rlhfless") and not of_kind(manifests, "ClusterRoleBinding")
    roles = named(manifests, "Role", "training-rlhfless")
    assert {role["metadata"]["namespace"] for role in roles} == {"default", "kube-public"}
    assert all(rights(role) == {**JOB_RIGHTS, **KUEUE_RIGHTS} for role in roles)


@needs_helm
def test_one_namespace_needs_nothing_of_the_cluster_but_the_definition() -> None:
    scoped = {"ClusterRole", "ClusterRoleBinding"}
    manifests = case("one-namespace")
    assert not scoped & {manifest["kind"] for manifest in manifests}
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {NAMESPACE, None}


@needs_helm
def test_no_right_is_a_wildcard() -> None:
    for values in CASES:
        for manifest in rendered(values):
            for rule in manifest.get("rules", []):
                assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]


@needs_helm
def test_editors_and_viewers_of_namespaces_may_edit_and_view_jobs() -> None:
    (editor,) = named(case("s3"), "ClusterRole", "training-rlhfless-editor")
    (viewer,) = named(case("s3"), "ClusterRole", "training-rlhfless-viewer")
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregate}edit", f"{aggregate}admin"} <= set(editor["metadata"]["labels"])
    assert f"{aggregate}view" in viewer["metadata"]["labels"]
    assert {"create", "patch", "delete"} <= rights(editor)["rlhfless.io", "rlhfjobs"]
    assert set().union(*rights(viewer).values()) == {"get", "list", "watch"}


def test_the_preflight_looks_at_every_right_that_a_job_needs() -> None:
    asked = {(permission.group, permission.resource, permission.verb) for permission in PERMISSIONS}
    assert asked == {(group, resource, verb) for (group, resource), verbs in JOB_RIGHTS.items() for verb in verbs}


def test_the_security_page_lists_every_right() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (?:`([\w.-]+)`|core) \| `([\w/]+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    documented = {(group, resource): set(verbs.split(", ")) for group, resource, verbs in rows}
    granted = {**JOB_RIGHTS, **CLUSTER_RIGHTS, **KUEUE_RIGHTS, **LEADER_RIGHTS, ("", "configmaps"): {"get"}}
    assert documented == granted


# --- real API servers ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane with the namespaces and the kinds that the values speak of."""
    assert ASSETS is not None
    with control_plane(Path(ASSETS), tmp_path_factory.mktemp("control-plane")) as api:
        for name, labels in (
            ("knative-serving", {}),
            ("locked-down", {"pod-security.kubernetes.io/enforce": "restricted"}),
        ):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
            assert api.request("POST", "/api/v1/namespaces", namespace)[0] == 201
        yield api


def kubectl(kubeconfig: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(ASSETS) / "kubectl") if ASSETS else "kubectl"
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)


def dry_run(kubeconfig: str | Path, manifests: list[Manifest]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(manifests, file)
        file.flush()
        done = kubectl(kubeconfig, "apply", "--dry-run=server", "--validate=strict", "--filename", file.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(manifests)


def without_monitoring(manifests: list[Manifest]) -> list[Manifest]:
    """Without the kinds that only clusters with Prometheus' operator have."""
    return [manifest for manifest in manifests if manifest["kind"] not in MONITORING]


@needs_helm
@needs_assets
@cases
def test_an_api_server_takes_every_manifest(server: ApiServer, case: Path) -> None:
    dry_run(server.kubeconfig, without_monitoring(rendered(case)))


@needs_helm
@needs_cluster
@cases
def test_the_cluster_takes_every_manifest(case: Path) -> None:
    dry_run(os.environ["KUBECONFIG"], without_monitoring(rendered(case)))


@needs_helm
@needs_assets
def test_the_operators_pod_may_run_where_only_restricted_pods_may(server: ApiServer) -> None:
    template = the(case("s3"), "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    status, answer = server.request("POST", "/api/v1/namespaces/locked-down/pods?dryRun=All", pod)
    assert status == 201, answer


@needs_helm
@needs_assets
def test_an_upgrade_keeps_the_certificate_that_the_chart_has_made(server: ApiServer) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/kept-rlhfless-admission"
    values = ("--values", CHART / "ci" / "quick-release.yaml", "--set", "crds.install=false")
    found: list[tuple[Any, Any]] = []
    for seconds in ("5", "6"):
        change = ("--set", f"quickRelease.graceSeconds={seconds}")
        command = ["helm", "upgrade", "--install", "kept", CHART, "--namespace", NAMESPACE, *values, *change]
        done = subprocess.run([*command, "--kubeconfig", server.kubeconfig], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        configurations = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        _, configuration = server.request("GET", f"{configurations}/{NAMESPACE}.kept-rlhfless")
        authority = configuration["webhooks"][0]["clientConfig"]["caBundle"]
        found.append((server.request("GET", path)[1]["data"], authority))
    assert found[0] == found[1]
    assert found[0][0]["ca.crt"] == found[0][1]


@dataclass(frozen=True)
class Attempt:
    """Something that the operator may want to do."""

    verb: str
    group: str
    resource: str
    namespace: str


@needs_helm
@needs_assets
def test_an_api_server_allows_what_is_documented_and_refuses_the_rest(server: ApiServer) -> None:
    roles = [manifest for manifest in case("namespaces") if "rbac.authorization.k8s.io" in manifest["apiVersion"]]
    for manifest in roles:
        group = f"/apis/{manifest['apiVersion']}"
        place = f"/namespaces/{manifest['metadata']['namespace']}" if "namespace" in manifest["metadata"] else ""
        status, answer = server.request("POST", f"{group}{place}/{manifest['kind'].lower()}s", manifest)
        assert status == 201, answer

    def allowed(attempt: Attempt) -> bool:
        resource, _, subresource = attempt.resource.partition("/")
        attributes = {"verb": attempt.verb, "group": attempt.group, "resource": resource, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{NAMESPACE}:training-rlhfless",
                "resourceAttributes": {**attributes, "namespace": attempt.namespace},
            },
        }
        _, answer = server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
    for (group, resource), granted in {**JOB_RIGHTS, **KUEUE_RIGHTS}.items():
        for namespace in ("kube-public", "kube-system"):
            tried = {verb for verb in verbs if allowed(Attempt(verb, group, resource, namespace))}
            assert tried == (granted if namespace == "kube-public" else set()), (resource, namespace)
