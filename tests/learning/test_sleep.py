"""A learner that gives the device's memory back between steps, and takes the same steps."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.api.metrics import LEARNING_METRICS
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning import learner as learner_module
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.offload import relocate
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import LearningSettings, LoraSettings, OptimizerSettings
from tests.learning.jobs import PPO, Job, assert_equal, context, job_of, processes_beside

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("warm_start")

JOBS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": PPO},
    "muon": {"optimizer": OptimizerSettings(name="muon", learning_rate=1e-3)},
    "an adapter with dropout": {"dtype": "bfloat16", "lora": LoraSettings(rank=2, dropout=0.2)},
    "optimizer on the host": {"optimizer": OptimizerSettings(learning_rate=1e-3, offload=True)},
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Job:
    """Two steps of it are taken and published."""
    job = job_of(tmp_path, tiny_model, **JOBS[request.param])
    job.undisturbed(2)
    return job


def storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors of this process, by where it is."""
    gc.collect()
    # A compiler's, which an earlier test may have left, have no memory.
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found if each.nbytes}


def offloaded(state: TrainingState) -> set[int]:
    """Where the optimizers' own memory is, if they keep it on the host."""
    held = [
        tensor
        for optimizer in (state.policy_optimizer, state.critic_optimizer)
        if optimizer is not None and optimizer._settings.offload
        for one in optimizer._optimizers
        for own, moments in one.state.items()
        for tensor in (own, *moments.values())
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def test_sleeps_between_steps_change_no_bit(job: Job) -> None:
    learner = Learner()
    learner.sleep()
    for step in (1, 2):
        result = learner.run(job.request(step, "slept"), context())
        learner.sleep()
        learner.sleep()
        assert_equal(job.published(step, "slept"), job.published(step))
    assert "seconds/load" not in result.metrics, "the state was in memory all the time"


@pytest.mark.slow
def test_a_state_that_has_moved_left_nothing_behind_and_takes_the_same_steps(job: Job) -> None:
    """To another device and back is to other memory and back."""
    before = storages()
    learner = Learner()
    learner.run(job.request(1, "moved"), context())
    assert learner._state is not None
    own = {place: storage for place, storage in storages().items() if place not in before}
    assert sum(each.nbytes() for each in own.values()) >= sum(
        each.nbytes for each in learner._state.policy.parameters()
    )
    relocate(learner._state, torch.clone)
    # The old memory is still held here, so none of it has been given to anything else.
    assert own.keys() & storages().keys() == own.keys() & offloaded(learner._state)
    learner.run(job.request(2, "moved"), context())
    assert_equal(job.published(2, "moved"), job.published(2))


def test_what_the_optimizer_keeps_on_the_host_stays_there(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS["optimizer on the host"])
    learner = Learner()
    learner.run(job.request(1), context())
    assert learner._state is not None
    before = offloaded(learner._state)
    assert len(before) >= 3 * len(list(learner._state.policy.parameters()))
    relocate(learner._state, torch.clone)
    assert offloaded(learner._state) == before


class Elsewhere:
    """A device that is not the host: a state leaves it for other memory, and comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves: list[str] = []
        monkeypatch.setattr(learner_module, "move", self._move)
        monkeypatch.setattr(Ranks, "device", torch.device("cpu", 0))
        monkeypatch.setattr(TrainingState, "device", property(lambda state: self._where))
        self._where = torch.device("cpu", 0)

    def _move(self, state: TrainingState, device: torch.device) -> None:
        self.moves.append(str(device))
        self._where = device
        relocate(state, torch.clone)


def test_a_state_that_left_the_device_is_back_on_it_before_the_next_step(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model, algorithm=PPO)
    job.undisturbed(2)
    elsewhere, learner = Elsewhere(monkeypatch), Learner()
    first = learner.run(job.request(1, "slept"), context())
    assert elsewhere.moves == []
    learner.sleep()
    assert elsewhere.moves == ["cpu"]
    told: list[tuple[str, int]] = []
    waking = TaskContext(emit=lambda event: told.append((event.event, len(elsewhere.moves))), asleep=True)
    second = learner.run(job.request(2, "slept"), waking)
    assert elsewhere.moves == ["cpu", "cpu:0"]
    assert told == [("awake", 2)]
    assert "seconds/wake" in second.metrics
    assert "seconds/wake" not in first.metrics
    assert LEARNING_METRICS.keys() >= {"seconds/wake"}
    assert_equal(job.published(2, "slept"), job.published(2))


def test_a_state_that_could_not_be_moved_is_rebuilt_and_not_used(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model)
    job.undisturbed(2)
    learner = Learner()
    learner.run(job.request(1, "again"), context())

    def half(state: TrainingState, device: torch.device) -> None:
        state.policy_unit._apply(torch.zeros_like)
        raise MemoryError("the host has no room")

    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "move", half)
        with pytest.raises(MemoryError):
            learner.sleep()
    result = learner.run(job.request(2, "again"), context())
    assert "seconds/replay" in result.metrics
    assert_equal(job.published(2, "again"), job.published(2))


@pytest.fixture
def together() -> Iterator[Learner]:
    """A learner that has a process beside it."""
    learner = Learner()
    yield learner
    learner.close()


@pytest.mark.usefixtures("nothing_is_left_behind")
def test_several_processes_sleep_together(tmp_path: Path, tiny_model: Path, together: Learner) -> None:
    job = job_of(tmp_path, tiny_model, learning=LearningSettings(processes=2), algorithm=PPO)
    wanted = Learner()
    for step in (1, 2):
        result = wanted.run(job.request(step), context())
        job.weights.append(result.weights)
    wanted.close()
    together.sleep()
    for step in (1, 2):
        result = together.run(job.request(step, "slept"), context())
        together.sleep()
        assert_equal(job.published(step, "slept"), job.published(step))
    assert "seconds/load" not in result.metrics, "no process was started anew"


@pytest.mark.usefixtures("nothing_is_left_behind")
def test_a_process_that_is_gone_is_noticed_when_all_are_to_sleep(
    tmp_path: Path, tiny_model: Path, together: Learner
) -> None:
    job = job_of(tmp_path, tiny_model, learning=LearningSettings(processes=2))
    together.run(job.request(1), context())
    (other,) = processes_beside()
    # As a program that it has started, and that is still there, holds its end of the pipe.
    with Path(f"/proc/{other.pid}/fd/0").open("rb"):
        other.kill()
        other.wait()
        with pytest.raises(TaskError, match="a learning process"):
            together.sleep()
    together.run(job.request(1, "again"), context())
    assert_equal(job.published(1, "again"), job.published(1))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize("offload", [False, True])
def test_parts_that_have_moved_take_the_same_steps(tmp_path: Path, tiny_model: Path, offload: bool) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, offload=offload)
    job = job_of(tmp_path, tiny_model, learning=LearningSettings(processes=2), algorithm=PPO, optimizer=optimizer)
    for where in ("stayed", "moved"):
        requests = []
        for step in (1, 2):
            requests.append(job.request(step, where).model_dump_json())
            job.weights.append(WeightsReference(version=step, uri=str(tmp_path / "stayed" / f"weights-{step}")))
        (tmp_path / "requests").write_text("\n".join(requests))
        folder = tmp_path / f"ranks-{where}"
        folder.mkdir()
        command = [sys.executable, "-m", "tests.learning.moving_rank", str(folder), str(tmp_path / "requests"), where]
        root = Path(__file__).parents[2]
        ranks = [subprocess.Popen([*command, str(rank)], cwd=root) for rank in (0, 1)]
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert_equal(job.published(2, "moved"), job.published(2, "stayed"))
