"""What keeps a run's steps from being taken again."""

from pathlib import Path

import pytest

from rlhfless_functions.api import BatchReference, SampleTask, WeightsReference
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.async_journal import AsyncJournal, BegunRollout, whole_rollout
from rlhfless_operator.training.replaying import NotReplayableError, kept_batch


def taken_from(folder: Path, part: str) -> JobFolder:
    """A run whose first step learnt from this file."""
    batch = BatchReference(step=1, parts=[part], samples=[SampleTask(prompt=0, index=0)])
    job = JobFolder(str(folder))
    begun = BegunRollout(step=1, policy=WeightsReference(version=0, uri="model"))
    AsyncJournal(job).take(whole_rollout(begun, batch, {}))
    return job


def test_what_a_step_learnt_from_is_found_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0.parquet").write_bytes(b"")
    folder = taken_from(tmp_path / "runs", "runs/0.parquet")
    with pytest.raises(NotReplayableError, match=r"^runs/0\.parquet is not there\..* replay it from that folder"):
        kept_batch(folder, 1)
    monkeypatch.chdir(tmp_path)
    assert kept_batch(folder, 1).parts == ["runs/0.parquet"]


def test_what_has_not_been_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotReplayableError, match=r"has not kept what step 1 learnt from.*checkpoints\.keepRollouts"):
        kept_batch(taken_from(tmp_path, f"{tmp_path}/gone.parquet"), 1)
    with pytest.raises(NotReplayableError, match=r"has not kept what step 2 learnt from"):
        kept_batch(JobFolder(str(tmp_path)), 2)
