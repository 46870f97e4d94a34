"""The preflight asks clusters and stores.

KUBEBUILDER_ASSETS leads to a control plane of the tests' own, KUBECONFIG to a cluster.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from typer.testing import CliRunner

from rlhfless_operator.cli import app
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.preflight import ClusterLook, Finding, preflight, stages_of
from rlhfless_operator.preflight.cluster import check_store
from tests.clusters.control_plane import ApiServer, control_plane
from tests.prerequisites import needs_api_server, needs_cluster

SETTINGS = ClusterSettings(functions_image="functions")

with_api_server = needs_api_server("no API server is asked")


# --- the store ---


def test_a_store_that_takes_and_gives_back_is_good_and_nothing_stays_in_it(tmp_path: Path) -> None:
    assert check_store(str(tmp_path)).verdict == "ok"
    assert not list(tmp_path.iterdir())


def test_a_bucket_is_tried_too(s3: str) -> None:
    assert check_store(f"{s3}/runs").verdict == "ok"
    assert check_store("s3://no-such-bucket/runs").verdict == "error"


def test_a_store_that_refuses_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    finding = check_store(str(file))
    assert finding.verdict == "error" and "65532" in finding.remedy


def test_a_folder_of_the_pods_is_tried_in_a_pod() -> None:
    finding = check_store("/no/such/folder")
    assert finding.verdict == "unknown" and "kubectl exec" in finding.remedy


# --- real API servers ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane with Knative's ConfigMaps as installed, a node, a quota, and no definition of jobs."""
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        create(api, "/api/v1/namespaces", "Namespace", "knative-serving")
        labels = {"app.kubernetes.io/version": "1.21.0"}
        for name in ("features", "autoscaler", "defaults", "deployment"):
            path = "/api/v1/namespaces/knative-serving/configmaps"
            create(api, path, "ConfigMap", f"config-{name}", labels=labels, data={"_example": "..."})
        create(api, "/api/v1/nodes", "Node", "gpu")
        body = {"status": {"allocatable": {"nvidia.com/gpu": "1"}}}
        assert api.request("PATCH", "/api/v1/nodes/gpu/status", body, "application/merge-patch+json")[0] == 200
        spec = {"hard": {"requests.nvidia.com/gpu": "1"}}
        create(api, "/api/v1/namespaces/default/resourcequotas", "ResourceQuota", "team", spec=spec)
        yield api


def create(api: ApiServer, path: str, kind: str, name: str, labels: Any = None, **rest: Any) -> None:
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels or {}}, **rest}
    status, answer = api.request("POST", path, body)
    assert status == 201, answer


async def ask(kubeconfig: Path | str, settings: ClusterSettings, **more: Any) -> dict[str, Finding]:
    configuration = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    async with ApiClient(configuration) as client:
        return {finding.check: finding for finding in await preflight(client, settings, **more)}


@with_api_server
async def test_everything_that_a_fresh_cluster_lacks_is_found(server: ApiServer, tmp_path: Path) -> None:
    two_gpus = PodsSpec.model_validate(
        {"resources": {"limits": {"nvidia.com/gpu": 2}}, "tolerations": [{"operator": "Exists"}]}
    )
    update = {"pods": two_gpus, "artifacts": str(tmp_path), "request_timeout": 3600.0}
    settings = SETTINGS.model_copy(update=update)
    findings = await ask(server.kubeconfig, settings)
    assert {check: finding.verdict for check, finding in findings.items()} == {
        "volumes": "ok",
        "knative/version": "ok",
        "knative/config-features": "error",
        "knative/config-autoscaler": "error",
        "knative/config-defaults": "error",
        "knative/config-deployment": "warning",
        "capacity": "warning",
        "quota of default": "error",
        "permissions": "ok",
        "definition": "error",
        "turns": "ok",
        "release": "unknown",
        "artifacts": "ok",
    }


@with_api_server
async def test_an_asynchronous_job_is_told_of_a_pool_that_is_too_small(server: ApiServer, tiny_job: Any) -> None:
    job = load_job(tiny_job(**{"async": {}}, pods={"resources": {"limits": {"nvidia.com/gpu": "1"}}}))
    small = SETTINGS.model_copy(update={"pools": {"default": PoolSettings(gpus=2)}})
    assert (await ask(server.kubeconfig, small, job=job))["spec.async"].verdict == "error"
    assert "spec.async" not in await ask(server.kubeconfig, SETTINGS, job=job, namespace="unlimited")


@with_api_server
async def test_an_asynchronous_job_is_told_of_a_quota_that_is_too_small(server: ApiServer, tiny_job: Any) -> None:
    assert server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "narrow"}})[0] == 201
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "2"}}}
    assert server.request("POST", "/api/v1/namespaces/narrow/resourcequotas", quota)[0] == 201
    job = load_job(tiny_job(**{"async": {}}, pods={"resources": {"limits": {"nvidia.com/gpu": "1"}}}))
    finding = (await ask(server.kubeconfig, SETTINGS, job=job, namespace="narrow"))["spec.async"]
    assert (finding.verdict, "quota gpus of the namespace allows 2" in finding.message) == ("error", True)


@with_api_server
async def test_many_jobs_are_looked_at_with_the_requests_of_one(server: ApiServer) -> None:
    configuration = Configuration()
    await config.load_kube_config(config_file=str(server.kubeconfig), client_configuration=configuration)
    asked = []
    async with ApiClient(configuration) as client:
        request = client.rest_client.request

        async def counted(method: str, url: str, **rest: Any) -> Any:
            asked.append(url)
            return await request(method, url, **rest)

        client.rest_client.request = counted
        look = ClusterLook(client, SETTINGS)
        stages = stages_of(SETTINGS, None, "default")
        both = await asyncio.gather(*(look.at_job(stages, "default") for _ in range(20)))
        one = [*both[0], *await look.at_installation()]
        assert {finding.check for finding in one} >= {"knative/version", "capacity", "quota of default", "permissions"}
        assert all(findings == both[0] for findings in both)
        before = len(asked)
        await look.at_job(stages, "default")
        await look.at_installation()
        assert len(asked) == before
        forgetful = ClusterLook(client, SETTINGS, memory=0.0)
        await forgetful.at_job(stages, "default")
        await forgetful.at_job(stages, "default")
        assert len(asked) == before + 2 * 6, "four ConfigMaps, nodes and quotas, twice"


@with_api_server
async def test_a_pool_with_a_device_class_is_compared_with_what_there_is(server: ApiServer, tmp_path: Path) -> None:
    def settings(**pool: Any) -> ClusterSettings:
        pods = PodsSpec.model_validate({"resources": {"limits": {"nvidia.com/gpu": 2}}})
        pools = {"default": PoolSettings.model_validate({"gpus": 4, "deviceClass": "gpu.test", **pool})}
        return SETTINGS.model_copy(update={"pods": pods, "pools": pools, "artifacts": str(tmp_path)})

    findings = await ask(server.kubeconfig, settings())
    assert "turns" not in findings
    assert "the cluster has none" in findings["pool default"].message
    assert findings["instances in pool default"].verdict == "error", "two GPUs a pod, and groups of one"
    api = "/apis/resource.k8s.io/v1"
    create_at_v1(server, f"{api}/deviceclasses", "DeviceClass", "gpu.test", DEVICE_CLASS)
    create_at_v1(server, f"{api}/resourceslices", "ResourceSlice", "gpu", RESOURCE_SLICE)
    findings = await ask(server.kubeconfig, settings(deviceClass="gpu.other"))
    assert "the cluster has gpu.test" in findings["pool default"].message
    findings = await ask(server.kubeconfig, settings(gpusPerGroup=2))
    assert {name: found.verdict for name, found in findings.items() if "pool" in name} == {
        "pool default": "warning",
        "instances in pool default": "ok",
    }
    assert "offer 2 devices of gpu.test in groups of 2" in findings["pool default"].message
    findings = await ask(server.kubeconfig, SETTINGS)
    assert "the cluster has devices of DeviceClass gpu.test" in findings["turns"].message


@with_api_server
async def test_a_server_without_claims_is_told_so(tmp_path: Path) -> None:
    pools = {"default": PoolSettings(gpus=4, device_class="gpu.test")}
    with control_plane(tmp_path, ["--runtime-config=resource.k8s.io/v1=false"]) as older:
        findings = await ask(older.kubeconfig, SETTINGS.model_copy(update={"pools": pools}))
        assert findings["pool default"].verdict == "error"
        assert "has no resource.k8s.io/v1" in findings["pool default"].message
        findings = await ask(older.kubeconfig, SETTINGS)
        assert "but the API server (v1." in findings["turns"].message


DEVICE_CLASS = {"selectors": [{"cel": {"expression": "device.driver == 'gpu.test'"}}]}
RESOURCE_SLICE = {
    "driver": "gpu.test",
    "nodeName": "gpu",
    "pool": {"name": "gpu", "generation": 1, "resourceSliceCount": 1},
    "devices": [{"name": f"gpu-{index}"} for index in range(3)],
}


def create_at_v1(server: ApiServer, path: str, kind: str, name: str, spec: dict[str, Any]) -> None:
    body = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    status, answer = server.request("POST", path, body)
    assert status == 201, answer


@with_api_server
async def test_permissions_of_the_operators_account_are_looked_at(server: ApiServer) -> None:
    settings = SETTINGS.model_copy(update={"namespaces": ("default",)})
    findings = await ask(server.kubeconfig, settings, service_account="rlhfless/rlhfless")
    assert findings["permissions"].verdict == "error" and "in namespace default" in findings["permissions"].message


@with_api_server
async def test_the_quotas_of_a_served_namespace_are_looked_at(server: ApiServer) -> None:
    findings = await ask(server.kubeconfig, SETTINGS.model_copy(update={"namespaces": ("team-a", "default")}))
    assert "quota of team-a" in findings and "quota of default" not in findings


@with_api_server
async def test_a_cluster_without_knative_is_told_so(server: ApiServer) -> None:
    settings = SETTINGS.model_copy(update={"knative_namespace": "elsewhere"})
    findings = await ask(server.kubeconfig, settings)
    assert findings["knative"].verdict == "error" and "knative.namespace" in findings["knative"].remedy


@with_api_server
async def test_what_may_not_be_read_is_unknown(server: ApiServer, tmp_path: Path) -> None:
    content = yaml.safe_load(server.kubeconfig.read_text())
    content["users"][0]["user"] = {}
    anonymous = tmp_path / "kubeconfig"
    anonymous.write_text(yaml.safe_dump(content))
    findings = await ask(anonymous, SETTINGS)
    assert {
        check: found.verdict for check, found in findings.items() if check not in ("artifacts", "volumes")
    } == dict.fromkeys(
        ("knative", "capacity", "quota of default", "permissions", "definition", "turns", "release"), "unknown"
    )


def test_no_kubeconfig_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = CliRunner().invoke(app, ["preflight"])
    assert result.exit_code == 1 and result.output.startswith("error: no cluster is configured")
    assert not caplog.records, "logs would stand beside it"


@pytest.mark.slow
def test_no_api_server_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    content = {"server": "http://127.0.0.1:1"}
    file = {
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": content}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "users": [{"name": "it", "user": {}}],
    }
    (tmp_path / "none").write_text(yaml.safe_dump(file))
    result = CliRunner().invoke(app, ["preflight"])
    assert result.exit_code == 1 and "the API server can't be reached" in result.output


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFLESS_REQUEST_TIMEOUT", "soon")
    result = CliRunner().invoke(app, ["preflight"])
    assert result.exit_code == 1 and "RLHFLESS_REQUEST_TIMEOUT" in result.output


@needs_cluster("no cluster is looked at")
def test_the_command_looks_at_the_cluster_that_kubeconfig_names() -> None:
    result = CliRunner().invoke(app, ["preflight", "--json"])
    findings = {finding["check"]: finding for finding in json.loads(result.output)}
    assert result.exit_code == int(any(finding["verdict"] == "error" for finding in findings.values()))
    assert findings["knative/version"]["verdict"] == "ok"
    assert findings["permissions"]["verdict"] == "ok"
