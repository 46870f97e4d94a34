"""Where the real kube-scheduler puts a job's pods: on nodes that are only objects, with the patch of the webhook."""

import subprocess
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from rlhfless_operator.planner.pools.placement import HOSTNAME, TOPOLOGY_KEYS
from rlhfless_operator.platforms.pods.affinity import placement_patch
from tests.clusters.control_plane import ApiServer, control_plane
from tests.clusters.json_patch import patched
from tests.prerequisites import needs_api_server, needs_scheduler

pytestmark = [needs_api_server("no pod is placed"), needs_scheduler("no pod is placed")]

ZONE = TOPOLOGY_KEYS[1]
GPUS = 4
"""Of a node."""
MERGE = "application/merge-patch+json"
_NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane with a scheduler, and two zones of three nodes."""
    folder = tmp_path_factory.mktemp("control-plane")
    with control_plane(folder) as api, (folder / "kube-scheduler.log").open("wb") as log:
        arguments = [f"--kubeconfig={api.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        scheduler = subprocess.Popen(["kube-scheduler", *arguments], stdout=log, stderr=subprocess.STDOUT)
        try:
            for zone in "ab":
                for number in range(3):
                    make_node(api, f"{zone}{number}", zone)
            yield api
        finally:
            scheduler.terminate()
            scheduler.wait()


def make_node(api: ApiServer, name: str, zone: str) -> None:
    labels = {HOSTNAME: name, ZONE: zone}
    status, answer = api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    assert status == 201, answer
    # A new node has a taint until its kubelet is ready.
    has = {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    changes = {"": {"spec": {"taints": None}}, "/status": {"status": {"allocatable": has, "capacity": has}}}
    for part, change in changes.items():
        status, answer = api.request("PATCH", f"/api/v1/nodes/{name}{part}", change, MERGE)
        assert status == 200, answer


class Job:
    """Pods of one job, each of a stage's ReplicaSet, as Knative makes them."""

    def __init__(self, api: ApiServer, *, placement: bool) -> None:
        self._api = api
        self._keys = TOPOLOGY_KEYS if placement else ()
        self._name = f"job{next(_NUMBERS)}"
        self._owners: dict[str, str] = {}

    def start(self, stage: str, node: str | None = None) -> str:
        """Make a pod with one GPU; on which node it is then."""
        labels = {"rlhfless.io/job": self._name, "rlhfless.io/stage": stage}
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{self._name}-{stage}", "controller": True}
        metadata = {
            "name": f"{self._name}-{stage}-{next(_NUMBERS)}",
            "labels": labels,
            "ownerReferences": [{**owner, "uid": self._owner(stage, labels)}],
        }
        resources = {"requests": {"cpu": "6", "memory": "60Gi"}, "limits": {"nvidia.com/gpu": "1"}}
        spec: dict[str, Any] = {"containers": [{"name": "function", "image": "x", "resources": resources}]}
        if node is not None:
            spec["nodeSelector"] = {HOSTNAME: node}
        pod = {"metadata": metadata, "spec": spec}
        pods = "/api/v1/namespaces/default/pods"
        status, answer = self._api.request("POST", pods, patched(pod, placement_patch(pod, self._keys)))
        assert status == 201, answer
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _, answer = self._api.request("GET", f"{pods}/{metadata['name']}")
            if found := answer["spec"].get("nodeName"):
                return str(found)
            time.sleep(0.02)
        pytest.fail(f"no node for {metadata['name']}: {answer['status']}")

    def _owner(self, stage: str, labels: dict[str, str]) -> str:
        if stage not in self._owners:
            template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "function", "image": "x"}]}}
            spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
            made = {"metadata": {"name": f"{self._name}-{stage}"}, "spec": spec}
            status, answer = self._api.request("POST", "/apis/apps/v1/namespaces/default/replicasets", made)
            assert status == 201, answer
            self._owners[stage] = answer["metadata"]["uid"]
        return self._owners[stage]


@pytest.fixture(autouse=True)
def empty(server: ApiServer) -> Iterator[None]:
    """The cluster is empty again after a test."""
    yield
    server.request("DELETE", "/api/v1/namespaces/default/pods?gracePeriodSeconds=0")


def test_generation_fills_the_learners_node_and_then_one_more_of_its_zone(server: ApiServer) -> None:
    job = Job(server, placement=True)
    learner = job.start("learning")
    near = [job.start("generation") for _ in range(GPUS - 1)]
    beyond = [job.start("generation") for _ in range(GPUS)]
    assert set(near) == {learner}
    (second,) = set(beyond)
    assert second != learner and second[0] == learner[0], "names begin with their zone"


def test_a_learner_goes_to_its_generation_and_preparation_follows(server: ApiServer) -> None:
    job = Job(server, placement=True)
    (node,) = {job.start("generation") for _ in range(GPUS - 2)}
    assert job.start("learning") == node
    assert job.start("preparation") == node


def test_a_pod_that_finds_no_room_near_the_others_runs_elsewhere(server: ApiServer) -> None:
    job = Job(server, placement=True)
    job.start("learning", "a0")
    nodes = [job.start("generation") for _ in range(6 * GPUS - 1)]
    assert {node[0] for node in nodes[: 3 * GPUS - 1]} == {"a"}, "the learner's zone is filled first"
    assert {node: nodes.count(node) for node in ("b0", "b1", "b2")} == dict.fromkeys(("b0", "b1", "b2"), GPUS)


def test_jobs_do_not_attract_each_other(server: ApiServer) -> None:
    one, other = Job(server, placement=True), Job(server, placement=True)
    first, second = one.start("learning"), other.start("learning")
    assert first != second, "Kubernetes takes the emptiest node"
    assert {one.start("generation") for _ in range(2)} == {first}
    assert {other.start("generation") for _ in range(2)} == {second}


def test_without_placement_kubernetes_spreads_pods(server: ApiServer) -> None:
    job = Job(server, placement=False)
    assert len({job.start("generation") for _ in range(4)}) == 4
