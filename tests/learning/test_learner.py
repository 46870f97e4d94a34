"""The learning stage: versions, replay, failures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    BatchReference,
    LearnRequest,
    SaveRequest,
    SaveResult,
    StepSettings,
    TakeUpRequest,
    TakeUpResult,
    TaskKey,
)
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan, write_prepared
from rlhfless_functions.learning import learner as learner_module
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import (
    AlgorithmSettings,
    ModelSettings,
    OptimizerSettings,
)
from rlhfless_functions.weights import load_policy
from tests.learning.jobs import JOBS, Job, StoppedContext, assert_equal, context, job_of, samples_of

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "muon"])
def test_settings_that_change_in_mid_run_are_those_of_the_steps_to_come_alone(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    """On a learner that has the steps before in memory, on one that takes them again, and on one with a checkpoint."""
    job = job_of(tmp_path, tiny_model, **JOBS[kind])
    job.undisturbed(2)
    first = job.request(1)
    before = StepSettings(optimizer=first.optimizer, total_steps=first.total_steps)
    numbers = {"learning_rate": 1e-2, "beta1": 0.5, "beta2": 0.8, "epsilon": 1e-3, "weight_decay": 0.5}
    after = {
        "optimizer": first.optimizer.model_copy(update={**numbers, "schedule": "cosine", "max_gradient_norm": 0.1}),
        "total_steps": 5,
    }
    warm = Learner()
    for step in (1, 2):
        warm.run(job.request(step, "warm"), context())
    warm.run(job.request(3, "warm", **after), context())
    Learner().run(job.request(3, "again", replay_settings={1: before, 2: before}, **after), context())
    Learner().run(job.request(3, "checkpoint", 2, **after), context())
    Learner().run(job.request(3, "unchanged"), context())
    expected = job.published(3, "warm")
    for where in ("again", "checkpoint"):
        assert_equal(job.published(3, where), expected)
    unchanged = job.published(3, "unchanged")
    assert not all(torch.equal(tensor, unchanged[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", JOBS)
def test_a_fresh_learner_gets_to_the_same_weights_bit_for_bit(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS[kind])
    job.undisturbed(4)
    for checkpoint_step in (0, 1, 2) if kind == "ppo" else (0, 2):
        where = f"from-{checkpoint_step}"
        learner = Learner()
        for step in (3, 4):
            learner.run(job.request(step, where, checkpoint_step), context())
            assert_equal(job.published(step, where), job.published(step))


def save_of(job: Job, version: int) -> SaveRequest:
    key = TaskKey(job_uid="job", step=version, stage="learning", part="save", attempt=0)
    return SaveRequest(key=key, result="r", version=version, checkpoint=str(job.folder / "saved"))


def test_the_state_in_memory_is_used_where_it_fits_and_only_there(job: Job) -> None:
    first, second = job.undisturbed(2)
    assert "seconds/load" in first.metrics
    assert "seconds/load" not in second.metrics
    learner = Learner()
    learner.run(job.request(1, "other"), context())
    ahead = learner.run(job.request(1, "again"), context())
    assert "seconds/load" in ahead.metrics, "it is at version 1, the step starts from 0"
    assert_equal(job.published(1, "again"), job.published(1))
    key = TaskKey(job_uid="another", step=2, stage="learning", part="learn", attempt=0)
    anew = learner.run(job.request(2, "another", key=key), context())
    assert "seconds/load" in anew.metrics, "its state is of another job"
    assert_equal(job.published(2, "another"), job.published(2))


def taking_up(step: LearnRequest) -> TakeUpRequest:
    batch = BatchReference(step=step.batch.step, parts=[], samples=[])
    return TakeUpRequest(key=step.key, result="r", step=step.model_copy(update={"batch": batch}))


def test_a_learner_that_takes_its_state_up_before_the_batch_is_there_makes_the_same_weights(job: Job) -> None:
    job.undisturbed(3)
    learner, step = Learner(), job.request(3, "ahead", 1)
    taken = learner.run(taking_up(step), context())
    assert isinstance(taken, TakeUpResult)
    assert taken.load_seconds > 0 and taken.replay_seconds > 0
    result = learner.run(step, context())
    assert "seconds/load" not in result.metrics and "seconds/replay" not in result.metrics
    assert_equal(job.published(3, "ahead"), job.published(3))
    again = learner.run(taking_up(job.request(4, "ahead", 1)), context())
    assert isinstance(again, TakeUpResult)
    assert (again.load_seconds, again.replay_seconds) == (0.0, 0.0), "it is in memory"


def test_a_step_is_not_taken_from_an_empty_batch(job: Job) -> None:
    request = job.request(1, "empty")
    empty = request.model_copy(update={"batch": request.batch.model_copy(update={"samples": []})})
    with pytest.raises(TaskError, match=r"batch\.samples: a step learns from at least one sample"):
        Learner().run(empty, context())


def test_a_learner_that_is_to_be_let_go_saves_its_state_and_another_goes_on_without_repeating_a_step(job: Job) -> None:
    job.undisturbed(3)
    first = Learner()
    for step in (1, 2):
        first.run(job.request(step, "first"), context())
    saved = first.run(save_of(job, 2), context())
    assert isinstance(saved, SaveResult)
    assert artifacts.is_published(saved.checkpoint)
    fresh = job.request(3, "fresh").model_copy(
        update={"checkpoint": saved.checkpoint, "checkpoint_step": 2, "replay": []}
    )
    Learner().run(fresh, context())
    assert_equal(job.published(3, "fresh"), job.published(3))
    stayed = first.run(job.request(3, "stayed"), context())
    assert "seconds/load" not in stayed.metrics, "the state stays in memory"
    assert_equal(job.published(3, "stayed"), job.published(3))


def test_only_the_version_in_memory_is_saved(job: Job) -> None:
    learner = Learner()
    with pytest.raises(TaskError, match="does not hold version 1"):
        learner.run(save_of(job, 1), context())
    learner.run(job.request(1), context())
    with pytest.raises(TaskError, match="does not hold version 2"):
        learner.run(save_of(job, 2), context())
    assert not artifacts.exists(str(job.folder / "saved"))


@pytest.mark.parametrize("polls", [0, 1])
def test_a_drained_step_publishes_nothing_and_is_taken_again_as_if_nothing_had_been(job: Job, polls: int) -> None:
    job.undisturbed(2)
    learner = Learner()
    learner.run(job.request(1, "drained"), context())
    with pytest.raises(TaskError, match="step 2 was interrupted by a drain") as caught:
        learner.run(job.request(2, "drained"), StoppedContext(polls))
    assert caught.value.reason == "drained"
    assert caught.value.retryable
    assert not artifacts.exists(str(job.folder / "drained" / "weights-2"))
    again = learner.run(job.request(2, "drained"), context())
    assert "seconds/replay" in again.metrics
    assert_equal(job.published(2, "drained"), job.published(2))


def test_a_drain_ends_a_replay_too(job: Job) -> None:
    job.undisturbed(3)
    with pytest.raises(TaskError, match="step 3 was interrupted"):
        Learner().run(job.request(3, "drained"), StoppedContext(2))


def test_a_loss_that_is_not_finite_names_the_step_and_leaves_the_last_good_weights(job: Job) -> None:
    job.undisturbed(2)
    poisoned = job.folder / "poisoned.parquet"
    write_prepared(str(poisoned), _poisoned(2))
    bad = job.request(2, "bad").model_copy(update={"batch": _with_parts(job.batch(2), poisoned)})
    learner = Learner()
    learner.run(job.request(1, "bad"), context())
    with pytest.raises(TaskError, match=r"step 2: the policy's update failed.*lower optimizer.learningRate") as caught:
        learner.run(bad, context())
    assert caught.value.reason == "non_finite_loss"
    assert not caught.value.retryable
    assert sorted(path.name for path in (job.folder / "bad").iterdir()) == ["weights-1"]
    learner.run(job.request(2, "bad"), context())
    assert_equal(job.published(2, "bad"), job.published(2))


def _poisoned(step: int) -> list[PreparedSample]:
    samples = samples_of(step)
    # The second of two minibatches: the first has changed the weights in memory already.
    for sample in samples[-1:]:
        sample.advantages = [float("inf")] * len(sample.response_tokens)
    return samples


def _with_parts(batch: BatchReference, part: Path) -> BatchReference:
    return batch.model_copy(update={"parts": [str(part)]})


def test_a_step_that_was_published_already_is_taken_again_and_publishes_nothing(job: Job) -> None:
    job.undisturbed(2)
    before = {path: path.stat().st_mtime_ns for path in (job.folder / "undisturbed").rglob("*")}
    result = Learner().run(job.request(2), context())
    assert result.weights == job.weights[2]
    assert {path: path.stat().st_mtime_ns for path in (job.folder / "undisturbed").rglob("*")} == before


def test_weights_that_cannot_be_written_are_an_error_and_the_next_attempt_is_not_harmed(job: Job) -> None:
    job.undisturbed(2)
    blocked = job.folder / "a-file"
    blocked.write_text("")
    learner = Learner()
    learner.run(job.request(1, "other"), context())
    with pytest.raises(TaskError, match="cannot be written") as caught:
        learner.run(job.request(2, publish=str(blocked / "weights")), context())
    assert caught.value.reason == "artifact_unwritable"
    learner.run(job.request(2, "other"), context())
    assert_equal(job.published(2, "other"), job.published(2))


def test_the_parts_and_their_order_do_not_matter(job: Job) -> None:
    job.undisturbed(1)
    samples = samples_of(1)
    parts = [str(job.folder / f"part-{number}.parquet") for number in range(3)]
    for number, part in enumerate(parts):
        write_prepared(part, samples[::-1][number::3])
    batch = job.batch(1).model_copy(update={"parts": parts[::-1]})
    Learner().run(job.request(1, "parts", batch=batch), context())
    assert_equal(job.published(1, "parts"), job.published(1))


def test_learning_makes_good_responses_likelier(tmp_path: Path, model: ModelSettings) -> None:
    optimizer = OptimizerSettings(learning_rate=2e-3)
    job = Job(tmp_path, model, AlgorithmSettings(), optimizer=optimizer)
    good = [50 - token for token in range(6)]
    samples = samples_of(1)
    for sample in samples:
        sample.response_tokens = good if sample.index else good[::-1]
        length = len(good)
        sample.versions = [VersionSpan(0, 0, length)]
        sample.log_probs = sample.old_log_probs = [-4.0] * length
        sample.reference_log_probs = sample.values = sample.returns = None
        sample.advantages = [1.0 if sample.index else -1.0] * length
    for step in range(1, 6):
        write_prepared(str(tmp_path / "batches" / f"{step}.parquet"), samples)
    job.undisturbed(5)

    def log_prob(version: int) -> float:
        policy = load_policy(model, job.weights[version])
        ids = torch.tensor([samples[0].prompt_tokens + good])
        logits = policy(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        return logits[range(6), good].sum().item()

    assert log_prob(5) > log_prob(0) + 1


def test_a_preloaded_model_is_not_loaded_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.undisturbed(1)
    loads = []
    load = learner_module.load_master_weights

    def counted(*arguments: Any) -> Any:
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(learner_module, "load_master_weights", counted)
    monkeypatch.setattr("rlhfless_functions.learning.state.load_master_weights", counted)
    learner = Learner()
    learner.preload(job.model, job.initial)
    learner.run(job.request(1, "preloaded"), context())
    assert len(loads) == 1
    assert_equal(job.published(1, "preloaded"), job.published(1))
    learner = Learner()
    learner.preload(job.model, job.weights[1])
    learner.run(job.request(1, "other"), context())
    assert len(loads) == 3, "the weights of version 1 are not where replay starts"


def test_a_device_out_of_memory_is_told_with_what_to_do(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(learner_module, "train_step", fail)
    with pytest.raises(TaskError, match=r"step 1: tried to allocate 20 GiB\. Lower batch\.microbatchTokens") as caught:
        Learner().run(job.request(1), context())
    assert caught.value.reason == "out_of_memory"


def test_replay_must_lead_from_the_checkpoint_to_the_step(job: Job) -> None:
    job.undisturbed(3)
    gap = job.request(4, replay=[job.batch(1), job.batch(3)])
    wrong_base = job.request(3, base=job.weights[1])
    for request, message in ((gap, r"replay: the batches of steps \[1, 3\]"), (wrong_base, "base: step")):
        with pytest.raises(TaskError, match=message) as caught:
            Learner().run(request, context())
        assert caught.value.reason == "bad_request"
    with pytest.raises(TaskError, match="publish_critic: must be set with"):
        Learner().run(job.request(1, publish_critic=str(job.folder / "critic")), context())


def test_a_batch_that_cannot_be_read_does_not_cost_the_state_in_memory(job: Job) -> None:
    job.undisturbed(2)
    learner = Learner()
    learner.run(job.request(1, "other"), context())
    missing = job.batch(2).model_copy(update={"parts": [str(job.folder / "nowhere.parquet")]})
    with pytest.raises(TaskError, match=r"nowhere\.parquet does not exist") as caught:
        learner.run(job.request(2, "other", batch=missing), context())
    assert caught.value.reason == "artifact_missing"
    result = learner.run(job.request(2, "other"), context())
    assert "seconds/load" not in result.metrics
    assert_equal(job.published(2, "other"), job.published(2))
