"""What the chart grants is what the operator uses: no less, and nothing else.

A real API server with RBAC writes an audit log of what the operator asks for. The operator has the account, and the
very roles, that `helm template` renders; Knative and its pods are emulated. It takes jobs through everything that may
happen to them. Whoever removes a right from the chart sees `test_nothing_is_denied` fail, with the request that was
denied, and whoever adds one sees `test_every_right_is_used` fail.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane import ApiServer, control_plane, wait_until
from emulated_functions import Emulation
from knative_emulation import KnativeEmulation
from knative_thread import knative_beside
from kueue_stand_in import WORKLOADS, Kueue, queued
from operator_harness import (
    QUICK,
    Jobs,
    RunningOperator,
    condition,
    jobs_path,
    small_job,
    wait_for,
)
from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.cluster_settings import ClusterSettings
from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.controller.main import Operator, connect
from rlhfless_operator.crd import crd
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import PlatformUnavailableError, TaskFailedError
from rlhfless_operator.platforms.job_objects import JobObjects
from rlhfless_operator.platforms.manifests import JobIdentity, StageFunction
from rlhfless_operator.pods import PodsSpec
from rlhfless_operator.preflight import preflight
from rlhfless_operator.preflight.permissions import PERMISSIONS, Permission
from rlhfless_operator.spec import API_VERSION, KIND

ASSETS = os.environ.get("KUBEBUILDER_ASSETS")
CHART = Path(__file__).resolve().parents[1] / "charts" / "rlhfless"
HOME = "rlhfless"
"""The operator's namespace."""
FINALIZERS = Permission("rlhfless.io", "rlhfjobs/finalizers", "update")
"""No request of its own: API servers that enforce permissions on owner references look at it."""

pytestmark = [
    pytest.mark.skipif(
        ASSETS is None,
        reason="no API server writes down what the operator asks for: KUBEBUILDER_ASSETS names no etcd, kube-apiserver",
    ),
    pytest.mark.skipif(shutil.which("helm") is None, reason="the chart's roles are not rendered: there is no helm"),
]

BESIDES: Mapping[str, str] = {
    "apiextensions.k8s.io customresourcedefinitions": "get",
    " nodes": "list",
    " configmaps": "get",
    "coordination.k8s.io leases": "get create update",
    "kueue.x-k8s.io workloads": "get create patch delete",
    "kueue.x-k8s.io workloads/status": "patch",
}
"""Rights that are not needed in every namespace with jobs, or not in every installation."""
RIGHTS = sorted(
    {
        *PERMISSIONS,
        *(Permission(*name.split(" "), verb) for name, verbs in BESIDES.items() for verb in verbs.split()),
    },
    key=str,
)


def words(value: Any) -> str | None:
    return f"{value.verb} {value.resource}" if isinstance(value, Permission) else None


# --- what the chart renders ---


def rendered(release: str, **values: str) -> list[dict[str, Any]]:
    """The accounts, roles and bindings of a release."""
    sets = [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
    command = ["helm", "template", release, CHART, "--namespace", HOME, "--values", CHART / "ci" / "s3.yaml", *sets]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    return [made for made in yaml.safe_load_all(done.stdout) if made and made["kind"] in kinds]


def rights_of(manifests: list[dict[str, Any]]) -> set[Permission]:
    """What the operator's own roles grant."""
    bound = {made["roleRef"]["name"] for made in manifests if made["kind"].endswith("Binding")}
    return {
        Permission(*granted)
        for made in manifests
        if made["kind"].endswith("Role") and made["metadata"]["name"] in bound
        for rule in made["rules"]
        for granted in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


# --- the API server, and what it writes down ---


@dataclass
class Audit:
    """The API server's log of what accounts have asked for."""

    file: Path

    def of(self, account: str) -> Iterator[dict[str, Any]]:
        for line in self.file.read_text().splitlines():
            entry = json.loads(line)
            if entry["user"]["username"] == account and "objectRef" in entry:
                yield entry

    def used(self, account: str) -> dict[Permission, set[str]]:
        """Every right that was used, and in which namespaces."""
        used: dict[Permission, set[str]] = defaultdict(set)
        for entry in self.of(account):
            for permission in _rights(entry):
                used[permission].add(entry["objectRef"].get("namespace", ""))
        return used

    def denied(self, account: str) -> list[str]:
        """Requests that RBAC, or an admission plugin that asks it, has refused."""
        return [
            f"{entry['verb']} {entry['requestURI']}: {entry['responseStatus'].get('message', '')}"
            for entry in self.of(account)
            if entry.get("responseStatus", {}).get("code") == 403
        ]


def _rights(entry: Mapping[str, Any]) -> Iterator[Permission]:
    about = entry["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    verbs = [entry["verb"]]
    if entry["verb"] == "patch" and entry["responseStatus"]["code"] == 201:
        # To apply what is not there yet is allowed to whoever may also create it.
        verbs.append("create")
    for verb in verbs:
        yield Permission(about.get("apiGroup", ""), resource, verb)


@dataclass
class Cluster:
    """An API server with an emulated Knative and the chart's accounts."""

    server: ApiServer
    audit: Audit
    knative: KnativeEmulation
    emulation: Emulation
    folder: Path

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        group = f"/apis/{manifest['apiVersion']}" if "/" in manifest["apiVersion"] else f"/api/{manifest['apiVersion']}"
        namespace = manifest["metadata"].get("namespace")
        place = f"/namespaces/{namespace}" if namespace else ""
        status, answer = self.server.request("POST", f"{group}{place}/{manifest['kind'].lower()}s", manifest)
        assert status == 201, answer
        return dict(answer)

    def namespace(self, name: str) -> Jobs:
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return Jobs(self.server, name)

    def kubeconfig(self, account: str) -> Path:
        """That of a service account of the operator's namespace."""
        path = f"/api/v1/namespaces/{HOME}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        status, answer = self.server.request("POST", path, request)
        assert status == 201, answer
        content = yaml.safe_load(self.server.kubeconfig.read_text())
        content["users"][0]["user"]["token"] = answer["status"]["token"]
        file = self.folder / f"{account}.kubeconfig"
        file.write_text(yaml.safe_dump(content))
        return file

    def settings(self, *namespaces: str) -> ClusterSettings:
        return ClusterSettings(
            functions_image="none",
            namespaces=namespaces,
            files="/files",
            artifacts=str(self.folder),
            ingress=self.knative.url,
            operator_namespace=HOME,
            egress="restricted",
            metrics_port=0,
            liveness_port=0,
        )


POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": [f"system:serviceaccounts:{HOME}"]}, {"level": "None"}],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert ASSETS is not None
    folder = tmp_path_factory.mktemp("control-plane")
    (folder / "audit.yaml").write_text(yaml.safe_dump(POLICY))
    arguments = [
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
    ]
    emulation = Emulation()
    with control_plane(Path(ASSETS), folder, arguments) as server:
        for definition in (crd(), WORKLOADS):
            status, answer = server.request(
                "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition
            )
            assert status == 201, answer
        for path in (jobs_path(), "/apis/kueue.x-k8s.io/v1beta1/workloads"):
            wait_until(lambda path=path: server.request("GET", path), folder)
        with knative_beside(server, emulation) as knative:
            made = Cluster(server, Audit(folder / "audit.log"), knative, emulation, folder)
            for name in (HOME, "knative-serving"):
                made.namespace(name)
            for name in ("autoscaler", "defaults", "deployment", "features"):
                metadata = {"name": f"config-{name}", "namespace": "knative-serving"}
                made.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
            yield made


# --- what the operator goes through ---


@dataclass
class Held:
    """Lets a task wait."""

    chosen: Callable[[RunRequest], bool]
    reached: list[RunRequest] = field(default_factory=list)
    over: bool = False

    def __call__(self, request: RunRequest) -> bool:
        if self.over or not self.chosen(request):
            return False
        self.reached.append(request)
        return True


@contextmanager
def operator_of(cluster: Cluster, release: str, *namespaces: str) -> Iterator[str]:
    """The operator of a release, under its own account; yields the account's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig(f"{release}-rlhfless")))
        election = Election(HOME, duration=4, renewal=3, retry=1)
        settings = cluster.settings(*namespaces)
        running = RunningOperator(Operator(settings, knative_platforms, election=election, pacing=QUICK))
        try:
            yield f"system:serviceaccount:{HOME}:{release}-rlhfless"
        finally:
            running.stop()
        assert running.error is None, running.error


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> str:
    """The account of an operator with the chart's roles for the whole cluster, after all that jobs may go through."""
    for manifest in rendered("training", kueue__enabled="true"):
        cluster.create(manifest)
    with operator_of(cluster, "training") as name:
        asyncio.run(look_at_the_cluster(cluster))
        lives_to_its_deletion(cluster)
        loses_a_pod_and_lets_another_go(cluster)
        waits_for_room(cluster, name)
        is_changed_while_its_status_is_written(cluster, name)
        waits_in_a_queue_and_is_evicted(cluster)
    return name


async def look_at_the_cluster(cluster: Cluster) -> None:
    """The preflight, as `kubectl exec` into the operator's pod runs it."""
    async with connect() as client:
        findings = await preflight(client, cluster.settings())
    unknown = {finding.check for finding in findings if finding.verdict == "unknown"}
    assert unknown <= {"knative/version"}, findings
    (permissions,) = (finding for finding in findings if finding.check == "permissions")
    assert permissions.verdict == "ok", permissions


def lives_to_its_deletion(cluster: Cluster) -> None:
    """A job is applied, succeeds, and is deleted by the operator when its time is over."""
    jobs = cluster.namespace("life")
    jobs.apply(small_job("life", steps=2))
    status = jobs.wait_phase("life", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert "allow-zero-initial-scale" in condition(status, "ClusterReady")["message"], "the operator has looked itself"
    jobs.patch("life", {"spec": {"ttlAfterFinished": "0s"}})
    jobs.wait_gone("life")


def loses_a_pod_and_lets_another_go(cluster: Cluster) -> None:
    """A pod whose engine is lost is deleted, and a busy one is marked before an idle one is let go."""
    jobs = cluster.namespace("pods")
    lost: list[RunRequest] = []
    shares: list[str] = []

    def lose_an_engine(request: RunRequest) -> None:
        if request.task == "generate" and request.key.step == 1:
            shares.append(request.result)
        if request.task == "generate" and request.key.step == 2 and not lost:
            lost.append(request)
            raise TaskFailedError(Failed(reason="engine_lost", message="gone", retryable=True))

    held = Held(lambda request: request.task == "generate" and request.key.step == 1 and request.result == shares[0])
    cluster.emulation.before, cluster.emulation.holding = lose_an_engine, held
    try:
        generation = {"instances": {"min": 2, "max": 2}, "keepAlive": "0s"}
        jobs.apply(small_job("pods", steps=2, generation=generation, planning={"policy": "even"}))
        wait_for(lambda: marked(cluster, "pods"), lambda: f"no pod is marked: {jobs.status('job')}")
        held.over = True
        assert jobs.wait_phase("pods", "Succeeded", "Failed")["phase"] == "Succeeded", jobs.get("pods")
    finally:
        cluster.emulation.before, cluster.emulation.holding = lambda request: None, lambda request: False
    assert lost


def marked(cluster: Cluster, namespace: str) -> bool:
    """Whether a pod has a deletion cost."""
    _, answer = cluster.server.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    cost = "controller.kubernetes.io/pod-deletion-cost"
    return any(cost in pod["metadata"].get("annotations", {}) for pod in answer["items"])


def waits_for_room(cluster: Cluster, account: str) -> None:
    """A Revision is asked why it has no pods."""
    jobs = cluster.namespace("room")
    cluster.knative.room = 0
    asked = Permission("serving.knative.dev", "revisions", "get")
    try:
        jobs.apply(small_job("room", steps=1))
        wait_for(lambda: asked in cluster.audit.used(account))
    finally:
        cluster.knative.room = 1000
    assert jobs.wait_phase("room", "Succeeded", "Failed")["phase"] == "Succeeded", jobs.get("room")


def is_changed_while_its_status_is_written(cluster: Cluster, account: str) -> None:
    """A status is written for a version that is not the newest any more, and the job is read again."""
    jobs = cluster.namespace("changed")
    jobs.apply(small_job("changed", steps=200))
    again = Permission("rlhfless.io", "rlhfjobs", "get")
    deadline = time.monotonic() + 120
    while again not in cluster.audit.used(account):
        assert time.monotonic() < deadline, "no write met a conflict"
        for _ in range(50):
            jobs.patch("changed", {"metadata": {"annotations": {"note": uuid.uuid4().hex}}})
    jobs.delete("changed")
    jobs.wait_gone("changed")


def waits_in_a_queue_and_is_evicted(cluster: Cluster) -> None:
    """A job gets a Workload, gives its quota back after an eviction, and leaves the queue at its end."""
    jobs = cluster.namespace("queue")
    kueue = Kueue(cluster.server, "queue")
    held = Held(lambda request: request.task == "learn" and request.key.step == 2)
    cluster.emulation.holding = held
    try:
        jobs.apply(queued(small_job("queue", steps=2)))
        kueue.admit()
        wait_for(lambda: held.reached)
        kueue.evict()
        jobs.wait("queue", lambda status: condition(status, "Progressing").get("reason") == "Queued")
        wait_for(lambda: kueue.conditions().get("QuotaReserved") == "False")
        held.over = True
        kueue.admit()
        assert jobs.wait_phase("queue", "Succeeded", "Failed")["phase"] == "Succeeded", jobs.get("queue")
        wait_for(lambda: kueue.workload() is None)
    finally:
        cluster.emulation.holding = lambda request: False


# --- what came of it ---


def test_nothing_is_denied(cluster: Cluster, account: str) -> None:
    assert cluster.audit.denied(account) == []


@pytest.mark.parametrize("right", [right for right in RIGHTS if right != FINALIZERS], ids=words)
def test_every_right_is_used(cluster: Cluster, account: str, right: Permission) -> None:
    assert right in cluster.audit.used(account), "the chart grants what nothing uses"


def test_the_chart_grants_these_rights_and_no_others() -> None:
    assert rights_of(rendered("training", kueue__enabled="true")) == set(RIGHTS)


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (FINALIZERS, "cannot set blockOwnerDeletion"),
        (Permission("serving.knative.dev", "services", "create"), 'cannot create resource "services"'),
        (Permission("networking.k8s.io", "networkpolicies", "create"), 'cannot create resource "networkpolicies"'),
    ],
    ids=words,
)
def test_a_right_that_no_request_shows_is_needed(cluster: Cluster, right: Permission, words: str) -> None:
    release = f"without-{right.resource.replace('/', '-')}"
    for manifest in rendered(release):
        for rule in manifest.get("rules", []):
            if right.resource in rule["resources"]:
                rule["verbs"] = [verb for verb in rule["verbs"] if verb != right.verb] or ["get"]
        cluster.create(manifest)
    cluster.namespace(release)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig(f"{release}-rlhfless")))
        # A new role takes a moment to count.
        wait_for(lambda: words in (said := asyncio.run(refusal(cluster, release))) and said, lambda: words)


async def refusal(cluster: Cluster, namespace: str) -> str:
    """What the cluster says to whoever makes a job's objects."""
    identity = JobIdentity(namespace, "job", "0b1f", API_VERSION, KIND)
    function = StageFunction(identity, "generation", PodsSpec(), str(cluster.folder))
    async with connect() as client:
        knative = KnativeClient(client, field_manager="rlhfless")
        with pytest.raises(PlatformUnavailableError, match="grant it, as its chart does") as caught:
            await JobObjects(knative, identity, [function], cluster.settings(), patience=5.0).create()
    return str(caught.value)


def test_an_operator_of_one_namespace_needs_no_role_of_the_cluster(cluster: Cluster, account: str) -> None:
    jobs = cluster.namespace("scoped")
    manifests = rendered("scoped", namespaces="{scoped}", rbac__aggregate="false")
    assert not [made for made in manifests if made["kind"].startswith("Cluster")]
    for manifest in manifests:
        cluster.create(manifest)
    with operator_of(cluster, "scoped", "scoped") as scoped:
        jobs.apply(small_job("scoped", steps=1))
        assert jobs.wait_phase("scoped", "Succeeded", "Failed")["phase"] == "Succeeded", jobs.get("scoped")
    assert cluster.audit.denied(scoped) == []
    assert cluster.audit.used(scoped)[Permission("rlhfless.io", "rlhfjobs", "watch")] == {"scoped"}
