"""Garbage collection: what the status, a fresh learner or the running step needs stays, the rest goes."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose, WeightsReference
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import CheckpointStatus, RLHFJobStatus
from rlhfless_operator.training.journal.garbage import Retention, remove_garbage, remove_remains
from rlhfless_operator.training.journal.older_checkpoints import older_checkpoints

STEPS = range(1, 9)


def filled(root: Path) -> JobFolder:
    """A job after step 7 whose step 8 is running, with a checkpoint every second step, nothing collected yet."""
    folder = JobFolder(str(root))
    purposes: tuple[Purpose, ...] = ("training", "evaluation")
    for step in STEPS:
        artifacts.write_bytes(artifacts.join(folder.line(step), "entry"), b"")
        for uri in (folder.weights(step), folder.critic(step)):
            artifacts.write_bytes(artifacts.join(uri, "model.safetensors"), b"x")
        if step % 2 == 0:
            artifacts.write_bytes(artifacts.join(folder.checkpoint(step), "optimizer.safetensors"), b"x")
            artifacts.write_bytes(artifacts.join(folder.checkpoint(step), artifacts.MANIFEST), b"x")
        for purpose in purposes:
            artifacts.write_bytes(artifacts.join(folder.rollouts(step, purpose), "sink", "part.parquet"), b"x")
            artifacts.write_bytes(artifacts.join(folder.batches(step, purpose), "chunk.parquet"), b"x")
        artifacts.write_bytes(artifacts.join(folder.drafts(step), "chunk.parquet"), b"x")
        artifacts.write_json(folder.result("batch", step), {})
        artifacts.write_json(folder.progress(step), {})
    artifacts.write_json(folder.file("status.json"), {})
    artifacts.write_json(folder.file("my-notes.json"), {})
    return folder


def status_of(folder: JobFolder, *, best: int | None = None) -> RLHFJobStatus:
    return RLHFJobStatus(
        step=7,
        weights=WeightsReference(version=7, uri=folder.weights(7)),
        critic=WeightsReference(version=7, uri=folder.critic(7)),
        checkpoint=CheckpointStatus(step=6, uri=folder.checkpoint(6)),
        best=WeightsReference(version=best, uri=folder.weights(best)) if best else None,
    )


def steps_in(folder: JobFolder, kind: str) -> list[str]:
    return sorted(path.name for path in Path(folder.file(kind)).iterdir())


def test_what_is_named_or_running_stays(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder, best=3), Retention(2))
    assert steps_in(folder, "weights") == ["step-000003", "step-000007", "step-000008"]
    assert steps_in(folder, "lines") == ["step-000007", "step-000008"]
    assert steps_in(folder, "critics") == ["step-000007", "step-000008"]
    assert steps_in(folder, "checkpoints") == ["step-000004", "step-000006", "step-000008"]
    assert steps_in(folder, "rollouts") == ["step-000008", "step-000008-evaluation"]
    # The older of the two checkpoints serves if the newer is damaged.
    since = ["step-000005", "step-000006", "step-000007", "step-000008"]
    assert steps_in(folder, "batches") == [*since, "step-000008-evaluation"]
    assert steps_in(folder, "results") == since
    assert steps_in(folder, "progress") == ["step-000007.json", "step-000008.json"]


def test_batches_since_the_only_checkpoint_that_is_kept_stay(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder), Retention(1))
    assert steps_in(folder, "batches") == ["step-000007", "step-000008", "step-000008-evaluation"]
    assert steps_in(folder, "results") == ["step-000007", "step-000008"]


def test_a_state_that_a_learner_saved_before_it_was_let_go_counts_as_no_checkpoint_to_keep(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    for step in (3, 5, 7):
        artifacts.write_bytes(artifacts.join(folder.state(step), "model.safetensors"), b"x")
    saved = CheckpointStatus(step=7, uri=folder.state(7))
    remove_garbage(folder, status_of(folder).model_copy(update={"checkpoint": saved}), Retention(2))
    assert steps_in(folder, "states") == ["step-000007"]
    assert steps_in(folder, "checkpoints") == ["step-000004", "step-000006", "step-000008"]
    # If what was saved is damaged, checkpoint 6 serves, and then checkpoint 4.
    assert steps_in(folder, "results") == ["step-000005", "step-000006", "step-000007", "step-000008"]
    older = [None if each is None else each.uri for each in older_checkpoints(folder, saved)]
    assert older == [folder.checkpoint(6), folder.checkpoint(4), None]


def test_a_state_or_a_checkpoint_that_may_be_being_written_stays(tmp_path: Path) -> None:
    """Of the newest step, beside the one that is running."""
    folder = filled(tmp_path)
    for uri in (folder.state(7), folder.checkpoint(7)):
        artifacts.write_bytes(artifacts.join(uri, "model.safetensors"), b"x")
    remove_garbage(folder, status_of(folder), Retention(2))
    assert steps_in(folder, "states") == ["step-000007"]
    assert steps_in(folder, "checkpoints") == ["step-000004", "step-000006", "step-000007", "step-000008"]


def test_a_checkpoint_that_was_not_written_to_its_end_is_none_of_those_to_keep(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    artifacts.remove(artifacts.join(folder.checkpoint(4), artifacts.MANIFEST))
    status = status_of(folder)
    assert status.checkpoint is not None
    older = [None if each is None else each.uri for each in older_checkpoints(folder, status.checkpoint)]
    assert older == [folder.checkpoint(2), None]
    remove_garbage(folder, status, Retention(2))
    assert steps_in(folder, "checkpoints") == ["step-000002", "step-000006", "step-000008"]
    assert steps_in(folder, "results") == [f"step-{step:06d}" for step in range(3, 9)]


def test_all_batches_stay_while_there_are_fewer_checkpoints_than_are_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder), Retention(4))
    assert steps_in(folder, "results") == [f"step-{step:06d}" for step in STEPS]


def test_all_batches_stay_while_there_is_no_checkpoint(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder).model_copy(update={"checkpoint": None}), Retention(1))
    assert [name for name in steps_in(folder, "batches") if "evaluation" not in name] == [
        f"step-{step:06d}" for step in STEPS
    ]


def test_responses_to_draft_from_stay_as_long_as_they_may_be_asked_for(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder), Retention(1), draft_steps=[2, 7])
    assert steps_in(folder, "drafts") == ["step-000002", "step-000007", "step-000008"]


def test_what_the_user_put_beside_stays(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder), Retention(1))
    remove_remains(folder)
    assert artifacts.exists(folder.file("status.json"))
    assert artifacts.exists(folder.file("my-notes.json"))


def test_what_runs_ahead_stays_with_the_weights_that_sample_it(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    for step in (9, 10, 11):
        artifacts.write_bytes(artifacts.join(folder.rollouts(step, "training"), "sink", "part.parquet"), b"x")
        artifacts.write_bytes(artifacts.join(folder.batches(step, "training"), "chunk.parquet"), b"x")
        artifacts.write_json(folder.result("batch", step), {})
    for step in (9, 10):
        for uri in (folder.weights(step), folder.critic(step), folder.checkpoint(step)):
            artifacts.write_bytes(artifacts.join(uri, "model.safetensors"), b"x")
    remove_garbage(folder, status_of(folder), Retention(1, staleness=2))
    # Step 10 may be sampled with version 7, and step 8 with version 5. The learner may publish step 9.
    assert steps_in(folder, "weights") == [f"step-{step:06d}" for step in (5, 6, 7, 8, 9)]
    # Preparation asks none of an earlier step.
    assert steps_in(folder, "critics") == [f"step-{step:06d}" for step in (7, 8, 9)]
    assert steps_in(folder, "checkpoints") == [f"step-{step:06d}" for step in (6, 8, 9)]
    assert steps_in(folder, "rollouts") == ["step-000008", "step-000008-evaluation", "step-000009", "step-000010"]
    assert steps_in(folder, "results") == [f"step-{step:06d}" for step in (7, 8, 9, 10)]
    assert [name for name in steps_in(folder, "batches") if "evaluation" not in name] == [
        f"step-{step:06d}" for step in (7, 8, 9, 10)
    ]


def test_all_batches_stay_where_rollouts_are_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    remove_garbage(folder, status_of(folder), Retention(1, rollouts=True))
    assert [name for name in steps_in(folder, "batches") if "evaluation" not in name] == [
        f"step-{step:06d}" for step in STEPS
    ]
    assert steps_in(folder, "results") == [f"step-{step:06d}" for step in STEPS]
    assert steps_in(folder, "rollouts") == ["step-000008", "step-000008-evaluation"]


def test_a_list_that_lacks_the_newest_checkpoint_does_not_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path)
    list_files = artifacts.list_files
    monkeypatch.setattr(artifacts, "list_files", lambda uri: [file for file in list_files(uri) if "000006" not in file])
    remove_garbage(folder, status_of(folder), Retention(1))
    assert steps_in(folder, "checkpoints") == ["step-000006", "step-000008"]
