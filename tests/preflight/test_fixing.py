"""`rlhfless preflight --fix` on a real API server, as a person and as a script run it.

Nothing here is Knative but its ConfigMaps and a Deployment with its activator's name.
"""

import os
import pty
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator import preflight
from rlhfless_operator.controller.main import connect
from rlhfless_operator.errors import UserError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests.clusters.control_plane import ApiServer, control_plane
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("nothing is fixed on a real API server")

NAMES = ("autoscaler", "defaults", "deployment", "features")
CONTAINERS = [{"name": "activator", "image": "activator"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


class Knative:
    """A namespace with Knative's ConfigMaps as they are installed, and its activator."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.namespace = f"knative-{uuid.uuid4().hex[:6]}"
        self.settings = ClusterSettings(functions_image="functions", knative_namespace=self.namespace)
        self.create("/api/v1/namespaces", self.namespace)
        for name in NAMES:
            data = {"_example": "# what\n# could be\n", "of-somebody-else": "kept"}
            self.create(self.path("configmaps"), f"config-{name}", data=data)
        labels = {"app": "activator"}
        pod = {"metadata": {"labels": labels}, "spec": {"containers": CONTAINERS, "terminationGracePeriodSeconds": 600}}
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        self.create(f"/apis/apps/v1/namespaces/{self.namespace}/deployments", "activator", spec=spec)

    def path(self, kind: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}"

    def create(self, path: str, name: str, **rest: Any) -> Any:
        status, answer = self.server.request("POST", path, {"metadata": {"name": name}, **rest})
        assert status == 201, answer
        return answer

    def set(self, name: str, **data: str) -> None:
        path = f"{self.path('configmaps')}/config-{name}"
        assert self.server.request("PATCH", path, {"data": data}, "application/merge-patch+json")[0] == 200

    def data(self) -> dict[str, dict[str, str]]:
        """What the ConfigMaps say."""
        return {
            name: self.server.request("GET", f"{self.path('configmaps')}/config-{name}")[1]["data"] for name in NAMES
        }

    def versions(self) -> list[str]:
        objects = [f"{self.path('configmaps')}/config-{name}" for name in NAMES]
        objects.append(f"/apis/apps/v1/namespaces/{self.namespace}/deployments/activator")
        return [self.server.request("GET", path)[1]["metadata"]["resourceVersion"] for path in objects]

    def grace(self) -> int:
        answer = self.server.request("GET", f"/apis/apps/v1/namespaces/{self.namespace}/deployments/activator")[1]
        seconds: int = answer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return seconds


@pytest.fixture
def knative(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Knative:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    return Knative(server)


def command(knative: Knative, *options: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rlhfless_operator", "preflight", "--knative-namespace", knative.namespace, *options]
    return subprocess.run(line, stdin=stdin, capture_output=True, text=True, timeout=120)


def answering(knative: Knative, answer: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, who answers its question."""
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, f"{answer}\n".encode())
        return command(knative, "--fix", stdin=terminal)
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_script_fixes_all_and_a_second_time_nothing(knative: Knative) -> None:
    ended = command(knative, "--fix", "--yes")
    data = knative.data()
    assert data["autoscaler"]["allow-zero-initial-scale"] == "true"
    assert data["defaults"]["max-revision-timeout-seconds"] == "43200"
    assert (data["deployment"]["pod-is-always-schedulable"], data["deployment"]["default-affinity-type"]) == (
        "true",
        "none",
    )
    assert data["features"]["kubernetes.podspec-tolerations"] == "enabled"
    assert knative.grace() == 43200
    assert all({"_example", "of-somebody-else"} <= set(content) for content in data.values()), "a key was dropped"
    for line in (
        "+  allow-zero-initial-scale: 'true'",
        "configmap/config-features is changed",
        "deployment/activator is changed",
    ):
        assert line in ended.stdout
    for name in ("features", "autoscaler", "defaults", "deployment"):
        assert f"ok       knative/config-{name}" in ended.stdout, "it looks again afterwards"
    versions = knative.versions()
    again = command(knative, "--fix")
    assert "already has all of these settings" in again.stdout and "is changed" not in again.stdout
    assert knative.versions() == versions


def test_without_a_terminal_nothing_is_asked_and_nothing_changed(knative: Knative) -> None:
    versions = knative.versions()
    ended = command(knative, "--fix")
    assert ended.returncode == 1 and "give --yes to apply the changes" in ended.stderr
    assert "+  default-affinity-type: none" in ended.stdout, "what would be changed is shown"
    assert knative.versions() == versions


def test_a_person_is_asked(knative: Knative) -> None:
    versions = knative.versions()
    refused = answering(knative, "n")
    assert refused.returncode == 1 and "nothing was changed" in refused.stderr
    assert knative.versions() == versions
    agreed = answering(knative, "y")
    assert "Change this? [y/N]" in agreed.stdout and "deployment/activator is changed" in agreed.stdout
    assert knative.data()["autoscaler"]["allow-zero-initial-scale"] == "true"


def test_a_job_has_what_it_needs_set_too(knative: Knative, tiny_job: Any) -> None:
    volume = {"name": "scratch", "hostPath": "/scratch", "mountPath": "/scratch", "readOnly": True}
    command(knative, str(tiny_job(pods={"volumes": [volume]})), "--fix", "--yes")
    assert knative.data()["features"]["kubernetes.podspec-volumes-hostpath"] == "enabled"


async def fix(knative: Knative, agrees: Any = lambda: True) -> list[str]:
    """Fix it with the rights that KUBECONFIG gives; what was said."""
    said: list[str] = []
    async with connect() as client:
        await preflight.fix(client, knative.settings, job=None, say=said.append, agrees=agrees)
    return said


async def test_what_somebody_else_changes_meanwhile_is_not_changed_over(knative: Knative) -> None:
    def meanwhile() -> bool:
        knative.set("defaults", **{"revision-timeout-seconds": "500"})
        return True

    with pytest.raises(
        UserError,
        match=r"config-defaults was changed by somebody else .*; changed so far: configmap/config-autoscaler; run",
    ):
        await fix(knative, meanwhile)
    assert "max-revision-timeout-seconds" not in knative.data()["defaults"]
    assert "configmap/config-autoscaler is changed" not in await fix(knative), "the rest is done the second time"
    assert knative.data()["defaults"]["revision-timeout-seconds"] == "500"


async def test_who_may_not_change_all_of_it_changes_none_of_it(
    knative: Knative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_account(knative, ["get", "patch"], ["config-autoscaler", "config-defaults"], tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"you may not read Knative's settings .*ask Knative's administrator"):
        await fix(knative)
    as_account(knative, ["get"], [], tmp_path, monkeypatch)
    versions = knative.versions()
    with pytest.raises(
        UserError, match=r"you may not change configmap/config-deployment \(.*\); nothing was changed: ask"
    ):
        await fix(knative)
    assert knative.versions() == versions


def as_account(
    knative: Knative, verbs: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make KUBECONFIG lead to an account that has these rights to ConfigMaps, beside those that it had."""
    account, group = "engineer", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{knative.namespace}"
    knative.server.request("POST", knative.path("serviceaccounts"), {"metadata": {"name": account}})
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs, "resourceNames": names}
    role = knative.create(f"{group}/roles", f"role-{uuid.uuid4().hex[:6]}", rules=[rule])["metadata"]["name"]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": knative.namespace}
    knative.create(f"{group}/rolebindings", role, roleRef=reference, subjects=[subject])
    path = f"{knative.path('serviceaccounts')}/{account}/token"
    token = knative.server.request("POST", path, {"spec": {}})[1]["status"]["token"]
    content = yaml.safe_load(knative.server.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))


async def test_a_namespace_without_knative_is_named(knative: Knative) -> None:
    knative.settings = knative.settings.model_copy(update={"knative_namespace": "elsewhere"})
    with pytest.raises(UserError, match="namespace elsewhere has no ConfigMaps of Knative Serving; install it"):
        await fix(knative)


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--yes",), "--yes works only with --fix"), (("--fix", "--json"), "remove --json")],
)
def test_options_that_do_not_go_together_are_refused(knative: Knative, options: tuple[str, ...], message: str) -> None:
    ended = command(knative, *options)
    assert ended.returncode == 1 and message in ended.stderr
