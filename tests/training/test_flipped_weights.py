"""One flipped byte in a job's weights or checkpoints: the same weights come of it, or one error names the file."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from tests.training.test_flipped_bytes import flips
from tests.training.whole_jobs import assert_equal_weights, final_weights, folder_of

READ = ("weights/", "checkpoints/", "data/", "batches/", "results/")
"""Folders of what functions have made and read again."""
SHORT: dict[str, Any] = {
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "checkpoints": {"everySteps": 1, "keep": 1},
}


def check_flips(make_job: Callable[..., Path], most: int) -> None:
    """Go on with a job of two steps for a third one, after each of some flips in each file."""
    from rlhfless_functions.rewards.scoring import RewardScorer
    from tests.training.functions_here import train_here

    scorer = RewardScorer()

    def train(steps: int) -> Path:
        file = make_job("flipped", **SHORT, steps=steps)
        asyncio.run(train_here(file, str(folder_of(file)), scorer))
        return file

    job = folder_of(train(2))
    copy = Path(shutil.copytree(job, job.parent / "copy"))
    expected = final_weights(train(3))
    seen = 0
    names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
    for name in (name for name in names if name.startswith(READ)):
        content = (copy / name).read_bytes()
        for place, bit in flips(content, most):
            shutil.rmtree(job)
            shutil.copytree(copy, job)
            flipped = bytearray(content)
            flipped[place] ^= bit
            (job / name).write_bytes(flipped)
            try:
                file = train(3)
            except (UserError, artifacts.ArtifactError) as error:
                seen += 1
                assert name in str(error) and ("restore" in str(error) or "remove" in str(error)), (name, place, error)
            else:
                assert_equal_weights(expected, final_weights(file))
    scorer.close()
    assert seen


@pytest.mark.slow
def test_a_flip_in_each_file_changes_nothing_unseen(tiny_job: Callable[..., Path]) -> None:
    check_flips(tiny_job, 1)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_flips_change_nothing_unseen(tiny_job: Callable[..., Path]) -> None:
    check_flips(tiny_job, 20)
