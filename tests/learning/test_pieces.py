"""Learning from a batch in pieces, also while it is still being prepared: the same weights, bit for bit."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, Event, PrepareResult, SampleTask, Waiting
from rlhfless_functions.data.rollouts import write_prepared
from rlhfless_functions.learning import pieces, trained_models
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.pieces import FollowedBatch, cut
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import AlgorithmSettings, BatchSettings, CriticSettings, LoraSettings
from tests.learning.jobs import Job, StoppedContext, assert_equal, context, job_of, samples_of

PIECES = 3
ONE_UPDATE = BatchSettings(prompts_per_step=4, samples_per_prompt=2)
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "critic": {
        "algorithm": AlgorithmSettings(
            name="ppo",
            epochs=1,
            advantage_normalization="none",
            critic=CriticSettings(learning_rate=1e-3, warmup_steps=1),
        )
    },
    "adapter with dropout": {"lora": LoraSettings(rank=2, dropout=0.2)},
}


def make_job(kind: str, folder: Path, model: Path) -> Job:
    return job_of(folder, model, batch_settings=ONE_UPDATE, pieces=PIECES, **JOBS[kind])


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return make_job("grpo", tmp_path, tiny_model)


class Preparation:
    """Publishes a step's groups in chunks, as the preparation function does: the result last."""

    def __init__(self, job: Job, step: int, chunks: list[list[int]]) -> None:
        self.following = str(job.folder / "chunks" / f"{step}" / "chunk-7-")
        self._chunks, self._samples = chunks, samples_of(step)
        self._published = 0

    def publish_next(self) -> None:
        """Nothing, once all are there."""
        if self._published < len(self._chunks):
            name = f"{self.following}{self._published:04d}"
            prompts = self._chunks[self._published]
            write_prepared(f"{name}.parquet", [sample for sample in self._samples if sample.prompt in prompts])
            result = PrepareResult(part=f"{name}.parquet", groups=[], metrics={})
            artifacts.write_json(f"{name}.json", result.model_dump(mode="json"))
            self._published += 1


def followed(job: Job, step: int, preparation: Preparation, where: str, **given: Any) -> Any:
    batch = job.batch(step).model_copy(update={"parts": []})
    return job.request(step, where, batch=batch, following=preparation.following, **given)


def publish_while_waiting(monkeypatch: pytest.MonkeyPatch, preparation: Preparation) -> None:
    """Whenever the learner finds nothing to do, another chunk is there when it looks again."""
    monkeypatch.setattr(pieces, "sleep", lambda seconds: preparation.publish_next())


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_that_comes_bit_by_bit_gives_the_weights_of_one_that_is_there(
    kind: str, seed: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    job.undisturbed(2)
    learner = Learner()
    for step in (1, 2):
        prompts = [0, 1, 2, 3]
        random.Random(seed + step).shuffle(prompts)
        preparation = Preparation(job, step, [prompts[:1], prompts[1:3], prompts[3:]])
        publish_while_waiting(monkeypatch, preparation)
        result = learner.run(followed(job, step, preparation, "followed"), context())
        assert result.metrics["seconds/wait"] > 0
        assert_equal(job.published(step, "followed"), job.published(step))


def test_a_fresh_learner_that_replays_gets_there_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.undisturbed(3)
    preparation = Preparation(job, 3, [[3], [2, 1, 0]])
    publish_while_waiting(monkeypatch, preparation)
    Learner().run(followed(job, 3, preparation, "fresh"), context())
    assert_equal(job.published(3, "fresh"), job.published(3))


def test_chunks_of_an_earlier_driver_are_parts_that_are_there(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.undisturbed(1)
    earlier = Preparation(job, 1, [[1, 3]])
    earlier.publish_next()
    part = f"{earlier.following}0000.parquet"
    later = Preparation(job, 1, [[0], [2]])
    later.following = earlier.following.replace("-7-", "-8-")
    publish_while_waiting(monkeypatch, later)
    request = followed(job, 1, later, "resumed")
    request = request.model_copy(update={"batch": request.batch.model_copy(update={"parts": [part]})})
    Learner().run(request, context())
    assert_equal(job.published(1, "resumed"), job.published(1))


def test_pieces_are_learnt_from_before_the_last_is_there(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation(job, 1, [[0], [1], [2, 3]])
    backward, learnt, learnt_when_waiting = trained_models._backward, 0, []

    def count(*arguments: Any) -> Any:
        nonlocal learnt
        learnt += 1
        return backward(*arguments)

    def wait(seconds: float) -> None:
        learnt_when_waiting.append(learnt)
        preparation.publish_next()

    monkeypatch.setattr(trained_models, "_backward", count)
    monkeypatch.setattr(pieces, "sleep", wait)
    Learner().run(followed(job, 1, preparation, "early"), context())
    assert learnt_when_waiting[0] == 0 < learnt_when_waiting[-1] < learnt


def test_waiting_is_told_when_it_begins_and_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation(job, 1, [[1], [0], [2, 3]])
    publish_while_waiting(monkeypatch, preparation)
    events: list[Event] = []
    Learner().run(followed(job, 1, preparation, "told"), TaskContext(emit=events.append))
    told = [event.waiting for event in events if isinstance(event, Waiting)]
    # For the first piece through two chunks, for the others through one.
    assert told == [True, False, True, False]


def test_whoever_waits_for_a_piece_can_be_told_to_stop(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.undisturbed(2)
    learner = Learner()
    learner.run(job.request(1, "stopped"), context())
    preparation = Preparation(job, 2, [[0, 1]])
    publish_while_waiting(monkeypatch, preparation)
    with pytest.raises(TaskError, match="step 2 was broken off by a drain") as caught:
        learner.run(followed(job, 2, preparation, "stopped"), StoppedContext(20))
    assert caught.value.retryable
    assert not artifacts.exists(str(job.folder / "stopped" / "weights-2"))
    # Half of its gradients are forgotten, whoever takes the step again.
    learner.run(job.request(2, "stopped"), context())
    assert_equal(job.published(2, "stopped"), job.published(2))


def test_pieces_change_no_more_than_the_order_of_a_sum_does(job: Job) -> None:
    job.undisturbed(1)
    Learner().run(job.request(1, "whole", pieces=1), context())
    whole, pieces = job.published(1, "whole"), job.published(1)
    assert all(float((tensor - pieces[name]).abs().max()) < 1e-6 for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": AlgorithmSettings(epochs=2).resolved()}, "pieces: .*one optimizer update"),
        ({"batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4)}, "pieces: "),
        ({"algorithm": AlgorithmSettings(advantage_normalization="batch").resolved()}, "whole batch is needed"),
        ({"pieces": 1, "following": "somewhere/chunk-"}, "following: "),
    ],
)
def test_what_needs_the_whole_batch_is_refused(job: Job, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        Learner().run(job.request(1, "refused", **given), context())
    assert caught.value.reason == "bad_request"


def test_a_batch_without_a_sample_in_the_loss_changes_nothing(job: Job, tiny_model: Path) -> None:
    part = str(job.folder / "masked.parquet")
    write_prepared(part, samples_of(1, mask=False))
    batch = job.batch(1).model_copy(update={"parts": [part]})
    Learner().run(job.request(1, "masked", batch=batch), context())
    job.undisturbed(1)
    Learner().run(job.request(1, "whole", batch=batch, pieces=1), context())
    assert_equal(job.published(1, "masked"), job.published(1, "whole"))


@given(groups=st.lists(st.integers(1, 4), min_size=1, max_size=20), pieces=st.integers(1, 24), seed=st.integers(0, 99))
def test_every_sample_is_in_one_piece_with_its_group(groups: list[int], pieces: int, seed: int) -> None:
    prompts = list(range(len(groups)))
    random.Random(seed).shuffle(prompts)
    samples = [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(groups[prompt])]
    found = cut(samples, pieces)
    assert [key for piece in found for key in piece] == [(sample.prompt, sample.index) for sample in samples]
    assert len(found) == min(pieces, len(groups))
    held = [{prompt for prompt, _ in piece} for piece in found]
    assert sum(map(len, held)) == len(groups)
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_reader_sees_what_others_publish(job: Job) -> None:
    preparation = Preparation(job, 1, [[3], [0], [1, 2]])
    reference = job.batch(1).model_copy(update={"parts": []})
    assert isinstance(reference, BatchReference)
    batch = FollowedBatch(reference, preparation.following, check=lambda: None)

    def publish() -> None:
        for _ in range(3):
            preparation.publish_next()

    publisher = threading.Thread(target=publish)
    publisher.start()
    found = [sample.key for piece in batch.pieces(PIECES) for sample in piece]
    publisher.join()
    assert found == [(sample.prompt, sample.index) for sample in reference.samples]
