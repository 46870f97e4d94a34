"""The Helm chart on API servers, by dry runs.

KUBEBUILDER_ASSETS leads to a control plane of the tests' own, KUBECONFIG to a cluster.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import CHART, MONITORING, NAMESPACE, Manifest, case, cases, needs_helm, rendered, the
from tests.clusters.control_plane import ApiServer, asset, control_plane
from tests.prerequisites import HAS_API_SERVER, needs_api_server, needs_cluster

with_an_api_server = needs_api_server("the chart is not given to an API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane with the namespaces and the kinds that the values speak of."""
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        for name, labels in (
            ("knative-serving", {}),
            ("locked-down", {"pod-security.kubernetes.io/enforce": "restricted"}),
        ):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
            assert api.request("POST", "/api/v1/namespaces", namespace)[0] == 201
        yield api


def kubectl(kubeconfig: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = asset("kubectl") if HAS_API_SERVER else "kubectl"
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
    return [manifest for manifest in manifests if manifest["kind"] not in MONITORING]


@needs_helm
@with_an_api_server
@cases
def test_an_api_server_takes_every_manifest(server: ApiServer, case: Path) -> None:
    dry_run(server.kubeconfig, without_monitoring(rendered(case)))


@needs_helm
@needs_cluster("the chart is not given to a cluster")
@cases
def test_the_cluster_takes_every_manifest(case: Path) -> None:
    dry_run(os.environ["KUBECONFIG"], without_monitoring(rendered(case)))


@needs_helm
@with_an_api_server
def test_the_operators_pod_may_run_where_only_restricted_pods_may(server: ApiServer) -> None:
    template = the(case("s3"), "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    status, answer = server.request("POST", "/api/v1/namespaces/locked-down/pods?dryRun=All", pod)
    assert status == 201, answer


@needs_helm
@with_an_api_server
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


@needs_helm
@with_an_api_server
def test_the_notes_say_which_pools_take_turns(server: ApiServer) -> None:
    def notes(*values: str) -> str:
        command = ["helm", "install", "noted", CHART, "--namespace", NAMESPACE, "--dry-run=client", *values]
        done = subprocess.run([*command, "--kubeconfig", server.kubeconfig], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:\n")[2]

    found = notes("--values", str(CHART / "ci" / "slots.yaml"), "--set", "pools.spare.gpus=8")
    turns = "use the 16 GPUs of pool default in turns: ResourceClaims of DeviceClass gpu.nvidia.com, in groups of 4."
    assert turns in found
    assert "Each pod has GPUs of pool spare of its own" in found
    assert "in turns" not in notes("--set", "artifacts.uri=s3://training", "--set", "pools.spare.gpus=8")
