"""A step that is reported before it is published, and published beside the next one."""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, LearnRequest, LearnResult, Learnt, Published, UnpublishedVersion
from rlhfless_functions.data.rollouts import write_prepared
from rlhfless_functions.learning import held_version as publication
from rlhfless_functions.learning import learner as learner_module
from rlhfless_functions.learning import outputs as publishing
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.pieces import LetGoError
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import LearningSettings, LoraSettings
from tests.learning.jobs import PPO, Job, StoppedContext, context, job_of, samples_of

torch.set_num_threads(1)

JOBS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "critic": {"algorithm": PPO},
    "adapter": {"dtype": "bfloat16", "lora": LoraSettings(rank=2, dropout=0.2)},
}


class Heard(TaskContext):
    """Keeps the events of a request, and cuts it as soon as it has learnt if `cuts`."""

    def __init__(self, *, cuts: bool = False) -> None:
        self.events: list[Event] = []

        def hear(event: Event) -> None:
            self.events.append(event)
            if cuts and isinstance(event, Learnt):
                self.stop("cut")

        super().__init__(emit=hear)

    @property
    def kinds(self) -> list[str]:
        return [event.event for event in self.events]


def beside(job: Job, step: int, where: str = "beside", **given: Any) -> LearnRequest:
    """The request of a step that may be published beside the next one, and whose predecessor is published beside it."""
    unpublished = version(job, step - 1, where, **given) if step > 1 else None
    return job.request(step, where, **{"publish_beside": True, "unpublished": unpublished, **given})


def version(job: Job, step: int, where: str, **given: Any) -> UnpublishedVersion:
    request = job.request(step, where, **{name: given[name] for name in given if name == "learning"})
    deltas = request.learning.weight_deltas == "auto"
    return UnpublishedVersion(
        weights=request.publish, critic=request.publish_critic, since=request.base.uri if deltas else None
    )


def checksums(job: Job, step: int, where: str) -> dict[str, list[str]]:
    """Of all that a step has published."""
    uris = [job.folder / where / f"{kind}-{step}" for kind in ("weights", "critic")]
    manifests = {uri.name: artifacts.manifest(str(uri)) for uri in uris}
    return {name: [each.checksum for each in found.files.values()] for name, found in manifests.items() if found}


def let_go_beside(job: Job) -> Learner:
    """A learner that has taken the first step, and whose request was cut before that was published."""
    learner = Learner()
    with pytest.raises(LetGoError):
        learner.run(beside(job, 1), Heard(cuts=True))
    return learner


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is published beside a step before this is set."""
    opened = threading.Event()
    publish = publication.HeldVersion.publish

    def later(held: publication.HeldVersion) -> dict[str, float]:
        opened.wait()
        return publish(held)

    monkeypatch.setattr(publication.HeldVersion, "publish", later)
    yield opened
    opened.set()


def once_trained(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[], None]) -> None:
    """Have something done when the learner has taken a step and not published it."""
    train_step = learner_module.train_step

    def trained(*given: Any) -> Any:
        report = train_step(*given)
        if given[3] == step:
            then()
        return report

    monkeypatch.setattr(learner_module, "train_step", trained)


@pytest.mark.parametrize("kind", JOBS)
def test_what_is_published_beside_a_step_is_what_was_learnt_before_it(
    kind: str, tmp_path: Path, tiny_model: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS[kind])
    job.undisturbed(3)
    learner, first, second = Learner(), Heard(cuts=True), Heard()
    with pytest.raises(LetGoError):
        learner.run(beside(job, 1), first)
    assert first.kinds == ["learnt"]
    assert not artifacts.is_published(str(tmp_path / "beside" / "weights-1"))
    once_trained(monkeypatch, 2, gate.set)
    result = learner.run(beside(job, 2), second)
    assert second.kinds == ["published", "learnt"]
    assert "seconds/load" not in result.metrics
    assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")
    assert checksums(job, 2, "beside") == checksums(job, 2, "undisturbed")
    last = learner.run(beside(job, 3, publish_beside=False, unpublished=None), context())
    assert "seconds/load" not in last.metrics
    assert checksums(job, 3, "beside") == checksums(job, 3, "undisturbed")


def test_a_step_that_is_not_cut_says_what_it_has_published(job: Job) -> None:
    job.undisturbed(1)
    heard = Heard()
    result = Learner().run(beside(job, 1), heard)
    assert isinstance(result, LearnResult)
    assert heard.kinds == ["learnt"]
    assert isinstance(heard.events[0], Learnt)
    learnt = LearnResult.model_validate(heard.events[0].result)
    publishing = {"weights/bytes", "weights/full_bytes", "seconds/publish"}
    assert result.metrics.keys() - learnt.metrics.keys() == publishing
    assert result.model_copy(update={"metrics": learnt.metrics}) == learnt
    assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")


def test_a_fresh_learner_publishes_what_the_one_before_may_not_have(job: Job) -> None:
    job.undisturbed(3)
    heard = Heard()
    Learner().run(beside(job, 3), heard)
    assert heard.kinds == ["published", "learnt"]
    assert isinstance(heard.events[0], Published)
    assert {"weights/bytes", "seconds/publish"} <= heard.events[0].metrics.keys()
    assert not artifacts.is_published(str(job.folder / "beside" / "weights-1")), "it was not asked for"
    for step in (2, 3):
        assert checksums(job, step, "beside") == checksums(job, step, "undisturbed")
    again = Heard()
    Learner().run(beside(job, 3), again)
    assert isinstance(again.events[0], Published)
    assert "seconds/publish" not in again.events[0].metrics, "it was there"


@pytest.mark.parametrize("why", ["memory", "checkpoint", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_learner_that_cannot_publish_beside_publishes_before_it_reports(
    why: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.undisturbed(2)
    given: dict[str, Any] = {}
    if why == "memory":
        monkeypatch.setattr(publication, "free_host_bytes", lambda: 1)
    elif why == "checkpoint":
        given["save_checkpoint"] = str(job.folder / "beside" / "checkpoint-2")
    else:
        given["learning"] = LearningSettings(processes=2)
    heard, learner = Heard(), Learner()
    try:
        learner.run(beside(job, 2, **given), heard)
    finally:
        learner.close()
    assert heard.kinds == ["published"]
    assert all(artifacts.is_published(str(job.folder / "beside" / f"weights-{step}")) for step in (1, 2))
    if why != "processes":
        assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")
        assert checksums(job, 2, "beside") == checksums(job, 2, "undisturbed")


@pytest.mark.parametrize("when", ["beside its own request", "beside the next step's"])
def test_a_version_that_cannot_be_published_is_an_error_and_the_step_can_be_taken_again(
    when: str, job: Job, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.undisturbed(2)
    step = 1 if when == "beside its own request" else 2
    learner = Learner() if step == 1 else let_go_beside(job)
    with monkeypatch.context() as patched:

        def full(*given: Any, **more: Any) -> None:
            raise TaskError("artifact_unwritable", "the disk is full", retryable=True)

        patched.setattr(publishing, "publish_weights", full)
        gate.set()
        with pytest.raises(TaskError, match="the disk is full") as caught:
            learner.run(beside(job, step), context())
    assert (caught.value.reason, caught.value.retryable) == ("artifact_unwritable", True)
    assert not artifacts.exists(str(job.folder / "beside" / "weights-1"))
    result = learner.run(beside(job, step), context())
    assert "seconds/load" in result.metrics
    for each in range(1, step + 1):
        assert checksums(job, each, "beside") == checksums(job, each, "undisturbed")


def test_where_a_step_fails_the_one_before_is_published_and_reported_first(job: Job, gate: threading.Event) -> None:
    job.undisturbed(2)
    learner, heard = let_go_beside(job), Heard()
    part = str(job.folder / "poisoned.parquet")
    nothing = [replace(each, advantages=[math.nan] * len(each.response_tokens)) for each in samples_of(2)]
    write_prepared(part, nothing)
    threading.Timer(0.2, gate.set).start()
    poisoned = job.batch(2).model_copy(update={"parts": [part]})
    with pytest.raises(TaskError, match=r"step 2: the policy's update failed"):
        learner.run(beside(job, 2, batch=poisoned), heard)
    assert heard.kinds == ["published"]
    assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")


def test_a_step_that_is_drained_leaves_the_one_before_to_be_published_until_the_instance_ends(
    job: Job, gate: threading.Event
) -> None:
    job.undisturbed(2)
    learner = let_go_beside(job)
    with pytest.raises(TaskError, match="step 2 was interrupted by a drain"):
        learner.run(beside(job, 2), StoppedContext(1))
    assert not artifacts.exists(str(job.folder / "beside" / "weights-1"))
    gate.set()
    learner.finish()
    assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")


def test_a_drained_learner_ends_its_step_once_that_is_published(job: Job) -> None:
    class Drained(Heard):
        def __init__(self) -> None:
            super().__init__()
            hear = self.emit
            self.emit = lambda event: (hear(event), self.stop("drain"))[0]

    result = Learner().run(beside(job, 1), Drained())
    assert "weights/bytes" in result.metrics
    assert artifacts.is_published(str(job.folder / "beside" / "weights-1"))


def test_a_step_that_is_asked_for_again_waits_for_the_publication_that_its_cut_request_left(
    job: Job, gate: threading.Event
) -> None:
    """As by a driver that comes later: it knows nothing of what the one before has learnt."""
    job.undisturbed(1)
    learner = let_go_beside(job)
    threading.Timer(0.2, gate.set).start()
    learner.run(beside(job, 1), context())
    assert checksums(job, 1, "beside") == checksums(job, 1, "undisturbed")


@pytest.mark.usefixtures("artifact_cache")
def test_deltas_are_made_beside_the_next_step_too(
    s3: str, tmp_path: Path, tiny_model: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model, dtype="bfloat16", learning=LearningSettings(weight_deltas="auto"))
    uris = [job.initial.uri, *(f"{s3}/weights-{step}" for step in (1, 2, 3))]
    job.weights = [job.initial.model_copy(update={"version": step, "uri": uri}) for step, uri in enumerate(uris)]
    learner = Learner()
    once_trained(monkeypatch, 3, gate.set)
    for step in (1, 2, 3):
        unpublished = UnpublishedVersion(weights=uris[step - 1], since=uris[step - 2]) if step > 1 else None
        request = job.request(step, publish=uris[step], publish_beside=True, unpublished=unpublished)
        if step == 1:
            gate.set()
            learner.run(request.model_copy(update={"unpublished": None}), context())
            gate.clear()
        elif step == 2:
            with pytest.raises(LetGoError):
                learner.run(request.model_copy(update={"unpublished": None}), Heard(cuts=True))
        else:
            learner.run(request, context())
    for step in (2, 3):
        manifest = artifacts.manifest(uris[step])
        assert manifest is not None
        assert manifest.delta is not None
