"""A damaged checkpoint: an older one serves, with the same weights bit for bit, or one error says what to do."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.whole_jobs import (
    assert_equal_weights,
    assert_same_final_weights,
    final_weights,
    folder_of,
    records_of,
    run_job,
    run_until_a_step_cannot_be_written,
    status_of,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

SHORT: dict[str, Any] = {
    "steps": 6,
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "checkpoints": {"everySteps": 2, "keep": 2},
}


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: Callable[..., Path]) -> Path:
    file = shared_tiny_job("undisturbed", **SHORT)
    run_job(file)
    return file


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What people are told."""
    told: list[str] = []
    note = LiveProgress.note
    monkeypatch.setattr(LiveProgress, "note", lambda self, text: (told.append(text), note(self, text))[1])
    return told


def flip(checkpoint: Path) -> None:
    file = checkpoint / "optimizers.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(checkpoint: Path) -> None:
    file = checkpoint / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


DAMAGES = [flip, cut, lose_a_file, lose_the_manifest, shutil.rmtree]


@dataclass(frozen=True)
class Interrupted:
    """A job that was interrupted while step 5 was written down."""

    file: Path
    copy: Path

    @property
    def checkpoints(self) -> Path:
        return folder_of(self.file) / "checkpoints"

    def restore(self) -> None:
        """Put its folder back."""
        shutil.rmtree(folder_of(self.file))
        shutil.copytree(self.copy, folder_of(self.file))


def interrupt(make_job: Callable[..., Path], name: str, until: str = "job.yaml", **spec: Any) -> Interrupted:
    """Make a job and interrupt it, once there is a file `until`."""
    file = make_job(name, **{**SHORT, **spec})
    with pytest.MonkeyPatch.context() as patch:
        run_until_a_step_cannot_be_written(file, patch, 5, (folder_of(file) / until).exists)
    # The learner may have been quicker: as if it had been interrupted before the next step.
    for folder in ("results", "weights", "checkpoints"):
        shutil.rmtree(folder_of(file) / folder / "step-000006", ignore_errors=True)
    return Interrupted(file, Path(shutil.copytree(folder_of(file), file.parent / "copy")))


@pytest.fixture(scope="module")
def interrupted(shared_tiny_job: Callable[..., Path]) -> Interrupted:
    return interrupt(shared_tiny_job, "damaged")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_an_older_checkpoint_serves(
    interrupted: Interrupted, undisturbed: Path, notes: list[str], damage: Callable[[Path], None]
) -> None:
    interrupted.restore()
    file, checkpoints = interrupted.file, interrupted.checkpoints
    assert status_of(file)["checkpoint"]["step"] == 4
    damage(checkpoints / "step-000004")
    run_job(file)
    (told,) = [note for note in notes if "going back" in note]
    assert told == (
        f"step 6: {checkpoints}/step-000004 is damaged; going back to the checkpoint of step 2: steps 3 to 5 are learnt"
        " again, from the same batches"
    )
    assert_same_final_weights(file, undisturbed)
    assert [record["step"] for record in records_of(file)] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000006"]


@pytest.mark.slow
def test_the_model_as_given_serves_while_there_are_fewer_checkpoints_than_are_kept(
    tiny_job: Callable[..., Path], undisturbed: Path, notes: list[str]
) -> None:
    few = interrupt(tiny_job, "few", checkpoints={"everySteps": 4, "keep": 2})
    flip(few.checkpoints / "step-000004")
    run_job(few.file)
    told = "going back to the model as given: steps 1 to 5 are learnt again, from the same batches"
    assert any(note.endswith(told) for note in notes), notes
    assert_same_final_weights(few.file, undisturbed)


@pytest.mark.slow
def test_with_no_older_one_the_error_names_the_file_and_a_remedy_that_helps(
    tiny_job: Callable[..., Path], undisturbed: Path
) -> None:
    alone = interrupt(tiny_job, "alone", checkpoints={"everySteps": 3, "keep": 1})
    assert [path.name for path in alone.checkpoints.iterdir()] == ["step-000003"]
    flip(alone.checkpoints / "step-000003")
    told = r"step-000003/optimizers\.pt is corrupt.*restore .*step-000003 from a copy"
    with pytest.raises(StageFailedError, match=told):
        run_job(alone.file)
    status = status_of(alone.file)
    assert status["phase"] == "Failed" and "No older checkpoint serves" in status["message"]
    assert status["checkpoint"]["step"] == 3
    shutil.rmtree(alone.checkpoints / "step-000003")
    shutil.copytree(alone.copy / "checkpoints" / "step-000003", alone.checkpoints / "step-000003")
    run_job(alone.file)
    assert_same_final_weights(alone.file, undisturbed)


@pytest.mark.nightly
def test_an_asynchronous_job_goes_back_too(tiny_job: Callable[..., Path], notes: list[str]) -> None:
    # By then it is written down which weights sample the last step.
    begun = "journal/step-000006-begun.json"
    job = interrupt(tiny_job, "asynchronous", until=begun, **{"async": {"maxStaleness": 1}})
    run_job(job.file)
    expected = final_weights(job.file)
    job.restore()
    flip(job.checkpoints / "step-000004")
    run_job(job.file)
    assert any("going back to the checkpoint of step 2" in note for note in notes), notes
    assert_equal_weights(final_weights(job.file), expected)
