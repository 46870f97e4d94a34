"""What the chart grants is what the operator uses: no less, and nothing else.

A real API server with RBAC writes an audit log of what the operator asks for. The operator has the account, and the
very roles, that `helm template` renders; Knative and its pods are emulated. It takes jobs through everything that may
happen to them. Whoever removes a right from the chart sees `test_nothing_is_denied` fail, with the request that was
denied, and whoever adds one sees `test_every_right_is_used` fail.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.controller.main import Operator, connect
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import API_VERSION, KIND
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import PlatformUnavailableError, TaskFailedError
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.pods import stage_pods
from rlhfless_operator.platforms.pods.job_objects import JobObjects
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction
from rlhfless_operator.platforms.turns import slot_pool
from rlhfless_operator.preflight import preflight
from rlhfless_operator.preflight.permissions import PERMISSIONS, TURNS_PERMISSIONS, Permission
from tests.charts.audited_cluster import HOME, Cluster, audited_cluster
from tests.charts.rendering import CHART, rendered
from tests.clusters.emulated_functions import Held
from tests.clusters.kueue_stand_in import Kueue, queued
from tests.clusters.slot_webhook import giving_slots
from tests.controller.operator_harness import QUICK, RunningOperator, condition, wait_for
from tests.jobs import small_job
from tests.prerequisites import needs_api_server, needs_helm

FINALIZERS = Permission("rlhfless.io", "rlhfjobs/finalizers", "update")
"""No request of its own: API servers that enforce permissions on owner references look at it."""

pytestmark = [
    needs_api_server("no API server writes down what the operator asks for"),
    needs_helm("the chart's roles are not rendered"),
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


def accounts_and_roles(release: str, **values: str) -> list[dict[str, Any]]:
    """With the roles' bindings."""
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    manifests = rendered(CHART / "ci" / "s3.yaml", release=release, namespace=HOME, **values)
    return [made for made in manifests if made["kind"] in kinds]


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


def grant(cluster: Cluster, release: str, manifests: list[dict[str, Any]]) -> None:
    """Make them, and wait until they count: an API server takes a moment to know of a new role."""
    for manifest in manifests:
        cluster.create(manifest)
    account = f"{release}-rlhfless"
    discovery = {"path": "/apis", "verb": "get"}
    wait_for(lambda: cluster.allows(account, nonResourceAttributes=discovery), lambda: "discovery")
    rules = {(made["kind"], made["metadata"]["name"]): made["rules"] for made in manifests if "rules" in made}
    for binding in manifests:
        reference = binding.get("roleRef", {})
        for rule in rules.get((reference.get("kind"), reference.get("name")), []):
            resource, _, subresource = rule["resources"][0].partition("/")
            attributes = {
                "group": rule["apiGroups"][0], "resource": resource, "subresource": subresource,
                "verb": rule["verbs"][0], "namespace": binding["metadata"].get("namespace", ""),
            }  # fmt: skip
            if "resourceNames" in rule:
                attributes["name"] = rule["resourceNames"][0]
            wait_for(partial(cluster.allows, account, resourceAttributes=attributes), partial(str, attributes))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with audited_cluster(tmp_path_factory.mktemp("control-plane")) as made:
        yield made


# --- what the operator goes through ---


@contextmanager
def operator_of(cluster: Cluster, release: str, *namespaces: str, **settings: Any) -> Iterator[str]:
    """The operator of a release, under its own account; yields the account's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig(f"{release}-rlhfless")))
        election = Election(HOME, duration=4, renewal=3, retry=1)
        own = cluster.settings(*namespaces).model_copy(update=settings)
        running = RunningOperator(Operator(own, knative_platforms, election=election, pacing=QUICK))
        try:
            yield f"system:serviceaccount:{HOME}:{release}-rlhfless"
        finally:
            running.stop()
        assert running.error is None, running.error


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> str:
    """The account of an operator with the chart's roles for the whole cluster, after all that jobs may go through."""
    grant(cluster, "training", accounts_and_roles("training", kueue__enabled="true"))
    with operator_of(cluster, "training") as name:
        asyncio.run(look_at_the_cluster(cluster))
        lives_to_its_deletion(cluster)
        loses_a_pod_and_lets_another_go(cluster)
        waits_for_room(cluster, name)
        waits_for_a_node(cluster, name)
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


def waits_for_a_node(cluster: Cluster, account: str) -> None:
    """A node does not prepare a pod, and the pod's events are read."""
    jobs = cluster.namespace("node")
    statuses = {"PodScheduled": "True", "PodReadyToStartContainers": "False"}
    conditions = [{"type": kind, "status": status} for kind, status in statuses.items()]
    cluster.knative.pod_status = {"phase": "Pending", "conditions": conditions}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_pods, "_PREPARATION_SECONDS", 0.2)
        try:
            jobs.apply(small_job("node", steps=1))
            wait_for(lambda: Permission("", "events", "list") in cluster.audit.used(account))
        finally:
            cluster.knative.pod_status = None
    jobs.delete("node")
    jobs.wait_gone("node")


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
    assert rights_of(accounts_and_roles("training", kueue__enabled="true")) == set(RIGHTS)


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
    for manifest in accounts_and_roles(release):
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
    """Warnings of the cluster about a job's objects."""
    identity = JobIdentity(namespace, "job", "0b1f", API_VERSION, KIND)
    function = StageFunction(identity, "generation", PodsSpec(), str(cluster.folder))
    async with connect() as client:
        knative = KnativeClient(client, field_manager="rlhfless")
        with pytest.raises(PlatformUnavailableError, match="grant it, as the chart does") as caught:
            await JobObjects(knative, identity, [function], cluster.settings(), patience=5.0).create()
    return str(caught.value)


def test_an_operator_of_one_namespace_needs_no_role_of_the_cluster(cluster: Cluster, account: str) -> None:
    jobs = cluster.namespace("scoped")
    manifests = accounts_and_roles("scoped", namespaces="{scoped}", rbac__aggregate="false")
    assert not [made for made in manifests if made["kind"].startswith("Cluster")]
    grant(cluster, "scoped", manifests)
    with operator_of(cluster, "scoped", "scoped") as scoped:
        jobs.apply(small_job("scoped", steps=1))
        assert jobs.wait_phase("scoped", "Succeeded", "Failed")["phase"] == "Succeeded", jobs.get("scoped")
    assert cluster.audit.denied(scoped) == []
    assert cluster.audit.used(scoped)[Permission("rlhfless.io", "rlhfjobs", "watch")] == {"scoped"}


DEVICES = {Permission("resource.k8s.io", resource, "list") for resource in ("deviceclasses", "resourceslices")}
"""For the preflight to count what pods use in turns: devices belong to no namespace."""


@pytest.mark.parametrize(
    ("release", "namespaces", "turns"),
    [("turns", "{turns}", {*TURNS_PERMISSIONS}), ("all-turns", "null", {*TURNS_PERMISSIONS, *DEVICES})],
    ids=["in one namespace", "cluster-wide"],
)
def test_where_pods_use_gpus_in_turns_the_rights_for_that_are_granted_and_used(
    cluster: Cluster,
    account: str,
    release: str,
    namespaces: str,
    turns: set[Permission],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_pool, "_KEPT_SECONDS", 0.1)
    jobs = cluster.namespace(release)
    pool = {"pools__default__gpus": "2", "pools__default__deviceClass": "gpu.test"}
    manifests = accounts_and_roles(release, namespaces=namespaces, rbac__aggregate="false", **pool)
    assert rights_of(manifests) - rights_of(accounts_and_roles("training")) == turns
    grant(cluster, release, manifests)
    cluster.knative.admit = giving_slots(cluster.knative.client)
    pools = {"default": PoolSettings(gpus=2, device_class="gpu.test")}
    only = [release] if namespaces != "null" else []
    try:
        with operator_of(cluster, release, *only, pools=pools) as name:
            limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
            jobs.apply(small_job(release, steps=2, pods=limits))
            status = jobs.wait_phase(release, "Succeeded", "Failed")
            assert status["phase"] == "Succeeded", status
            wait_for(lambda: cluster.audit.used(name).keys() >= turns)
            if not only:
                told = condition(status, "ClusterReady")
                assert "pools.default.deviceClass is gpu.test, but there is no such DeviceClass" in told["message"]
    finally:
        cluster.knative.admit = None
    assert cluster.audit.denied(name) == []
