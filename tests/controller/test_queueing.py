"""Jobs in a queue of Kueue, on a real API server. Kueue itself is stood in for by `kueue_stand_in`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhfless_functions.api import RunRequest
from rlhfless_operator.controller.kueue import Admission
from rlhfless_operator.controller.queueing import pod_sets, within
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.kueue_stand_in import WORKLOADS, Kueue, queued
from tests.controller.api_server_jobs import jobs as jobs  # A fixture.
from tests.controller.operator_harness import Jobs, condition, job_server, running_operator, wait_for
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

with_a_server = needs_api_server("no Workload is queued on a real API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with job_server(tmp_path_factory.mktemp("control-plane"), definitions=[WORKLOADS]) as api:
        yield api


@pytest.fixture
def kueue(server: ApiServer, jobs: Jobs) -> Kueue:
    return Kueue(server, jobs.namespace)


@with_a_server
def test_a_job_waits_for_its_admission_and_leaves_the_queue_when_it_is_done(
    jobs: Jobs, kueue: Kueue, tmp_path: Path
) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        jobs.apply(queued(small_job(priority=7)))
        workload = wait_for(kueue.workload)
        assert (workload["spec"]["queueName"], workload["spec"]["priority"]) == ("gpus", 7)
        assert [pods["name"] for pods in workload["spec"]["podSets"]] == ["generation", "preparation", "learning"]
        assert workload["metadata"]["ownerReferences"][0]["kind"] == "RLHFJob"
        status = jobs.wait("job", lambda status: condition(status, "Progressing").get("reason") == "Queued")
        assert status["phase"] == "Pending"
        assert emulation.requests == []
        kueue.admit(generation=1, preparation=1, learning=1)
        assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
        wait_for(lambda: kueue.workload() is None)


@with_a_server
def test_an_evicted_job_stops_gives_its_quota_back_and_goes_on_later(jobs: Jobs, kueue: Kueue, tmp_path: Path) -> None:
    learning = []

    def hold_the_second_step(request: RunRequest) -> bool:
        learning.append(request.key)
        return request.key.stage == "learning" and request.key.step == 2 and len(emulation.tasks(root)) and evicting

    evicting = True
    emulation = Emulation(holding=hold_the_second_step)
    root = str(tmp_path / jobs.namespace / "runs" / "job")
    with running_operator(tmp_path, emulation):
        jobs.apply(queued(small_job(backoffLimit=0)))
        kueue.admit()
        jobs.wait("job", lambda status: status.get("step") == 1 and status.get("stage") == "learning")
        kueue.evict()
        status = jobs.wait("job", lambda status: condition(status, "Progressing").get("reason") == "Queued")
        assert (status["phase"], status["step"]) == ("Pending", 1)
        wait_for(lambda: kueue.conditions().get("QuotaReserved") == "False")
        assert kueue.conditions()["Requeued"] == "True"
        assert "admission" not in (kueue.workload() or {})["status"]
        assert emulation.opened == emulation.closed == 1
        evicting = False
        kueue.admit()
        status = jobs.wait_phase("job", "Succeeded", "Failed")
    assert (status["phase"], status["step"]) == ("Succeeded", 3)
    generated = [(key.step, key.part) for key in learning if key.stage == "generation"]
    assert len(generated) == len(set(generated)), "a step that was done before the eviction was done again"


@with_a_server
def test_a_suspended_job_leaves_the_queue_and_queues_anew(jobs: Jobs, kueue: Kueue, tmp_path: Path) -> None:
    with running_operator(tmp_path, Emulation(holding=lambda request: request.key.step == 2)):
        jobs.apply(queued(small_job()))
        kueue.admit()
        jobs.wait("job", lambda status: status.get("step") == 1)
        jobs.patch("job", {"spec": {"suspend": True}})
        jobs.wait_phase("job", "Suspended")
        wait_for(lambda: kueue.workload() is None)
        jobs.patch("job", {"spec": {"suspend": False}})
        wait_for(kueue.workload)
        jobs.wait("job", lambda status: condition(status, "Progressing").get("reason") == "Queued")


@with_a_server
def test_a_job_without_its_label_runs_and_has_no_workload(jobs: Jobs, kueue: Kueue, tmp_path: Path) -> None:
    with running_operator(tmp_path, Emulation(holding=lambda request: request.key.step == 2)):
        jobs.apply(queued(small_job()))
        wait_for(kueue.workload)
        jobs.patch("job", {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}})
        jobs.wait("job", lambda status: status.get("step") == 1)
        assert kueue.workload() is None


@with_a_server
def test_partial_admission_bounds_the_generation_instances(jobs: Jobs, kueue: Kueue, tmp_path: Path) -> None:
    emulation = Emulation()
    with running_operator(tmp_path, emulation):
        instances = {"instances": {"min": 1, "max": 4}}
        jobs.apply(queued(small_job(generation=instances, planning={"policy": "even"})))
        assert wait_for(kueue.workload)["spec"]["podSets"][0] | {"template": None} == {
            "name": "generation",
            "count": 4,
            "minCount": 1,
            "template": None,
        }
        kueue.admit(generation=2)
        assert jobs.wait_phase("job", "Succeeded", "Failed")["actors"] == 2


@with_a_server
def test_a_cluster_without_kueue_is_named(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch
) -> None:
    with job_server(tmp_path_factory.mktemp("bare-control-plane")) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        jobs = Jobs(api, "default")
        with running_operator(tmp_path, Emulation()):
            jobs.apply(queued(small_job()))
            status = jobs.wait("job", lambda status: condition(status, "Progressing").get("reason") == "Queued")
            assert "which this cluster does not have; remove the label" in status["message"]
            jobs.patch("job", {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}})
            assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"


def test_kueue_is_told_of_all_that_learn_together_and_of_all_that_may_prepare(tiny_job: Callable[..., Path]) -> None:
    file = tiny_job(learning={"instances": {"max": 3}}, preparation={"instances": {"max": 2}})
    _, preparation, learning = pod_sets(load_job(file), ActorRange(1, 1), ClusterSettings(functions_image="f:1"))
    assert (learning.count, learning.least) == (3, 3)
    assert (preparation.count, preparation.least) == (2, 2)


def test_kueue_is_told_of_the_most_pods_and_what_each_asks_for(tiny_job: Callable[..., Path]) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    file = tiny_job(pods={"tolerations": [toleration]}, generation={"instances": {"min": 2, "max": 6}})
    defaults = PodsSpec(resources=ResourcesSpec(limits={"nvidia.com/gpu": "1"}))
    generation, _, learning = pod_sets(
        load_job(file), ActorRange(2, 6), ClusterSettings(functions_image="f:1", pods=defaults)
    )
    assert (generation.count, generation.least, learning.count) == (6, 2, 1)
    assert generation.template["spec"] == {
        "containers": [{"name": "function", "image": "f:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        "restartPolicy": "Always",
        "tolerations": [toleration],
    }


@pytest.mark.parametrize(
    ("counts", "most"), [({"generation": 4}, 4), ({"generation": 1}, 2), ({"generation": 8}, 6), ({}, 6)]
)
def test_a_job_keeps_within_what_was_admitted(counts: dict[str, int], most: int) -> None:
    assert within(ActorRange(2, 6), Admission("admitted", "", counts)) == ActorRange(2, most)
