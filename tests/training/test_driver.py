"""A driver from its lease to its last account: what a job that has ended is charged."""

import asyncio
import time
from pathlib import Path

import pytest

from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import parse_content
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.journal.step_journal import read_status
from rlhfless_operator.training.run import AvailableGpus
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.jobs import small_job


class LingeringPlatform(EmulatedPlatform):
    """A pod more, which has been on its way out for a minute when the job is over, and stays until it is told."""

    def __init__(self, on_state: StateListener) -> None:
        super().__init__(Emulation(task_seconds=0.01), on_state)
        self.tell = on_state

    async def close(self) -> None:
        await super().close()
        self.tell(StateChange("lingering", "learning", "draining", time.monotonic() - 60.0))

    def gone(self) -> None:
        self.tell(StateChange("lingering", "learning", "ended", time.monotonic()))


async def test_a_job_is_charged_for_its_instances_until_they_are_gone(tmp_path: Path) -> None:
    platforms: list[LingeringPlatform] = []

    def make_platform(on_state: StateListener) -> LingeringPlatform:
        platforms.append(LingeringPlatform(on_state))
        return platforms[0]

    folder = JobFolder(str(tmp_path))
    phases: list[str] = []

    async def on_finished() -> None:
        status = read_status(folder)
        assert status is not None and status.instance_seconds < 60
        phases.append(status.phase)
        asyncio.get_running_loop().call_later(0.2, platforms[0].gone)

    job = parse_content(small_job(), "job")
    gpus = AvailableGpus(ActorRange(1, 1))
    summary = await drive(job, folder, make_platform, LiveProgress(), gpus, on_finished=on_finished)
    assert phases == ["Succeeded"], "told once, before the last instance is gone"
    assert 60 < summary["instance_seconds"] < 120
    status = read_status(folder)
    assert status is not None
    assert status.instance_seconds == pytest.approx(summary["instance_seconds"], abs=0.001)


@pytest.mark.parametrize(("gpus", "learners", "follows"), [(None, 1, True), (1, 1, False), (2, 1, True), (2, 2, False)])
async def test_where_a_pool_has_too_few_gpus_for_all_stages_a_learner_waits_for_the_whole_batch(
    tmp_path: Path, gpus: int | None, learners: int, follows: bool
) -> None:
    found: list[bool] = []
    whole = SharedGpus(gpus, {"generation": 1, "learning": 1}) if gpus is not None else None
    await drive(
        parse_content(small_job(steps=1, learning={"instances": {"min": learners, "max": learners}}), "job"),
        JobFolder(str(tmp_path)),
        lambda on_state: EmulatedPlatform(Emulation(task_seconds=0.01), on_state),
        LiveProgress(),
        AvailableGpus(ActorRange(1, 1), whole=whole),
        on_open=lambda run, journal: found.append(run.requests.learns_in_pieces),
    )
    assert found == [follows]
