"""Two jobs of different priorities that share one slot, by the operator. Knative is emulated."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfless_functions.api import GenerationRequest, PrepareRequest, RunRequest, Stage
from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.turns import slot_division
from rlhfless_operator.platforms.turns.slot_pool import SlotPool
from rlhfless_operator.platforms.turns.slot_users import Hope, SlotUser
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.knative_thread import knative_beside
from tests.clusters.slot_webhook import giving_slots
from tests.controller.operator_harness import QUICK, Jobs, RunningOperator, fresh_namespace, job_server
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no claims are made")

LIMITS = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
PRIORITIES = {"low": 0, "high": 10}
STEPS = 4


class ContestedSlot:
    """Lets no generation end before its own job's preparation and a task of the other job wait for the slot, for as
    long as the other job has tasks to come. So there is a choice whenever generation ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.jobs: dict[str, str] = {}
        """Names of the jobs by their unique ids."""
        self._waiting: dict[int, tuple[SlotUser, Stage]] = {}
        self._numbers = itertools.count()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note who waits."""
        acquire = SlotPool.acquire

        async def noting(pool: SlotPool, user: SlotUser, stage: Stage, hope: Hope, *, spare: bool = False) -> str:
            number = next(self._numbers)
            self._waiting[number] = (user, stage)
            try:
                return await acquire(pool, user, stage, hope, spare=spare)
            finally:
                del self._waiting[number]

        monkeypatch.setattr(SlotPool, "acquire", noting)

    def lingering(self, request: RunRequest) -> bool:
        """Whether a generation has to wait for others to wait."""
        name = job_of(self._folder, request)
        other = next(each for each in PRIORITIES if each != name)
        # A task whose pod has not started yet can't have the slot.
        waiting = {
            (self.jobs.get(user.job), stage)
            for user, stage in list(self._waiting.values())
            if user.free(stage) or user.asleep(stage)
        }
        prepares = (name, "preparation") in waiting
        contests = any(job == other for job, _ in waiting) or (self._folder / "runs" / other / "model").exists()
        return not (prepares and contests)


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return Emulation()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with job_server(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


@pytest.fixture
def jobs(server: ApiServer, emulation: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """A namespace whose jobs an operator runs, in a pool of one slot."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setattr(slot_division, "_ABANDONED_SECONDS", 1.0)
    with knative_beside(server, emulation) as knative, fresh_namespace(server) as jobs:
        knative.admit = giving_slots(knative.client)
        settings = ClusterSettings(
            functions_image="none",
            artifacts=str(tmp_path),
            ingress=knative.url,
            metrics_port=0,
            liveness_port=0,
            pools={"default": PoolSettings(gpus=1, device_class="gpu.test")},
        )
        running = RunningOperator(Operator(settings, knative_platforms, pacing=QUICK))
        try:
            yield jobs
        finally:
            running.stop()
        assert running.error is None, running.error


def test_at_every_change_of_hands_the_higher_priority_goes_first_and_the_lower_one_ends(
    jobs: Jobs, emulation: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = ContestedSlot(tmp_path / jobs.namespace)
    slot.install(monkeypatch)
    emulation.lingering = slot.lingering
    for name, priority in PRIORITIES.items():
        made = jobs.apply(small_job(name, steps=STEPS, pods=LIMITS, priority=priority))
        slot.jobs[made["metadata"]["uid"]] = name
    for name in PRIORITIES:
        status = jobs.wait_phase(name, "Succeeded", "Failed")
        assert (status["phase"], status["step"]) == ("Succeeded", STEPS), status
    assert sum(isinstance(request, GenerationRequest) for request in emulation.requests) == 2 * STEPS

    # An emulated pod takes its task when it is its turn: each task of the list had the slot after the one before.
    turns = [(job_of(tmp_path / jobs.namespace, request), type(request)) for request in emulation.requests]
    last = max(number for number, (job, _) in enumerate(turns) if job == "high")
    ends = [number for number, (_, stage) in enumerate(turns[:last]) if issubclass(stage, GenerationRequest)]
    assert {turns[number][0] for number in ends} == set(PRIORITIES), "there was a choice after both jobs' turns"
    for number in ends:
        (job, _), (next_job, next_stage) = turns[number : number + 2]
        # By how near a step's end is alone, the preparation of the same job would follow.
        assert next_job == "high", turns
        assert job == "low" or next_stage is PrepareRequest, turns


def job_of(folder: Path, request: RunRequest) -> str:
    """The name of the job that a request is of."""
    return next(name for name in PRIORITIES if request.result.startswith(f"{folder}/runs/{name}/"))
