"""Checkpoints that are another job's, damaged, or too large for their place."""

import resource
from pathlib import Path

import pytest
import torch

from rlhfless_functions.learning.batch import TrainingBatch, read_batch
from rlhfless_functions.learning.checkpoints import save_checkpoint
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.state import initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import (
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
)
from tests.learning.jobs import Job, context

torch.set_num_threads(1)


def test_a_checkpoint_of_another_job_is_refused(job: Job, model: ModelSettings) -> None:
    job.undisturbed(2)
    muon = OptimizerSettings(name="muon", learning_rate=1e-3)
    other_model = model.model_copy(update={"lora": LoraSettings(rank=2)})
    for given in ({"optimizer": muon}, {"model": other_model}):
        with pytest.raises(TaskError, match=r"checkpoint .* does not fit the job's model, algorithm") as caught:
            Learner().run(job.request(2, "other", 1, **given), context())
        assert caught.value.reason == "model_unloadable"


def test_a_damaged_checkpoint_is_an_error(job: Job) -> None:
    job.undisturbed(1)
    file = job.folder / "undisturbed" / "checkpoint-1" / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(TaskError, match="corrupt"):
        Learner().run(job.request(2, "other", 1), context())


@pytest.mark.parametrize("kilobytes", [60, 200], ids=["master weights", "moments"])
def test_a_checkpoint_that_finds_no_room_is_named(job: Job, kilobytes: int) -> None:
    """torch's own writer tells of nothing but a position."""
    state = initial_state(job.request(1))
    train_step(state, TrainingBatch(read_batch(job.batch(1)), job.algorithm, 1), job.request(1), 1, lambda: None)
    uri = job.checkpoint(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, before[1]))
    try:
        with pytest.raises(TaskError, match=r"checkpoint-1 cannot be written: no file may be that large") as raised:
            save_checkpoint(uri, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.reason == "artifact_unwritable"
    assert not Path(uri).exists()
