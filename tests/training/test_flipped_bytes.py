"""One flipped byte in any file of a job: the job goes on as it would have, or one error names the file and a remedy."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import parse_content
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.journal.step_journal import read_status
from rlhfless_operator.training.run import AvailableGpus
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.jobs import small_job

HARMLESS = ("report.html", "summary.json", "logs/", "lines/", "model/", "traces/", "drafts/")
"""Made anew, or for people alone."""


def drive_emulated(folder: Path, steps: int) -> None:
    """Run a job on emulated functions."""
    job = parse_content(small_job(steps=steps, checkpoints={"everySteps": 1}), "job")
    gpus = AvailableGpus(ActorRange(1, 1))

    def make_platform(on_state: Any) -> EmulatedPlatform:
        return EmulatedPlatform(Emulation(), on_state)

    asyncio.run(drive(job, JobFolder(str(folder)), make_platform, LiveProgress(), gpus))


def outcome(folder: Path) -> Any:
    """What a job has come to, without what depends on the clock."""
    status = read_status(JobFolder(str(folder)))
    assert status is not None
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [(record["step"], record["metrics"].get("reward")) for record in records]
    return status.phase, status.step, status.weights, status.checkpoint, rewards


def flips(content: bytes, most: int) -> list[tuple[int, int]]:
    """Places and bits to flip: of a small file in each byte, of others in some."""
    chance = random.Random(len(content))
    places = range(len(content)) if len(content) <= most else sorted(chance.sample(range(len(content)), most))
    return [(place, 1 << chance.randrange(8)) for place in places]


def check_flips(tmp_path: Path, most: int) -> None:
    job, copy = tmp_path / "job", tmp_path / "copy"
    drive_emulated(job, 2)
    shutil.copytree(job, copy)
    drive_emulated(job, 3)
    expected = outcome(job)
    seen = 0
    for file in sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file()):
        if str(file).startswith(HARMLESS):
            continue
        content = (copy / file).read_bytes()
        for place, bit in flips(content, most):
            shutil.rmtree(job)
            shutil.copytree(copy, job)
            flipped = bytearray(content)
            flipped[place] ^= bit
            (job / file).write_bytes(flipped)
            try:
                drive_emulated(job, 3)
            except (UserError, artifacts.ArtifactError, ValueError) as error:
                seen += 1
                assert str(file) in str(error) and ("restore" in str(error) or "remove" in str(error)), (
                    file,
                    place,
                    error,
                )
            else:
                assert outcome(job) == expected, (file, place, bit)
    assert seen


@pytest.mark.slow
def test_some_flips_change_nothing_unseen(tmp_path: Path) -> None:
    check_flips(tmp_path, 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_flips_change_nothing_unseen(tmp_path: Path) -> None:
    check_flips(tmp_path, 20)
