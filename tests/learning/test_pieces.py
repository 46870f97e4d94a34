"""Learning from a batch in pieces, also while it is still being prepared: the journal says what the weights are."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, Event, JournalledPiece, Piece, SampleTask, Waiting, piece_uri
from rlhfless_functions.data.rollouts import write_prepared
from rlhfless_functions.learning import pieces, trained_models
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.pieces import FollowedJournal, LetGoError
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import AlgorithmSettings, BatchSettings, CriticSettings, LearningSettings, LoraSettings
from tests.learning.jobs import LEFT_OUT, Job, assert_equal, context, job_of, samples_of

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
Order = Sequence[Sequence[int]]
"""The prompts of each piece."""
ORDER: Order = [[2], [0, 3], [1]]


def make_job(kind: str, folder: Path, model: Path) -> Job:
    return job_of(folder, model, batch_settings=ONE_UPDATE, **JOBS[kind])


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return make_job("grpo", tmp_path, tiny_model)


class Driver:
    """Prepares a step's groups and journals them, as a driver does: the part first."""

    def __init__(self, job: Job, step: int, order: Order) -> None:
        self.step = step
        self.journal = str(job.folder / f"journal-{step}-{order}")
        self.published = 0
        self._order, self._samples = order, samples_of(step, **job.prepared)

    def publish_next(self) -> None:
        """Nothing, once all are there."""
        if self.published == len(self._order):
            return
        uri, prompts = piece_uri(self.journal, self.published), self._order[self.published]
        part = f"{self.journal}/{self.published}.parquet"
        samples = [sample for sample in self._samples if sample.prompt in prompts]
        write_prepared(part, samples)
        tasks = [SampleTask(prompt=sample.prompt, index=sample.index) for sample in samples]
        artifacts.create_exclusive(uri, JournalledPiece(samples=tasks, parts=[part]).model_dump_json().encode())
        self.published += 1

    def batch(self) -> BatchReference:
        """The whole batch as the journal has it."""
        while self.published < len(self._order):
            self.publish_next()
        found = [
            JournalledPiece.model_validate(artifacts.read_json(piece_uri(self.journal, number)))
            for number in range(self.published)
        ]
        return BatchReference(
            step=self.step,
            parts=[part for piece in found for part in piece.parts],
            samples=[sample for piece in found for sample in piece.samples],
            pieces=[Piece(samples=len(piece.samples), parts=piece.parts) for piece in found],
        )


def followed(job: Job, driver: Driver, where: str, **given: Any) -> Any:
    batch = job.batch(driver.step).model_copy(update={"parts": []})
    return job.request(driver.step, where, batch=batch, following=driver.journal, **given)


def publish_while_waiting(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Whenever the learner finds nothing to do, another piece is there when it looks again."""
    monkeypatch.setattr(pieces, "sleep", lambda seconds: driver.publish_next())


def learn_whole(job: Job, driver: Driver, where: str = "journalled", **given: Any) -> None:
    """Learn from a batch that is complete, in the journal's pieces."""
    result = Learner().run(job.request(driver.step, where, batch=driver.batch(), **given), context())
    job.weights[driver.step :] = [result.weights]


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("order", [ORDER, [[3, 1], [0, 2]]])
def test_pieces_that_come_one_by_one_give_the_weights_of_a_batch_that_is_there(
    kind: str, order: Order, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    learner = Learner()
    batches: list[BatchReference] = []
    for step in (1, 2):
        driver = Driver(job, step, order)
        publish_while_waiting(monkeypatch, driver)
        result = learner.run(followed(job, driver, "followed"), context())
        assert result.metrics["seconds/wait"] > 0
        learn_whole(job, driver, replay=batches)
        batches.append(driver.batch())
        assert_equal(job.published(step, "followed"), job.published(step, "journalled"))


def test_groups_that_are_chosen_as_they_come_give_the_weights_of_the_batch_that_they_made(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their number is known beforehand. One prompt is there twice, and some groups count for less."""
    earlier, later = samples_of(1, **job.prepared), samples_of(2, **job.prepared)
    parts = [str(job.folder / "earlier.parquet"), str(job.folder / "later.parquet")]
    write_prepared(parts[0], earlier)
    write_prepared(parts[1], later)

    def piece(*groups: tuple[int, int, float]) -> JournalledPiece:
        """Each of a part, a prompt and a factor."""
        named = [(SampleTask(prompt=p, index=i), part, factor) for part, p, factor in groups for i in range(2)]
        samples, of, factors = (list(each) for each in zip(*named, strict=True))
        return JournalledPiece(samples=samples, parts=parts, part_of=of, factors=factors)

    chosen = [piece((0, 1, 1.0), (1, 1, 0.5)), piece((1, 0, 1.0)), piece((0, 3, 0.25))]
    left, journal = iter(enumerate(chosen)), str(job.folder / "journal")

    def publish(seconds: float) -> None:
        number, content = next(left)
        artifacts.create_json(piece_uri(journal, number), content.model_dump(mode="json"))

    monkeypatch.setattr(pieces, "sleep", publish)
    counted = BatchReference(step=1, parts=[], samples=[], count=8)
    Learner().run(job.request(1, "followed", batch=counted, following=journal), context())
    whole = BatchReference(
        step=1,
        parts=parts,
        samples=[sample for each in chosen for sample in each.samples],
        pieces=[Piece(samples=len(each.samples), parts=parts) for each in chosen],
        part_of=[part for each in chosen for part in each.part_of],
        factors=[factor for each in chosen for factor in each.factors],
    )
    Learner().run(job.request(1, "whole", batch=whole), context())
    assert_equal(job.published(1, "followed"), job.published(1, "whole"))
    evenly = whole.model_copy(update={"factors": []})
    Learner().run(job.request(1, "evenly", batch=evenly), context())
    with pytest.raises(AssertionError):
        assert_equal(job.published(1, "evenly"), job.published(1, "whole"))


def test_a_fresh_learner_replays_what_the_journal_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, batches = Learner(), []
    for step, order in ((1, ORDER), (2, [[1, 2, 3], [0]])):
        driver = Driver(job, step, order)
        batches.append(driver.batch())
        job.weights.append(learner.run(followed(job, driver, "first"), context()).weights)
    driver = Driver(job, 3, [[3], [2, 1, 0]])
    publish_while_waiting(monkeypatch, driver)
    learner.run(followed(job, driver, "first"), context())
    Learner().run(followed(job, driver, "fresh", replay=batches), context())
    assert_equal(job.published(3, "fresh"), job.published(3, "first"))


def test_pieces_are_learnt_from_before_the_last_is_there(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(job, 1, ORDER)
    backward, learnt, learnt_when_waiting = trained_models._backward, 0, []

    def count(*arguments: Any) -> Any:
        nonlocal learnt
        learnt += 1
        return backward(*arguments)

    def wait(seconds: float) -> None:
        learnt_when_waiting.append(learnt)
        driver.publish_next()

    monkeypatch.setattr(trained_models, "_backward", count)
    monkeypatch.setattr(pieces, "sleep", wait)
    Learner().run(followed(job, driver, "early"), context())
    assert learnt_when_waiting[0] == 0 < learnt_when_waiting[-1] < learnt


def test_waiting_is_told_when_it_begins_and_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(job, 1, ORDER)
    driver.publish_next()
    publish_while_waiting(monkeypatch, driver)
    events: list[Event] = []
    Learner().run(followed(job, driver, "told"), TaskContext(emit=events.append))
    told = [(event.waiting, event.pieces) for event in events if isinstance(event, Waiting)]
    assert told == [(True, 1), (False, 1), (True, 2), (False, 2)]


class CutWhileItWaits:
    """Cuts a task when it has looked in vain for the piece of a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Driver, piece: int) -> None:
        self.context = TaskContext(emit=lambda event: None)

        def wait(seconds: float) -> None:
            if driver.published == piece:
                self.context.stop("cut")
            else:
                driver.publish_next()

        monkeypatch.setattr(pieces, "sleep", wait)


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("sleeps", [False, True], ids=["", "asleep meanwhile"])
def test_a_learner_that_is_let_go_keeps_what_it_has_accumulated(
    kind: str, sleeps: bool, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    learner, driver = Learner(), Driver(job, 1, ORDER)
    with pytest.raises(LetGoError, match="step 1 was interrupted"):
        learner.run(followed(job, driver, "let go"), CutWhileItWaits(monkeypatch, driver, 2).context)
    if sleeps:
        learner.sleep()
    # Other random draws in the process change nothing.
    torch.rand(7)
    first, second, _ = driver.batch().parts
    for part in (first, second):
        artifacts.remove(part)
    result = learner.run(followed(job, driver, "let go"), context())
    assert result.metrics["seconds/train"] < result.metrics["seconds"]
    again = Driver(job, 1, ORDER)
    learn_whole(job, again)
    assert_equal(job.published(1, "let go"), job.published(1, "journalled"))


@pytest.mark.parametrize("kind", JOBS)
def test_a_learner_that_waits_for_nothing_ends_and_keeps_what_it_has_accumulated(
    kind: str, tmp_path: Path, tiny_model: Path
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    learner, driver = Learner(), Driver(job, 1, ORDER)
    for pieces_done in (1, 2):
        driver.publish_next()
        events: list[Event] = []
        with pytest.raises(LetGoError) as caught:
            learner.run(followed(job, driver, "spare", waits=False), TaskContext(emit=events.append))
        assert (caught.value.reason, caught.value.retryable) == ("awaits_pieces", True)
        assert [event for event in events if isinstance(event, Waiting)] == [Waiting(waiting=True, pieces=pieces_done)]
        learner.sleep()
    first, second, _ = driver.batch().parts
    for part in (first, second):
        artifacts.remove(part)
    learner.run(followed(job, driver, "spare"), context())
    learn_whole(job, Driver(job, 1, ORDER))
    assert_equal(job.published(1, "spare"), job.published(1, "journalled"))


@pytest.mark.slow
def test_ranks_that_are_let_go_keep_what_they_have_accumulated(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    two = LearningSettings(processes=2)
    learner, driver = Learner(), Driver(job, 1, ORDER)
    try:
        with pytest.raises(LetGoError):
            learner.run(followed(job, driver, "let go", learning=two), CutWhileItWaits(monkeypatch, driver, 2).context)
        team = learner._team
        learner.sleep()
        publish_while_waiting(monkeypatch, driver)
        learner.run(followed(job, driver, "let go", learning=two), context())
        assert learner._team is team is not None
    finally:
        learner.close()
    whole = Learner()
    try:
        whole.run(job.request(1, "journalled", batch=driver.batch(), learning=two), context())
    finally:
        whole.close()
    assert_equal(job.published(1, "let go"), job.published(1, "journalled"))


def test_another_step_forgets_the_one_that_was_let_go(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, driver = Learner(), Driver(job, 1, ORDER)
    with pytest.raises(LetGoError):
        learner.run(followed(job, driver, "let go"), CutWhileItWaits(monkeypatch, driver, 1).context)
    other = Driver(job, 1, [[0, 1], [2, 3]])
    learner.run(job.request(1, "other", batch=other.batch()), context())
    learn_whole(job, other)
    assert_equal(job.published(1, "other"), job.published(1, "journalled"))


def test_a_learner_that_is_drained_while_it_waits_forgets_the_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, driver = Learner(), Driver(job, 1, ORDER)
    draining = TaskContext(emit=lambda event: None)
    monkeypatch.setattr(pieces, "sleep", lambda seconds: draining.stop("drain"))
    with pytest.raises(TaskError, match="step 1 was interrupted by a drain") as caught:
        learner.run(followed(job, driver, "stopped"), draining)
    assert caught.value.retryable
    assert not artifacts.exists(str(job.folder / "stopped" / "weights-1"))
    publish_while_waiting(monkeypatch, driver)
    learner.run(followed(job, driver, "stopped"), context())
    learn_whole(job, driver)
    assert_equal(job.published(1, "stopped"), job.published(1, "journalled"))


def in_pieces(prompts: list[int], bounds: set[int]) -> Order:
    cuts = [0, *sorted(bounds), len(prompts)]
    return [prompts[start:end] for start, end in pairwise(cuts) if end > start]


@pytest.mark.slow
@given(prompts=st.permutations(range(4)), bounds=st.sets(st.integers(1, 3)))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_arrival_changes_no_more_than_the_order_of_a_sum_does(
    prompts: list[int], bounds: set[int], job: Job
) -> None:
    Learner().run(job.request(1, "whole"), context())
    driver = Driver(job, 1, in_pieces(prompts, bounds))
    where = [f"{place}-{driver.journal[-30:].replace('/', '')}" for place in ("once", "again")]
    for each in where:
        Learner().run(job.request(1, each, batch=driver.batch()), context())
    whole, once, again = (job.published(1, each) for each in ("whole", *where))
    assert all(float((tensor - once[name]).abs().max()) < 1e-6 for name, tensor in whole.items())
    assert_equal(once, again)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": AlgorithmSettings(epochs=2).resolved()}, "pieces: .*one optimizer update"),
        ({"batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4)}, "pieces: "),
        ({"algorithm": AlgorithmSettings(advantage_normalization="batch").resolved()}, "needs the whole batch"),
    ],
)
@pytest.mark.parametrize("follows", [False, True])
def test_what_needs_the_whole_batch_is_refused(job: Job, given: dict[str, Any], message: str, follows: bool) -> None:
    driver = Driver(job, 1, ORDER)
    where = {"following": driver.journal} if follows else {"batch": driver.batch()}
    with pytest.raises(TaskError, match=message) as caught:
        Learner().run(job.request(1, "refused", **where, **given), context())
    assert caught.value.reason == "bad_request"


def test_pieces_without_values_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    """The critic's values are those before the step, and need the whole batch."""
    job = make_job("critic", tmp_path, tiny_model)
    job.prepared = LEFT_OUT
    with pytest.raises(TaskError, match=r"step 1: .*no values.*prepare the step again") as caught:
        Learner().run(job.request(1, batch=Driver(job, 1, ORDER).batch()), context())
    assert caught.value.reason == "data_invalid"


def test_pieces_that_do_not_add_up_to_the_batch_are_refused(job: Job) -> None:
    batch = Driver(job, 1, ORDER).batch()
    with pytest.raises(TaskError, match="6 samples, but the batch of step 1 has 8") as caught:
        Learner().run(job.request(1, "refused", batch=batch.model_copy(update={"pieces": batch.pieces[:2]})), context())
    assert caught.value.reason == "bad_request"


def test_a_sample_that_is_in_none_of_its_piece_s_parts_is_named(job: Job) -> None:
    batch = Driver(job, 1, ORDER).batch()
    swapped = [piece.model_copy(update={"parts": batch.pieces[0].parts}) for piece in batch.pieces]
    with pytest.raises(TaskError, match=r"\(0, 0\) is in none of its piece's parts") as caught:
        Learner().run(job.request(1, "refused", batch=batch.model_copy(update={"pieces": swapped})), context())
    assert caught.value.reason == "data_invalid"


def test_of_a_sample_that_was_prepared_twice_the_first_part_that_is_named_counts(job: Job) -> None:
    driver = Driver(job, 1, ORDER)
    batch = driver.batch()
    other = str(job.folder / "other.parquet")
    write_prepared(other, [sample for sample in samples_of(5) if sample.prompt < 4])
    pieces = [piece.model_copy(update={"parts": [*piece.parts, other]}) for piece in batch.pieces]
    Learner().run(job.request(1, "twice", batch=batch.model_copy(update={"pieces": pieces})), context())
    learn_whole(job, driver)
    assert_equal(job.published(1, "twice"), job.published(1, "journalled"))


def test_a_batch_without_a_sample_in_the_loss_changes_nothing(job: Job) -> None:
    part = str(job.folder / "masked.parquet")
    write_prepared(part, samples_of(1, mask=False))
    batch = job.batch(1).model_copy(update={"parts": [part]})
    Learner().run(job.request(1, "whole", batch=batch), context())
    cut = batch.model_copy(update={"pieces": [Piece(samples=4, parts=[part])] * 2})
    Learner().run(job.request(1, "masked", batch=cut), context())
    assert_equal(job.published(1, "masked"), job.published(1, "whole"))


def test_a_reader_passes_over_the_pieces_that_it_is_done_with(job: Job) -> None:
    driver = Driver(job, 1, ORDER)
    reference = driver.batch()
    journal = FollowedJournal(reference, driver.journal, context())
    found = [sample.prompt for piece in journal.pieces(2, 6) for sample in piece.samples]
    assert found == [1, 1]
