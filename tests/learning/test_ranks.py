"""Several learning processes that share the weights: two ranks on a CPU take the steps that one takes."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhfless_functions import artifacts
from rlhfless_functions.api import SaveRequest, TaskKey, WeightsReference
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    KlSettings,
    LearningSettings,
    LoraSettings,
    OptimizerSettings,
)
from rlhfless_functions.weights import load_policy, swap_policy
from tests.learning.jobs import LEFT_OUT, PPO, Job, StoppedContext, assert_equal, context, job_of, processes_beside
from tests.training.whole_jobs import MakeJob, folder_of, run_job

torch.set_num_threads(1)

# Adam divides a gradient by its own size: with a tiny epsilon, rounding alone would decide where gradients vanish.
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, weight_decay=0.1, epsilon=1e-3)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


@pytest.fixture
def learner() -> Iterator[Learner]:
    """One that has processes beside it."""
    learner = Learner()
    yield learner
    learner.close()


JOBS: dict[str, dict[str, Any]] = {
    "grpo, two minibatches": {"algorithm": AlgorithmSettings(kl=KlSettings(coefficient=0.01))},
    "ppo": {"algorithm": PPO},
    "ppo, values of its own critic": {"algorithm": PPO, "prepared": LEFT_OUT},
    "an adapter": {"lora": LoraSettings(rank=2)},
    "an adapter on a bfloat16 backbone": {"lora": LoraSettings(rank=2), "dtype": "bfloat16"},
    "checkpointed activations, small passes": {
        "learning": {"gradient_checkpointing": True, "logits_chunk_tokens": 3},
        "batch_settings": BatchSettings(
            prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4, microbatch_tokens=20
        ),
    },
    "in pieces": {"pieces": 2, "batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2)},
    "packed rows, checkpointed": {"algorithm": PPO, "learning": {"pack": "always", "gradient_checkpointing": True}},
    "optimizer on the host": {"optimizer": OPTIMIZER.model_copy(update={"offload": True})},
}


TOLERANCE = {"an adapter on a bfloat16 backbone": 5e-5}
"""Of weights; 1e-6 elsewhere. A CPU without instructions for bfloat16 rounds a product by the rows that it has. 8e-6
was seen, where a step changes weights by up to the learning rate of 1e-3."""


def make_job(kind: str, folder: Path, model: Path) -> Job:
    given = {"optimizer": OPTIMIZER, **JOBS[kind]}
    return job_of(folder, model, **{**given, "learning": LearningSettings(**given.get("learning", {}), processes=1)})


def with_processes(job: Job, count: int) -> dict[str, Any]:
    return {"learning": job.given["learning"].model_copy(update={"processes": count})}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all weights files of a folder, under their own names."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", JOBS)
def test_two_processes_take_the_steps_that_one_takes(
    kind: str, tmp_path: Path, tiny_model: Path, learner: Learner
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    alone = job.undisturbed(2)
    for step in (1, 2):
        together = learner.run(job.request(step, "together", **with_processes(job, 2)), context())
        for folder in (f"weights-{step}", f"critic-{step}"):
            expected = tensors(tmp_path / "undisturbed" / folder)
            actual = tensors(tmp_path / "together" / folder)
            assert actual.keys() == expected.keys()
            for name, tensor in actual.items():
                assert tensor.dtype == expected[name].dtype
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE.get(kind, 1e-6))
        for name, value in alone[step - 1].metrics.items():
            if not name.startswith(("seconds", "weights/bytes", "tokens/shared")):
                assert together.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert "seconds/load" not in together.metrics


def test_processes_save_their_parts_of_the_state_together(tmp_path: Path, tiny_model: Path) -> None:
    job = make_job("ppo", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    key = TaskKey(job_uid="job", step=2, stage="learning", part="save", attempt=0)
    checkpoint = str(tmp_path / "saved")
    first, fresh = Learner(), Learner()
    try:
        for step in (1, 2):
            job.weights.append(first.run(job.request(step), context()).weights)
        first.run(SaveRequest(key=key, result="r", version=2, checkpoint=checkpoint), context())
        first.run(job.request(3), context())
        first.close()
        given = {"checkpoint": checkpoint, "checkpoint_step": 2, "replay": []}
        fresh.run(job.request(3, "fresh").model_copy(update=given), context())
    finally:
        first.close()
        fresh.close()
    assert_equal(job.published(3, "fresh"), job.published(3))


def test_ratios_are_one_on_every_rank_before_anything_is_learnt(
    tmp_path: Path, tiny_model: Path, learner: Learner
) -> None:
    nothing = OPTIMIZER.model_copy(update={"learning_rate": 1e-12})
    four = BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=2, microbatch_tokens=20)
    job = job_of(
        tmp_path, tiny_model, dtype="bfloat16", optimizer=nothing, batch_settings=four, learning=LearningSettings()
    )
    metrics = learner.run(job.request(1, **with_processes(job, 2)), context()).metrics
    assert metrics["policy/updates"] == 4
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-6)


def test_what_several_processes_publish_is_a_hugging_face_folder_that_none_of_them_held(
    tmp_path: Path, tiny_model: Path, learner: Learner
) -> None:
    job = make_job("ppo", tmp_path, tiny_model)
    job.undisturbed(1)
    learner.run(job.request(1, "together", **with_processes(job, 2)), context())
    folder = tmp_path / "together" / "weights-1"
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.7 * sum(sizes)
    names = []
    for file in files:
        with safe_open(file, "pt") as handle:
            names += handle.keys()
    assert sorted(names) == sorted(load_file(tiny_model / "model.safetensors"))
    assert artifacts.local_folder(str(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    policy = load_policy(job.model, job.initial)
    swap_policy(policy, WeightsReference(version=1, uri=str(folder)))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(policy.state_dict()[name], tensor)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "together" / "critic-1")
    assert critic.score.weight.any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "an adapter"])
def test_fresh_processes_get_to_the_same_weights_bit_for_bit(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    first, fresh = Learner(), Learner()
    try:
        for step in (1, 2, 3):
            result = first.run(job.request(step, save_checkpoint=job.checkpoint(step)), context())
            job.weights.append(result.weights)
        first.close()
        fresh.run(job.request(3, "fresh", 1), context())
        assert_equal(job.published(3, "fresh"), job.published(3))
    finally:
        first.close()
        fresh.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "an adapter", "optimizer on the host"])
def test_any_number_of_processes_goes_on_from_what_others_wrote(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    job.undisturbed(4)
    before = None
    for step, count in ((1, 2), (2, 3), (3, 1), (4, 2)):
        uri = str(tmp_path / f"checkpoint-of-{count}-{step}")
        given = {"save_checkpoint": uri, "checkpoint": before, "checkpoint_step": step - 1, "replay": []}
        learner = Learner()
        try:
            learner.run(job.request(step, "changing", **with_processes(job, count), **given), context())
        finally:
            learner.close()
        before = uri
        for folder in (f"weights-{step}", f"critic-{step}"):
            expected, actual = tensors(tmp_path / "undisturbed" / folder), tensors(tmp_path / "changing" / folder)
            assert actual.keys() == expected.keys()
            for name, tensor in actual.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_a_drained_step_publishes_nothing_and_is_taken_again(
    tmp_path: Path, tiny_model: Path, learner: Learner
) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    with pytest.raises(TaskError, match="was interrupted by a drain"):
        learner.run(job.request(1, "drained"), StoppedContext(1))
    assert not (tmp_path / "drained" / "weights-1").exists()
    learner.run(job.request(1, "drained"), context())
    assert (tmp_path / "drained" / "weights-1" / "manifest.json").exists()


class SignallingContext(TaskContext):
    """Sends the other process a signal in the middle of a step."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(emit=lambda event: None)
        self._signal: signal.Signals | None = number

    @property
    def stop_reason(self) -> None:
        if self._signal is not None:
            (other,) = processes_beside()
            other.send_signal(self._signal)
            self._signal = None


def test_a_process_that_dies_in_mid_step_is_noticed_at_once(tmp_path: Path, tiny_model: Path, learner: Learner) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    with pytest.raises(TaskError, match="a learning process ended with status -9; take the step again") as caught:
        learner.run(job.request(1), SignallingContext(signal.SIGKILL))
    assert caught.value.retryable
    assert processes_beside() == []
    learner.run(job.request(1), context())
    assert (tmp_path / "undisturbed" / "weights-1" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cold_start")
def test_a_process_that_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, tiny_model: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    monkeypatch.setattr("rlhfless_functions.distributed.ranks._PASSING", timedelta(seconds=2))
    with pytest.raises((RuntimeError, TaskError)):
        learner.run(job.request(1), SignallingContext(signal.SIGSTOP))
    assert processes_beside() == []
    monkeypatch.undo()
    learner.run(job.request(1), context())
    assert (tmp_path / "undisturbed" / "weights-1" / "manifest.json").exists()


def test_a_process_that_does_not_start_is_not_waited_for(
    tmp_path: Path, tiny_model: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TaskError, match="a learning process ended with status 1"):
        learner.run(job.request(1, **with_processes(job, 3)), context())
    assert list(tmp_path.glob("rlhfless-ranks-*")) == []


HOLDER = """
import time
from rlhfless_functions.learning.team import Team
team = Team(3)
print(*(process.pid for process in team._others), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_processes_end_with_the_instance_that_started_them() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        others = [psutil.Process(int(number)) for number in holder.stdout.readline().split()]
        assert len(others) == 2
        holder.kill()
    _, alive = psutil.wait_procs(others, timeout=60)
    assert alive == []


def test_a_process_that_dies_ends_the_step_and_the_next_attempt_has_another(
    tmp_path: Path, tiny_model: Path, learner: Learner
) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    learner.run(job.request(1), context())
    (other,) = processes_beside()
    other.kill()
    job.weights.append(WeightsReference(version=1, uri=str(tmp_path / "undisturbed" / "weights-1")))
    with pytest.raises(TaskError, match="a learning process ended with status -9"):
        learner.run(job.request(2), context())
    assert not (tmp_path / "undisturbed" / "weights-2").exists()
    result = learner.run(job.request(2), context())
    assert "seconds/replay" in result.metrics
    assert (tmp_path / "undisturbed" / "weights-2" / "manifest.json").exists()


def test_a_process_that_fails_says_why(tmp_path: Path, tiny_model: Path, learner: Learner) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    job.given |= with_processes(job, 2)
    request = job.request(1, batch=job.batch(1).model_copy(update={"parts": [str(tmp_path / "nowhere.parquet")]}))
    with pytest.raises(TaskError, match=r"nowhere\.parquet does not exist") as caught:
        learner.run(request, context())
    assert caught.value.reason == "artifact_missing"
    learner.run(job.request(1), context())


def test_muon_is_refused_for_parts_of_matrices(tmp_path: Path, tiny_model: Path) -> None:
    job = make_job("grpo, two minibatches", tmp_path, tiny_model)
    learner = Learner()
    try:
        muon = OptimizerSettings(name="muon")
        with pytest.raises(TaskError, match=r"optimizer\.name: muon needs whole matrices.*learning\.processes to 1"):
            learner.run(job.request(1, optimizer=muon, **with_processes(job, 2)), context())
    finally:
        learner.close()


def test_work_is_dealt_evenly_and_each_thing_once() -> None:
    draw = random.Random(0)
    for _ in range(50):
        weights = [draw.randint(1, 100) for _ in range(draw.randint(0, 30))]
        size = draw.randint(1, 5)
        dealt = [Ranks(rank, size).deal(weights) for rank in range(size)]
        assert sorted(index for mine in dealt for index in mine) == list(range(len(weights)))
        loads = [sum(weights[index] for index in mine) for mine in dealt]
        assert max(loads) - min(loads) <= max(weights, default=0)


def test_a_job_learns_with_several_processes(tiny_job: MakeJob) -> None:
    file = tiny_job("ranks", steps=2, learning={"processes": 2})
    summary = run_job(file)
    root = folder_of(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 2)
    for version in (root / "weights").iterdir():
        assert len(list(version.glob("model-*-of-00002.safetensors"))) == 2
    AutoModelForCausalLM.from_pretrained(root / "model")
