"""Checkpoints that are another job's, damaged, or too large for their place."""

import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfless_functions import artifacts
from rlhfless_functions.learning.batch import TrainingBatch, read_batch
from rlhfless_functions.learning.checkpoints import restore_policy, save_checkpoint
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.state import initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import (
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
)
from rlhfless_functions.weights import load_policy
from tests.learning.jobs import Job, context, job_of

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


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["whole", "adapter"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_gives_a_policy_the_weights_that_its_step_published(
    tmp_path: Path, tiny_model: Path, lora: LoraSettings | None, ranks: int
) -> None:
    job = job_of(tmp_path, tiny_model, lora=lora)
    published = job.undisturbed(2)[-1].weights
    checkpoint = job.checkpoint(2)
    policy = load_policy(job.model, job.initial)
    restore_policy(checkpoint if ranks == 1 else divided(Path(checkpoint), ranks), policy)
    expected = load_policy(job.model, published).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.state_dict().items())


def test_a_checkpoint_of_another_model_is_no_policys(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, lora=LoraSettings(rank=2))
    job.undisturbed(1)
    policy = load_policy(job.model.model_copy(update={"lora": None}), job.initial)
    with pytest.raises(TaskError, match=r"checkpoint-1 does not fit the model of its job"):
        restore_policy(job.checkpoint(1), policy)


def divided(folder: Path, ranks: int) -> str:
    """The checkpoint as so many ranks would have written it."""
    uri = f"{folder}-divided"
    with artifacts.publish(uri) as parts:
        for rank in range(ranks):
            # A tensor may have fewer rows than there are ranks.
            rows = {
                name: (*tensor.chunk(ranks), *[tensor[:0]] * ranks)[rank].clone()
                for name, tensor in load_file(folder / "policy.safetensors").items()
            }
            save_file(rows, parts / f"policy-{rank + 1}-of-{ranks}.safetensors")
        (parts / "state.json").write_text(f'{{"version": 2, "processes": {ranks}}}')
    return uri
